"""Sinks for the records of a run: `Sink` is the protocol, also for a sink of your own.

`observe.sinks=[{path: mine.py:Wandb, options: {project: x}}]` names a class, which is called with
its options once, before the first step. A record maps names (`winnow.observe.metrics`) to numbers.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from winnow.config.root import CustomSink
from winnow.errors import ConfigError
from winnow.observe.metrics import Record

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


class Sinks:
    """Several sinks as one: told in order, closed in reverse, even when one of them fails.

    Args:
        first: more figures of the first record.
    """

    def __init__(self, sinks: Iterable[Sink], first: Record | None = None) -> None:
        self._sinks, self._first = tuple(sinks), dict(first or {})

    def start(self, info: RunInfo) -> None:
        for sink in self._sinks:
            sink.start(info)

    def log(self, step: int, record: Record) -> None:
        record, self._first = {**record, **self._first}, {}
        for sink in self._sinks:
            sink.log(step, record)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


class UserSink:
    """A user's own sink: whatever it raises drops it with a warning, and stops no run."""

    def __init__(self, section: CustomSink, number: int, warn: Warn) -> None:
        """Load the class of the section `observe.sinks[number]`, and call it with its options.

        Raises:
            ConfigError: the class is not there, or lacks a method.
        """
        from winnow.user_code import load_user_object

        field = f"observe.sinks[{number}].path"
        self._place, self._warn = f"{field} {section.path}", warn
        made = load_user_object(section.path, field, ConfigError)
        missing = [name for name in ("start", "log", "close") if not hasattr(made, name)]
        if missing:
            raise ConfigError(
                f"{self._place} has no method {missing[0]}; a sink is a class with start, log and "
                "close"
            )
        self._sink = self._guarded(made, **section.options)

    def start(self, info: RunInfo) -> None:
        self._tell("start", info)

    def log(self, step: int, record: Record) -> None:
        self._tell("log", step, dict(record))

    def close(self) -> None:
        self._tell("close")

    def _tell(self, method: str, *given: object) -> None:
        if self._sink is not None:
            self._guarded(getattr(self._sink, method), *given)

    def _guarded(self, call: Callable[..., Any], *given: object, **options: object) -> Any:
        try:
            return call(*given, **options)
        except Exception as error:
            self._sink = None
            reason = " ".join(str(error).split())
            self._warn(
                f"Warning: {self._place} fails with {type(error).__name__}: {reason}; it gets no "
                "more records, and the run goes on"
            )
