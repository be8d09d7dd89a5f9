"""Time and peak memory of the log-prob kernel against plain arithmetic, forward and backward.

    python benchmarks/logprob_kernel.py                       # V=151,936, T=4,096, H=256, fp32
    python benchmarks/logprob_kernel.py --dtype bfloat16 --chunks 128 1024

Each case runs in a process of its own, so that its peak is its own; "memory" is what the passes
add to the process once the inputs exist. Ratios are to the naive case of the same call. Needs
about 13 GiB free for the naive case; `--tokens` makes it smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

PAGE = resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(arguments)))
        return
    print(
        f"V={arguments.vocabulary:,} T={arguments.tokens:,} H={arguments.hidden:,} "
        f"{arguments.dtype}, {arguments.threads} threads, with entropy, forward and backward"
    )
    print(f"{'case':<12}{'seconds':>9}{'ratio':>8}{'GiB':>9}{'ratio':>8}   logp sum, |grad|")
    naive: dict[str, float] | None = None
    for case in ("naive", *map(str, arguments.chunks)):
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        naive = naive or result
        label = case if case == "naive" else f"chunk {case}"
        print(
            f"{label:<12}{result['seconds']:>9.1f}{result['seconds'] / naive['seconds']:>8.2f}"
            f"{result['gib']:>9.2f}{result['gib'] / naive['gib']:>8.3f}"
            f"   {result['logprob']:.2f}, {result['gradient']:.4f}",
            flush=True,
        )


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One case: seconds, GiB over the inputs, and two numbers that all cases share."""
    import torch

    from winnow.algorithms.logprobs import token_logprobs

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    hidden = torch.randn(arguments.tokens, arguments.hidden).to(dtype).requires_grad_()
    weight = torch.randn(arguments.vocabulary, arguments.hidden).mul_(0.05).to(dtype)
    weight.requires_grad_()
    labels = torch.randint(0, arguments.vocabulary, (arguments.tokens,))
    before = resident_bytes()
    start = time.perf_counter()
    if arguments.case == "naive":
        logp = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
        logprob = logp.gather(1, labels[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
    else:
        chunk = int(arguments.case)
        logprob, entropy = token_logprobs(hidden, weight, labels, chunk_tokens=chunk)  # type: ignore[assignment]
    (logprob.mean() + 0.01 * entropy.mean()).backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert weight.grad is not None
    return {
        "seconds": seconds,
        "gib": (peak - before) / 2**30,
        "logprob": float(logprob.sum()),
        "gradient": float(weight.grad.float().norm()),
    }


def resident_bytes() -> int:
    """What this process holds now (Linux)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


if __name__ == "__main__":
    main()
