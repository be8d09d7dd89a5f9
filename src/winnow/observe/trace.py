"""trace.json: a timeline of who did what in a run, and who waited for whom.

Chrome's Trace Event Format, which chrome://tracing and https://ui.perfetto.dev read: one event a
line, the array's end missing while the run goes on or after a kill, which the format allows. Times
are microseconds since 1970. A gap in an actor's track is time in which it waited.

| track | slices |
|---|---|
| trainer | phases of the step, as in `time/PHASE_s`; the end of each step as an instant |
| learner | phases of learning, where that goes on beside sampling |
| sampler | rollout: a step's groups are sampled, where that goes on beside learning |
| engine K | write, publish, canary, …: what an engine in its own process works on |
| scorers | score: at least one score is waited for, a millisecond or longer |
| checkpoint | save: a thread writes a checkpoint |

Beside them a graph of the groups that wait after each step. Slices of one name that follow each
other within `MERGE_S` are one, so that engines that are looked at often cost little. At
`LIMIT_BYTES` the file becomes trace-before.json, in the place of an older one, and another is
begun: what is longest ago is lost. A resumed run goes on in the same file, where the work that a
kill has cost stays to be seen.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from winnow.errors import WinnowError
from winnow.observe.files import AppendFile, explain_write_errors
from winnow.observe.metrics import Number, Record, Timeline
from winnow.observe.sinks import RunInfo
from winnow.types import Prompt, Score, Trajectory

MERGE_S = 0.002
LIMIT_BYTES = 16 << 20
_FLUSH_S, _LEAST_S = 1.0, 0.001
_TRACKS = ("trainer", "learner", "sampler", "scorers", "checkpoint")
_ENGINE = re.compile(r"engine (\d+)")
_END = b'{"name":"process_name","ph":"M","pid":1,"args":{"name":"winnow"}}\n]\n'

log = logging.getLogger(__name__)


class TraceFile:
    """A `Timeline` and a sink that write trace.json; several threads may tell.

    The file is made when the first step, or the evaluation before it, is logged: a run that never
    came so far leaves its folder as it was. A disk that refuses ends the timeline with a warning in
    the log, and not the run.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._limit = path, limit_bytes
        self._epoch_s = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._named: set[str] = set()
        self._slices: dict[str, tuple[str, float, float]] = {}
        """The last slice of each actor, to which another may be added: name, begin, end."""
        self._flushed_s = time.perf_counter()
        self._file: AppendFile | None = None
        self._is_logged = self._is_ended = False  # until a step is logged, events are queued

    def __call__(self, actor: str, phase: str, began_s: float, ended_s: float) -> None:
        """Record a phase of an actor, with begin and end by `time.perf_counter`."""
        with self._lock:
            name, first_s, last_s = self._slices.get(actor, ("", 0.0, 0.0))
            if name == phase and 0 <= began_s - last_s < MERGE_S:
                began_s = first_s
            else:
                self._close_slice(actor)
            self._slices[actor] = (phase, began_s, ended_s)
            if ended_s - self._flushed_s > _FLUSH_S:
                self._flush()

    def start(self, info: RunInfo) -> None:
        """Mark where the run begins, or is resumed."""
        before = info.first_step - 1
        self._add_mark(f"resumed after step {before}" if before else "start")

    def log(self, step: int, record: Record) -> None:
        """Mark the end of a step, and count the groups that wait after it."""
        kinds = ("qualified", "open")
        waiting = {kind: record.get(f"sampling/groups/carried_{kind}", 0) for kind in kinds}
        with self._lock:
            self._emit("groups that wait", "C", time.perf_counter(), args=waiting)
            self._is_logged = True
        self._add_mark(f"step {step}")

    def close(self) -> None:
        """Write what is left and the end of the array; a second time does nothing."""
        with self._lock:
            self._flush(_END)
            self._end()

    def _add_mark(self, name: str) -> None:
        with self._lock:
            self._emit(name, "i", time.perf_counter(), s="p")
            self._flush()

    def _emit(self, name: str, kind: str, at_s: float, actor: str = "trainer", **data: Any) -> None:
        track = _track_id(actor)
        if actor not in self._named:
            self._named.add(actor)
            names = {"thread_name": {"name": actor}, "thread_sort_index": {"sort_index": track}}
            self._events += [
                {"name": key, "ph": "M", "pid": 1, "tid": track, "args": value}
                for key, value in names.items()
            ]
        micros = round((self._epoch_s + at_s) * 1e6)
        self._events.append(
            {"name": name, "ph": kind, "pid": 1, "tid": track, "ts": micros, **data}
        )

    def _close_slice(self, actor: str) -> None:
        if actor in self._slices:
            name, began_s, ended_s = self._slices.pop(actor)
            self._emit(name, "X", began_s, actor, dur=round((ended_s - began_s) * 1e6))

    def _end(self) -> None:
        self._is_ended = True
        if self._file is not None:
            self._file.close()

    def _flush(self, end: bytes = b"") -> None:
        if not self._is_logged:
            return
        for actor in list(self._slices):
            self._close_slice(actor)
        events, self._events = self._events, []
        self._flushed_s = time.perf_counter()
        if self._is_ended:
            return
        try:
            self._file = self._file or _open_to_append(self._path)
            lines = (json.dumps(each, separators=(",", ":")) for each in events)
            self._file.append("".join(f"{line},\n" for line in lines).encode() + end)
            if self._file.size > self._limit and not end:
                self._rotate()
        except WinnowError as error:
            log.warning("%s (no timeline)", error)
            self._end()

    def _rotate(self) -> None:
        assert self._file is not None
        self._file.append(_END)
        self._file.close()
        with explain_write_errors(self._path):
            self._path.replace(self._path.with_stem(f"{self._path.stem}-before"))
        self._file, self._named = _open_to_append(self._path), set()


