"""`winnow compare`: two files of held-out answers, paired by problem."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from winnow.errors import DataError, WinnowError
from winnow.evaluation.paired import EXACT_FLIPS, Paired, paired
from winnow.evaluation.tables import ALL, show, table_of
from winnow.observe.figures import share
from winnow.observe.rollouts import read_rollouts, rollout_files
from winnow.observe.run_folder import RunFolder
from winnow.observe.summary import WIDTH
from winnow.runs.evaluation_subject import ANSWERS, REPORT, SCORED

_COLUMNS = ("problem", "data_source", "outcome", "accuracy")
_ERROR = "scorer_error"
_LEAST_PROBLEMS = 6
"""With fewer no sign test can be clear: 2 of 2^5 patterns are more than 5 %."""


@dataclass(frozen=True)
class Answers:
    """What a file of held-out answers says of each problem."""

    file: Path
    sources: Mapping[str, str]
    """By problem, in the order of the file."""
    accuracies: Mapping[str, Sequence[float]]
    """By problem."""
    settings: Mapping[str, Any]
    """How they were sampled and scored; empty where no report lies beside the file."""
    failed: int = 0
    """Answers whose scoring failed; they count as wrong."""

    def mean(self, problem: str) -> float:
        """The mean accuracy of a problem's answers."""
        return math.fsum(self.accuracies[problem]) / len(self.accuracies[problem])


@dataclass(frozen=True)
class Comparison:
    """Two files of answers, compared on what both answered."""

    a: Answers
    b: Answers
    sources: Mapping[str, Paired]
    everything: Paired | None
    """Over all sources, where there are several."""

    @property
    def shared(self) -> int:
        """Problems that both answered."""
        return sum(each.problems for each in self.sources.values())

    @property
    def deciding(self) -> Paired:
        """The comparison over all problems."""
        return self.everything or next(iter(self.sources.values()))


def run_comparison(a: str, b: str, as_json: bool, console: Console) -> Comparison:
    """Compare two evaluations and print what came of it.

    Raises:
        WinnowError: one of them is missing or damaged, or they are of different problems.
    """
    found = compare(read_answers(a), read_answers(b))
    if as_json:
        print(json.dumps(_as_json(found), ensure_ascii=False, indent=2))
    else:
        _print(found, console)
    return found


def compare(a: Answers, b: Answers) -> Comparison:
    """Pair two evaluations by problem.

    Raises:
        DataError: they have no problem in common.
    """
    shared = [problem for problem in a.sources if problem in b.sources]
    if not shared:
        raise DataError(
            f"{a.file} and {b.file} have no problem in common: other data, or asked with another "
            "data.prompt_template; evaluate both on one file in the same way"
        )
    by_source: dict[str, list[str]] = {}
    for problem in shared:
        by_source.setdefault(a.sources[problem], []).append(problem)
    sources = {source: _paired(a, b, members) for source, members in by_source.items()}
    return Comparison(a, b, sources, _paired(a, b, shared) if len(sources) > 1 else None)


def read_answers(path: str) -> Answers:
    """The sampled held-out answers of a file, of a folder that `winnow eval` wrote, or of a run.

    Raises:
        WinnowError: there are none.
    """
    file = _file(path)
    table = read_rollouts(file)
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise DataError(
            f"{file}: no column {missing[0]}; give what winnow eval writes (evaluate again, if an "
            "older version wrote it)"
        )
    sources: dict[str, str] = {}
    accuracies: dict[str, list[float]] = {}
    failed = 0
    told = [*_COLUMNS, *([_ERROR] if _ERROR in table.column_names else [])]
    for row in table.select(told).to_pylist():
        if row["outcome"] != "held_out":
            continue
        failed += bool(row.get(_ERROR))
        sources.setdefault(row["problem"], row["data_source"])
        accuracies.setdefault(row["problem"], []).append(row["accuracy"])
    if not sources:
        raise DataError(f"{file} holds no held-out answers; give what winnow eval writes")
    return Answers(file, sources, accuracies, _settings(file), failed)


def _file(path: str) -> Path:
    place = Path(path).expanduser()
    if place.is_file():
        return place
    if (place / ANSWERS).is_file():
        return place / ANSWERS
    if not (place / "config.yaml").is_file():
        raise WinnowError(
            f"{place} holds no evaluation (no {ANSWERS}) and is no run's folder; "
            f"give a folder that winnow eval wrote, its {ANSWERS}, or runs/NAME"
        )
    folder = RunFolder.open(place).evaluations
    asked = [(_step(file), 1, file) for file in folder.glob("checkpoint-*.parquet")]
    own = [(step, 0, file) for step, file in rollout_files(folder)]
    found = sorted((each for each in [*own, *asked] if each[0] >= 0), key=lambda each: each[:2])
    if not found:
        raise WinnowError(f"{place} has no evaluation yet; make one: winnow eval {place}")
    return found[-1][2]


