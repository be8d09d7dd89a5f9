"""Checkpoints of models whose weights lie on several ranks, read and written by all of them.

On disk (`torch.distributed.checkpoint`) each rank writes the parts that it holds, and what several
hold is written once. What was saved on some ranks can be read on any other number of them, and in
any other parts: keys and shapes are those of whole tensors. The model's own folder is as Hugging
Face has it: its files are put together from the ranks' parts, each by one rank.

A part is what a `DTensor` has on its rank, or a `Piece`: any rectangle of a tensor.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from winnow.errors import CheckpointError
from winnow.learning.strategy import local
from winnow.models.sharded_loading import to_saved_layout
from winnow.observe.files import find_os_error

MODEL_FILE_BYTES = 1 << 30
"""The most bytes of a file in a model's folder, unless one tensor is larger."""
State = dict[str, Any]
"""Tensors in nested dicts."""


class Piece(Tensor):
    """A rectangle of a tensor whose other parts lie on other ranks.

    It has the shape of the whole tensor and the memory of this rank's part, which may be a view of
    something else. Copies and casts of it are pieces; all else is done on `to_local()`.
    `torch.distributed.checkpoint` treats it as it does a DTensor, by the methods with underscores:
    it looks leaves of a state up as tensors, and has no other protocol for other classes.

    Args:
        part: this rank's part, live.
        shape: of the whole tensor.
        offsets: where the part begins in it, by dimension.
    """

    __torch_function__ = cast(Any, torch._C._disabled_torch_function_impl)
    offsets: tuple[int, ...]

    @staticmethod
    def __new__(cls, part: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Piece:
        return cast(Any, Tensor)._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, tuple(shape), dtype=part.dtype, device=part.device
        )

    def __init__(self, part: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> None:
        ends = [start + size for start, size in zip(offsets, part.shape, strict=True)]
        assert all(end <= size for end, size in zip(ends, shape, strict=True)), "it sticks out"
        self._part, self.offsets = part.detach(), tuple(offsets)

    @classmethod
    def absent(cls, shape: Sequence[int], dtype: torch.dtype) -> Piece:
        """Make the piece of a rank that has nothing of a tensor, which is no single number."""
        assert len(shape), "a single number has no part that is empty"
        nothing = [0] * len(shape)
        return cls(torch.empty(nothing, dtype=dtype), shape, nothing)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part's place in the whole tensor, by dimension."""
        sides = zip(self.offsets, self._part.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in sides)

    def to_local(self) -> Tensor:
        """Return this rank's part, live."""
        return self._part

    def fill(self, source: Tensor) -> None:
        """Copy in the same part of a tensor: its piece, or cut from the whole."""
        if isinstance(source, Piece):
            assert source.slices == self.slices, f"{source.slices} is not {self.slices}"
        self._part.copy_(source._part if isinstance(source, Piece) else source[self.slices])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Chunks are distinguished by their offsets alone: an empty one may hide another rank's.
        full = self._part.numel() > 0
        return [ChunkStorageMetadata(torch.Size(self.offsets), self._part.shape)] if full else []

    def __create_write_items__(self, name: str, _: Tensor) -> list[WriteItem]:
        kind = TensorProperties.create_from_tensor(self._part)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Piece:
        if func not in _COPIES:
            raise NotImplementedError(
                f"{func} takes no piece of a tensor; give it that of to_local()"
            )
        piece, *rest = args
        return cls(func(piece._part, *rest, **(kwargs or {})), piece.shape, piece.offsets)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Piece({self._part}, {list(self.shape)}, {list(self.offsets)})"


_ATEN = torch.ops.aten
_COPIES = {
    *(_ATEN.detach.default, _ATEN.clone.default, _ATEN._to_copy.default),
    *(_ATEN.zeros_like.default, _ATEN.empty_like.default),
}
"""Operations on a piece that give a piece: each is done to the part."""


def copy_to_host(state: Mapping[str, Any], mesh: DeviceMesh) -> State:
    """Copy a state to the host, where later updates do not change it.

    Args:
        mesh: that of DTensors, for the host.
    """

    def copied(tensor: Tensor) -> Tensor:
        part = local(tensor).detach()
        part = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
        if isinstance(tensor, Piece):
            return Piece(part, tensor.shape, tensor.offsets)
        if not isinstance(tensor, DTensor):
            return part
        return DTensor.from_local(
            part,
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    return {
        key: copy_to_host(value, mesh) if isinstance(value, Mapping) else copied(value)
        for key, value in state.items()
    }


class _Writer(FileSystemWriter):
    """A writer that raises the system's own error, which pickling for other ranks would lose."""

    def write_data(self, plan: Any, planner: Any) -> Any:
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
        group: a gloo group that nothing else uses meanwhile.

    Raises:
        OSError: the disk is full, or not writable; on every rank.
    """
    try:
        writer = _Writer(folder, single_file_per_rank=True, sync_files=False)
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _first_error(error) from error


def write_model(
    model: nn.Module, weights: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup
) -> list[Path]:
    """Write a sharded model that is on the host into a Hugging Face folder, as `write_shards` does.

    No rank holds more than its parts and one file, of which experts are there twice.

    Args:
        model: names the tensors in the files; its weights are not read.
        weights: all of the model, by name and in order, on every rank: where a rank has nothing of
            one, its part is empty (`Piece.absent`).

    Returns:
        The files that this rank wrote.
    """
    file_of = _model_files(weights)
    files = sorted(set(file_of.values()))
    local_files = files[group.rank() :: group.size()]
    parts = folder / "parts"
    try:
        writer = HuggingFaceStorageWriter(str(parts), save_distributed=True)
        writer.sync_files = False
        save(dict(weights), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _first_error(error) from error
    fault: OSError | None = None
    try:
        for file in local_files:
            inside = {name: t for name, t in weights.items() if file_of[name] == file}
            _assemble_file(model, inside, parts, folder / file)
    except (OSError, RuntimeError, SafetensorError) as error:
        if (fault := find_os_error(error)) is None:
            raise
    try:
        raise_on_all(fault, group)
    finally:
        if group.rank() == 0:
            shutil.rmtree(parts, ignore_errors=True)
    written = [folder / name for name in local_files]
    if group.rank() == 0 and len(files) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        blank = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in weights.items()}
        saved = {name: to_saved_layout(model, {name: tensor}) for name, tensor in blank.items()}
        names = {key: file_of[name] for name, keys in saved.items() for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": names}
        written.append(folder / "model.safetensors.index.json")
        written[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def _assemble_file(
    model: nn.Module, weights: Mapping[str, Tensor], parts: Path, file: Path
) -> None:
    """Write a file of whole tensors from the parts of all ranks, as transformers would."""
    whole = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in weights.items()}
    try:
        load(whole, storage_reader=HuggingFaceStorageReader(str(parts)), no_dist=True)
    except CheckpointException as error:
        raise _first_error(error) from error
    saved = {name: tensor.contiguous() for name, tensor in to_saved_layout(model, whole).items()}
    save_file(saved, file, metadata={"format": "pt"})
    # The library lets only their owner read its files.
    file.chmod(stat.S_IMODE(next(parts.iterdir()).stat().st_mode))


def _model_files(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Name the file of each tensor of a model's folder, as transformers names them."""
    numbers, number, room = dict[str, int](), 0, 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if not number or size > room:
            number, room = number + 1, MODEL_FILE_BYTES
        numbers[name], room = number, room - size
    if number == 1:
        return dict.fromkeys(numbers, "model.safetensors")
    return {name: f"model-{n:05}-of-{number:05}.safetensors" for name, n in numbers.items()}


def read_shards(states: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Read what `write_shards` wrote into states with room for it, by role; all ranks call this.

    A rank need not have all names. A model that has made no step yet has no optimizer state:
    entries that were not saved are taken out of `optimizer`.

    Args:
        group: as `write_shards` takes it.

    Raises:
        CheckpointError: the folder is damaged, or of another model; on every rank.
    """
    fault: CheckpointError | None = None
    reader = FileSystemReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
        for role, state in states.items():
            for name in list(state["optimizer"]):
                if f"{role}.optimizer.{name}.step" not in saved:
                    del state["optimizer"][name]
    except Exception as error:  # a pickle may fail in any way
        fault = _read_error(folder, error)
    raise_on_all(fault, group)
    try:
        load(states, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise _read_error(folder, _first_error(error)) from error


def raise_on_all(fault: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise the failure of the first rank that has one, on every rank; all ranks call this."""
    faults: list[Exception | None] = [None] * group.size()
    dist.all_gather_object(faults, fault, group=group)
    if first := next(filter(None, faults), None):
        raise first


def _read_error(folder: Path, error: BaseException) -> CheckpointError:
    reason = str(error).partition("\n")[0]
    return CheckpointError(f"{folder} cannot be read: {reason}; use another checkpoint")


def _first_error(error: CheckpointException) -> BaseException:
    """Return the failure of the first rank that has one."""
    return error.failures[min(error.failures)][0]
