"""Statistics of an evaluation: numbers for each prompt first, then means over prompts.

Legend: `P` prompts, `N` answers to a prompt, `D` different parsed answers of a prompt.
An answer counts as right where its accuracy is 1; avg@N and std@N take accuracy as it is, so
that a scorer may give part marks.

| name | for one prompt, c right answers of N |
|---|---|
| avg@N | mean accuracy |
| std@N | standard deviation of the accuracies (population: divided by N) |
| pass@k | 1 - C(N-c, k) / C(N, k): the chance that k of the N, drawn at once, hold a right one |
| maj@k | the accuracy of the most frequent parsed answer among k drawn with replacement |
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from winnow.observe.names import EVAL

Floats = NDArray[np.float64]
_Z95 = 1.959963984540054
RESAMPLES = 500


@dataclass(frozen=True, eq=False)
class PromptAnswers:
    """The scored answers to one prompt."""

    data_source: str
    accuracies: Sequence[float]
    """[N] 0..1"""
    parsed: Sequence[Hashable | None] | None = None
    """[N] what each answer says; None where nothing could be read. Absent: no maj@k."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and how sure it is."""

    mean: float
    standard_error: float
    """Over prompts: answers to one prompt are not independent. NaN for a single prompt."""
    prompts: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for a share: Wilson's interval at the effective number of independent answers.

        That number is mean·(1-mean)/standard_error², or the number of prompts where all agree,
        so that 30 right ones of 30 do not pretend to certainty.
        """
        p, n = self.mean, float(self.prompts)
        spread = p * (1 - p)
        if self.standard_error > 0 and spread > 0:
            n = spread / self.standard_error**2
        centre = (p + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
        half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(spread / n + _Z95**2 / (4 * n**2))
        return max(centre - half, 0.0), min(centre + half, 1.0)


def pass_at_k(n: ArrayLike, correct: ArrayLike, k: int) -> Floats:
    """The unbiased pass@k of each prompt, as a product that neither over- nor underflows.

    Example: `pass_at_k([4], [1], 2)` is `[0.5]`.

    Raises:
        ValueError: k is not in 1..N, or correct not in 0..N.
    """
    answers, right = np.broadcast_arrays(
        np.asarray(n, dtype=np.int64), np.asarray(correct, dtype=np.int64)
    )
    if answers.size and not 1 <= k <= answers.min():
        raise ValueError(f"pass@k: k must lie in 1..{answers.min()} (answers a prompt), got {k}")
    if np.any((right < 0) | (right > answers)):
        raise ValueError("pass@k: the right answers of a prompt must lie in 0..N")
    # C(N-c, k) / C(N, k) = product over j < k of (N-c-j) / (N-j); it is 0 once N-c-j is.
    drawn = np.arange(k)
    wrong = np.maximum((answers - right)[..., None] - drawn, 0)
    ratios = wrong / (answers[..., None] - drawn)
    return np.asarray(1.0 - ratios.prod(axis=-1), dtype=np.float64)


def maj_at_k(
    accuracies: Sequence[float],
    parsed: Sequence[Hashable | None],
    k: int,
    seed: int | Sequence[int],
    resamples: int = RESAMPLES,
) -> float:
    """The maj@k of one prompt, by bootstrap: the same seed gives the same number.

    Draws k answers with replacement, `resamples` times. The most frequent parsed answer wins and
    brings the mean accuracy of the answers that say it; equally frequent ones share: each brings
    its part. What could not be parsed has no vote; where nobody has one, the draw brings 0.

    Raises:
        ValueError: k or `resamples` is below 1, or the lengths differ.
    """
    if k < 1 or resamples < 1:
        raise ValueError(f"maj@k: k and resamples must be at least 1, got {k} and {resamples}")
    if len(accuracies) != len(parsed):
        raise ValueError(f"maj@k: {len(accuracies)} accuracies but {len(parsed)} parsed answers")
    classes: dict[Hashable, int] = {}
    labels = [-1 if p is None else classes.setdefault(p, len(classes)) for p in parsed]
    sizes = np.bincount(np.array(labels, dtype=np.int64) + 1, minlength=len(classes) + 1)
    marks = np.bincount(
        np.array(labels, dtype=np.int64) + 1, weights=accuracies, minlength=len(classes) + 1
    )
    if not classes:
        return 0.0
    worth = marks[1:] / sizes[1:]  # [D]
    if len(classes) == 1 and sizes[0] == 0:
        return float(worth[0])
    # Counts of each class among k draws are multinomial: no need to draw one by one.
    generator = np.random.default_rng(seed)
    votes = generator.multinomial(k, sizes / sizes.sum(), size=resamples)[:, 1:]  # [R, D]
    most = votes.max(axis=1, keepdims=True)
    wins = (votes == most) & (most > 0)
    ties = np.maximum(wins.sum(axis=1), 1)
    return float(np.mean((wins @ worth) / ties))


def estimate(per_prompt: ArrayLike) -> Estimate:
    """The mean over prompts with its standard error.

    Raises:
        ValueError: there is no prompt.
    """
    values = np.asarray(per_prompt, dtype=np.float64)
    if values.size == 0:
        raise ValueError("an evaluation needs at least one prompt")
    error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else math.nan
    return Estimate(float(values.mean()), error, values.size)


def default_ks(n: int) -> tuple[int, ...]:
    """1, 2, 4, … and N itself."""
    powers = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return tuple(dict.fromkeys([*powers, n]))


def summarise(prompts: Sequence[PromptAnswers], seed: int = 0) -> dict[str, dict[str, Estimate]]:
    """All statistics: data source → `avg@N`, `std@N`, `pass@k`, `maj@k` → estimate.

    N is the smallest number of answers to a prompt of the source; k runs through `default_ks(N)`,
    maj@k starts at 2, and needs parsed answers throughout. The bootstrap of a prompt depends on
    `seed` and its place alone.

    Raises:
        ValueError: a prompt without answers.
    """
    by_source: dict[str, list[tuple[int, PromptAnswers]]] = {}
    for place, prompt in enumerate(prompts):
        if not prompt.accuracies:
            raise ValueError(f"prompt {place} of {prompt.data_source} has no answer to evaluate")
        by_source.setdefault(prompt.data_source, []).append((place, prompt))
    return {source: _of_source(members, seed) for source, members in by_source.items()}


def as_record(
    sampled: Mapping[str, Mapping[str, Estimate]],
    greedy: Mapping[str, Mapping[str, Estimate]] | None = None,
) -> dict[str, float]:
    """The figures as a step's record has them: `eval/SOURCE/pass@1`, `…/greedy`, `…/prompts`.

    `greedy` is the summary of one greedy answer a prompt. The standard errors of avg@N and of
    the greedy answers go along under the name with `_se`.
    """
    record: dict[str, float] = {}
    for source, figures in sampled.items():
        for name, found in figures.items():
            record[f"{EVAL}{source}/{name}"] = found.mean
            if name.startswith("avg@"):
                record[f"{EVAL}{source}/{name}_se"] = found.standard_error
                record[f"{EVAL}{source}/prompts"] = found.prompts
    for source, figures in (greedy or {}).items():
        record[f"{EVAL}{source}/greedy"] = figures["pass@1"].mean
        record[f"{EVAL}{source}/greedy_se"] = figures["pass@1"].standard_error
    return record


def _of_source(members: Sequence[tuple[int, PromptAnswers]], seed: int) -> dict[str, Estimate]:
    accuracies = [np.asarray(prompt.accuracies, dtype=np.float64) for _, prompt in members]
    sizes = np.array([len(values) for values in accuracies])
    correct = np.array([int((values >= 1).sum()) for values in accuracies])
    n = int(sizes.min())
    ks = default_ks(n)
    found = {
        f"avg@{n}": estimate([values.mean() for values in accuracies]),
        f"std@{n}": estimate([values.std() for values in accuracies]),
    }
    for k in ks:
        found[f"pass@{k}"] = estimate(pass_at_k(sizes, correct, k))
    votes = [(place, p, p.parsed) for place, p in members if p.parsed is not None]
    if len(votes) < len(members):
        return found
    for k in ks[1:]:
        per_prompt = [maj_at_k(p.accuracies, said, k, [seed, place]) for place, p, said in votes]
        found[f"maj@{k}"] = estimate(per_prompt)
    return found
