"""`winnow compare`: two files of held-out answers, paired by problem, with significance tests.

Legend: `P` problems that both answered, `d` [P] the difference of their mean accuracies, B - A.

Pairing by problem takes out the noise of problems that both find hard, which is most of it (Miller
2024, arXiv 2411.00640, section 4). Two tests see whether d is centred on 0:

| test | rests on |
|---|---|
| Student's t | the mean of d being about normal |
| sign flips | signs alone: were A and B alike, each d could as well be -d; exact for few problems |
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike
from rich.console import Console
from rich.text import Text

from winnow.errors import DataError, WinnowError
from winnow.evaluation.report import ALL, ANSWERS, REPORT, SCORED
from winnow.evaluation.statistics import LEVEL, two_sided_bound, two_sided_p
from winnow.observe.files import RunFolder
from winnow.observe.format import WIDTH, figure_table, percent, print_table, printable
from winnow.observe.metrics import grouped
from winnow.observe.rollouts import read_rollouts

_COLUMNS = ("problem", "data_source", "outcome", "accuracy", "scorer_error")
_OF_STEP = re.compile(r"(step|checkpoint)-([0-9]+)\.parquet")
"""The evaluations of a run: its own, and what winnow eval asked of a checkpoint."""
_LEAST_PROBLEMS = 6
"""With fewer no sign test can be clear: 2 of 2^5 patterns are more than 5 %."""
EXACT_FLIPS = 14
"""Up to so many problems with a difference all sign patterns are counted: 16,384."""
FLIPS = 20_000
"""Random patterns are drawn beyond."""
_BLOCK = 1000
"""Patterns at once: all of them would take much memory."""
_POWER_BOUND = 0.8416212335729143
"""The standard normal's quantile of 0.8: a power of four in five."""
_CLOSE = 1e-12


@dataclass(frozen=True)
class PairedTest:
    """Two evaluations over the same problems, with the names of `winnow compare --json`."""

    problems: int
    a: float
    """Mean accuracy of A."""
    b: float
    difference: float
    """The mean of B less that of A."""
    standard_error: float
    """Standard error of the difference; NaN for a single problem."""
    low: float
    """Lower end of the 95 % interval by Student's t; -1 for a single problem."""
    high: float
    p_t: float
    p_sign_flips: float
    won: int
    """Problems on which B is better."""
    tied: int
    lost: int

    @property
    def detectable(self) -> float:
        """The smallest true difference that is detected with a power of 80 %."""
        if self.problems < 2:
            return math.nan
        return (two_sided_bound(1 - LEVEL, self.problems - 1) + _POWER_BOUND) * self.standard_error

    @property
    def is_significant(self) -> bool:
        """True if both tests are significant at 5 %."""
        return self.p_sign_flips < 1 - LEVEL and not self.low <= 0 <= self.high


def paired_test(a: ArrayLike, b: ArrayLike, seed: int = 0) -> PairedTest:
    """Compare mean accuracies [P] of the same problems in the same order.

    Args:
        seed: seed of the random sign patterns.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    assert x.shape == y.shape != (0,), "paired: two equally long lists, not empty"
    d = y - x
    d[np.abs(d) < _CLOSE] = 0.0  # such as 0.1 + 0.2 against 0.3
    mean_a, mean_b, count = float(x.mean()), float(y.mean()), d.size
    difference, error, low, high, p_t = mean_b - mean_a, math.nan, -1.0, 1.0, 1.0
    if count > 1:
        error = float(d.std(ddof=1) / math.sqrt(count))
        half = two_sided_bound(1 - LEVEL, count - 1) * error
        low, high = difference - half, difference + half
        mean = float(d.mean())
        if error > _CLOSE:
            p_t = two_sided_p(mean / error, count - 1)
        elif abs(mean) > _CLOSE:
            p_t = 0.0
    return PairedTest(
        count, mean_a, mean_b, difference, error, low, high, p_t, sign_flip_p(d, seed),
        won=int((d > 0).sum()), tied=int((d == 0).sum()), lost=int((d < 0).sum()),
    )  # fmt: skip


def sign_flip_p(differences: ArrayLike, seed: int = 0) -> float:
    """Return the share of sign patterns whose sum is at least as far from 0 as the observed one.

    All patterns of the differences that are not 0, where these are few; else random ones, among
    which the one there is counts, so that no p is 0 (Phipson and Smyth 2010).

    Example: `sign_flip_p([1, 1, 1])` is 0.25: 2 of 8 patterns.
    """
    d = np.asarray(differences, dtype=np.float64)
    d = d[d != 0]
    if not d.size:
        return 1.0
    bound = abs(float(d.sum())) - _CLOSE * float(np.abs(d).sum())
    if d.size <= EXACT_FLIPS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=d.size)))
        return float(np.mean(np.abs(signs @ d) >= bound))
    generator, reached = np.random.default_rng(seed), 0
    for _ in range(FLIPS // _BLOCK):
        signs = np.where(generator.random((_BLOCK, d.size)) < 0.5, -1.0, 1.0)
        reached += int((np.abs(signs @ d) >= bound).sum())
    return (1 + reached) / (1 + FLIPS)


@dataclass(frozen=True)
class HeldOutAnswers:
    """The held-out answers in a file, by problem."""

    file: Path
    sources: Mapping[str, str]
    """Data sources by problem, in the order of the file."""
    means: Mapping[str, float]
    """Mean accuracies of a problem's answers."""
    settings: Mapping[str, Any]
    """Settings of sampling and scoring; empty where no report lies next to the file."""
    failed: int = 0
    """Answers whose scoring failed; they count as wrong."""