def _step(file: Path) -> int:
    number = file.stem.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def _settings(file: Path) -> Mapping[str, Any]:
    report = file.with_name(REPORT) if file.name == ANSWERS else file.with_suffix(".json")
    if not report.is_file():
        return {}
    try:
        settings = json.loads(report.read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{report}: not a report of winnow eval; delete it to go on") from error
    return settings if isinstance(settings, dict) else {}


def _paired(a: Answers, b: Answers, problems: Sequence[str]) -> Paired:
    return paired([a.mean(each) for each in problems], [b.mean(each) for each in problems])


def _print(found: Comparison, console: Console) -> None:
    width = min(WIDTH, console.width)
    console.print()
    for name, answers in (("A", found.a), ("B", found.b)):
        console.print(Text(f"{name}  {answers.file}"), soft_wrap=True)
    console.print()
    rows = {**found.sources, **({ALL: found.everything} if found.everything else {})}
    table = table_of("A", "B", "B - A", "95 %", "p", "won/tied/lost")
    for label, pair in rows.items():
        low, high = pair.interval
        table.add_row(
            Text(label),
            share(pair.mean_a, 1),
            share(pair.mean_b, 1),
            f"{100 * pair.difference:+.1f}",
            f"{100 * low:+.1f} .. {100 * high:+.1f}",
            _p(pair.p_flip),
            f"{pair.won}/{pair.tied}/{pair.lost}",
        )
    show(table, console)
    for line in [*notes(found), verdict(found.deciding)]:
        console.print(Text(line), width=width)


def notes(found: Comparison) -> list[str]:
    """What makes the comparison less than it seems."""
    lines = []
    for name, mine, other in (("A", found.a, found.b), ("B", found.b, found.a)):
        alone = len([problem for problem in mine.sources if problem not in other.sources])
        if alone:
            lines.append(f"{alone:,} problems of {name} alone are left out.")
        if mine.failed:
            lines.append(
                f"Scoring failed for {mine.failed:,} answers of {name}, which count as wrong."
            )
    for key in found.a.settings.keys() & found.b.settings.keys() - {"seed"}:
        left, right = found.a.settings[key], found.b.settings[key]
        if left != right:
            how = "scored" if key.startswith(SCORED) else "asked"
            what = f"{key.removeprefix(SCORED)} is {left} in A, {right} in B"
            lines.append(f"They were {how} in different ways: {what}.")
    return sorted(lines)


def verdict(pair: Paired) -> str:
    """One honest sentence."""
    points = f"{100 * abs(pair.difference):.1f} points"
    better = "better" if pair.difference > 0 else "worse"
    if pair.tied == pair.problems:
        return f"No difference: A and B did equally well on each of the {_problems(pair)}."
    if pair.problems < _LEAST_PROBLEMS:
        return (
            f"Nothing can be said: {_problems(pair)} are too few to tell a difference from luck "
            f"(at least {_LEAST_PROBLEMS})."
        )
    if not pair.is_clear:
        return (
            f"Within noise: B is {points} {better} on these {_problems(pair)}, which may well be "
            f"luck ({_p_said(pair)}); a difference below about {100 * pair.visible:.1f} points "
            "would often be missed here."
        )
    low, high = sorted(abs(100 * each) for each in pair.interval)
    return (
        f"B is {better}: by {points} on these {_problems(pair)}, most likely {low:.1f} to "
        f"{high:.1f} ({_p_said(pair)})."
    )


def _problems(pair: Paired) -> str:
    return "1 problem" if pair.problems == 1 else f"{pair.problems:,} problems"


def _p_said(pair: Paired) -> str:
    kind = "all" if pair.problems - pair.tied <= EXACT_FLIPS else "random"
    p = _p(pair.p_flip)
    return f"p {p if p.startswith('<') else f'= {p}'} by {kind} sign flips"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _as_json(found: Comparison) -> dict[str, Any]:
    body: dict[str, Any] = {"a": str(found.a.file), "b": str(found.b.file)}
    body["shared_problems"] = found.shared
    body["sources"] = {source: _figures(pair) for source, pair in found.sources.items()}
    if found.everything is not None:
        body["all"] = _figures(found.everything)
    body["notes"], body["verdict"] = notes(found), verdict(found.deciding)
    return body


def _figures(pair: Paired) -> dict[str, Any]:
    low, high = pair.interval
    error = pair.standard_error
    return {
        "problems": pair.problems,
        "a": pair.mean_a,
        "b": pair.mean_b,
        "difference": pair.difference,
        "standard_error": error if math.isfinite(error) else None,
        "low": low,
        "high": high,
        "p_t": pair.p_t,
        "p_sign_flips": pair.p_flip,
        "won": pair.won,
        "tied": pair.tied,
        "lost": pair.lost,
    }
