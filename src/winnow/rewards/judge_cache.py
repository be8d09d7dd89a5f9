"""Replies of judges on disk, so that the same question is asked once, by whichever run.

One SQLite file, which several processes may share. Of two replies to one question the first that
was kept is what everybody gets, so that a run that is resumed reads what it read before.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from winnow.errors import RewardError

_OURS = 0x574A4447
"""Marks the file as one of these."""
_BUSY_S = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Reply:
    """What a judge said."""

    text: str
    tokens: int
    """Of prompt and reply, as the service counts them."""
    is_cut: bool = False
    """It ended at the length limit; what the cache holds is read as whole."""


def cache_path(given: str) -> Path | None:
    """The file that `reward.judge.cache` means; None keeps nothing."""
    if given == "none":
        return None
    if given != "auto":
        return Path(given).expanduser()
    root = os.environ.get("WINNOW_CACHE") or Path.home() / ".cache" / "winnow"
    return Path(root) / "judge.sqlite"


class ReplyCache:
    """A file of replies. Reads and writes wait for the disk in a thread of their own."""

    def __init__(self, path: Path) -> None:
        """Open or make it.

        Raises:
            RewardError: it is none of ours, is damaged, or cannot be written.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RewardError(
                f"reward.judge.cache {path}: its folder cannot be made ({error.strerror}); give "
                "another path, or none"
            ) from error
        self._connection = self._told(self._opened)
        self._thread = ThreadPoolExecutor(1, "judge cache")

    def _opened(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            # Two processes that make the file at the same time wait for each other here.
            connection.execute("BEGIN IMMEDIATE")
            (mark,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if mark != _OURS and tables:
                raise sqlite3.DatabaseError("it holds tables of something else")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS replies "
                "(question BLOB PRIMARY KEY, reply BLOB, tokens INTEGER, made_s REAL)"
            )
            connection.execute(f"PRAGMA application_id = {_OURS}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    async def get(self, question: bytes) -> Reply | None:
        """The reply to a question, named by its digest.

        Raises:
            RewardError: the file is damaged.
        """
        return await self._aside(lambda: self._kept(question))

    async def put(self, question: bytes, reply: Reply) -> Reply:
        """Keep a reply, and return the one that is kept: another process may have been quicker.

        Raises:
            RewardError: the file is damaged, or cannot be written.
        """

        def keep() -> Reply:
            self._connection.execute(
                "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?)",
                (question, reply.text.encode("utf-8", "surrogatepass"), reply.tokens, time.time()),
            )
            return self._kept(question) or reply

        return await self._aside(keep)

    def size(self) -> tuple[int, int]:
        """Replies, and bytes of the file."""

        def count() -> int:
            (replies,) = self._connection.execute("SELECT count(*) FROM replies").fetchone()
            return int(replies)

        return self._told(count), self._path.stat().st_size

    def close(self) -> None:
        """Wait for what is being written, and close the file."""
        self._thread.shutdown()
        self._connection.close()

    def _kept(self, question: bytes) -> Reply | None:
        row = self._connection.execute(
            "SELECT reply, tokens FROM replies WHERE question = ?", (question,)
        ).fetchone()
        return None if row is None else Reply(row[0].decode("utf-8", "surrogatepass"), row[1])

    async def _aside(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._told(work)
        )

    def _told(self, work: Callable[[], _T]) -> _T:
        """What `work` returns; its errors in one line."""
        try:
            return work()
        except sqlite3.OperationalError as error:
            raise RewardError(
                f"reward.judge.cache {self._path} cannot be used ({error}); see to its folder and "
                "disk, or give another path, or none"
            ) from error
        except sqlite3.Error as error:
            raise RewardError(
                f"reward.judge.cache {self._path} is damaged or no file of winnow's ({error}); "
                "give another path, or delete it: what it held is asked for again"
            ) from error
