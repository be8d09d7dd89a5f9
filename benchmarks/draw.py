"""CPU time of drawing tokens, against a draw by one float64 sum over the whole vocabulary.

    OMP_NUM_THREADS=1 python benchmarks/draw.py [--repeat 20]

Logits are normal numbers of a standard deviation of 2 (flat: few rows are settled by fp32 sums of
blocks) or 4. They take turns, the least time of each counts, and the ids must be the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from winnow.rollout.draw import RowParams, draw, select, uniform
from winnow.rollout.engine import SamplingParams

SHAPES = ((128, 8192), (64, 151_936))


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU time of a call in ms."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def main() -> None:
    """Print a line for each shape and spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for rows, vocabulary in SHAPES:
        for spread in (2, 4):
            generator = torch.Generator().manual_seed(0)
            logits = torch.randn(rows, vocabulary, generator=generator) * spread
            u = uniform(torch.arange(rows), torch.zeros(rows, dtype=torch.long))
            params = RowParams([SamplingParams(1)], torch.zeros(rows, dtype=torch.long))

            def by_one_sum(logits: Tensor = logits, u: Tensor = u) -> tuple[Tensor, Tensor]:
                logprobs = torch.log_softmax(logits, -1)
                ids = select(logprobs.exp(), u)
                return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)

            def ours(
                logits: Tensor = logits, u: Tensor = u, params: RowParams = params
            ) -> tuple[Tensor, Tensor]:
                return draw(logits, u, params)

            (want, want_logprobs), (got, logprobs) = by_one_sum(), ours()
            took = [(cpu_ms(by_one_sum), cpu_ms(ours)) for _ in range(args.repeat)]
            before, after = map(min, zip(*took, strict=True))
            print(
                f"{rows} x {vocabulary:,}, spread {spread}: {before:.1f} ms by one sum, "
                f"{after:.2f} ms now, {before / after:.1f} times faster; same ids "
                f"{torch.equal(want, got)}, log-probs within "
                f"{float((want_logprobs - logprobs).abs().max()):.1e}"
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
