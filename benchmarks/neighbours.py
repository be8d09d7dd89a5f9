"""Whether an answer's bits depend on who is decoded beside it, and what padding rows would cost.

    OMP_NUM_THREADS=1 python benchmarks/neighbours.py [--answers 256] [--out FILE]

The quickstart's architecture with random weights, one thread. The same answers (same prompts,
same random numbers, 48 tokens each) are written with different numbers of slots, so that each has
other neighbours, and twice with the same number. Bits are those of the log-probs. The second table
is the time of a decode tick by live rows: padding R rows to a bucket costs the tick of the bucket.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import torch
from decode import GROUP, VOCABULARY, tiny_model
from transformers import PreTrainedModel

from winnow.models.causal_lm import use_layout_attention
from winnow.models.fused_layers import fuse_layers
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams
from winnow.types import Segment

TOKENS = 48
ROWS = (1, 8, 32, 64, 128, 224, 256, 384, 512)


def write(
    model: PreTrainedModel, answers: int, slots: int, tokens: int = TOKENS
) -> tuple[dict[tuple[int, int], Segment], float]:
    """The answers by (group, index), and seconds a tick."""
    rng = np.random.default_rng(0)
    engine = TorchEngine(model, slots=slots, prefill_tokens=8192)
    sampling = SamplingParams(max_tokens=tokens)
    size = min(GROUP, answers)
    groups = [
        GroupRequest(
            group_id=g,
            prompt_ids=rng.integers(3, VOCABULARY, rng.integers(5, 10)),
            answers=tuple(AnswerRequest(i, g * GROUP + i) for i in range(size)),
            sampling=sampling,
            priority=g,
        )
        for g in range(answers // size)
    ]

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        done: list[CompletionEvent] = []
        while events := await engine.events():
            done += events
        return done

    began = time.process_time()
    done = asyncio.run(run())
    seconds = (time.process_time() - began) / engine.status().tick
    return {(e.group_id, e.answer): e.segment for e in done}, seconds


def bits_table(model: PreTrainedModel, answers: int) -> str:
    """Answers against those written with all slots, by the number of slots."""
    lines = [
        "| slots | answers with other bits | log-probs with other bits | largest difference "
        "| answers with other tokens |",
        "|---|---|---|---|---|",
    ]
    whole, _ = write(model, answers, answers)
    for slots in (answers, answers - 1, answers // 2, answers // 2 + 3, answers // 8, 8, 7, 1):
        other, _ = write(model, answers, slots)
        tokens = {k for k in whole if (whole[k].token_ids != other[k].token_ids).any()}
        gaps = np.array([whole[k].logprobs - other[k].logprobs for k in whole if k not in tokens])
        differing = (gaps != 0).any(1).sum() + len(tokens)
        lines.append(
            f"| {slots} | {differing / answers:.0%} | {(gaps != 0).mean():.1%} "
            f"| {np.abs(gaps).max():.1e} | {len(tokens)} |"
        )
    return "\n".join(lines)


def ticks_table(model: PreTrainedModel, repeat: int = 5) -> str:
    """CPU milliseconds a tick."""
    best = {rows: min(write(model, rows, rows)[1] for _ in range(repeat)) for rows in ROWS}
    return "\n".join(
        [
            "| live rows | " + " | ".join(map(str, best)) + " |",
            "|---" * (len(best) + 1) + "|",
            "| ms a tick | " + " | ".join(f"{s * 1000:.2f}" for s in best.values()) + " |",
        ]
    )


def main() -> None:
    """Print or write both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model()
    use_layout_attention(model)
    fuse_layers(model)
    text = f"{bits_table(model, args.answers)}\n\n{ticks_table(model)}"
    print(text)
    if args.out is not None:
        command = " ".join(["python", "benchmarks/neighbours.py", *sys.argv[1:]])
        args.out.write_text(
            f"# Neighbours and bits\n\nMade by `{command}`: {args.answers} answers of {TOKENS} "
            f"tokens, against those written with {args.answers} slots.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
