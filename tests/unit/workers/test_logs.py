"""The stream of what a worker says: printed text and records between it, however it is cut."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.workers.logs import (
    LONGEST_LINE_BYTES,
    Beat,
    LogReceiver,
    LogSender,
    Parser,
    Said,
    log_line,
)
from winnow.workers.protocol import WorkerLine

TEXT = st.text(
    st.characters(exclude_characters="\r\n\x1e", exclude_categories=["Cs"]), max_size=900
)
EVENTS = st.lists(
    st.one_of(
        st.builds(lambda text: Said(logging.INFO, "", "p" + text.rstrip()), TEXT),
        st.builds(Said, st.sampled_from([10, 20, 30, 40]), st.just("winnow.a"), TEXT),
        st.builds(Beat, st.integers(0, 10**12)),
    ),
    max_size=8,
)


def told(events: list[Said | Beat], folder: Path) -> bytes:
    """What a process with these events writes."""
    path = folder / "stream"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    teller = LogSender(descriptor)
    for event in events:
        if isinstance(event, Beat):
            teller.beat(event.progress)
        elif event.logger:
            teller.log(event.level, event.logger, event.text)
        else:
            os.write(descriptor, event.text.encode() + b"\n")
    os.close(descriptor)
    return path.read_bytes()


def heard(*pieces: bytes) -> list[Said | Beat]:
    parser = Parser()
    return [event for piece in pieces for event in parser.feed(piece)] + list(parser.rest())


@given(EVENTS, st.lists(st.integers(0, 5000), max_size=6))
def test_what_is_told_is_heard_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, events: list[Said | Beat], cuts: list[int]
) -> None:
    stream = told(events, tmp_path_factory.mktemp("told"))
    ends = [0, *sorted(cuts), max(len(stream), *cuts, 0)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(ends)]
    assert heard(*pieces) == events


def test_a_record_within_a_printed_line_leaves_the_line_whole(tmp_path: Path) -> None:
    record = told([Said(30, "winnow", "between")], tmp_path)
    assert heard(b"first ", record, b"half\n") == [
        Said(30, "winnow", "between"),
        Said(20, "", "first half"),
    ]


@pytest.mark.parametrize("bad", [b"\x1e{\n", b"\x1e[1]\n", b'\x1e{"level": 3}\n', b"\x1enull\n"])
def test_what_only_looks_like_a_record_is_text(bad: bytes) -> None:
    assert heard(bad, b"next\n") == [Said(20, "", bad.decode().strip("\n")), Said(20, "", "next")]


def test_a_progress_bar_shows_its_last_state_and_bytes_that_are_no_text_are_kept() -> None:
    assert heard(b"10%\r20%\r30%\n\n  \nend\xff") == [Said(20, "", "30%"), Said(20, "", "end\\xff")]


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    pieces = [b"x" * 1000] * (3 * LONGEST_LINE_BYTES // 1000)
    found = heard(*pieces)
    assert len(found) >= 2
    assert sum(len(event.text) for event in found if isinstance(event, Said)) == 1000 * len(pieces)


def test_a_listener_keeps_progress_and_says_when_the_stream_ends(tmp_path: Path) -> None:
    async def work() -> tuple[list[str], int | None]:
        lines: list[str] = []
        reader = asyncio.StreamReader()
        reader.feed_data(told([Beat(3), Said(20, "", "a"), Beat(9)], tmp_path) + b"b")
        reader.feed_eof()
        listener = LogReceiver("critic", 2, lambda line: lines.append(str(line)))
        await listener.follow(reader)
        assert listener.has_ended.is_set()
        return lines, listener.progress

    assert asyncio.run(work()) == (["critic[2]: a", "critic[2]: b"], 9)


@pytest.mark.parametrize(
    ("logger", "to"),
    [
        ("winnow.rollout", "winnow.rollout"),
        ("", "winnow.workers.worker"),
        ("winnower", "winnow.workers.worker"),
        ("torch", "winnow.workers.worker"),
        ("py.warnings", "py.warnings"),
    ],
)
def test_a_line_goes_to_a_logger_that_the_run_writes_down(
    logger: str, to: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_line(WorkerLine("policy", 1, logging.WARNING, logger, "100 %s"))
    assert caplog.record_tuples == [(to, logging.WARNING, "policy[1]: 100 %s")]