@dataclass(frozen=True)
class Comparison:
    """Two files of answers, compared on what both answered."""

    a: HeldOutAnswers
    b: HeldOutAnswers
    sources: Mapping[str, PairedTest]
    overall: PairedTest | None
    """The pair over all sources, where there are several."""

    @property
    def pooled(self) -> PairedTest:
        """The comparison over all problems."""
        return self.overall or next(iter(self.sources.values()))


def run_comparison(a: str, b: str, as_json: bool, console: Console) -> Comparison:
    """Compare two evaluations and print the result.

    Raises:
        WinnowError: one of them is missing or damaged, or they are of different problems.
    """
    comparison = compare(read_answers(a), read_answers(b))
    if as_json:
        print(json.dumps(comparison_json(comparison), ensure_ascii=False, indent=2))
    else:
        _print_comparison(comparison, console)
    return comparison


def compare(a: HeldOutAnswers, b: HeldOutAnswers) -> Comparison:
    """Pair two evaluations by problem.

    Raises:
        DataError: they have no problem in common.
    """
    shared = [problem for problem in a.sources if problem in b.sources]
    if not shared:
        raise DataError(
            f"{a.file} and {b.file} have no problem in common: the data or "
            "data.prompt_template differs; evaluate both on the same file with the same template"
        )
    by_source = grouped((a.sources[problem], problem) for problem in shared)
    sources = {source: _test_problems(a, b, members) for source, members in by_source.items()}
    return Comparison(a, b, sources, _test_problems(a, b, shared) if len(sources) > 1 else None)


def read_answers(path: str) -> HeldOutAnswers:
    """Read the sampled held-out answers of a file, of an evaluation's folder, or of a run.

    Raises:
        WinnowError: there are none.
    """
    file = _find_file(path)
    return parse_answers(file, read_rollouts(file), _read_settings(file))


def parse_answers(file: Path, table: pa.Table, settings: Mapping[str, Any] = {}) -> HeldOutAnswers:
    """Take the sampled held-out answers out of the rows of a file.

    Args:
        file: as messages name it.
        settings: of sampling and scoring, where they are known.

    Raises:
        DataError: there are none.
    """
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise DataError(
            f"{file}: no column {missing[0]}; give a file of winnow eval (evaluate again if an "
            "older version wrote it)"
        )
    rows = [row for row in table.select(_COLUMNS).to_pylist() if row["outcome"] == "held_out"]
    if not rows:
        raise DataError(f"{file} has no held-out answers; give a file that winnow eval wrote")
    accuracies = grouped((row["problem"], row["accuracy"]) for row in rows)
    return HeldOutAnswers(
        file,
        {row["problem"]: row["data_source"] for row in rows},
        {problem: math.fsum(marks) / len(marks) for problem, marks in accuracies.items()},
        settings,
        sum(bool(row["scorer_error"]) for row in rows),
    )


def _find_file(path: str) -> Path:
    place = Path(path).expanduser()
    if place.is_file():
        return place
    if (place / ANSWERS).is_file():
        return place / ANSWERS
    if not (place / "config.yaml").is_file():
        raise WinnowError(
            f"{place} has no {ANSWERS} and is not a run folder; "
            f"give a folder that winnow eval wrote, its {ANSWERS}, or runs/NAME"
        )
    candidates = [
        (int(match[2]), match[1] == "checkpoint", file)
        for file in RunFolder.open(place).evaluations.glob("*.parquet")
        if (match := _OF_STEP.fullmatch(file.name))
    ]
    if not candidates:
        raise WinnowError(f"{place} has no evaluation yet; run winnow eval {place}")
    return max(candidates)[2]


