"""`winnow sft`: supervised fine-tuning on a user's demonstrations, with checkpoints and records.

demonstrations ─loader─► groups of a step ─► one update ─► held-out loss, answers │ checkpoint
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from winnow.data.demonstrations import DemonstrationSet
from winnow.data.loader import PromptLoader
from winnow.observe.metrics import HELD_OUT_LOSS, Metrics, Number
from winnow.run.loop import BaseRun
from winnow.workers.threads import in_thread


@dataclass(frozen=True, eq=False)
class SftData:
    """The training and held-out demonstrations of a run."""

    training: DemonstrationSet
    held_out: DemonstrationSet
    batch_size: int

    def count_steps(self, epochs: float) -> int:
        """Return the steps of passes over the data; the last may begin another pass."""
        return max(1, math.ceil(epochs * len(self.training.prompts.prompts) / self.batch_size))

    def note(self, steps: int) -> str:
        """Return a line on the number of demonstrations and epochs."""
        size = len(self.training.prompts.prompts)
        epochs = steps * self.batch_size / size
        note = f"{size:,} demonstrations, {epochs:.3g} epochs in {steps:,} steps"
        left_out = self.training.prompts.filtered + self.held_out.prompts.filtered
        if left_out:
            note += f"; {left_out:,} left out: longer than sft.max_tokens or the model's positions"
        return note


@dataclass(kw_only=True)
class SftRun(BaseRun):
    """The objects of an SFT run."""

    data: SftData
    loader: PromptLoader


async def train_sft(run: SftRun) -> None:
    """Train the steps of a run, and evaluate, log and save each if due.

    Raises:
        Stopped: on request; `run.state` holds the last boundary, which may not be saved.
        WinnowError: the run cannot continue.
    """
    watch, before = run.watch, run.first_step - 1
    if run.unfinished is not None:
        await _evaluate_log_save(run, before, run.unfinished)
    else:
        if run.evaluate_before:
            run.sinks.log(before, {**await _evaluate(run, before), **watch.lap()})
        run.record_boundary(before, None)
    size, training = run.data.batch_size, run.data.training
    for step in run.remaining_steps():
        run.stop.check()
        metrics = Metrics()
        groups = [training.make_group(step * size + i, run.loader.next()) for i in range(size)]
        await in_thread(run.learner.learn, groups, step, metrics, watch)
        await _evaluate_log_save(run, step, metrics.record())


async def _evaluate_log_save(run: SftRun, step: int, record: Mapping[str, Number]) -> None:
    """Evaluate, log and save a step, each if due."""
    figures: Mapping[str, Number] = {}
    if run.is_due(run.evaluate_every, step):
        run.record_boundary(step, record)  # so that a stop during evaluation keeps the step
        figures = await _evaluate(run, step)
    record = {**record, **figures, **run.data_figures(), **run.watch.lap()}
    run.sinks.log(step, record)
    run.record_boundary(step, None, figures)
    if run.is_due(run.save_every, step):
        with run.watch.phase("checkpoint"):
            run.state.save()
    with run.watch.paused():
        run.on_step(step, record)


async def _evaluate(run: SftRun, step: int) -> Mapping[str, Number]:
    """Return the loss on held-out demonstrations, and the scores of answers to held-out prompts."""
    figures: dict[str, Number] = {}
    with run.watch.phase("evaluate"):
        held_out = run.data.held_out
        if groups := [held_out.make_group(i, p) for i, p in enumerate(held_out.prompts.prompts)]:
            learner = cast(Any, run.learner)
            figures[HELD_OUT_LOSS] = await in_thread(learner.held_out, groups)
        if run.evaluator.prompts:
            await run.publish(step)
            figures |= await run.stop.interruptible(run.evaluator.evaluate(step))
    return figures
