"""Writes checkpoints in a thread, one at a time, while training goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from winnow.errors import CheckpointError
from winnow.runs.checkpoint import Checkpoint, Content, Retention, clean, save_checkpoint

_ABANDON_S = 1.0

log = logging.getLogger(__name__)


class Saver:
    """The next save waits for the one before; an error comes up there, or at the end.

    Args:
        before: makes durable what the checkpoint refers to.
        after: called with a checkpoint that is in place, such as to copy it elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        before: Callable[[], None] = lambda: None,
        after: Callable[[Checkpoint], None] = lambda _: None,
    ) -> None:
        self._folder, self._retention = folder, retention
        self._before, self._after = before, after
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, content: Content) -> None:
        """Begin to write `content`.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(content,), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until what was begun is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Saver:
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
            with contextlib.suppress(CheckpointError):  # the next start meets it, and says so
                clean(self._folder)
            return
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            # What broke the run off matters more.
            log.warning("%s", failure)

    def _write(self, content: Content) -> None:
        try:
            self._before()
            checkpoint = save_checkpoint(self._folder, content)
            self._retention.apply(self._folder)
            self._after(checkpoint)
        except BaseException as error:  # handed over to whoever waits
            self._error = error
