"""Publication of weights to engines: buckets of bounded size, each acknowledged by a checksum.

    tensors ─► bucket ─► every engine copies it, reads it back from its own model, answers with a
                         checksum of that ─► the next bucket … ─► `load_weights` of the version

An engine that writes answers meanwhile may copy the update beside its weights, if memory allows
(`can_stage`): it goes on with the old ones, and stands still only while they are replaced.

The checksum (CRC-32 of a bucket's names, shapes and bytes) is taken of the engine's own memory
after copying, so that one reading covers transport and copy; the engine counts buckets, and tensors
that did not come. A bucket's arrays are views of the trainer's tensors where those lie on the host;
two buckets are alive at a time.

    ranks ─► each packs every n-th bucket, and a list of them ─► its store (`workers.array_refs`)
    driver   a handle a rank ─► one call an engine ─► it fetches the lists, then bucket after bucket

Ranks leave all buckets in their stores, as many bytes each, and the engine compares checksums. The
driver never sees names, checksums or handles of buckets, which only the lists have.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import warnings
import zlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from winnow.errors import PublicationError
from winnow.workers.array_refs import ArrayBlock, ArrayRef, Handle, Store
from winnow.workers.threads import in_thread

BUCKET_BYTES = 64 << 20
"""Large enough that a call's own time (milliseconds) does not count, small beside any model."""
_NOTHING: Any = np.zeros(0, np.uint8)
"""Stands for elements that another rank hands out."""
_UNDER_WAY = 2
"""Buckets: one is being copied there while the next is packed here."""
Array = NDArray[Any]
Named = list[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class BucketPiece:
    """A tensor, or a part of a large one.

    Example: `BucketPiece("lm_head.weight", "bfloat16", (151936, 1024), 0, array)`.
    """

    name: str
    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """Place of the first element in the flattened tensor."""
    array: Array
    """[elements]; bfloat16 as uint16, which numpy has. May be stored elsewhere."""

    def checksum(self, before: int) -> int:
        """Return the CRC-32 of the piece and all that is said of it, continued from `before`."""
        heading = repr((self.name, self.dtype, self.shape, self.start, len(self.array))).encode()
        data: Any = np.ascontiguousarray(self.array).view(np.uint8)
        return zlib.crc32(data, zlib.crc32(heading, before))


@dataclass(frozen=True, eq=False)
class Bucket:
    """Pieces that are sent together."""

    version: int
    index: int
    pieces: tuple[BucketPiece, ...]
    stored_checksum: int | None = None
    """The checksum, if the rank that packed the bucket has computed it."""

    def checksum(self) -> int:
        """Return the CRC-32 of all pieces, in order."""
        if self.stored_checksum is not None:
            return self.stored_checksum
        found = self.index
        for piece in self.pieces:
            found = piece.checksum(found)
        return found


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """New weights for an engine; only the version if it shares the trainer's tensors, or has
    received all buckets."""

    version: int
    tensors: Iterable[tuple[str, Tensor]] | None = None
    stored: Sequence[Handle] | None = None
    """Weights that ranks have packed and stored: by rank, the handle of its list of buckets
    (`store_bucket`)."""


def store_bucket(bucket: Bucket, store: Store) -> Bucket:
    """Put a bucket's arrays into a store; return it with references to them and its checksum."""
    block = ArrayBlock(None, store.put(tuple(piece.array for piece in bucket.pieces)))
    refs: list[Any] = [
        ArrayRef(block, index, 0, len(piece.array), piece.array.dtype)
        for index, piece in enumerate(bucket.pieces)
    ]
    pieces = tuple(replace(p, array=ref) for p, ref in zip(bucket.pieces, refs, strict=True))
    return replace(bucket, pieces=pieces, stored_checksum=bucket.checksum())


def fetch_buckets(stored: Sequence[Handle]) -> Iterator[Bucket]:
    """Yield stored buckets in order, and prefetch the next one.

    Args:
        stored: as in `WeightUpdate.stored`.
    """
    for handle in stored:
        handle.prefetch()
    listed: Iterable[Bucket] = chain.from_iterable(handle.get() for handle in stored)
    waiting = sorted(listed, key=attrgetter("index"), reverse=True)
    while waiting:
        bucket = waiting.pop()
        if waiting and (coming := _block_of(waiting[-1]).handle) is not None:
            coming.prefetch()
        yield bucket
        _block_of(bucket).pop_arrays()  # it can be fetched again


def _block_of(bucket: Bucket) -> ArrayBlock:
    array: Any = bucket.pieces[0].array
    block: ArrayBlock = getattr(array, "block", ArrayBlock())  # none if it is in this process
    return block


TakeBucket = Callable[[Bucket], Awaitable[Mapping[str, int]]]
"""Sends a bucket to all engines, concurrently; returns their checksums by name."""


def to_array(tensor: Tensor) -> Array:
    """Return a tensor's elements [n] on the host, a view if possible; bfloat16 as uint16."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_cuda:  # to pinned memory a GPU copies 35 times as fast
        flat = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    array: Array = flat.numpy()
    return array


def to_tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """Return a view of an array as `to_array` made it."""
    array = np.asarray(array)  # it may be stored elsewhere
    if dtype == torch.bfloat16:
        array = array.view(np.int16)
    with warnings.catch_warnings():  # an array from another process is read-only, as we use it
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype)


def pack_buckets(
    update: WeightUpdate, bucket_bytes: int = BUCKET_BYTES, rank: int = 0, ranks: int = 1
) -> Iterator[Bucket]:
    """Pack an update's tensors in order; a bucket holds `bucket_bytes` at most, or one element.

    Args:
        rank: of `ranks` ranks with the same tensors; each yields every `ranks`-th bucket.
    """
    pieces: list[BucketPiece] = []
    index = room = 0
    for name, tensor in update.tensors or ():
        elements = tensor.detach().contiguous().view(-1)
        total, size, start = tensor.numel(), tensor.element_size(), 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        while start < total:
            count = min(room // size, total - start)
            if not count:
                if pieces:
                    if index % ranks == rank:
                        yield Bucket(update.version, index, tuple(pieces))
                    index += 1
                pieces, room = [], max(bucket_bytes, size)
                continue
            part = _NOTHING
            if index % ranks == rank:
                part = to_array(elements[start : start + count])
            pieces.append(BucketPiece(name, dtype, tuple(tensor.shape), start, part))
            start += count
            room -= count * size
    if pieces and index % ranks == rank:
        yield Bucket(update.version, index, tuple(pieces))


def unpack_tensors(stored: Sequence[Handle]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of stored buckets (`fetch_buckets`), with their pieces concatenated."""
    parts: list[Array] = []
    for piece in (piece for bucket in fetch_buckets(stored) for piece in bucket.pieces):
        parts.append(np.asarray(piece.array))
        if piece.start + len(parts[-1]) == math.prod(piece.shape):
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            yield piece.name, to_tensor(whole, getattr(torch, piece.dtype)).view(piece.shape)
            parts = []


def _raise(name: str, error: PublicationError) -> None:
    raise error


async def send_weights(
    update: WeightUpdate,
    take: TakeBucket,
    bucket_bytes: int = BUCKET_BYTES,
    reject: Callable[[str, PublicationError], None] = _raise,
) -> None:
    """Send an update to engines bucket by bucket, and compare their checksums.

    Args:
        update: with tensors.
        take: sends a bucket to all engines, in the order of its calls.
        bucket_bytes: most bytes of a bucket; two are sent at a time.
        reject: called for an engine with other bytes than were sent; unless it raises, the other
            engines get the remaining buckets.

    Raises:
        PublicationError: an engine has other bytes than were sent, and does not use them; or
            the update has no tensors.
    """
    under_way: list[asyncio.Task[None]] = []
    bucket = None
    try:
        packed = pack_buckets(update, bucket_bytes)
        while (found := await in_thread(next, packed, None)) is not None:
            bucket = found
            if len(under_way) == _UNDER_WAY:
                await under_way.pop(0)
            under_way.append(asyncio.create_task(_deliver(bucket, take, reject)))
            await asyncio.sleep(0)
        while under_way:
            await under_way.pop(0)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    if bucket is None:
        raise _empty_update_error(update)


async def fetch_next(buckets: Iterator[Bucket]) -> Bucket | None:
    """Fetch the next bucket; None after the last one."""
    return next(buckets, None)


async def load_stored(
    update: WeightUpdate,
    take: Callable[[Bucket], Awaitable[int]],
    fetch: Callable[[Iterator[Bucket]], Awaitable[Bucket | None]] = fetch_next,
) -> AsyncIterator[None]:
    """Load all stored buckets of an update into one engine, compare checksums, yield after each.

    Args:
        take: copies a bucket; returns the checksum of the copy.
        fetch: as `fetch_next`, which waits for the bucket.

    Raises:
        PublicationError: the engine has other bytes than were sent, or there are no buckets.
    """
    last, buckets = None, fetch_buckets(update.stored or ())
    while (bucket := await fetch(buckets)) is not None:
        last = bucket
        held = await take(bucket)
        if held != bucket.checksum():
            raise _checksum_error("the engine", bucket, held)
        await asyncio.sleep(0)
        yield
    if last is None:
        raise _empty_update_error(update)


def _empty_update_error(update: WeightUpdate) -> PublicationError:
    return PublicationError(
        f"weights of version {update.version}: the update has no tensors; export all of them"
    )


def _checksum_error(name: str, bucket: Bucket, held: int) -> PublicationError:
    return PublicationError(
        f"weights of version {bucket.version}: {name} has other bytes than were sent in "
        f"bucket {bucket.index} (from {bucket.pieces[0].name} on): checksum "
        f"{held:#010x}, not {bucket.checksum():#010x}; check that machine's memory and network"
    )


async def _deliver(
    bucket: Bucket, take: TakeBucket, reject: Callable[[str, PublicationError], None]
) -> None:
    # Computing the checksum releases the GIL: it runs while the bucket is sent.
    answers, sent = await asyncio.gather(take(bucket), asyncio.to_thread(bucket.checksum))
    for name, held in answers.items():
        if held != sent:
            reject(name, _checksum_error(name, bucket, held))


_USED = {
    "memory.max": ("anon", "shmem"),
    "memory.limit_in_bytes": ("total_rss", "total_shmem"),
}
"""By the file of a control group's limit (version 2 and 1), names of what its processes use."""


def can_stage(nbytes: int, device: torch.device, engines: int) -> bool:
    """Return whether an update may be copied beside the weights: it takes half of what is free.

    The other half is left to caches and batches, which grow meanwhile.

    Args:
        nbytes: of the update.
        device: where it is copied to; a GPU is one engine's, the host's memory serves all of them.
        engines: that take updates at the same time; 0: none may copy beside its weights.
    """
    if device.type == "cuda":
        return engines > 0 and 2 * nbytes <= torch.cuda.mem_get_info(device)[0]
    return engines > 0 and 2 * nbytes * engines <= free_host_bytes()


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that the machine, a container or a batch system's job has left for
    processes; 0 if unknown."""
    free = _read_numbers(root / "proc/meminfo").get("MemAvailable:", 0) << 10
    for group in _control_groups(root):
        for limit in (group / "memory.max", group / "memory.limit_in_bytes"):
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                stat = _read_numbers(group / "memory.stat")  # files that are cached can be dropped
                used = sum(stat.get(name, 0) for name in _USED[limit.name])
                free = min(free, int(text) - used)
    return max(free, 0)


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups for memory, and those around them."""
    mount, groups = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    yield mount  # of a container that sees its own group only
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            base = mount / "memory" if controllers else mount
            group = base / path.strip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(base))


