"""Everything a run goes on from, as it stood at a step's boundary.

Between two steps the engine holds nothing, so this is all there is: weights and optimizer, the
sampler's groups and rates, the loader's cursor, counters, random states, the place in
metrics.jsonl. All but the tensors is noted at each boundary, which is cheap; the tensors do not
change until the next update, so a boundary can be saved as long as the next step only samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from winnow.errors import ConfigError
from winnow.learning.strategy import Strategy
from winnow.observe.jsonl import MetricsLog
from winnow.observe.names import Record
from winnow.runs.checkpoint import Checkpoint, Manifest, Saver, Snapshot

Save = Callable[[dict[str, Tensor], Path], None]
"""Writes model weights, given by name, to a folder."""


class Tensors(Protocol):
    """The models and optimizers of a run, in this process or on ranks."""

    def copy(self) -> Snapshot:
        """Copy all of them to the host."""
        ...

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Become what a checkpoint holds, its model being loaded already.

        Args:
            checkpoint: its folder.
            state: of which `Snapshot.state` is a part.

        Raises:
            CheckpointError: it belongs to another model.
        """
        ...


class LocalTensors:
    """`Tensors` of strategies in this process.

    Args:
        policy: its model is the checkpoint's.
        others: strategies of other roles that learn, such as the critic; saved whole in the state.
        save_model: writes model weights, given by name, to a folder.
    """

    def __init__(self, policy: Strategy, others: Mapping[str, Strategy], save_model: Save) -> None:
        self._policy, self._others, self._save_model = policy, dict(others), save_model

    def copy(self) -> Snapshot:
        live = dict(self._policy.export_weights(adapter_only=self._policy.has_adapter))
        weights = _copied(live)
        in_folder = {tensor.data_ptr() for tensor in live.values()}
        own = self._policy.state_dict()
        # Half-precision models only: elsewhere the model's folder has the same tensors.
        masters = {n: t for n, t in own["weights"].items() if t.data_ptr() not in in_folder}
        others = {role: strategy.state_dict() for role, strategy in self._others.items()}
        state = {"masters": masters, "optimizer": own["optimizer"], "others": others}
        return Snapshot(_copied(state), lambda folder: self._save_model(weights, folder))

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        weights = {**self._policy.state_dict()["weights"], **state["masters"]}
        self._policy.load_state_dict({"weights": weights, "optimizer": state["optimizer"]})
        for role, strategy in self._others.items():
            strategy.load_state_dict(state["others"][role])


def _copied(tree: Any) -> Any:
    """Copy the tensors in a tree of dicts to the host."""
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    return tree.detach().to("cpu", copy=True) if isinstance(tree, Tensor) else tree


class Stateful(Protocol):
    """An object with a state of plain values, dataclasses, numpy arrays and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        ...


class RunState:
    """The notes of boundaries, of which checkpoints are made.

    Args:
        tensors: models and optimizers.
        parts: all other objects with a state, by name.
        frame: the manifest of each checkpoint, but for what a boundary fills in.
        required: a figure that each evaluation must have (`trainer.keep_best`).
    """

    def __init__(
        self,
        tensors: Tensors,
        parts: Mapping[str, Stateful],
        metrics: MetricsLog,
        saver: Saver,
        frame: Manifest,
        required: str | None = None,
    ) -> None:
        self._tensors, self._parts = tensors, dict(parts)
        self._metrics, self._saver = metrics, saver
        self._manifest, self._required = frame, required
        self._states: dict[str, Any] = {}
        self._saved: tuple[int, bool] | None = None

    @property
    def step(self) -> int | None:
        """The step of the last boundary; None before the first."""
        return self._manifest.step if self._states else None

    def note(self, step: int, unfinished: Record | None, figures: Record | None = None) -> None:
        """Note that a step is done, or all of it but its evaluation.

        Args:
            unfinished: the step's figures, while its evaluation is to come.
            figures: of the evaluation.

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
        self._states = {**states, "random": _random_states(), "unfinished": unfinished}
        self._manifest = replace(
            self._manifest,
            step=step,
            evaluated=unfinished is None,
            metrics_bytes=self._metrics.offset(),
            figures=dict(figures or {}),
        )

    def note_sampling(self) -> None:
        """Take in what was sampled since the boundary; it must be in order, though not a step's."""
        assert self._states
        self.note(self._manifest.step, self._states["unfinished"], self._manifest.figures)
        self._saved = None

    def save(self) -> bool:
        """Save the last boundary unless that is done; return False when there is none yet."""
        key = self._manifest.step, self._manifest.evaluated
        if self._states and key != self._saved:
            copied = self._tensors.copy()
            state = {**self._states, **copied.state}
            self._saver.save(self._manifest, replace(copied, state=state))
            self._saved = key
        return bool(self._states)

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
