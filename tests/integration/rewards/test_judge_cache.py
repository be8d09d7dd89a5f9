"""The judge's replies on disk: shared by processes, safe from kills, honest about damage."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from winnow.errors import RewardError
from winnow.rewards.judge_cache import JudgeReply, ReplyCache, cache_path

WRITER = """
import sys
from pathlib import Path
from winnow.rewards.judge_cache import JudgeReply, ReplyCache

def write(cache, own, count):
    for i in range(count):
        kept = cache.put(i.to_bytes(32, "big"), JudgeReply(f"{own} says {i}", i))
        print(kept.text, flush=True)

cache = ReplyCache(Path(sys.argv[1]))
write(cache, sys.argv[2], int(sys.argv[3]))
"""


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def opened(path: Path) -> Iterator[ReplyCache]:
    with closing(ReplyCache(path)) as cache:
        yield cache


def test_of_two_processes_both_get_what_the_first_kept(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    processes = [writer(path, name, 60) for name in ("a", "b")]
    said = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(said[0]) == 60
    assert said[0] == said[1]
    with opened(path) as cache:
        replies, size = cache.size()
        assert (replies, size) == (60, path.stat().st_size)
        assert cache.get(key(7)) == JudgeReply(said[0][7], 7)
        assert cache.get(key(60)) is None


def test_what_a_killed_process_had_kept_is_there(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    process = writer(path, "a", 100_000)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with opened(path) as cache:
        for i, line in enumerate(told):
            assert cache.get(key(i)) == JudgeReply(line.strip(), i)
        cache.put(key(10**6), JudgeReply("more", 1))


def test_any_text_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path / "replies") as cache:
        for i, text in enumerate(["", "\x00", "\ud800", "ä€😀", "x" * 100_000]):
            cache.put(key(i), JudgeReply(text, 0))
            assert cache.get(key(i)) == JudgeReply(text, 0)


@pytest.mark.parametrize("what", ["text", "other tables", "cut", "folder", "no folder"])
def test_a_file_that_cannot_serve_is_told_in_one_line_and_left_alone(
    what: str, tmp_path: Path
) -> None:
    path = tmp_path / "replies"
    if what == "text":
        path.write_text("these are notes of mine\n" * 100)
    elif what == "other tables":
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE replies (mine)")
    elif what == "cut":
        with opened(path) as cache:
            for i in range(30):
                cache.put(key(i), JudgeReply("said " * 500, 0))
        path.write_bytes(path.read_bytes()[:5000])
    elif what == "folder":
        path.mkdir()
    else:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "replies"
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(RewardError) as told, opened(path) as cache:
        read_all(cache)
    said = str(told.value)
    assert said.startswith(f"reward.judge.cache {path}")
    assert "give another path" in said
    assert "\n" not in said
    assert (path.read_bytes() if path.is_file() else b"") == before


def read_all(cache: ReplyCache) -> None:
    for i in range(30):
        cache.get(key(i))


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    with opened(tmp_path / "replies") as cache:
        cache._connection.execute("PRAGMA max_page_count = 3")  # which SQLite takes for a full disk
        with pytest.raises(
            RewardError, match=r"cannot be used \(database or disk is full\); see to"
        ):
            cache.put(key(1), JudgeReply("x" * 100_000, 0))


def test_where_replies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_CACHE", str(tmp_path))
    assert cache_path("auto") == tmp_path / "judge.sqlite"
    assert cache_path("none") is None
    assert cache_path("~/x.db") == Path.home() / "x.db"
    monkeypatch.delenv("WINNOW_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path("auto") == tmp_path / ".cache" / "winnow" / "judge.sqlite"
