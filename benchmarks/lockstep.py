"""How long ranks wait for each other at micro-batches, and what dealing an update out costs them.

    python -m benchmarks.lockstep [--cost] [--out benchmarks/results/lockstep.md]

A step of the published DAPO recipe: 8,192 answers, 16 updates of 512, a model 5,120 wide. Lengths
are drawn, with a prompt of 200 tokens each: log-normal with the tail and the limit of 20,480 tokens
that long reasoning has (`dapo` means 6k, `late` 10k), or the recorded lengths of the quickstart's
warm start (`tests/fixtures/rollouts.npz`, limit 128), times 160. No lengths of a real 32B run were
at hand. A lockstep is of all updates together, as `ranks/lockstep` is: the work of all, over the
ranks times the sum over micro-batches of the heaviest rank's.

`by sums` deals as Winnow did before: each sample to the rank with the least work, then each rank's
own cut by the budget. `bound` is what no dealing can pass (`least_time`).
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from winnow.learning.balance import Assignment, assign, estimate_work
from winnow.learning.batch import Batch, MicroBatch, split_update, split_updates
from winnow.types import IntArray

WIDTH = 5120
PROMPT = 200
ANSWERS, N, UPDATES = 8192, 16, 16
LIMIT = 20_480
RECORDED = Path(__file__).parents[1] / "tests" / "fixtures" / "rollouts.npz"
SETUPS = ((128, 22_528), (128, 32_768), (64, 22_528), (16, 22_528))
_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.45, 0.5)


def drawn(kind: str, seed: int = 0) -> IntArray:
    """Draw the lengths of a step's samples [B], prompts included."""
    rng = np.random.default_rng(seed)
    if kind == "recorded":
        with np.load(RECORDED) as file:
            answers = rng.choice(file["response_tokens"], ANSWERS) * (LIMIT // 128)
    else:
        mean, deviation = {"dapo": (8.3, 0.9), "late": (9.0, 0.7)}[kind]
        answers = np.exp(rng.normal(mean, deviation, ANSWERS)).astype(np.int64) + 50
    lengths: IntArray = np.minimum(answers, LIMIT).astype(np.int64) + PROMPT
    return lengths


def updates_of(lengths_B: IntArray) -> Iterator[IntArray]:
    """Yield the lengths of each update's samples, longest first."""
    groups = ANSWERS // N
    for update in split_updates(groups, groups // UPDATES, (1, 1, 0)):
        places = np.concatenate([np.arange(N) + N * group for group in update])
        yield np.sort(lengths_B[places])[::-1]


def dealt_by_sums(lengths_B: IntArray, max_tokens: int, ranks: int, width: int) -> Assignment:
    """Deal as before: sums of ranks are even, and each cuts its own samples by the budget."""
    heap = [(0, rank) for rank in range(ranks)]
    own: list[list[int]] = [[] for _ in range(ranks)]
    work_B = estimate_work(lengths_B, width)
    for i, one in enumerate(work_B.tolist()):
        total, rank = heap[0]
        heapq.heapreplace(heap, (total + one, rank))
        own[rank].append(i)
    cuts = [assign(lengths_B[part], max_tokens, 1, width).work[0] for part in own]
    rounds = max(map(len, cuts))
    work_RK = np.array([np.pad(cut, (0, rounds - len(cut))) for cut in cuts])
    return Assignment(np.empty(0, np.int64), work_RK)


def least_time(lengths_B: IntArray, max_tokens: int, ranks: int, width: int) -> float:
    """Return a time, in the unit of `work`, that no dealing of these samples falls below.

    Let level k be the k-th largest work of a round's heaviest micro-batch; time is their sum.
    Some samples need at least so many rounds as their tokens ask for, also when those that leave
    no room for others count as the whole budget and the ones that fit beside them as nothing (for
    any share of the budget: S. Fekete and J. Schepers, New classes of lower bounds for bin packing,
    1998). So if the i longest samples need k rounds, level k is at least the work of the i-th. On
    top of these levels:

    - the rounds with any of the i longest hold all their work, in however many rounds;
    - a micro-batch has no more tokens than the budget, nor than work / 12 H, so what a level is
      above a full micro-batch of short samples holds no token.

    Args:
        lengths_B: tokens, longest first.
    """
    work_B, tokens_B = estimate_work(lengths_B, width), np.minimum(lengths_B, max_tokens)
    needed = np.zeros(len(lengths_B))
    for part in _SHARES:
        counted = np.where(tokens_B < part * max_tokens, 0, tokens_B)
        counted = np.where(tokens_B > (1 - part) * max_tokens, max_tokens, counted)
        needed = np.maximum(needed, np.cumsum(counted) / (ranks * max_tokens))
    rounds_B = np.ceil(needed - 1e-9).astype(np.int64)
    rounds = int(rounds_B[-1])
    levels = np.array([work_B[np.searchsorted(rounds_B, k)] for k in range(1, rounds + 1)])
    sums = np.concatenate([[0], np.cumsum(levels)])
    # At least rounds_B of the rounds hold one of the i longest; with a of them:
    a = np.arange(1, rounds + 1)
    theirs = sums[rounds_B][:, None] + (a - rounds_B[:, None]) * work_B[:, None]
    theirs = np.maximum(theirs, np.cumsum(work_B)[:, None] / ranks)
    total = np.where(a < rounds_B[:, None], np.inf, theirs + sums[-1] - sums[a])
    short = estimate_work(np.array([1]), width)[0] - 1  # 12 H
    by_tokens = short * tokens_B.sum() / ranks + np.maximum(levels - short * max_tokens, 0).sum()
    return float(max(total.min(1).max(), by_tokens))


def lockstep_rows() -> Iterator[str]:
    """Yield the table of locksteps."""
    yield "| lengths | mean | ranks | budget | by sums | dealt | bound | micro-batches | spread |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for kind in ("dapo", "late", "recorded"):
        lengths = drawn(kind)
        for ranks, budget in SETUPS:
            before = after = all_work = best = 0.0
            rounds, spread = 0, 0.0
            for own in updates_of(lengths):
                found = assign(own, budget, ranks, WIDTH)
                all_work += float(found.work.sum())
                before += dealt_by_sums(own, budget, ranks, WIDTH).capacity
                after += found.capacity
                best += ranks * least_time(own, budget, ranks, WIDTH)
                rounds, spread = rounds + found.work.shape[1], spread + found.spread / UPDATES
            yield (
                f"| {kind} | {lengths.mean():,.0f} | {ranks} | {budget:,} | "
                f"{all_work / before:.3f} | {all_work / after:.3f} | {all_work / best:.3f} | "
                f"{rounds} | {spread:.3f} |"
            )


def batch_of(lengths_B: IntArray) -> Batch:
    """Make a batch of samples of these lengths, whose tokens say nothing."""
    offsets = np.concatenate([[0], np.cumsum(lengths_B)])
    tokens = int(offsets[-1])
    positions = torch.arange(tokens) - torch.from_numpy(np.repeat(offsets[:-1], lengths_B))
    written = positions >= PROMPT
    columns = {name: torch.zeros(tokens) for name in ("old", "advantages")}
    return Batch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=positions,
        offsets=torch.from_numpy(offsets),
        prompt_lengths=torch.full((len(lengths_B),), PROMPT),
        groups=torch.arange(len(lengths_B)) // N,
        gen_mask=written,
        loss_mask=written.clone(),
        behav=torch.zeros(tokens),
        rewards=torch.zeros(len(lengths_B), dtype=torch.float64),
        columns=columns | {"age": torch.zeros(tokens, dtype=torch.int64)},
    )


def cost_rows(ranks: int = 128, budget: int = 22_528) -> Iterator[str]:
    """Yield the table of what a step's dealing costs one rank."""
    lengths = drawn("dapo")
    batch = batch_of(lengths)
    updates = split_updates(ANSWERS // N, ANSWERS // N // UPDATES, (1, 1, 0))
    every = [range(batch.n_groups)]
    yield "| dealing | what is cut | CPU-seconds | tokens cut | most alive, MiB |"
    yield "|---|---|---|---|---|"
    for what, parts in ((f"the {UPDATES} updates", updates), ("a pass over the step", every)):
        for whose, own in ((f"all {ranks} ranks'", range(ranks)), ("a rank's own", range(1))):
            began, tokens, most = time.process_time(), 0, 0
            for part in parts:
                shares = split_update(batch, part, budget, ranks, WIDTH)
                micro = [each for rank in own for each in shares.micro_batches(rank)]
                tokens += sum(len(each.token_ids) for each in micro)
                most = max(most, sum(map(_bytes, micro)))
            seconds = time.process_time() - began
            yield f"| {what} | {whose} | {seconds:.2f} | {tokens:,} | {most / 2**20:,.1f} |"


def _bytes(micro: MicroBatch) -> int:
    tensors = [each for each in vars(micro).values() if isinstance(each, torch.Tensor)]
    return sum(each.nbytes for each in [*tensors, *micro.columns.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cost", action="store_true", help="measure dealing, too (4 GiB)")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Ranks in step",
        "",
        f"Made by `python -m benchmarks.lockstep{' --cost' * chosen.cost}`.",
        "",
    ]
    lines += lockstep_rows()
    if chosen.cost:
        lines += ["", "## What dealing costs a rank in a step", "", *cost_rows()]
    text = "\n".join(lines) + "\n"
    print(text)
    if chosen.out:
        chosen.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
