"""Output of an evaluation: progress, report.json, and tables on the terminal."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from winnow.evaluation.evaluator import EvalProgress, EvalResult, Evaluator
from winnow.evaluation.statistics import Estimate, SourceFigures, default_ks, summarise
from winnow.observe.format import (
    WIDTH,
    count,
    duration,
    figure_table,
    number,
    percent,
    print_table,
    printable,
)

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
class Report:
    """The figures of an evaluation."""

    sources: Mapping[str, SourceFigures]
    overall: SourceFigures | None
    """The figures over all sources, where there are several."""

    @classmethod
    def from_result(cls, evaluated: EvalResult) -> Report:
        """Compute the figures of an evaluation's answers."""
        sources = summarise(evaluated.problems, evaluated.seed)
        members = list(enumerate(evaluated.problems))
        overall = SourceFigures.compute(members, evaluated.seed) if len(sources) > 1 else None
        return cls(sources, overall)

    @property
    def rows(self) -> dict[str, SourceFigures]:
        """The rows of a table: each source, and all of them where there are several."""
        return {**self.sources, **({ALL: self.overall} if self.overall else {})}

    def as_json(self, about: Mapping[str, Any]) -> bytes:
        """Write the text of report.json, which begins with what is said `about` the evaluation."""
        sources = {name: _source_json(source) for name, source in self.sources.items()}
        everything = {"all": _source_json(self.overall)} if self.overall else {}
        body = {**about, "sources": sources, **everything}
        return (json.dumps(body, ensure_ascii=False, indent=2) + "\n").encode()


def _source_json(source: SourceFigures) -> dict[str, Any]:
    spread = f"std@{source.answers}"
    return {
        "problems": len(source.prompts),
        "answers": source.answers,
        **{name: _estimate_json(value) for name, value in source.figures.items() if name != spread},
        spread: source.figures[spread].mean,
        **({"avg_ended": _estimate_json(source.ended)} if source.ended else {}),
        **({"greedy": _estimate_json(source.greedy)} if source.greedy else {}),
        "truncated": _estimate_json(source.truncated),
        "tokens": {"mean": source.tokens.mean, "standard_error": _error_or_none(source.tokens)},
        "failed_scorings": sum(prompt.failed for prompt in source.prompts),
    }


def _estimate_json(value: Estimate) -> dict[str, float | None]:
    low, high = value.interval
    return {"mean": value.mean, "standard_error": _error_or_none(value), "low": low, "high": high}


def _error_or_none(value: Estimate) -> float | None:
    """Return the standard error, or None for the NaN that JSON does not have."""
    return value.standard_error if math.isfinite(value.standard_error) else None


def print_report(report: Report, console: Console, rules: Mapping[str, str]) -> None:
    """Print a line for each data source, then pass@k and maj@k for each k.

    Args:
        rules: what the scorer of a data source wants, for one without a right answer.
    """
    rows = report.rows
    console.print()
    print_table(_average_table(rows), console)
    if any(source.answers > 1 for source in rows.values()):
        print_table(_table_by_k(rows), console)
    failed = sum(p.failed for source in report.sources.values() for p in source.prompts)
    if failed:
        text = f"Scoring failed for {failed:,} answers, which count as wrong (scorer_error)."
        console.print(Text(text), width=min(WIDTH, console.width))
    for name, source in report.sources.items():
        if not source.average.mean:
            text = f"{name}: {_describe_all_wrong(source)} {rules.get(name, '')}".rstrip()
            console.print(Text(text), width=min(WIDTH, console.width))


def _describe_all_wrong(source: SourceFigures) -> str:
    """Describe the answers of a data source without a right one."""
    answers = sum(len(prompt.accuracies) for prompt in source.prompts)
    cut_off = sum(sum(prompt.truncated) for prompt in source.prompts)
    text = f"none of {answers:,} answers is right; {cut_off:,} were cut off"
    if any(prompt.parsed is not None for prompt in source.prompts):
        unread = sum(prompt.unread for prompt in source.prompts)
        text += f", and in {unread:,} the scorer found nothing to compare"
    return f"{text}."


def _average_table(rows: Mapping[str, SourceFigures]) -> Table:
    counts = {source.answers for source in rows.values()}
    name = f"avg@{counts.pop()}" if len(counts) == 1 else "avg@N"
    greedy = ["greedy"] if any(source.greedy for source in rows.values()) else []
    has_cuts = any(source.truncated.mean for source in rows.values())
    ended = ["avg_ended"] if has_cuts else []
    table = figure_table("problems", name, "95 %", *greedy, "cut off", *ended, "tokens")
    for label, source in rows.items():
        best = [percent(source.greedy.mean if source.greedy else None, 1)] if greedy else []
        low, high = source.average.interval
        table.add_row(
            Text(printable(label)),
            count(len(source.prompts)),
            percent(source.average.mean, 1),
            f"{100 * low:.1f} .. {100 * high:.1f}",
            *best,
            percent(source.truncated.mean, 1),
            *([percent(source.ended.mean if source.ended else None, 1)] if ended else []),
            number(source.tokens.mean, 1),
        )
    return table


def _table_by_k(rows: Mapping[str, SourceFigures]) -> Table:
    ks = sorted({k for source in rows.values() for k in default_ks(source.answers)})
    table = figure_table(*(f"k = {k}" if k == ks[0] else str(k) for k in ks))
    for label, source in rows.items():
        for kind in ("pass", "maj"):
            estimates = [source.figures.get(f"{kind}@{k}") for k in ks]
            if any(estimates):
                cells = [percent(value.mean if value else None, 1) for value in estimates]
                table.add_row(Text(printable(f"{label} {kind}@k")), *cells)
    return table


def progress_line(progress: EvalProgress, seconds: float) -> str:
    """Write the progress as `1,234 of 3,840 answers, 17 scored, 512 tokens/s, 0:35`."""
    speed = progress.tokens / seconds if seconds > 0 else 0.0
    scored = f", {count(progress.scored)} scored" if progress.scored else ""
    return (
        f"{count(progress.written)} of {count(progress.answers)} answers{scored}, "
        f"{count(speed)} tokens/s, {duration(seconds)}"
    )


async def run_with_progress(
    evaluator: Evaluator,
    step: int,
    console: Console,
    mode: Literal["auto", "plain", "off"],
    clock: Callable[[], float] = time.monotonic,
) -> EvalResult:
    """Ask the held-out prompts, and show the progress.

    A terminal gets a line that is rewritten, a log a new one now and then; `off` shows nothing.
    """
    is_live = mode == "auto" and console.is_terminal and not console.is_dumb_terminal
    status = Status("", console=console) if is_live else None
    began = clock()

    async def look() -> None:
        last = began
        while True:
            now = clock()
            text = progress_line(evaluator.progress, now - began)
            if status is not None:
                status.update(text)
            elif mode != "off" and now - last >= _LINE_EVERY_S:
                last = now
                console.print(text, markup=False)
            await asyncio.sleep(_EVERY_S)

    with status or nullcontext():
        watch = asyncio.create_task(look())
        try:
            return await evaluator.collect_answers(step)
        finally:
            watch.cancel()
