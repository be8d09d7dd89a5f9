"""Replies of judges on disk, so that the same question is asked once, by whichever run.

One SQLite file, which several processes may share. Of two replies to one question the first that
was kept is what everybody gets, so that a run that is resumed reads what it read before.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from winnow.errors import RewardError

_MARK = 0x574A4447
"""SQLite's application id of these files."""
_BUSY_S = 60.0
_COLUMNS = "question BLOB PRIMARY KEY, reply BLOB, tokens INTEGER, made_s REAL"


@dataclass(frozen=True)
class JudgeReply:
    """A judge's message."""

    text: str
    tokens: int
    """Tokens of prompt and reply, as the service counts them."""
    is_cut: bool = False
    """True if it ended at the length limit; replies from the cache count as whole."""


def cache_path(setting: str) -> Path | None:
    """Return the file that `reward.judge.cache` means; None keeps nothing."""
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    root = os.environ.get("WINNOW_CACHE") or Path.home() / ".cache" / "winnow"
    return Path(root) / "judge.sqlite"


class ReplyCache:
    """A file of replies; any thread may use it, and waits for the disk.

    Raises:
        RewardError: here and in each method, where the file is another program's, is damaged, or
            cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        with self._locked():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            execute = self._connection.execute
            try:
                # Two processes that make the file at the same time wait for each other here.
                execute("BEGIN IMMEDIATE")
                (mark,) = execute("PRAGMA application_id").fetchone()
                (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
                if mark != _MARK and tables:
                    raise sqlite3.DatabaseError("it has tables of another program")
                execute(f"CREATE TABLE IF NOT EXISTS replies ({_COLUMNS})")
                execute(f"PRAGMA application_id = {_MARK}")
                execute("COMMIT")
            except BaseException:
                self._connection.close()
                raise

    def get(self, question: bytes) -> JudgeReply | None:
        """Return the reply to a question, which is named by its digest."""
        with self._locked():
            row = self._connection.execute(
                "SELECT reply, tokens FROM replies WHERE question = ?", (question,)
            ).fetchone()
        return None if row is None else JudgeReply(row[0].decode("utf-8", "surrogatepass"), row[1])

    def put(self, question: bytes, reply: JudgeReply) -> JudgeReply:
        """Store a reply, and return the stored one: another process may have been first."""
        text = reply.text.encode("utf-8", "surrogatepass")
        with self._locked():
            self._connection.execute(
                "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?)",
                (question, text, reply.tokens, time.time()),
            )
        return self.get(question) or reply

    def count_and_bytes(self) -> tuple[int, int]:
        """Return the number of replies, and the bytes of the file."""
        with self._locked():
            (replies,) = self._connection.execute("SELECT count(*) FROM replies").fetchone()
        return int(replies), self._path.stat().st_size

    def close(self) -> None:
        """Wait for pending writes, and close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread at a time; errors in one line."""
        where = f"reward.judge.cache {self._path}"
        try:
            with self._lock:
                yield
        except (sqlite3.OperationalError, OSError) as error:
            raise RewardError(
                f"{where} cannot be used ({error}); check its folder and disk space, or set "
                "another path, or none"
            ) from error
        except sqlite3.Error as error:
            raise RewardError(
                f"{where} is damaged or not a judge cache ({error}); set another path, or "
                "delete it (its replies are then requested again)"
            ) from error
