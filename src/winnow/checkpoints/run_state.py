"""Everything a run goes on from, as it stood at a step's boundary.

Between two steps the engine holds nothing, so this is all there is: weights and optimizer, the
sampler's groups and rates, the loader's cursor, counters, random states, the place in
metrics.jsonl. All but the tensors is noted at each boundary, which is cheap; the tensors do not
change until the next update, so a boundary can be saved as long as the next step only samples.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from winnow.checkpoints.checkpoint import (
    PATIENCE,
    Checkpoint,
    Manifest,
    Snapshot,
    clean_drafts,
    prune,
    save_checkpoint,
)
from winnow.config.trainer import TrainerConfig
from winnow.errors import ConfigError, TransientError
from winnow.learning.strategy import Strategy
from winnow.observe.files import RunFolder, explain_write_errors, fsync_path
from winnow.observe.jsonl import MetricsLog
from winnow.observe.metrics import Record, Timeline, no_timeline
from winnow.workers.threads import start_thread

log = logging.getLogger(__name__)

_ABANDON_S = 1.0

Save = Callable[[dict[str, Tensor], Path], None]
"""Writes model weights, given by name, to a folder."""


class ModelStates(Protocol):
    """The models and optimizers of a run, in this process or on ranks."""

    def copy(self) -> Snapshot:
        """Copy all of them to the host."""

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's state; its model is loaded already.

        Args:
            checkpoint: its folder.
            state: of which `Snapshot.state` is a part.

        Raises:
            CheckpointError: it belongs to another model.
        """


class LocalModelStates:
    """`ModelStates` of strategies in this process.

    Args:
        policy: its model is the checkpoint's.
        others: strategies of other roles that learn, such as the critic; saved whole in the state.
        save_model: writes model weights, given by name, to a folder.
    """

    def __init__(
        self, policy: Strategy, strategies: Mapping[str, Strategy], save_model: Save
    ) -> None:
        self._policy, self._others, self._save_model = policy, dict(strategies), save_model

    def copy(self) -> Snapshot:
        live = dict(self._policy.export_weights(adapter_only=self._policy.has_adapter))
        weights = _copy_to_host(live)
        in_folder = {tensor.data_ptr() for tensor in live.values()}
        policy = self._policy.state_dict()
        # Half-precision models only: elsewhere the model's folder has the same tensors.
        masters = {n: t for n, t in policy["weights"].items() if t.data_ptr() not in in_folder}
        states = {role: strategy.state_dict() for role, strategy in self._others.items()}
        state = {"masters": masters, "optimizer": policy["optimizer"], "others": states}
        return Snapshot(_copy_to_host(state), lambda folder: self._save_model(weights, folder))

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        weights = {**self._policy.state_dict()["weights"], **state["masters"]}
        self._policy.load_state_dict({"weights": weights, "optimizer": state["optimizer"]})
        for role, strategy in self._others.items():
            strategy.load_state_dict(state["others"][role])


def _copy_to_host(tree: Any) -> Any:
    """Copy the tensors in a tree of dicts to the host."""
    if isinstance(tree, Mapping):
        return {key: _copy_to_host(value) for key, value in tree.items()}
    return tree.detach().to("cpu", copy=True) if isinstance(tree, Tensor) else tree


