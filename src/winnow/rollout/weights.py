"""Weights on their way to engines: buckets of bounded size, each acknowledged with what arrived.

    tensors ─► bucket ─► every engine copies it, reads it back from its own model, answers with a
                         checksum of that ─► the next bucket … ─► the list of all names and shapes

The checksum (CRC-32, of a bucket's names, shapes and bytes) is of what an engine holds after
copying, so that transport and copy are covered by one reading. A bucket's arrays are views of the
trainer's tensors where those lie on the host; two buckets are alive at a time. Ranks pack buckets
of their own and keep the arrays (`winnow.workers.array_refs`), so that only names and checksums
pass through the driver.
"""

from __future__ import annotations

import asyncio
import logging
import math
import warnings
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from winnow.errors import PublicationError
from winnow.rollout.engine import WeightUpdate
from winnow.workers.array_refs import ArrayBlock, LocalRef, Placeholder, SplitResult

log = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
"""Large enough that a call's own time (milliseconds) does not count, small beside any model."""
_NOTHING: Any = np.zeros(0, np.uint8)
"""In the place of elements that another rank hands out."""
_UNDER_WAY = 2
"""Buckets: one is being copied there while the next is packed here."""
Array = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor, or a part of a large one.

    Example: `Piece("lm_head.weight", "bfloat16", (151936, 1024), 0, array)`.
    """

    name: str
    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Place of the first element in the flattened tensor."""
    array: Array
    """[elements]; bfloat16 as uint16, which numpy has. May be stored elsewhere."""

    @property
    def heading(self) -> bytes:
        """What is said of it beside its bytes."""
        return repr((self.name, self.dtype, self.shape, self.start, len(self.array))).encode()

    def checksum(self, before: int) -> int:
        """CRC-32 of heading and bytes, behind what has checksum `before`."""
        data: Any = np.ascontiguousarray(self.array).view(np.uint8)
        return zlib.crc32(data, zlib.crc32(self.heading, before))


@dataclass(frozen=True, eq=False)
class Bucket:
    """What travels at once."""

    version: int
    index: int
    pieces: tuple[Piece, ...]
    known: int | None = None
    """Its checksum, where that was taken by whoever packed it."""

    def checksum(self) -> int:
        """CRC-32 of all pieces, in order."""
        if self.known is not None:
            return self.known
        found = self.index
        for piece in self.pieces:
            found = piece.checksum(found)
        return found

    def listing(self, before: int) -> int:
        """CRC-32 of names, dtypes and shapes alone, behind what has checksum `before`."""
        for piece in self.pieces:
            before = zlib.crc32(piece.heading, before)
        return before


@dataclass(frozen=True)
class WeightReceipt:
    """What an engine says it decodes with, at the end of an update."""

    version: int
    listing: int
    """`Bucket.listing` over all buckets, from the version on."""


def kept(bucket: Bucket) -> SplitResult:
    """A bucket of which the arrays stay behind; `found` puts it together again."""
    arrays = tuple(piece.array for piece in bucket.pieces)
    bare = [replace(p, array=Placeholder.of(p.array, p.array.dtype)) for p in bucket.pieces]
    return SplitResult(
        replace(bucket, pieces=tuple(bare), known=bucket.checksum()), LocalRef(arrays)
    )


def found(said: SplitResult) -> Bucket:
    """A bucket, its arrays here or stored."""
    bare: Bucket = said.told
    shelf = ArrayBlock(said.kept)
    gaps: list[Any] = [piece.array for piece in bare.pieces]
    arrays = [gap.filled(shelf, index) for index, gap in enumerate(gaps)]
    pieces = [replace(p, array=a) for p, a in zip(bare.pieces, arrays, strict=True)]
    return replace(bare, pieces=tuple(pieces))


@runtime_checkable
class Receiver(Protocol):
    """An engine that takes weights in buckets. No token is drawn between begin and finish."""

    async def begin_update(self, version: int) -> None:
        """New weights are about to come."""
        ...

    async def take_bucket(self, bucket: Bucket) -> int:
        """Copy it into the model; returns the checksum of what the model then holds."""
        ...

    async def finish_update(self) -> WeightReceipt:
        """All buckets came: decode with them."""
        ...


Ask = Callable[[Callable[[Receiver], Awaitable[T]]], Awaitable[Mapping[str, T]]]
"""Asks each receiver the same, at once; answers by name."""


def array_of(tensor: Tensor) -> Array:
    """Its elements [n] on the host, a view where they lie there; bfloat16 as uint16."""
    flat = tensor.detach().contiguous().view(-1).cpu()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    array: Array = flat.numpy()
    return array


def tensor_of(array: Array, dtype: torch.dtype) -> Tensor:
    """The inverse of `array_of`, a view."""
    array = np.asarray(array)  # it may be stored
    if dtype == torch.bfloat16:
        array = array.view(np.int16)
    with warnings.catch_warnings():  # an array from another process is read-only, as we use it
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype)


