"""The timeline of a step out of trace.json, the lines of log.txt, and usage.jsonl as columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from threading import RLock
from typing import Any

from winnow.dashboard.runs import ABSENT, FileEntry, GrowingFile, RunFiles
from winnow.observe.files import USAGE
from winnow.observe.usage import parse_usage

TRACE, LOG = "trace.json", "log.txt"
_MARK = re.compile(
    rb'^\{"name":"([^"\n]{1,60})","ph":"i"[^\n]*"ts":(\d{1,18})[^\n]*$', re.MULTILINE
)
_TRACK = re.compile(
    rb'^\{"name":"thread_name","ph":"M",[^\n]*"tid":(\d{1,18}),"args":\{"name":("[^"\n]*")\}',
    re.MULTILINE,
)
_STEP = re.compile(r"step (\d+)")
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) ([\w.]+): (.*)")
_LOG_BYTES = 1 << 18
_USAGE_BYTES = 1 << 22
_MOST_SLICES = 3000


class TraceWindows:
    """Windows of a run's trace.json; the places of its marks are found once, as it grows."""

    def __init__(self, files: RunFiles) -> None:
        self._files, self._file, self._lock = files, GrowingFile(files, TRACE), RLock()
        self._reset()

    def _reset(self) -> None:
        self._tracks: dict[int, str] = {}
        self._marks: list[tuple[str, int, int]] = []
        """Name, microseconds since 1970, and place in the file."""

    def refresh(self, size: int) -> None:
        """Find the marks that were added; all of them where another file was begun.

        Raises:
            UnreadableError: the file cannot be read.
        """
        with self._lock:
            lines, is_new = self._file.read_lines(size)
            if is_new:
                self._reset()
            start = self._file.offset - len(lines)
            for match in _TRACK.finditer(lines):
                self._tracks[int(match[1])] = json.loads(match[2])
            for match in _MARK.finditer(lines):
                name = match[1].decode("utf-8", "replace")
                self._marks.append((name, int(match[2]), start + match.start()))

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Each start of the run's process, as `{"name": …, "time_s": …}`."""
        return [
            {"name": name, "time_s": micros / 1e6}
            for name, micros, _ in list(self._marks)
            if not _STEP.fullmatch(name)
        ]

    @property
    def steps(self) -> list[int]:
        """Steps whose end is marked."""
        matches = (_STEP.fullmatch(name) for name, _, _ in list(self._marks))
        return sorted({int(match[1]) for match in matches if match})

    def window(self, step: int) -> dict[str, Any]:
        """Return the slices of a step by track, in seconds from its begin.

        Returns:
            `{"seconds": 9.1, "tracks": [{"name": "trainer", "slices": [["rollout", 0, 5.2]]}]}`;
            without tracks where the step is not marked.

        Raises:
            UnreadableError: the file cannot be read.
        """
        with self._lock:
            places = [n for n, (name, _, _) in enumerate(self._marks) if name == f"step {step}"]
            if not places:
                return {"seconds": 0.0, "tracks": [], "left_out": 0}
            at = places[-1]  # the last time that it was done
            start_name, began, start = self._marks[at - 1] if at else ("", self._marks[at][1], 0)
            ended = self._marks[at][1]
            later = self._marks[at + 1][2] if at + 1 < len(self._marks) else self._file.offset
            tracks: dict[str, list[tuple[str, float, float]]] = {}
            for event in self._slices(start, later):
                first, last = event["ts"], event["ts"] + event["dur"]
                if first < ended and last > began:
                    inside = max(first, began), min(last, ended)
                    track = self._tracks.get(event["tid"], f"track {event['tid']}")
                    tracks.setdefault(track, []).append(
                        (event["name"], (inside[0] - began) / 1e6, (inside[1] - inside[0]) / 1e6)
                    )
            longest = sorted((s for each in tracks.values() for s in each), key=lambda s: -s[2])
            least = longest[_MOST_SLICES][2] if len(longest) > _MOST_SLICES else -1.0
            return {
                "seconds": (ended - began) / 1e6,
                "after": start_name,
                "tracks": [
                    {"name": name, "slices": [
                        [s[0], round(s[1], 4), round(s[2], 4)] for s in slices if s[2] > least]}
                    for name, slices in tracks.items()
                ],
                "left_out": sum(s[2] <= least for s in longest),
            }  # fmt: skip

    def _slices(self, start: int, end: int) -> Iterator[dict[str, Any]]:
        for line in self._files.read(TRACE, start, end).splitlines():
            if b'"ph":"X"' in line:
                with suppress(ValueError):  # half a line
                    yield json.loads(line.rstrip(b","))


def read_log_tail(files: RunFiles, entry: FileEntry | None) -> dict[str, Any]:
    """Read the end of log.txt: its lines, of a level each, the newest last.

    Returns:
        `{"lines": [{"time": …, "level": "WARNING", "where": …, "text": …}], "is_cut": False}`.

    Raises:
        UnreadableError: the file cannot be read.
    """
    if entry is None:
        return {"lines": [], "is_cut": False}
    start = max(entry.size - _LOG_BYTES, 0)
    text = files.read(LOG, start, entry.size).decode("utf-8", "replace")
    lines: list[dict[str, str]] = []
    for line in text.splitlines()[1 if start else 0 :]:
        match = _LINE.match(line)
        if match:
            lines.append({"time": match[1], "level": match[2], "where": match[3], "text": match[4]})
        elif lines:  # of a traceback
            lines[-1]["text"] += "\n" + line
    return {"lines": lines, "is_cut": bool(start)}


def read_usage(files: RunFiles, entry: FileEntry = ABSENT) -> dict[str, list[float | None]]:
    """Read what a run used over time, as columns: `time_s`, `over_s` and the figures by name.

    Raises:
        UnreadableError: the file cannot be read.
    """
    start = max(entry.size - _USAGE_BYTES, 0)
    lines = parse_usage(files.read(USAGE, start, entry.size)) if entry.size else []
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [line.get(name) for line in lines] for name in names}
