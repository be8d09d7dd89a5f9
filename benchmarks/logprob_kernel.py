"""Time and peak memory of the log-prob kernel against plain arithmetic, forward and backward.

    python benchmarks/logprob_kernel.py                # all variants at the default chunk
    python benchmarks/logprob_kernel.py --variants float32 bfloat16 --chunks 64 128 256 1024
    python benchmarks/logprob_kernel.py --vocabulary 29 --tokens 65536 --chunks 128 auto
    python benchmarks/logprob_kernel.py --variants float32 --ranks 1 2 --without-naive

V=151,936, T=4,096 and H=256 unless told. Variants are the dtype, and behind it `tied` (states are
made from rows of the head) or `fp32-head` (a bf16 model whose logits are computed in fp32). Each
case runs in a process of its own, so that its peak is its own; "memory" is what the passes add to
the process once the inputs exist. Ratios are to the naive case of the same variant. Seconds are
the clock's, the least of `--repeats`, and beside them the processor's, which other work on the
machine changes less, but which may leave out what the system does to find the naive case's pages.
The naive case needs about 14 GiB free; `--tokens` makes it smaller, `--without-naive` leaves it out
and takes ratios to the first case. `--ranks` also cuts the head over ranks (gloo) of one thread
each: seconds and memory are those of the rank that takes most. `--out FILE` appends the table as
Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE = resource.getpagesize()
VARIANTS = ("float32", "float32-tied", "bfloat16", "bfloat16-tied", "bfloat16-fp32-head")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--chunks", nargs="+", default=["auto"], help="tokens, or auto")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--without-naive", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--place", nargs=3, default=(0, 1, ""), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(arguments)))
        return
    lines = [
        f"V={arguments.vocabulary:,} T={arguments.tokens:,} H={arguments.hidden:,}, "
        f"{arguments.threads} threads, log-prob and entropy, forward and backward",
        "",
        "| variant | case | seconds | ratio | CPU s | ratio | GiB | ratio "
        "| sum of log-probs | norm of gradient |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for variant in arguments.variants:
        base: dict[str, Any] | None = None
        cases = [(case, ranks) for case in arguments.chunks for ranks in arguments.ranks]
        for case, ranks in [("naive", 1), *cases][arguments.without_naive :]:
            result = run(variant, case, ranks, arguments.repeats)
            base = base or result
            lines.append(row(variant, case, ranks, result, base))
            print(lines[-1], flush=True)
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write("\n".join(lines) + "\n\n")


def run(variant: str, case: str, ranks: int, repeats: int) -> dict[str, Any]:
    """The case in processes of its own; its least seconds."""
    results = [run_once(variant, case, ranks) for _ in range(repeats)]
    return min(results, key=lambda result: result["seconds"])


def run_once(variant: str, case: str, ranks: int) -> dict[str, Any]:
    """The case, once; the most that any of its ranks takes."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", variant, case, "--place"]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), f"{folder}/store"], stdout=subprocess.PIPE
            )
            for rank in range(ranks)
        ]
        printed = [process.communicate()[0] for process in processes]
    found: list[dict[str, Any]] = [json.loads(each) for each in printed]
    return found[0] | {
        name: max(each[name] for each in found) for name in ("seconds", "cpu", "gib")
    }


def row(variant: str, case: str, ranks: int, result: dict[str, Any], base: dict[str, Any]) -> str:
    """A line of the table."""
    label = case if case == "naive" else f"chunk of {result['chunk']}"
    if case == "auto":
        label += " (auto)"
    label += f", a rank of {ranks}" if ranks > 1 else ""
    return (
        f"| {variant} | {label} | {result['seconds']:.2f} | "
        f"{result['seconds'] / base['seconds']:.2f} | {result['cpu']:.2f} | "
        f"{result['cpu'] / base['cpu']:.2f} | {result['gib']:.3f} | "
        f"{result['gib'] / base['gib']:.3f} | {result['logprob']:.2f} | {result['gradient']:.5f} |"
    )


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One case: seconds, GiB over the inputs, and two numbers that all cases share."""
    import torch
    import torch.distributed as dist

    from winnow.algorithms.logprobs import OutputHead, chunk_size, token_logprobs

    variant, case = arguments.case
    dtype_name, _, head = variant.partition("-")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    rank, ranks, store = int(arguments.place[0]), int(arguments.place[1]), arguments.place[2]
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    rows = -(-arguments.vocabulary // ranks)
    weight = torch.randn(rows * ranks, arguments.hidden).mul_(0.05).to(dtype)
    weight = weight[rows * rank :][:rows].clone().requires_grad_()
    labels = torch.randint(0, arguments.vocabulary, (arguments.tokens,))
    hidden = torch.randn(arguments.tokens, arguments.hidden).to(dtype).requires_grad_()
    chunk = chunk_size(arguments.vocabulary, int(case) if case.isdigit() else None)
    before = resident_bytes()
    start, cpu = time.perf_counter(), time.process_time()
    states = torch.tanh(20 * weight[labels.flip(0)]) if head == "tied" else hidden
    if case == "naive":
        if head == "fp32-head":
            logits = states.float() @ weight.float().T
        else:
            logits = (states @ weight.T).float()
        logp = torch.log_softmax(logits, dim=-1)
        logprob = logp.gather(1, labels[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
    else:
        read = token_logprobs(
            states,
            OutputHead(
                weight,
                vocab_size=arguments.vocabulary,
                dtype=torch.float32 if head == "fp32-head" else None,
                group=dist.group.WORLD if ranks > 1 else None,
            ),
            labels,
            chunk_tokens=chunk,
        )
        assert read.entropy is not None
        logprob, entropy = read.logprob, read.entropy
    torch.autograd.backward(logprob.mean() + 0.01 * entropy.mean())
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert weight.grad is not None
    square_sum = weight.grad.float().norm().square()
    if ranks > 1:
        dist.all_reduce(square_sum)
    return {
        "seconds": seconds,
        "cpu": cpu,
        "gib": (peak - before) / 2**30,
        "logprob": float(logprob.detach().sum()),
        "gradient": float(square_sum.sqrt()),
        "chunk": chunk,
    }


def resident_bytes() -> int:
    """What this process holds now (Linux)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


if __name__ == "__main__":
    main()
