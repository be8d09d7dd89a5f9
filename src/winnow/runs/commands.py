"""Which checkpoint of a run a command is about."""

from __future__ import annotations

from winnow.errors import CheckpointError
from winnow.observe.run_folder import RunFolder
from winnow.runs.checkpoint import Checkpoint, checkpoints_in, verify


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