def _read_settings(file: Path) -> Mapping[str, Any]:
    report = file.with_name(REPORT) if file.name == ANSWERS else file.with_suffix(".json")
    if not report.is_file():
        return {}
    try:
        settings = json.loads(report.read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{report}: not a report of winnow eval; delete it to continue") from error
    return settings if isinstance(settings, dict) else {}


def _test_problems(a: HeldOutAnswers, b: HeldOutAnswers, problems: Sequence[str]) -> PairedTest:
    return paired_test([a.means[each] for each in problems], [b.means[each] for each in problems])


def _print_comparison(compared: Comparison, console: Console) -> None:
    console.print()
    for name, answers in (("A", compared.a), ("B", compared.b)):
        console.print(Text(printable(f"{name}  {answers.file}")), soft_wrap=True)
    console.print()
    table = figure_table("A", "B", "B - A", "95 %", "p", "won/tied/lost")
    rows = {**compared.sources, **({ALL: compared.overall} if compared.overall else {})}
    for label, pair in rows.items():
        table.add_row(
            Text(printable(label)),
            percent(pair.a, 1),
            percent(pair.b, 1),
            f"{100 * pair.difference:+.1f}",
            f"{100 * pair.low:+.1f} .. {100 * pair.high:+.1f}",
            _format_p(pair.p_sign_flips),
            f"{pair.won}/{pair.tied}/{pair.lost}",
        )
    print_table(table, console)
    for line in [*comparison_notes(compared), verdict(compared.pooled)]:
        console.print(Text(printable(line)), width=min(WIDTH, console.width))


def comparison_notes(compared: Comparison) -> list[str]:
    """List the reasons why the comparison shows less than it seems."""
    lines = []
    for name, mine, other in (("A", compared.a, compared.b), ("B", compared.b, compared.a)):
        alone = len([problem for problem in mine.sources if problem not in other.sources])
        if alone:
            lines.append(f"{alone:,} problems are only in {name} and are left out.")
        if mine.failed:
            lines.append(
                f"Scoring failed for {mine.failed:,} answers of {name}, which count as wrong."
            )
    for key in compared.a.settings.keys() & compared.b.settings.keys() - {"seed"}:
        value_a, value_b = compared.a.settings[key], compared.b.settings[key]
        if value_a != value_b:
            how = "scored" if key.startswith(SCORED) else "sampled"
            what = f"{key.removeprefix(SCORED)} is {value_a} in A, {value_b} in B"
            lines.append(f"The evaluations were {how} differently: {what}.")
    return sorted(lines)


def verdict(pair: PairedTest) -> str:
    """Summarise a comparison in one sentence that claims no more than the tests show."""
    points = f"{100 * abs(pair.difference):.1f} points"
    better = "better" if pair.difference > 0 else "worse"
    problems = "1 problem" if pair.problems == 1 else f"{pair.problems:,} problems"
    if pair.tied == pair.problems:
        return f"No difference: A and B did equally well on each of the {problems}."
    if pair.problems < _LEAST_PROBLEMS:
        return (
            f"Inconclusive: {problems} are too few for a significance test (at least "
            f"{_LEAST_PROBLEMS})."
        )
    p = _format_p(pair.p_sign_flips)
    kind = "all" if pair.problems - pair.tied <= EXACT_FLIPS else "random"
    by = f"p {p if p.startswith('<') else f'= {p}'} by {kind} sign flips"
    if not pair.is_significant:
        return (
            f"Not significant: B is {points} {better} on these {problems} ({by}); differences "
            f"below about {100 * pair.detectable:.1f} points are often missed at this sample size."
        )
    low, high = sorted((abs(100 * pair.low), abs(100 * pair.high)))
    return (
        f"B is {better} by {points} on these {problems}, 95 % interval {low:.1f} to {high:.1f} "
        f"({by})."
    )


def _format_p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values, as `winnow compare --json` prints it."""
    return {
        "a": str(comparison.a.file),
        "b": str(comparison.b.file),
        "shared_problems": comparison.pooled.problems,
        "sources": {source: _test_json(pair) for source, pair in comparison.sources.items()},
        **({"all": _test_json(comparison.overall)} if comparison.overall else {}),
        "notes": comparison_notes(comparison),
        "verdict": verdict(comparison.pooled),
    }


def _test_json(pair: PairedTest) -> dict[str, Any]:
    """Return the figures as plain values; JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(pair).items()}
