"""Sharded state on disk (`torch.distributed.checkpoint`): each rank writes its own rows, once.

What was saved on some ranks can be read on any other number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from winnow.errors import CheckpointError
from winnow.learning.shards import local

State = dict[str, Any]
"""Tensors in nested dicts."""


def on_host(state: Mapping[str, Any], mesh: DeviceMesh) -> State:
    """A copy on the host, which later updates do not change.

    Args:
        mesh: of the same ranks, for the host.
    """
    return {
        key: on_host(value, mesh) if isinstance(value, Mapping) else _copied(value, mesh)
        for key, value in state.items()
    }


def _copied(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    own = local(tensor).detach().to("cpu", copy=True)
    if not isinstance(tensor, DTensor):
        return own
    return DTensor.from_local(
        own,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class _Writer(FileSystemWriter):
    """Tells what the system refused, which pickling for the other ranks would lose."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """See `StorageWriter.write_data`."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # After a write that failed, torch's zip writer fails at its closing, too.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def write_shards(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Write a state that is on the host; all ranks call this, in a thread if they like.

    Args:
        group: gloo's, which nothing else uses meanwhile.

    Raises:
        OSError: the disk is full, or not writable; on every rank.
    """
    try:
        writer = _Writer(folder, single_file_per_rank=True, sync_files=False)
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _first(error) from error


def read_shards(blank: State, folder: Path) -> State:
    """What `write_shards` wrote, in the shape of `blank`, which has room for all that may be there.

    All ranks call this. Of `optimizer` entries those that were not saved are left out: a model that
    has made no step yet has none.

    Raises:
        CheckpointError: the folder is damaged, or of another model.
    """
    try:
        reader = FileSystemReader(folder)
        saved = set(reader.read_metadata().state_dict_metadata)
        wanted = _known(blank, saved)
        load(wanted, storage_reader=reader)
    except CheckpointException as error:
        raise _unreadable(folder, _first(error)) from error
    except (OSError, EOFError, ValueError) as error:
        raise _unreadable(folder, error) from error
    return wanted


def _unreadable(folder: Path, error: BaseException) -> CheckpointError:
    reason = str(error).partition("\n")[0]
    return CheckpointError(f"{folder} cannot be read: {reason}; use another checkpoint")


def _known(blank: State, saved: set[str], path: str = "") -> State:
    """Without the optimizer's entries that nothing was saved of."""
    found = {}
    for key, value in blank.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            found[key] = _known(cast(State, value), saved, here)
        elif here in saved or ".optimizer." not in here:
            found[key] = value
    return {key: value for key, value in found.items() if not isinstance(value, dict) or value}


def _first(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed."""
    failures = error.failures
    rank = min(failures)
    return failures[rank][0]
