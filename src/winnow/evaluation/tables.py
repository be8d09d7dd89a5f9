"""The figures of an evaluation, and of a comparison, in a terminal at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from winnow.evaluation.report import Report, SourceReport
from winnow.evaluation.statistics import Estimate
from winnow.observe.figures import count, number, share
from winnow.observe.summary import WIDTH

ALL = "all"


def print_report(report: Report, console: Console) -> None:
    """A line for each data source, then pass@k and maj@k for each k."""
    rows = {**report.sources, **({ALL: report.everything} if report.everything else {})}
    console.print()
    show(_averages(rows), console)
    if any(source.answers > 1 for source in rows.values()):
        show(_by_k(rows), console)
    failed = sum(source.failed for source in report.sources.values())
    if failed:
        text = f"Scoring failed for {failed:,} answers, which count as wrong (scorer_error)."
        console.print(Text(text), width=min(WIDTH, console.width))


def table_of(*columns: str) -> Table:
    """A first column of names, and right-aligned figures under `columns`."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, overflow="crop")
    return table


def show(table: Table, console: Console) -> None:
    """Print a table with a line of space behind it."""
    console.print(Padding(table, (0, 0, 1, 0), expand=False), width=min(WIDTH, console.width))


def _averages(rows: dict[str, SourceReport]) -> Table:
    counts = {source.answers for source in rows.values()}
    name = f"avg@{counts.pop()}" if len(counts) == 1 else "avg@N"
    greedy = ["greedy"] if any(source.greedy for source in rows.values()) else []
    table = table_of("problems", name, "95 %", *greedy, "cut off", "tokens")
    for label, source in rows.items():
        best = [share(source.greedy.mean if source.greedy else None, 1)] if greedy else []
        low, high = source.average.interval
        table.add_row(
            Text(label),
            count(source.problems),
            share(source.average.mean, 1),
            f"{100 * low:.1f} .. {100 * high:.1f}",
            *best,
            share(source.truncated.mean, 1),
            number(source.tokens.mean, 1),
        )
    return table


def _by_k(rows: dict[str, SourceReport]) -> Table:
    ks = sorted({k for source in rows.values() for k in source.at_k("pass")})
    table = table_of(*(f"k = {k}" if k == ks[0] else str(k) for k in ks))
    for label, source in rows.items():
        passed, voted = source.at_k("pass"), source.at_k("maj")
        table.add_row(Text(f"{label} pass@k"), *_cells(passed, ks))
        if voted:
            table.add_row(Text(f"{label} maj@k"), *_cells(voted, ks))
    return table


def _cells(by_k: dict[int, Estimate], ks: Sequence[int]) -> list[str]:
    return [share(by_k[k].mean if k in by_k else None, 1) for k in ks]
