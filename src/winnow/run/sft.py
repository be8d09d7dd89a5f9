"""`winnow sft`: a model imitates a user's own demonstrations, as a run that is kept like any other.

demonstrations ─loader─► groups of a step ─► one update ─► held-out loss, answers │ checkpoint
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from winnow.config.root import Config
from winnow.data.demonstrations import DemonstrationSet
from winnow.data.loader import PromptLoader
from winnow.observe.metrics import HELD_OUT_LOSS, Metrics, Number, Stopwatch
from winnow.run.loop import BaseRun
from winnow.types import Group
from winnow.workers.threads import in_thread


@dataclass(frozen=True, eq=False)
class Shown:
    """The demonstrations of a run."""

    training: DemonstrationSet
    held_out: DemonstrationSet
    batch_size: int

    def with_steps(self, config: Config) -> Config:
        """Put the steps that `trainer.data_epochs` asks for into a recipe; the last may begin
        another epoch."""
        epochs, size = config.trainer.data_epochs, len(self.training.prompts.prompts)
        if epochs is None:
            return config
        steps = max(1, math.ceil(epochs * size / self.batch_size))
        trainer = config.trainer.model_copy(update={"steps": steps})
        return config.model_copy(update={"trainer": trainer})

    def note(self, steps: int) -> str:
        """Say how many there are."""
        size = len(self.training.prompts.prompts)
        epochs = steps * self.batch_size / size
        note = f"{size:,} demonstrations, {epochs:.3g} epochs in {steps:,} steps"
        left_out = self.training.prompts.filtered + self.held_out.prompts.filtered
        if left_out:
            note += f"; {left_out:,} left out: longer than sft.max_tokens or the model's positions"
        return note


@dataclass(kw_only=True)
class Imitation(BaseRun):
    """The objects that a run is made of that imitates."""

    shown: Shown
    loader: PromptLoader

    def draw(self, step: int) -> list[Group]:
        """Return the demonstrations of a step: a fixed number, over the ends of epochs."""
        size, training = self.shown.batch_size, self.shown.training
        return [training.make_group(step * size + i, self.loader.next()) for i in range(size)]


async def imitate(run: Imitation) -> None:
    """Learn the steps of a run, and evaluate, log and save each, if it is due.

    Raises:
        Stopped: that was asked for; `run.state` has the last boundary, saved or not.
        WinnowError: the run cannot go on.
    """
    watch = Stopwatch(tell=run.tell)
    before = run.first_step - 1
    if run.unfinished is not None:
        await _finish(run, before, run.unfinished, watch)
    else:
        if run.evaluate_before:
            run.sinks.log(before, {**await _evaluated(run, before, watch), **watch.lap()})
        run.note(before, None)
    for step in run.remaining():
        run.stop.check()
        metrics = Metrics()
        await in_thread(run.learner.learn, run.draw(step), step, metrics, watch)
        await _finish(run, step, metrics.record(), watch)


async def _finish(
    run: Imitation, step: int, record: Mapping[str, Number], watch: Stopwatch
) -> None:
    """Evaluate, log and save a step, each if it is due."""
    figures: Mapping[str, Number] = {}
    if run.evaluations.due(step):
        run.note(step, record)  # a stop while it evaluates has the step's weights already
        figures = await _evaluated(run, step, watch)
    run.sinks.log(step, {**record, **figures, **run.data_figures(), **watch.lap()})
    run.note(step, None, figures)
    if run.checkpoints.due(step):
        with watch.phase("checkpoint"):
            run.state.save()


async def _evaluated(run: Imitation, step: int, watch: Stopwatch) -> Mapping[str, Number]:
    """Return the loss on held-out demonstrations, and the scores of answers to held-out prompts."""
    figures: dict[str, Number] = {}
    with watch.phase("evaluate"):
        held_out = run.shown.held_out.make_groups()
        if held_out:
            learner = cast(Any, run.learner)
            figures[HELD_OUT_LOSS] = await in_thread(learner.held_out, held_out)
        if run.evaluator.prompts:
            await run.publish(step)
            figures |= await run.stop.interruptible(run.evaluator.evaluate(step))
    return figures
