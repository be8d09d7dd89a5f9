"""A checkpoint of a run, and its evaluation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from rich.console import Console

from winnow.checkpoint import Checkpoint, checkpoints_in, verify
from winnow.config.load import load_recipe
from winnow.errors import CheckpointError, DataError
from winnow.observe.history import evaluations
from winnow.observe.names import Number
from winnow.observe.run_folder import RunFolder
from winnow.observe.summary import Summary, print_summary
from winnow.rollout.engine import WeightUpdate
from winnow.trainer.build import (
    load_policy,
    make_engine,
    make_evaluator,
    make_rewards,
    use_machine,
)
from winnow.trainer.evaluate import Evaluator


def find_checkpoint(folder: RunFolder, step: int | None) -> Checkpoint:
    """A run's checkpoint of a step, or its last; its files are checked.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = checkpoints_in(folder.checkpoints)
    chosen = [c for c in found if step is None or c.step == step]
    if not chosen:
        there = ", ".join(str(c.step) for c in found) or "none"
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"{folder.path} has no {wanted}; there are: {there}")
    verify(chosen[-1])
    return chosen[-1]


def run_evaluation(run: str, step: int | None, overrides: Sequence[str], console: Console) -> None:
    """Evaluate a run's model on its held-out prompts and print the figures.

    Raises:
        WinnowError: no such run or checkpoint, or nothing to evaluate on.
    """
    folder = RunFolder.open(run)
    checkpoint = find_checkpoint(folder, step)
    config = load_recipe(str(folder.config), overrides)
    device = use_machine(config)
    policy = load_policy(config, str(checkpoint.model), device)
    target = folder.evaluations / f"checkpoint-{checkpoint.step}.parquet"
    engine = make_engine(config, policy)

    async def evaluate(evaluator: Evaluator) -> dict[str, Number]:
        await engine.load_weights(WeightUpdate(version=checkpoint.step))
        return await evaluator.evaluate(checkpoint.step)

    with contextlib.closing(make_rewards(config, device, training=False)) as rewards:
        evaluator = make_evaluator(config, policy, engine, lambda _: target, rewards)
        if not evaluator.prompts:
            raise DataError("no held-out prompts: give data.eval_files=[FILE], or a data/task")
        record = asyncio.run(evaluate(evaluator))
    print_summary(
        Summary(
            f"{folder.name}, step {checkpoint.step}: {len(evaluator.prompts):,} held-out prompts",
            after=evaluations(record),
            paths={"answers": target},
        ),
        console,
    )
