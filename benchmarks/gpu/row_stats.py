"""A prototype of a Triton kernel that reads each row of logits once. Winnow does not use it."""

from __future__ import annotations

import triton
import triton.language as tl
from benchmarks.gpu.harness import Bench
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit  # type: ignore[untyped-decorator]
def row_stats(logits, stride, labels, lse, entropy, logprob, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write log-sum-exp and entropy of a row, and the log-prob of its label."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    top, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        scale, exps = tl.exp(top - higher), tl.exp(z - higher)
        total = total * scale + tl.sum(exps, 0)
        weighted = weighted * scale + tl.sum(tl.where(columns < width, exps * z, 0.0), 0)
        top = higher
    log_total = top + tl.log(total)
    tl.store(lse + row, log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(logprob + row, tl.load(base + tl.load(labels + row)).to(tl.float32) - log_total)


def kernel(bench: Bench) -> None:
    """Compile the kernel for an H100, for which no GPU is needed."""
    types = "*bf16", "i32", "*i64", "*fp32", "*fp32", "*fp32", "i32", "constexpr"
    signature = dict(zip(row_stats.arg_names, types, strict=True))
    source = ASTSource(fn=row_stats, signature=signature, constexprs={(7,): 4096})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    lines, size = built.asm["ptx"].count("\n"), len(built.asm["cubin"])
    bench.report("compiled", cubin_bytes=size, ptx_lines=lines, shared=built.metadata.shared)
