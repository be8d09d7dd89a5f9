"""Everything a run goes on from, as it stood at a step's boundary.

Between two steps the engine holds nothing, so this is all there is: weights and optimizer, the
sampler's groups and rates, the loader's cursor, counters, random states, the place in
metrics.jsonl. All but the tensors is noted at each boundary, which is cheap; the tensors do not
change until the next update, so a boundary can be saved as long as the next step only samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from winnow.errors import ConfigError
from winnow.observe.names import Record
from winnow.runs.checkpoint import Checkpoint, Content
from winnow.runs.snapshot import Tensors


class Stateful(Protocol):
    """Has a state of plain values, numpy arrays and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """What it goes on from."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        ...


@dataclass(frozen=True, eq=False)
class Boundary:
    """A step's end without the tensors."""

    step: int
    unfinished: Record | None
    """The step's figures while its evaluation is to come, then None."""
    figures: Record
    """The step's evaluation."""
    metrics_bytes: int
    states: Mapping[str, Any]


class RunState:
    """Notes boundaries and makes checkpoints of them.

    Args:
        tensors: models and optimizers.
        parts: by name, whatever else has a state.
        offset: where metrics.jsonl ends.
        write: takes a finished content; may return before it is on disk.
        frame: makes the content, given step, `save_model` and the rest as keywords.
        required: a figure that each evaluation must have (`trainer.keep_best`).
    """

    def __init__(
        self,
        tensors: Tensors,
        parts: Mapping[str, Stateful],
        offset: Callable[[], int],
        write: Callable[[Content], None],
        frame: Callable[..., Content],
        required: str | None = None,
    ) -> None:
        self._tensors, self._parts = tensors, dict(parts)
        self._offset, self._write, self._frame = offset, write, frame
        self._required = required
        self._boundary: Boundary | None = None
        self._saved: tuple[int, bool] | None = None

    @property
    def step(self) -> int | None:
        """The step of the last boundary; None before the first."""
        return None if self._boundary is None else self._boundary.step

    def note(self, step: int, unfinished: Record | None, figures: Record | None = None) -> None:
        """Step `step` is done, or all of it but its evaluation, which then gave `figures`.

        Raises:
            ConfigError: they lack the required one.
        """
        if figures and self._required is not None and self._required not in figures:
            names = ", ".join(sorted(figures))
            raise ConfigError(
                f"trainer.keep_best={self._required} is no figure of the evaluation; "
                f"there are {names}"
            )
        states: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        states["random"] = _random_states()
        self._boundary = Boundary(step, unfinished, figures or {}, self._offset(), states)

    def note_sampling(self) -> None:
        """Take in what was sampled since the boundary; it must be in order, though not a step's."""
        boundary = self._boundary
        assert boundary is not None
        self.note(boundary.step, boundary.unfinished, boundary.figures)
        self._saved = None

    def save(self) -> bool:
        """Save the last boundary unless that is done; False when there is none yet."""
        boundary = self._boundary
        if boundary is None:
            return False
        key = boundary.step, boundary.unfinished is None
        if key == self._saved:
            return True
        copied = self._tensors.copy()
        self._write(
            self._frame(
                step=boundary.step,
                save_model=copied.save_model,
                save_ranks=copied.save_ranks,
                state={**boundary.states, "unfinished": boundary.unfinished, **copied.state},
                evaluated=boundary.unfinished is None,
                metrics_bytes=boundary.metrics_bytes,
                figures=boundary.figures,
            )
        )
        self._saved = key
        return True

    def restore(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> Record | None:
        """Become what the checkpoint of a step holds, its model being loaded already.

        Returns:
            The figures of a step that is all done but its evaluation, else None.

        Raises:
            CheckpointError: it belongs to other data or another model.
        """
        self._tensors.restore(checkpoint.path, state)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        _set_random_states(state["random"])
        unfinished = cast("Record | None", state["unfinished"])
        self._saved = checkpoint.step, unfinished is None
        return unfinished


def seed_everything(seed: int) -> None:
    """Seed the global generators. Winnow draws from none of them; a user's scorer may."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _random_states() -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    # Asked of a process that uses none, each GPU of the machine would be opened.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state_all(states["cuda"])
