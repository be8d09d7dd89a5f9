"""An evaluation for people: progress while it goes on, report.json, and tables in a terminal."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from winnow.evaluation.evaluator import AskProgress, Evaluated, Evaluator
from winnow.evaluation.statistics import Estimate, PromptAnswers, estimate, figures_of
from winnow.observe.figures import WIDTH, count, duration, figure_table, number, print_table, share
from winnow.types import Group

ANSWERS, REPORT = "answers.parquet", "report.json"
"""Files in the folder of an evaluation."""
SCORED = "reward: "
"""Prefix of the settings in a report that say what scored the answers."""
ALL = "all"
"""Label of the figures over all data sources."""
_EVERY_S = 0.5
"""Between two looks at the progress."""
_LINE_EVERY_S = 30.0
"""Between two lines where the terminal cannot rewrite one."""


@dataclass(frozen=True)
class SourceReport:
    """The figures of the problems of one data source, or of all."""

    problems: int
    answers: int
    """Answers to each problem; to the one with the fewest, where they differ."""
    figures: Mapping[str, Estimate]
    """`avg@N`, `std@N`, `pass@K`, `maj@K`."""
    greedy: Estimate | None
    truncated: Estimate
    """Share of answers that the limit ended."""
    tokens: Estimate
    """Mean length of an answer."""
    failed: int
    """Answers whose scoring failed; they count as wrong."""

    @property
    def average(self) -> Estimate:
        """The estimate avg@N."""
        return self.figures[f"avg@{self.answers}"]

    def at_k(self, kind: str) -> dict[int, Estimate]:
        """Return pass@k or maj@k by k."""
        found = {name.removeprefix(f"{kind}@"): value for name, value in self.figures.items()}
        return {int(k): value for k, value in found.items() if k.isdecimal()}

    def as_json(self) -> dict[str, Any]:
        """Return plain values for report.json."""
        shares = {name: v for name, v in self.figures.items() if not name.startswith("std@")}
        return {
            "problems": self.problems,
            "answers": self.answers,
            **{name: _share(value) for name, value in shares.items()},
            f"std@{self.answers}": self.figures[f"std@{self.answers}"].mean,
            **({"greedy": _share(self.greedy)} if self.greedy else {}),
            "truncated": _share(self.truncated),
            "tokens": {"mean": self.tokens.mean, "standard_error": _finite(self.tokens)},
            "failed_scorings": self.failed,
        }


@dataclass(frozen=True)
class Report:
    """The figures of an evaluation."""

    sources: Mapping[str, SourceReport]
    everything: SourceReport | None
    """The figures over all sources, where there are several."""

    @classmethod
    def of(cls, found: Evaluated) -> Report:
        """Compute the figures of an evaluation's answers."""
        sampled, greedy = found.problems, found.greedy_problems
        names = list(dict.fromkeys(prompt.data_source for prompt in sampled))
        sources = {name: _of_source(found, sampled, greedy, {name}) for name in names}
        several = len(names) > 1
        everything = _of_source(found, sampled, greedy, set(names)) if several else None
        return cls(sources, everything)

    def as_json(self, about: Mapping[str, Any]) -> bytes:
        """Write the text of report.json, which begins with what is said `about` the evaluation."""
        body: dict[str, Any] = dict(about)
        body["sources"] = {name: source.as_json() for name, source in self.sources.items()}
        if self.everything is not None:
            body["all"] = self.everything.as_json()
        return (json.dumps(body, ensure_ascii=False, indent=2) + "\n").encode()


def _of_source(
    found: Evaluated,
    sampled: Sequence[PromptAnswers],
    greedy: Sequence[PromptAnswers],
    names: set[str],
) -> SourceReport:
    mine = [p for p in sampled if p.data_source in names]
    mine_greedy = [p for p in greedy if p.data_source in names]
    answers = min(len(p.accuracies) for p in mine)
    best = figures_of([*enumerate(mine_greedy)], found.seed)["pass@1"] if mine_greedy else None
    return SourceReport(
        problems=len(mine),
        answers=answers,
        figures=figures_of([*enumerate(mine)], found.seed),
        greedy=best,
        truncated=estimate([float(np.mean(p.truncated)) for p in mine]),
        tokens=estimate([float(np.mean(p.tokens)) for p in mine]),
        failed=sum(_failed(group, names) for group in (*found.groups, *found.greedy)),
    )


