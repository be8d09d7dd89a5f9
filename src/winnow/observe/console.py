"""Console output of a run: a live view on a terminal, plain lines elsewhere.

The live view is a bar and the last step's figures at the bottom of the screen, with a line left
above it every few steps. Only figures that steer a decision are shown; metrics.jsonl has the rest.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from winnow.observe import metrics
from winnow.observe.format import count, duration, number, percent, safe_line
from winnow.observe.jsonl import Evaluation, evaluations
from winnow.observe.metrics import Record
from winnow.observe.sinks import Kind, RunInfo, Sink

_LINES_OF_A_RUN = 16
"""Lines that the live view leaves behind, about."""
_LINES_OF_A_WARM_UP = 10
_REMAINING_WIDTH = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FigureColumn:
    """A metric in the console view: title, name, format and width."""

    title: str
    name: str
    """Its name in the record."""
    show: Callable[[float | None], str]
    width: int

    def format(self, record: Record) -> str:
        """Write the figure of a record, or a dash."""
        return self.show(record.get(self.name))


_LOSS = FigureColumn("loss", metrics.SFT_LOSS, lambda v: number(v, 3), 7)
_STEP_S = FigureColumn("s/step", metrics.STEP_S, number, 6)
COLUMNS: dict[Kind, tuple[FigureColumn, ...]] = {
    "train": (
        FigureColumn("accuracy", metrics.ACCURACY, percent, 8),
        FigureColumn("reward", metrics.REWARD, number, 6),
        FigureColumn("kept", metrics.KEEP_RATE, percent, 5),
        FigureColumn("length", metrics.LENGTH, lambda v: number(v, 0 if v and v >= 1000 else 1), 6),
        FigureColumn("cut off", metrics.TRUNCATED, percent, 7),
        FigureColumn("entropy", metrics.ENTROPY, number, 7),
        FigureColumn("tokens/s", metrics.TOKENS_PER_S, count, 8),
        _STEP_S,
    ),
    "warm_up": (_LOSS,),
    "sft": (
        _LOSS,
        FigureColumn("held out", metrics.HELD_OUT_LOSS, lambda v: number(v, 3), 8),
        FigureColumn("tokens", "sft/tokens", count, 8),
        _STEP_S,
    ),
}
"""The figures that are shown of a step."""


def make_console(mode: Literal["auto", "plain", "off"], console: Console) -> ConsoleSink:
    """Make the console sink of `observe.console`."""
    if mode == "auto" and console.is_terminal and not console.is_dumb_terminal:
        return LiveConsole(console)
    return ConsoleSink(Console(quiet=True) if mode == "off" else console)


class ConsoleSink(Sink):
    """A sink that prints one line a step (about ten for a warm-up) under a header."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock

    def start(self, info: RunInfo) -> None:
        self._info = info
        self._began = self._steps_began = self._logged = self._clock()
        self._has_header = False

    def log(self, step: int, record: Record) -> None:
        self._logged = self._clock()
        if self._info.kind == "warm_up" and self._is_tenth(step):
            log.info("warm-up: step %d of %d", step, self._info.steps)
        if step < self._info.first_step:
            self._steps_began = self._logged
        elif self._prints_step(step):
            self._print_step(step, record)
        for line in evaluation_lines(step, record):
            self.print_line(line)

    def print_line(self, text: str) -> None:
        """Print a permanent line: a warning or a result."""
        # A log is wider than rich believes: never fold.
        self._console.print(
            Text(safe_line(text, self._console.encoding)), soft_wrap=not self._console.is_terminal
        )

    def show_status(self, text: str) -> None:
        """Show the progress within a step in the live view."""

    def _prints_step(self, step: int) -> bool:
        return self._info.kind != "warm_up" or self._is_tenth(step)

    def _is_tenth(self, step: int) -> bool:
        return step % max(self._info.steps // _LINES_OF_A_WARM_UP, 1) == 0

    def _print_step(self, step: int, record: Record) -> None:
        width = max(2 * len(str(self._info.steps)) + 1, len("step"))
        columns = list(COLUMNS[self._info.kind])
        room = self._console.width - width - 1 - _REMAINING_WIDTH
        while columns and self._console.is_terminal and sum(1 + c.width for c in columns) > room:
            columns.pop()  # the last ones can be done without
        if not self._has_header:
            titles = "".join(f" {column.title:>{column.width}}" for column in columns)
            self._print_row(Text(f"{'step':>{width}}{titles}     left", style="bold"))
            self._has_header = True
        cells = "".join(f" {column.format(record):>{column.width}}" for column in columns)
        remaining = duration(self._remaining_s(step, self._logged))
        self._print_row(
            Text(f"{f'{step}/{self._info.steps}':>{width}}{cells} {remaining:>{_REMAINING_WIDTH}}")
        )

    def _print_row(self, row: Text) -> None:
        if self._console.is_terminal:
            self._console.print(row, no_wrap=True, overflow="crop")
        else:
            self._console.print(row, soft_wrap=True)

    def _remaining_s(self, step: int, now: float) -> float | None:
        done = step - self._info.first_step + 1
        if done < 1:
            return None
        remaining = (self._logged - self._steps_began) / done * (self._info.steps - step)
        return max(remaining - (now - self._logged), 0.0)


class LiveConsole(ConsoleSink):
    """A sink with a bar and the latest figures, and a line above them every few steps."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._live: Live | None = None
        ascii_only = not console.encoding.lower().startswith("utf")
        self._spinner = Spinner("line" if ascii_only else "dots")

    def start(self, info: RunInfo) -> None:
        self.close()
        super().start(info)
        self._step, self._status, self._first_loss = info.first_step - 1, "", math.nan
        self._record: Record = {}
        # No more often than the eye needs: the drawing thread shares the trainer's cores.
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
        self._live.start(refresh=True)

    def log(self, step: int, record: Record) -> None:
        self._step, self._record, self._status = step, record, ""
        if math.isnan(self._first_loss):
            self._first_loss = record.get(metrics.SFT_LOSS, math.nan)
        super().log(step, record)

    def show_status(self, text: str) -> None:
        self._status = text

    def close(self) -> None:
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        if self._info.kind == "warm_up" and self._record:
            last = self._record.get(metrics.SFT_LOSS, math.nan)
            seconds = duration(self._clock() - self._began)
            fell = f"loss {number(self._first_loss, 3)} -> {number(last, 3)}"
            self.print_line(f"warm-up: {self._step:,} steps in {seconds}, {fell}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the progress bar, and below it the figures that fit."""
        info = self._info
        step = max(self._step, 0)
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True, overflow="crop")
        head.add_column(no_wrap=True, overflow="crop")
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, overflow="crop", justify="right")
        title = "warm-up" if info.kind == "warm_up" else "step"
        now = self._clock()
        elapsed, remaining = duration(now - self._began), duration(self._remaining_s(step, now))
        bar = ProgressBar(total=info.steps, completed=step)
        head.add_row(
            self._spinner, f"{title} {step}/{info.steps}", bar, f"{elapsed} gone, {remaining} left"
        )
        pairs = (
            [(c.title, c.format(self._record)) for c in COLUMNS[info.kind]] if self._record else []
        )
        yield Group(head, _fit_to_line(pairs, self._status, options.max_width))

    def _prints_step(self, step: int) -> bool:
        if self._info.kind == "warm_up":
            return False
        every = max(self._info.steps // _LINES_OF_A_RUN, 1)
        return step % every == 0 or step in (self._info.first_step, self._info.steps)


def evaluation_lines(step: int, record: Record) -> list[str]:
    """Format a line for each data source that was evaluated after the step."""
    when = "start" if step == 0 else f"step {step}"
    return [
        f"held out, {when}: {source} {_format_evaluation(evaluation)}"
        for source, evaluation in evaluations(record).items()
    ]


def _format_evaluation(evaluation: Evaluation) -> str:
    parts = [percent(evaluation.accuracy, 1)]
    if evaluation.greedy is not None:
        parts.append(f"greedy {percent(evaluation.greedy, 1)}")
    for kind, best in (("pass", evaluation.best_pass), ("maj", evaluation.best_maj)):
        if best:
            parts.append(f"{kind}@{best[0]} {percent(best[1], 1)}")
    if evaluation.length is not None:
        parts.append(f"length {number(evaluation.length, 0)}")
    if evaluation.truncated is not None:
        parts.append(f"cut off {percent(evaluation.truncated, 1)}")
    if evaluation.truncated and evaluation.avg_ended is not None:
        parts.append(f"of the others {percent(evaluation.avg_ended, 1)}")
    if not evaluation.accuracy and evaluation.unread:
        parts.append(f"nothing to compare found in {percent(evaluation.unread, 1)}")
    return ", ".join(parts)


def _fit_to_line(pairs: list[tuple[str, str]], status: str, width: int) -> Text:
    """Format the first figures that fit on one line, after the status."""
    line = Text(no_wrap=True, overflow="crop")
    if status:
        line.append(status, style="italic")
    for title, value in pairs:
        gap = "   " if line else ""
        if len(line) + len(gap) + len(title) + 1 + len(value) > width:
            break
        line.append(f"{gap}{title} ", style="dim")
        line.append(value, style="bold")
    return line