def _read_numbers(file: Path) -> dict[str, int]:
    """Return the first number of each line of a file by the word before it."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {line.split()[0]: int(line.split()[1]) for line in lines}


class WeightReceiver:
    """Copies an update into a model, or beside it, bucket by bucket, on the engine's side.

    Args:
        only: the tensors to receive, by their names in the update; None is all of the model.
        may_stage: decides by the update's bytes whether it is copied beside the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        version: int,
        only: Mapping[str, Tensor] | None = None,
        may_stage: Callable[[int], bool] = lambda nbytes: False,
    ) -> None:
        self.version = version
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the model may be used again."""
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {n: t for n, t in model.state_dict().items() if n not in tied}
        self._own = dict(parameters | buffers if only is None else only)
        self._filled = dict.fromkeys(self._own, 0)
        self._next = 0
        self.is_staged = may_stage(sum(own.nbytes for own in self._own.values()))
        """True if the weights stay whole, and may be used, until `finish` replaces them."""
        self.turn = asyncio.Lock()
        """Held while a bucket is copied beside the weights, in a thread."""
        self._staged: dict[str, Tensor] = {}

    def take(self, bucket: Bucket) -> int:
        """Copy a bucket into the model; return the checksum of the copy.

        Raises:
            PublicationError: it is not the next bucket, or a piece does not fit the model.
        """
        if (bucket.version, bucket.index) != (self.version, self._next):
            raise PublicationError(
                f"weights: got bucket {bucket.index} of version {bucket.version}, expected bucket "
                f"{self._next} of version {self.version}; publish the weights again"
            )
        self._next += 1
        held = tuple(map(self._copy_piece, bucket.pieces))
        return replace(bucket, pieces=held, stored_checksum=None).checksum()

    def _copy_piece(self, piece: BucketPiece) -> BucketPiece:
        """Check and copy a piece; return it as read back from the model."""
        own = self._own.get(piece.name)
        dtype = "" if own is None else str(own.dtype).removeprefix("torch.")
        if own is None or (tuple(own.shape), dtype) != (piece.shape, piece.dtype):
            has = "no such tensor" if own is None else f"{list(own.shape)} {dtype}"
            raise PublicationError(
                f"weights of version {self.version}: got {piece.name} {list(piece.shape)} "
                f"{piece.dtype}, but the engine's model has {has}; use the same model and dtype "
                "for both"
            )
        if piece.start != self._filled[piece.name]:
            raise PublicationError(
                f"weights of version {self.version}: a part of {piece.name} is duplicate or "
                "missing; publish the weights again"
            )
        self._filled[piece.name] += len(piece.array)
        return self._store_piece(piece, own)

    def _store_piece(self, piece: BucketPiece, own: Tensor) -> BucketPiece:
        """Copy a piece into a tensor; return it as read back."""
        if not self.is_staged:
            return _copy_into(own.detach(), piece)
        if piece.name not in self._staged:
            self._staged[piece.name] = torch.empty_like(own, requires_grad=False)
        with _side_stream(own.device):
            return _copy_into(self._staged[piece.name], piece)

    def finish(self, version: int) -> None:
        """End the update after all tensors of this version have been received.

        Raises:
            PublicationError: a tensor is missing, or the buckets are of another version.
        """
        if version != self.version:
            raise PublicationError(
                f"weights of version {version}: got buckets of version {self.version}; publish "
                "the weights again"
            )
        missing = [name for name, own in self._own.items() if self._filled[name] < own.numel()]
        if missing:
            raise PublicationError(
                f"weights of version {self.version}: {len(missing)} of the model's tensors are "
                f"missing, such as {missing[0]}; export all of them"
            )
        replace_weights(self._own, self._staged)
        self._staged = {}
        self.ready.set_result(None)


def replace_weights(model: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
    """Put staged tensors in the place of a model's, by name; parameters without a copy."""
    for name, tensor in staged.items():
        if isinstance(model[name], nn.Parameter):
            model[name].data = tensor
        else:
            model[name].copy_(tensor)
    if any(tensor.is_cuda for tensor in staged.values()):
        torch.cuda.empty_cache()  # `can_stage` counts what PyTorch holds as used


