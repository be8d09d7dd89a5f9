"""The stream of what a worker says: printed text and records between it, however it is cut."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.workers.logs import LogReceiver, LogSender

TEXT = st.text(
    st.characters(exclude_characters="\r\n\x1e", exclude_categories=["Cs"]), max_size=900
)
Said = tuple[str, int, str]
"""Logger, level and text; the logger of what was printed has no name."""
PRINTED = "winnow.workers.worker"
EVENTS = st.lists(
    st.one_of(
        st.builds(lambda text: ("", logging.INFO, "p" + text.rstrip()), TEXT),
        st.tuples(
            st.just("winnow.a"), st.sampled_from([10, 20, 30, 40]), TEXT.map(lambda t: t.rstrip())
        ),
        st.integers(0, 10**12),
    ),
    max_size=8,
)
"""What was printed or logged, and progress."""


def told(events: Sequence[Said | int], folder: Path) -> bytes:
    """What a process with these events writes."""
    path = folder / "stream"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    sender = LogSender(descriptor)
    for event in events:
        if isinstance(event, int):
            sender.send_progress(event)
        elif event[0]:
            name, level, text = event
            sender.handle(logging.LogRecord(name, level, "", 0, text, (), None))
        else:
            os.write(descriptor, event[2].encode() + b"\n")
    os.close(descriptor)
    return path.read_bytes()


def heard(*pieces: bytes) -> tuple[list[Said], int | None]:
    """What a receiver logs of a stream that comes in pieces, and the progress that it has then."""
    said: list[Said] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            role, rank, text = cast("tuple[str, int, str]", record.args)
            assert record.getMessage() == f"critic[2]: {text}"
            said.append((record.name.replace(PRINTED, ""), record.levelno, text))
            assert (role, rank) == ("critic", 2)

    async def follow() -> int | None:
        reader, receiver = asyncio.StreamReader(), LogReceiver("critic", 2)
        following = asyncio.ensure_future(receiver.follow(reader))
        for piece in pieces:
            reader.feed_data(piece)
            await asyncio.sleep(0)
        assert not receiver.has_ended.is_set()
        reader.feed_eof()
        await following
        assert receiver.has_ended.is_set()
        return receiver.progress

    root, listener = logging.getLogger(), Listener()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("winnow"), "level", logging.DEBUG)
        logging.getLogger("winnow").manager._clear_cache()  # type: ignore[attr-defined]
        root.addHandler(listener)
        try:
            return said, asyncio.run(follow())
        finally:
            root.removeHandler(listener)
            logging.getLogger("winnow").manager._clear_cache()  # type: ignore[attr-defined]


@given(EVENTS, st.lists(st.integers(0, 5000), max_size=6))
def test_what_is_told_is_heard_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, events: list[Said | int], cuts: list[int]
) -> None:
    stream = told(events, tmp_path_factory.mktemp("told"))
    ends = [0, *sorted(cuts), max(len(stream), *cuts, 0)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(ends)]
    beats = [event for event in events if isinstance(event, int)]
    said = [event for event in events if not isinstance(event, int)]
    assert heard(*pieces) == (said, beats[-1] if beats else None)


def test_a_record_within_a_printed_line_leaves_the_line_whole(tmp_path: Path) -> None:
    record = told([("winnow", 30, "between")], tmp_path)
    said, _ = heard(b"first ", record, b"half\n")
    assert said == [("winnow", 30, "between"), ("", 20, "first half")]


@pytest.mark.parametrize("bad", [b"\x1e{\n", b"\x1e[1]\n", b'\x1e{"level": 3}\n', b"\x1enull\n"])
def test_what_only_looks_like_a_record_is_text(bad: bytes) -> None:
    said, _ = heard(bad, b"next\n")
    assert said == [("", 20, bad.decode().strip("\n")), ("", 20, "next")]


def test_a_progress_bar_shows_its_last_state_and_bytes_that_are_no_text_are_kept() -> None:
    said, _ = heard(b"10%\r20%\r30%\n\n  \nend\xff")
    assert said == [("", 20, "30%"), ("", 20, "end\\xff")]


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    pieces = [b"x" * 1000] * 200
    said, _ = heard(*pieces)
    assert len(said) >= 2
    assert sum(len(text) for _, _, text in said) == 1000 * len(pieces)


def test_a_record_behind_a_line_without_an_end_is_not_cut(tmp_path: Path) -> None:
    stream = told([7, ("winnow", 30, "news")], tmp_path)
    for at in (1, 5, stream.index(b"\n"), stream.index(b"news")):
        said, progress = heard(b"bar\r" * 17000 + stream[:at], stream[at:])
        assert sorted(said) == [("", 20, "bar"), ("winnow", 30, "news")]
        assert progress == 7


@pytest.mark.parametrize(
    ("logger", "to"),
    [
        ("winnow.rollout", "winnow.rollout"),
        ("winnower", PRINTED),
        ("torch", PRINTED),
        ("py.warnings", "py.warnings"),
    ],
)
def test_a_line_goes_to_a_logger_that_the_run_writes_down(
    logger: str, to: str, tmp_path: Path
) -> None:
    said, _ = heard(told([(logger, logging.WARNING, "100 %s")], tmp_path))
    assert said == [(to.replace(PRINTED, ""), logging.WARNING, "100 %s")]