def buckets(
    update: WeightUpdate, bucket_bytes: int = BUCKET_BYTES, is_here: bool = True
) -> Iterator[Bucket]:
    """An update's tensors in order; a bucket holds `bucket_bytes` at most, or one element.

    Args:
        is_here: else the arrays are left out, for a rank that only takes part in gathering them.
    """
    pieces: list[Piece] = []
    index = room = 0
    for name, tensor in update.tensors or ():
        elements: Any = array_of(tensor) if is_here else None
        total, size, start = tensor.numel(), tensor.element_size(), 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        while start < total:
            count = min(room // size, total - start)
            if not count:
                if pieces:
                    yield Bucket(update.version, index, tuple(pieces))
                    index += 1
                pieces, room = [], max(bucket_bytes, size)
                continue
            part = elements[start : start + count] if is_here else _NOTHING
            pieces.append(Piece(name, dtype, tuple(tensor.shape), start, part))
            start += count
            room -= count * size
    if pieces:
        yield Bucket(update.version, index, tuple(pieces))


def tensors(packed: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of buckets, put together where they were cut."""
    parts: list[Array] = []
    for piece in (piece for bucket in packed for piece in bucket.pieces):
        parts.append(np.asarray(piece.array))
        if piece.start + len(parts[-1]) == math.prod(piece.shape):
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            yield piece.name, tensor_of(whole, getattr(torch, piece.dtype)).view(piece.shape)
            parts = []


async def send(update: WeightUpdate, ask: Ask[Any], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Give receivers an update bucket by bucket, and compare what each says it holds.

    Args:
        update: with tensors, or buckets.
        ask: reaches all receivers; what is asked first must reach them first.
        bucket_bytes: most that a bucket has; two are on their way at once.

    Raises:
        PublicationError: a receiver holds something else than was sent. It draws no more token.
    """
    version = update.version
    await ask(lambda receiver: receiver.begin_update(version))
    listing = zlib.crc32(str(version).encode())
    under_way: list[asyncio.Task[None]] = []
    try:
        for bucket in update.buckets or buckets(update, bucket_bytes):
            listing = bucket.listing(listing)
            if len(under_way) == _UNDER_WAY:
                await under_way.pop(0)
            under_way.append(asyncio.create_task(_deliver(bucket, ask)))
            await asyncio.sleep(0)
        while under_way:
            await under_way.pop(0)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    for name, whole in (await ask(lambda receiver: receiver.finish_update())).items():
        if whole != WeightReceipt(version, listing):
            raise PublicationError(
                f"weights of version {version}: {name} says that it holds version "
                f"{whole.version} with the listing {whole.listing:#010x}, but {listing:#010x} was "
                "sent; are both of the same model?"
            )


async def _deliver(bucket: Bucket, ask: Ask[Any]) -> None:
    # The checksum lets go of the interpreter: it is taken while the bucket travels.
    answers, sent = await asyncio.gather(
        ask(partial(_take, bucket)), asyncio.to_thread(bucket.checksum)
    )
    for name, held in answers.items():
        if held != sent:
            raise PublicationError(
                f"weights of version {bucket.version}: {name} holds other bytes than were sent in "
                f"bucket {bucket.index} (from {bucket.pieces[0].name} on): checksum "
                f"{held:#010x}, not {sent:#010x}; look at that machine's memory and network"
            )


def _take(bucket: Bucket, receiver: Receiver) -> Awaitable[int]:
    return receiver.take_bucket(bucket)


class WeightReceiver:
    """An update on its way into a model, on the receiver's side."""

    def __init__(self, model: nn.Module, version: int) -> None:
        """Begin; nothing of the model has come yet."""
        self.version = version
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the model may be used again."""
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {n: t for n, t in model.state_dict().items() if n not in tied}
        self._own = {name: t.detach() for name, t in (parameters | buffers).items()}
        self._filled = dict.fromkeys(self._own, 0)
        self._next = 0
        self._listing = zlib.crc32(str(version).encode())

    def take(self, bucket: Bucket) -> int:
        """Copy a bucket; returns the checksum of what the model then holds.

        Raises:
            PublicationError: it is not the next one, or something in it has no place.
        """
        if (bucket.version, bucket.index) != (self.version, self._next):
            raise PublicationError(
                f"weights: bucket {bucket.index} of version {bucket.version} came, but bucket "
                f"{self._next} of version {self.version} is due; publish the weights again"
            )
        self._next += 1
        self._listing = bucket.listing(self._listing)
        return Bucket(
            bucket.version, bucket.index, tuple(map(self._copy, bucket.pieces))
        ).checksum()

    def _copy(self, piece: Piece) -> Piece:
        """Put a piece into its place; returns it as the model holds it now."""
        own = self._own.get(piece.name)
        dtype = "" if own is None else str(own.dtype).removeprefix("torch.")
        if own is None or (tuple(own.shape), dtype) != (piece.shape, piece.dtype):
            has = "none of that name" if own is None else f"{list(own.shape)} {dtype}"
            raise PublicationError(
                f"weights of version {self.version}: {piece.name} {list(piece.shape)} "
                f"{piece.dtype} came, but the engine's model has {has}; give both the same model "
                "and dtype"
            )
        if piece.start != self._filled[piece.name]:
            raise PublicationError(
                f"weights of version {self.version}: a part of {piece.name} came twice or is "
                "missing; publish the weights again"
            )
        here = own.view(-1)[piece.start : piece.start + len(piece.array)]
        here.copy_(tensor_of(piece.array, own.dtype))
        self._filled[piece.name] += len(piece.array)
        return Piece(piece.name, piece.dtype, piece.shape, piece.start, array_of(here))

    def finish(self) -> WeightReceipt:
        """Everything came.

        Raises:
            PublicationError: something of the model did not.
        """
        missing = [name for name, own in self._own.items() if self._filled[name] < own.numel()]
        if missing:
            raise PublicationError(
                f"weights of version {self.version}: {len(missing)} of the model's tensors did not "
                f"come, such as {missing[0]}; export all of them"
            )
        return WeightReceipt(self.version, self._listing)