def _copy_into(target: Tensor, piece: BucketPiece) -> BucketPiece:
    """Copy a piece into its place in a tensor; return it as read back."""
    part = target.view(-1)[piece.start : piece.start + len(piece.array)]
    part.copy_(to_tensor(piece.array, target.dtype))
    return replace(piece, array=to_array(part))


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Copy to a GPU beside its kernels, after those queued so far: memory may have been theirs."""
    if device.type != "cuda":
        yield
        return
    stream: Any = cast(Any, torch.cuda).Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class WholeTensorReceiver(WeightReceiver):
    """A weight receiver that assembles whole tensors in host memory and loads them into vLLM.

    Beside the weights it keeps them all until `finish`, and begins with vLLM's update then.
    Checksums are of the staged tensors, since vLLM fuses and repacks weights.

    Args:
        model: on the meta device; has the tensors to receive.
        load: loads tensors into vLLM.
        mark: tells vLLM of the update's "start" and "finish".
        options: `only` and `may_stage`, as `WeightReceiver` takes them.
    """

    def __init__(
        self,
        model: nn.Module,
        version: int,
        load: Callable[[Named], None],
        mark: Callable[[Literal["start", "finish"]], None],
        *options: Any,
    ) -> None:
        super().__init__(model, version, *options)
        self._load, self._mark = load, mark
        self._part: Tensor | None = None  # the tensor that is being received
        self._whole: list[Named] = []  # by bucket
        if not self.is_staged:
            mark("start")

    def take(self, bucket: Bucket) -> int:
        self._whole.append([])
        checksum = super().take(bucket)
        if not self.is_staged:
            self._load_whole()
        return checksum

    def _load_whole(self) -> None:
        while self._whole:
            if named := self._whole.pop(0):
                self._load(named)

    def _store_piece(self, piece: BucketPiece, own: Tensor) -> BucketPiece:
        # Separate memory for each tensor: vLLM refers to it until its layer is complete.
        staged = torch.empty(own.shape, dtype=own.dtype) if self._part is None else self._part
        held = _copy_into(staged, piece)
        is_whole = piece.start + len(piece.array) == own.numel()
        self._part = None if is_whole else staged
        if is_whole:
            self._whole[-1].append((piece.name, staged))
        return held

    def finish(self, version: int) -> None:
        super().finish(version)
        if self.is_staged:
            self._mark("start")
            self._load_whole()
        self._mark("finish")
