"""Where the records of a run go: a sink is told of the start, of each step, and of the end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from winnow.observe.names import Record


@dataclass(frozen=True)
class RunInfo:
    """What a sink knows before the first record."""

    name: str
    steps: int
    """The last step's number."""
    first_step: int = 1
    """Higher when a run is resumed."""
    kind: Literal["train", "warm_up"] = "train"


class Sink(Protocol):
    """Takes one record a step."""

    def start(self, info: RunInfo) -> None:
        """A run, or its warm-up, begins."""
        ...

    def log(self, step: int, record: Record) -> None:
        """The figures of a step; step 0 holds the evaluation before training."""
        ...

    def close(self) -> None:
        """No more records come; also called after an error."""
        ...


class FirstRecord:
    """Adds figures to the first record of a run that a sink takes."""

    def __init__(self, sink: Sink, figures: Record) -> None:
        self._sink, self._figures = sink, figures

    def start(self, info: RunInfo) -> None:
        """Tell the sink."""
        self._sink.start(info)

    def log(self, step: int, record: Record) -> None:
        """Tell the sink, the first time with the figures."""
        figures, self._figures = self._figures, {}
        self._sink.log(step, {**record, **figures})

    def close(self) -> None:
        """Tell the sink."""
        self._sink.close()


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def start(self, info: RunInfo) -> None:
        """Tell each, in order."""
        for sink in self._sinks:
            sink.start(info)

    def log(self, step: int, record: Record) -> None:
        """Tell each, in order."""
        for sink in self._sinks:
            sink.log(step, record)

    def close(self) -> None:
        """Tell each, the last first, even when one of them fails."""
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
