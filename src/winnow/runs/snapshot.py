"""Models and optimizers of a run as a checkpoint has them, wherever they are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from winnow.learning.strategy import Strategy

Save = Callable[[dict[str, Tensor], Path], None]
"""Writes model weights, given by name, to a folder."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Tensors as they were at one moment: later updates change nothing in it."""

    state: Mapping[str, Any]
    """What goes into the checkpoint's state."""
    save_model: Callable[[Path], None]
    """Writes a Hugging Face folder at the path it is given; may be called in a thread."""
    save_ranks: Callable[[Path], None] = lambda folder: None
    """Writes what ranks hold into a checkpoint's folder; may be called in a thread."""


class Tensors(Protocol):
    """Whoever holds what learns."""

    def copy(self) -> Snapshot:
        """All of it as it is now, on the host."""
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
    """Strategies of this process.

    Args:
        policy: its model is the checkpoint's.
        others: by role, what else learns; saved whole in the state.
        save_model: writes model weights, given by name, to a folder.
    """

    def __init__(
        self,
        policy: Strategy,
        others: Mapping[str, Strategy],
        save_model: Save,
    ) -> None:
        self._policy, self._others, self._save_model = policy, dict(others), save_model

    def copy(self) -> Snapshot:
        """See `Tensors.copy`."""
        only = self._policy.has_adapter
        live = dict(self._policy.export_weights(adapter_only=only))
        weights = {name: _copied(tensor) for name, tensor in live.items()}
        in_folder = {tensor.data_ptr() for tensor in live.values()}
        own = self._policy.state_dict()
        state = {
            # Half-precision models only: elsewhere the model's folder has the same tensors.
            "masters": {
                name: _copied(tensor)
                for name, tensor in own["weights"].items()
                if tensor.data_ptr() not in in_folder
            },
            "optimizer": _all_copied(own["optimizer"]),
            "others": {role: _all_copied(s.state_dict()) for role, s in self._others.items()},
        }
        return Snapshot(state, lambda folder: self._save_model(weights, folder))

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """See `Tensors.restore`."""
        weights = {**self._policy.state_dict()["weights"], **state["masters"]}
        self._policy.load_state_dict({"weights": weights, "optimizer": state["optimizer"]})
        for role, strategy in self._others.items():
            strategy.load_state_dict(state["others"][role])


def _all_copied(tree: Any) -> Any:
    """A tree of dicts with its tensors copied to the host."""
    if isinstance(tree, Mapping):
        return {key: _all_copied(value) for key, value in tree.items()}
    return _copied(tree)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