class Stateful(Protocol):
    """An object with a state of plain values, dataclasses, numpy arrays and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""


class RunState:
    """Records the state at step boundaries and writes checkpoints in a background thread.

    A save waits for the one before; an error comes up there, or at the end of the `with` block. One
    that may be over soon comes up at the end only, or the third time in a row.

    Args:
        tensors: models and optimizers.
        parts: all other objects with a state, by name.
        trainer: says which checkpoints stay, and where they are copied.
        manifest: the manifest of each checkpoint, but for what a boundary fills in.
        recipe: as text in YAML, kept with each checkpoint.
        timeline: called with the start and end of each write.

    Raises:
        CheckpointError: `trainer.checkpoint_url` cannot be used.
    """

    def __init__(
        self,
        tensors: ModelStates,
        parts: Mapping[str, Stateful],
        folder: RunFolder,
        metrics: MetricsLog,
        trainer: TrainerConfig,
        manifest: Manifest,
        recipe: str = "",
        timeline: Timeline = no_timeline,
    ) -> None:
        self._tensors, self._parts = tensors, dict(parts)
        self._folder, self._metrics, self._trainer = folder, metrics, trainer
        self._manifest, self._recipe, self._timeline = manifest, recipe, timeline
        self._states: dict[str, Any] = {}
        self._saved: tuple[int, bool] | None = None
        self.save_s = 0.0
        """Longest time that a checkpoint took to be written so far."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._passing: TransientError | None = None
        """Why the last checkpoint could not be written, where the next one may be."""
        self._failures = 0
        self._upload = None
        if trainer.checkpoint_url is not None:
            from winnow.checkpoints.upload import CheckpointUpload

            self._upload = CheckpointUpload(trainer.checkpoint_url, folder.path)

    @property
    def step(self) -> int | None:
        """The step of the last boundary; None before the first."""
        return self._manifest.step if self._states else None

    def part_states(self, *names: str) -> dict[str, Any]:
        """Return the states of some parts as they are now, by name."""
        return {name: self._parts[name].state_dict() for name in names}

    def record_step(
        self,
        step: int,
        unfinished: Record | None,
        figures: Record | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Record the state after a step, or after all of it but its evaluation.

        Args:
            unfinished: the step's figures, while its evaluation is to come.
            figures: of the evaluation.
            overrides: states of some parts, by name, which have gone on since the boundary.

        Raises:
            ConfigError: they lack the required one.
        """
        best = self._trainer.keep_best
        if figures and best is not None and best not in figures:
            names = ", ".join(sorted(figures))
            raise ConfigError(
                f"trainer.keep_best={best} is not an evaluation metric; available: {names}"
            )
        now = self.part_states(*(name for name in self._parts if name not in overrides))
        states = {**now, **overrides}
        self._metrics.sync()
        self._states = {**states, "random": _random_states(), "unfinished": unfinished}
        self._manifest = replace(
            self._manifest,
            step=step,
            evaluated=unfinished is None,
            metrics_bytes=self._metrics.size,
            figures=dict(figures or {}),
        )

    def record_sampling(self) -> None:
        """Add what was sampled since the boundary, which may be part of a step."""
        assert self._states
        self.record_step(self._manifest.step, self._states["unfinished"], self._manifest.figures)
        self._saved = None

    def save(self) -> bool:
        """Start saving the last boundary, unless it is saved; False when there is none yet.

        Raises:
            CheckpointError: the save before failed.
        """
        key = self._manifest.step, self._manifest.evaluated
        if self._states and key != self._saved:
            self._join()  # before the copy: ranks hold one until it is written
            copied = self._tensors.copy()
            snapshot = replace(copied, state={**self._states, **copied.state})
            write = partial(self._write, self._manifest, snapshot)
            self._saved = key
            self._thread = start_thread(write, "checkpoint")
        return bool(self._states)

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk.

        Raises:
            WinnowError: it could not be written.
        """
        self._join()
        if self._passing is not None:
            raise self._passing

    def _join(self) -> None:
        """Wait for the thread; transient errors are not raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> RunState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the last save; after Ctrl-C twice give it up and leave no draft."""
        if isinstance(error, KeyboardInterrupt):
            if self._thread is not None:
                self._thread.join(_ABANDON_S)
            with contextlib.suppress(OSError):  # the next start meets it, and says so
                clean_drafts(self._folder.checkpoints)
            return
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            # What broke the run off matters more.
            log.warning("%s", failure)

    def _write(self, manifest: Manifest, snapshot: Snapshot) -> None:
        folder, trainer, began_s = self._folder, self._trainer, time.perf_counter()
        try:
            folder.check_exists()
            # A checkpoint refers to these.
            for path in (folder.path, folder.ledger, folder.rollouts, folder.evaluations):
                with explain_write_errors(path):
                    if path.is_dir():
                        fsync_path(path)
            checkpoint = save_checkpoint(folder.checkpoints, manifest, snapshot, self._recipe)
            prune(folder.checkpoints, trainer.keep_last, trainer.keep_every, trainer.keep_best)
            if self._upload is not None:
                self._upload.push(checkpoint)
            self._passing, self._failures = None, 0
        except TransientError as error:
            self._passing, self._failures = error, self._failures + 1
            if self._failures >= PATIENCE:
                self._error = error
            else:
                self._saved = None
                log.warning("%s; retrying at the next checkpoint", error)
        except BaseException as error:  # handed over to the one that waits
            self._error = error
        finally:
            ended_s = time.perf_counter()
            self.save_s = max(self.save_s, ended_s - began_s)
            self._timeline("checkpoint", "save", began_s, ended_s)

    def restore(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> Record | None:
        """Load the state of a checkpoint whose model is loaded already.

        Returns:
            The figures of a step that is all done but its evaluation, else None.

        Raises:
            CheckpointError: it belongs to other data or another model.
        """
        self._tensors.restore(checkpoint.path, state)
        for name, part in self._parts.items():
            if name in state:  # an older run's has no pending steps
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