def _failed(group: Group, names: set[str]) -> int:
    if group.prompt.data_source not in names:
        return 0
    return sum(bool(answer.score.error) for answer in group.answers)


def _share(value: Estimate) -> dict[str, float | None]:
    low, high = value.interval
    return {"mean": value.mean, "standard_error": _finite(value), "low": low, "high": high}


def _finite(value: Estimate) -> float | None:
    """Return the standard error, or None for the NaN that JSON does not have."""
    return value.standard_error if math.isfinite(value.standard_error) else None


def print_report(report: Report, console: Console) -> None:
    """Print a line for each data source, then pass@k and maj@k for each k."""
    rows = {**report.sources, **({ALL: report.everything} if report.everything else {})}
    console.print()
    print_table(_averages(rows), console)
    if any(source.answers > 1 for source in rows.values()):
        print_table(_by_k(rows), console)
    failed = sum(source.failed for source in report.sources.values())
    if failed:
        text = f"Scoring failed for {failed:,} answers, which count as wrong (scorer_error)."
        console.print(Text(text), width=min(WIDTH, console.width))


def _averages(rows: dict[str, SourceReport]) -> Table:
    counts = {source.answers for source in rows.values()}
    name = f"avg@{counts.pop()}" if len(counts) == 1 else "avg@N"
    greedy = ["greedy"] if any(source.greedy for source in rows.values()) else []
    table = figure_table("problems", name, "95 %", *greedy, "cut off", "tokens")
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
    table = figure_table(*(f"k = {k}" if k == ks[0] else str(k) for k in ks))
    for label, source in rows.items():
        passed, voted = source.at_k("pass"), source.at_k("maj")
        table.add_row(Text(f"{label} pass@k"), *_cells(passed, ks))
        if voted:
            table.add_row(Text(f"{label} maj@k"), *_cells(voted, ks))
    return table


def _cells(by_k: dict[int, Estimate], ks: Sequence[int]) -> list[str]:
    return [share(by_k[k].mean if k in by_k else None, 1) for k in ks]


class ProgressLine:
    """A line of progress that is rewritten, or now and then a new one; nothing if off."""

    def __init__(
        self,
        console: Console,
        mode: Literal["auto", "plain", "off"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_live = mode == "auto" and console.is_terminal and not console.is_dumb_terminal
        self._status = Status("", console=console) if is_live else None
        self._console, self._is_off, self._clock = console, mode == "off", clock
        self._began = self._last = clock()

    def shown(self) -> AbstractContextManager[object]:
        """Hold a live line at the bottom of the screen while the block runs."""
        return self._status or nullcontext()

    def update(self, progress: AskProgress) -> None:
        """Show the progress."""
        now = self._clock()
        text = in_words(progress, now - self._began)
        if self._status is not None:
            self._status.update(text)
        elif not self._is_off and now - self._last >= _LINE_EVERY_S:
            self._last = now
            self._console.print(text, markup=False)


def in_words(progress: AskProgress, seconds: float) -> str:
    """Write the progress as `1,234 of 3,840 answers, 17 scored, 512 tokens/s, 0:35`."""
    speed = progress.tokens / seconds if seconds > 0 else 0.0
    scored = f", {count(progress.scored)} scored" if progress.scored else ""
    return (
        f"{count(progress.written)} of {count(progress.answers)} answers{scored}, "
        f"{count(speed)} tokens/s, {duration(seconds)}"
    )


async def watched(evaluator: Evaluator, step: int, line: ProgressLine) -> Evaluated:
    """Ask the held-out prompts, and show the progress."""

    async def look() -> None:
        while True:
            line.update(evaluator.progress)
            await asyncio.sleep(_EVERY_S)

    watch = asyncio.create_task(look())
    try:
        return await evaluator.ask(step)
    finally:
        watch.cancel()
