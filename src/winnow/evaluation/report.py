"""The figures of an evaluation, by data source and over all: what report.json holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from winnow.evaluation.evaluator import Evaluated
from winnow.evaluation.statistics import Estimate, PromptAnswers, estimate, summarise
from winnow.types import Group


@dataclass(frozen=True)
class SourceReport:
    """How the answers to the problems of one data source, or of all, were."""

    problems: int
    answers: int
    """To each problem; to the one with the fewest, where they differ."""
    figures: Mapping[str, Estimate]
    """`avg@N`, `std@N`, `pass@K`, `maj@K`."""
    greedy: Estimate | None
    truncated: Estimate
    """Share of the answers that the limit ended."""
    tokens: Estimate
    """Mean length of an answer."""
    failed: int
    """Answers whose scoring failed; they count as wrong."""

    @property
    def average(self) -> Estimate:
        """avg@N."""
        return self.figures[f"avg@{self.answers}"]

    def at_k(self, kind: str) -> dict[int, Estimate]:
        """pass@k or maj@k by k."""
        found = {name.removeprefix(f"{kind}@"): value for name, value in self.figures.items()}
        return {int(k): value for k, value in found.items() if k.isdecimal()}

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
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
    """Over the problems of all sources, where there are several."""

    @classmethod
    def of(cls, found: Evaluated) -> Report:
        """From the answers."""
        sampled, greedy = found.problems, found.greedy_problems
        names = list(dict.fromkeys(prompt.data_source for prompt in sampled))
        sources = {name: _of_source(found, sampled, greedy, {name}) for name in names}
        several = len(names) > 1
        everything = _of_source(found, sampled, greedy, set(names)) if several else None
        return cls(sources, everything)

    def as_json(self, about: Mapping[str, Any]) -> bytes:
        """The text of report.json, which begins with what is said `about` the evaluation."""
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
    # Under one name, they are one source to the statistics.
    mine = [replace(p, data_source="") for p in sampled if p.data_source in names]
    mine_greedy = [replace(p, data_source="") for p in greedy if p.data_source in names]
    answers = min(len(p.accuracies) for p in mine)
    best = summarise(mine_greedy, found.seed)[""]["pass@1"] if mine_greedy else None
    return SourceReport(
        problems=len(mine),
        answers=answers,
        figures=summarise(mine, found.seed)[""],
        greedy=best,
        truncated=estimate([float(np.mean(p.truncated)) for p in mine]),
        tokens=estimate([float(np.mean(p.tokens)) for p in mine]),
        failed=_failed(found.groups, names) + _failed(found.greedy, names),
    )


def _failed(groups: Sequence[Group], names: set[str]) -> int:
    chosen = [group for group in groups if group.prompt.data_source in names]
    return sum(bool(answer.score.error) for group in chosen for answer in group.answers)


def _share(value: Estimate) -> dict[str, float | None]:
    low, high = value.interval
    return {"mean": value.mean, "standard_error": _finite(value), "low": low, "high": high}


def _finite(value: Estimate) -> float | None:
    """The standard error; JSON has no NaN."""
    return value.standard_error if math.isfinite(value.standard_error) else None
