"""The log-prob kernel at the shapes of published heads, and its products by the stride of rows.

Shapes: `T` tokens, `H` width, `V` rows of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.gpu.harness import Bench

from winnow.algorithms.logprobs import OutputHead, token_logprobs

SHAPES = [
    (8192, 4096, 131_072, 131_072),
    *((16_384, 1024, 151_936, ids) for ids in (151_669, 151_936)),
    *((16_384, 2560, 151_936, ids) for ids in (151_669, 151_936)),
    *((16_384, 5120, 152_064, ids) for ids in (151_665, 152_064)),
]
"""T, H, V and the tokenizer's ids, with which rows are no multiple of 16 bytes, and without.
Liger Kernel's own figures are of the first."""


def head(bench: Bench) -> None:
    """Time log-prob and entropy of tokens, forward and with gradients; then single products."""
    for shape in bench.pick(SHAPES, [(256, 32, 512, 509), (256, 32, 512, 512)]):
        log_probs(bench, *shape)
    shape = bench.pick((883, 1024, 151_669, 8192), (33, 32, 509, 64))
    for pad in (0, -shape[2] % 64):
        products(bench, pad, *shape)


def log_probs(bench: Bench, T: int, H: int, V: int, ids: int) -> None:
    """Time the kernel at one shape."""
    hidden = torch.randn(T, H, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.randn(V, H, device=bench.device, dtype=torch.bfloat16) * H**-0.5
    weight, labels = rows.requires_grad_(), torch.randint(0, ids, (T,), device=bench.device)

    def both() -> None:
        result: Any = token_logprobs(hidden, OutputHead(weight, vocab_size=ids), labels)
        (result.logprob.sum() + result.entropy.sum()).backward()
        hidden.grad = weight.grad = None

    head = OutputHead(weight.detach(), vocab_size=ids)
    forward_ms = bench.timed(lambda: token_logprobs(hidden.detach(), head, labels)) * 1e3
    both_s = bench.timed(both)
    figures = {"forward_ms": forward_ms, "both_ms": both_s * 1e3}
    figures["tflops_of_4_products"] = 8 * T * ids * H / both_s / 1e12
    bench.report("log-probs", T=T, H=H, V=V, ids=ids, **figures)


def products(bench: Bench, pad: int, T: int, H: int, V: int, part: int) -> None:
    """Time a chunk's products: logits, gradient of the states, and of `part` rows of the weight."""
    options: Any = {"device": bench.device, "dtype": torch.bfloat16}
    hidden, weight = torch.randn(T, H, **options), torch.randn(V, H, **options)
    logits, gradient = torch.randn(T, V + pad, **options)[:, :V], torch.empty(T, H, **options)
    works = {
        "logits": (V, lambda: torch.mm(hidden, weight.T, out=logits)),
        "hidden_gradient": (V, lambda: torch.mm(logits, weight, out=gradient)),
        "weight_gradient": (part, lambda: logits.T[:part] @ hidden),
    }
    figures = {
        f"{name}_tflops": 2 * T * H * rows / bench.timed(work, 10, 3) / 1e12
        for name, (rows, work) in works.items()
    }
    bench.report("products", row_bytes=2 * (V + pad), **figures)
