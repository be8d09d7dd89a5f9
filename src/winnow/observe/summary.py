"""The closing screen of a run: what it learnt, what it cost, where to look next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from winnow.observe.figures import DASH, count, duration, number, printable, share, shorten
from winnow.observe.history import Evaluation, evaluations, phase_seconds, token_account
from winnow.observe.names import Record

WIDTH = 100
_ANSWER_CHARACTERS = 240
_TOKEN_CLASSES = {
    "trained": "trained on",
    "all_right": "all right, no signal",
    "all_wrong": "all wrong, no signal",
    "surplus": "surplus, dropped",
    "stale": "too old",
    "failed": "failed",
    "in_progress": "in progress at the end",
}


@dataclass(frozen=True)
class Sample:
    """One held-out question with its answer before and after training."""

    question: str
    before: str
    before_right: bool
    after: str
    after_right: bool


@dataclass(frozen=True)
class Summary:
    """All that the closing screen says; what is empty is not shown."""

    title: str
    before: Mapping[str, Evaluation] = field(default_factory=dict)
    """By data source."""
    after: Mapping[str, Evaluation] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    """As `history.token_account` gives them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """What lies where."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """A command line, and what it does."""

    @classmethod
    def of(
        cls,
        title: str,
        records: Sequence[Record],
        *,
        samples: Sequence[Sample] = (),
        paths: Mapping[str, Path] | None = None,
        commands: Mapping[str, str] | None = None,
    ) -> Summary:
        """From the lines of metrics.jsonl."""
        evaluated = [(record["step"], evaluations(record)) for record in records]
        found = [(step, by_source) for step, by_source in evaluated if by_source]
        return cls(
            title=title,
            before=found[0][1] if found and found[0][0] == 0 else {},
            after=found[-1][1] if found and found[-1][0] > 0 else {},
            samples=samples,
            tokens=token_account(records),
            seconds=phase_seconds(records),
            paths=paths or {},
            commands=commands or {},
        )


def print_summary(summary: Summary, console: Console) -> None:
    """Print the closing screen, at most 100 columns wide."""
    width = min(WIDTH, console.width)
    _rule(console, printable(summary.title, console.encoding), width)
    for source in dict.fromkeys([*summary.before, *summary.after]):
        table = _accuracy_table(source, summary.before.get(source), summary.after.get(source))
        console.print(table, width=width)
    for sample in summary.samples:
        console.print(_sample_table(sample, console.encoding), width=width)
    _print_costs(console, summary, width)
    _print_pairs(console, "Look at", {k: str(v) for k, v in summary.paths.items()}, width)
    _print_pairs(console, "Next", summary.commands, width)


def _print_costs(console: Console, summary: Summary, width: int) -> None:
    tables = []
    if sum(summary.tokens.values()):
        tables.append(_token_table(summary.tokens))
    if summary.seconds:
        tables.append(_time_table(summary.seconds))
    side_by_side = Table.grid(padding=(0, 3, 0, 0))
    side_by_side.add_row(*tables)
    unbounded = console.options.update(width=10 * WIDTH)
    needed = Measurement.get(console, unbounded, side_by_side).maximum
    for table in [side_by_side] if tables and needed <= width else tables:
        console.print(table, width=width)


def _rule(console: Console, title: str, width: int) -> None:
    line = "=" if console.options.ascii_only else "\u2500"
    console.print()
    console.print(Text(title, style="bold"), width=width)
    console.print(Text(line * width, style="dim"), width=width, no_wrap=True)


def _table(title: str, *columns: str) -> Table:
    """A first column of names, and right-aligned figures under `columns`; without them no head."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if columns else None,
        show_header=bool(columns),
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    if columns:
        table.add_column("", no_wrap=True, overflow="crop")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, overflow="crop")
    return table


def _spaced(table: Table) -> Padding:
    return Padding(table, (0, 0, 1, 0), expand=False)


def _accuracy_table(source: str, before: Evaluation | None, after: Evaluation | None) -> Padding:
    known = [evaluation for evaluation in (before, after) if evaluation]
    prompts = next((e.prompts for e in known if e.prompts), None)
    of = f"{count(prompts)} held-out problems of {source}" if prompts else f"held out: {source}"
    table = _table(of, "before", "after")

    def row(title: str, get: Callable[[Evaluation], float | None], percent: bool = True) -> None:
        values = [None if e is None else get(e) for e in (before, after)]
        if any(value is not None for value in values):
            show = (lambda v: share(v, 1)) if percent else (lambda v: number(v, 1))
            table.add_row(title, *map(show, values))

    row("right, sampled (pass@1)", lambda e: e.accuracy)
    row("right, greedy", lambda e: e.greedy)
    for kind, words in (("best_pass", "right at least once"), ("best_maj", "majority right")):
        k = next((getattr(e, kind)[0] for e in known if getattr(e, kind)), 0)
        row(f"{words} in {k}", lambda e, kind=kind: (getattr(e, kind) or (0, None))[1])  # type: ignore[misc]
    row("cut off at the limit", lambda e: e.truncated)
    row("length of an answer", lambda e: e.length, percent=False)
    return _spaced(table)


def _sample_table(sample: Sample, encoding: str) -> Padding:
    table = _table("A held-out problem: " + _one_line(sample.question, encoding))
    table.add_column(no_wrap=True, overflow="crop")
    table.add_column(no_wrap=True, overflow="crop")
    table.add_column(overflow="fold")
    for when, text, is_right in (
        ("before", sample.before, sample.before_right),
        ("after", sample.after, sample.after_right),
    ):
        verdict = Text("right", style="green") if is_right else Text("wrong", style="red")
        table.add_row(when, verdict, Text(_one_line(text, encoding)))
    return _spaced(table)


def _one_line(text: str, encoding: str) -> str:
    words = " ".join(printable(text, encoding).split())
    return shorten(words, _ANSWER_CHARACTERS) or "(nothing)"


def _token_table(tokens: Mapping[str, int]) -> Padding:
    total = sum(tokens.values())
    table = _table("Tokens generated", "tokens", "share")
    for name, words in _TOKEN_CLASSES.items():
        value = tokens.get(name, 0)
        table.add_row(words, f"{value:,}", share(value / total, 1))
    table.add_section()
    table.add_row("in all", f"{total:,}", share(1.0, 1))
    return _spaced(table)


def _time_table(seconds: Mapping[str, float]) -> Padding:
    total = sum(seconds.values())
    table = _table("Time", "min:s", "share")
    for phase, value in seconds.items():
        portion = share(value / total, 1) if total else DASH
        table.add_row(phase.replace("_", " "), duration(value), portion)
    table.add_section()
    table.add_row("in all", duration(total), share(1.0, 1))
    return _spaced(table)


def _print_pairs(console: Console, title: str, pairs: Mapping[str, str], width: int) -> None:
    """A heading and two columns; on a narrow screen the second folds, nothing is lost."""
    if not pairs:
        return
    table = _table(title)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for left, right in pairs.items():
        table.add_row(Text(left), Text(printable(right, console.encoding)))
    console.print(_spaced(table), width=width)
