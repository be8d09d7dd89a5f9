"""Sinks for the records of a run: `Sink` is the protocol, also for a sink of your own.

`observe.sinks=[{path: mine.py:Wandb, options: {project: x}}]` names a class, which is called with
its options once, before the first step. A record maps names (`winnow.observe.names`) to numbers.
Calls come from the training loop, between steps, so a sink should hand slow work to a thread. One
that raises is dropped with a warning, and the run goes on. Example:

    class Table:
        def __init__(self, file: str) -> None:
            self.file = open(file, "a")

        def start(self, info) -> None:
            print(info.name, info.steps, file=self.file)

        def log(self, step: int, record) -> None:
            print(step, record.get("score/reward/mean"), file=self.file)

        def close(self) -> None:
            self.file.close()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from winnow.config.root import CustomSink
from winnow.errors import ConfigError
from winnow.observe.names import Record

Warn = Callable[[str], None]


@dataclass(frozen=True)
class RunInfo:
    """A run, as a sink is told of it before the first record."""

    name: str
    steps: int
    """The last step's number."""
    first_step: int = 1
    """Higher when a run is resumed."""
    kind: Literal["train", "warm_up"] = "train"


class Sink(Protocol):
    """Takes one record a step."""

    def start(self, info: RunInfo) -> None:
        """Begin a run, or its warm-up."""
        ...

    def log(self, step: int, record: Record) -> None:
        """Take the figures of a step; step 0 holds the evaluation before training."""
        ...

    def close(self) -> None:
        """End: no more records come. Also called after an error."""
        ...


class FirstRecord:
    """A sink that passes all on, with more figures in the first record."""

    def __init__(self, sink: Sink, figures: Record) -> None:
        self._sink, self._figures = sink, figures
        self.start, self.close = sink.start, sink.close

    def log(self, step: int, record: Record) -> None:
        figures, self._figures = self._figures, {}
        self._sink.log(step, {**record, **figures})


class Sinks:
    """Several sinks as one: told in order, closed in reverse, even when one of them fails."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def start(self, info: RunInfo) -> None:
        for sink in self._sinks:
            sink.start(info)

    def log(self, step: int, record: Record) -> None:
        for sink in self._sinks:
            sink.log(step, record)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


class CustomSinks:
    """A user's own sinks as one: whatever one raises drops it with a warning, and stops no run."""

    def __init__(self, sections: Sequence[CustomSink], warn: Warn) -> None:
        """Load the classes, and make a sink of each with its options.

        Raises:
            ConfigError: a class is not there, or lacks a method.
        """
        from winnow.user_code import load_user_object

        self._warn = warn
        self._sinks: dict[str, Any] = {}
        for number, section in enumerate(sections):
            field = f"observe.sinks[{number}].path"
            made = load_user_object(section.path, field, ConfigError)
            missing = [name for name in ("start", "log", "close") if not hasattr(made, name)]
            if missing:
                raise ConfigError(
                    f"{field} {section.path} has no method {missing[0]}; a sink is a class with "
                    "start, log and close"
                )
            place = f"{field} {section.path}"
            with self._guarded(place):
                self._sinks[place] = made(**section.options)

    def start(self, info: RunInfo) -> None:
        self._tell(lambda sink: sink.start(info))

    def log(self, step: int, record: Record) -> None:
        self._tell(lambda sink: sink.log(step, dict(record)))

    def close(self) -> None:
        self._tell(lambda sink: sink.close())

    def _tell(self, call: Callable[[Any], object]) -> None:
        for place, sink in list(self._sinks.items()):
            with self._guarded(place):
                call(sink)

    @contextlib.contextmanager
    def _guarded(self, place: str) -> Any:
        try:
            yield
        except Exception as error:
            self._sinks.pop(place, None)
            reason = " ".join(str(error).split())
            self._warn(
                f"Warning: {place} fails with {type(error).__name__}: {reason}; it gets no more "
                "records, and the run goes on"
            )