class TimedScorer:
    """Wraps a scorer and records how long scores take, and when any are pending."""

    def __init__(
        self, score: Callable[[Prompt, Trajectory], Score | Awaitable[Score]], tell: Timeline
    ) -> None:
        self._score, self._tell = score, tell
        self._under_way, self._began_s, self._counted_s, self._busy_s = 0, 0.0, 0.0, 0.0
        self._took_s: list[float] = []

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score | Awaitable[Score]:
        """Score an answer."""
        began_s = time.perf_counter()
        score = self._score(prompt, trajectory)
        if not isinstance(score, Score):
            return self._await_score(score)
        self._took_s.append(time.perf_counter() - began_s)
        if not self._under_way:
            self._busy_s += self._took_s[-1]
        return score

    async def _await_score(self, score: Awaitable[Score]) -> Score:
        began_s = time.perf_counter()
        if not self._under_way:
            self._began_s = self._counted_s = began_s
        self._under_way += 1
        try:
            return await score
        finally:
            self._under_way -= 1
            now_s = time.perf_counter()
            self._took_s.append(now_s - began_s)
            if not self._under_way:
                self._busy_s += now_s - self._counted_s
                if now_s - self._began_s >= _LEAST_S:
                    self._tell("scorers", "score", self._began_s, now_s)

    def figures(self) -> dict[str, Number]:
        """Return `scoring/…` of training answers since the last call; nothing without any."""
        took_s, busy_s = self._took_s, self._busy_s
        if self._under_way:
            now_s = time.perf_counter()
            busy_s, self._counted_s = busy_s + now_s - self._counted_s, now_s
        self._took_s, self._busy_s = [], 0.0
        if not took_s:
            return {}
        mean_s, max_s = sum(took_s) / len(took_s), max(took_s)
        return {"scoring/busy_s": busy_s, "scoring/mean_s": mean_s, "scoring/max_s": max_s}


def _open_to_append(path: Path) -> AppendFile:
    """Open a file for more events: without its array's end, and without half a line."""
    file = AppendFile(path)
    if file.size:
        with explain_write_errors(path):
            content = path.read_bytes().removesuffix(_END)
        file.truncate(content.rfind(b"\n") + 1)
    if not file.size:
        file.append(b"[\n")
    return file


def _track_id(actor: str) -> int:
    """Number an actor's track, the same in each start of a run."""
    if actor in _TRACKS:
        return 1 + _TRACKS.index(actor)
    engine = _ENGINE.fullmatch(actor)
    return 100 + int(engine[1]) if engine else 10_000 + crc32(actor.encode()) % 10_000
