"""Array references of Ray workers: arrays that stay in the object store of the worker's node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from winnow.errors import WorkerError
from winnow.workers.ray.session import ray_module

_beside = threading.local()


@contextlib.contextmanager
def collecting() -> Iterator[list[Any]]:
    """Within, handles that are pickled leave their references here, and hold their numbers."""
    found: list[Any] = []
    _beside.collected = found
    try:
        yield found
    finally:
        _beside.collected = None


@contextlib.contextmanager
def giving(references: Sequence[Any]) -> Iterator[None]:
    """Within, handles that were pickled so get their references back."""
    _beside.given = references
    try:
        yield
    finally:
        _beside.given = None


class RayHandle:
    """A reference to it. Ray frees the memory when the last one is gone, wherever it is.

    The driver owns what it was returned, so that it outlives the worker; not the worker's node.

    Args:
        role, rank: whose it was.
    """

    def __init__(self, reference: Any, role: str, rank: int) -> None:
        self._reference, self._role, self._rank = reference, role, rank
        self._coming: Future[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        collected: list[Any] | None = getattr(_beside, "collected", None)
        if collected is None:
            return RayHandle, (self._reference, self._role, self._rank)
        collected.append(self._reference)
        return _numbered, (len(collected) - 1, self._role, self._rank)

    def begin(self) -> None:
        """See `Handle.begin`."""
        self._begun()

    def get(self) -> Any:
        """See `Handle.get`."""
        coming = self._begun()
        try:
            return coming.result()
        except ray_module().exceptions.RayError as error:
            whose = f"{self._role}[{self._rank}]"
            raise WorkerError(
                f"what {whose} wrote is lost, as its node is gone ({type(error).__name__})",
                self._role,
                self._rank,
            ) from error
        finally:
            self._coming = None  # a future holds what came

    def _begun(self) -> Future[Any]:
        coming = self._coming  # once: another thread may be done with it
        if coming is None:
            self._coming = coming = self._reference.future()
        return coming


def _numbered(number: int, role: str, rank: int) -> RayHandle:
    return RayHandle(_beside.given[number], role, rank)
