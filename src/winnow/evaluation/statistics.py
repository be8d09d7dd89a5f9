"""Statistics of an evaluation: figures of each prompt first, then means over prompts.

Legend: `P` prompts, `N` answers to a prompt, `D` different parsed answers of a prompt.
An answer counts as right where its accuracy is 1; avg@N and std@N take accuracy as it is, so
that a scorer may give part marks.

| name | for one prompt, c right answers of N |
|---|---|
| avg@N | mean accuracy |
| avg_ended | mean accuracy of the answers that ended before the limit |
| std@N | standard deviation of the accuracies (population: divided by N) |
| pass@k | 1 - C(N-c, k) / C(N, k): the chance that k of the N, drawn at once, hold a right one |
| maj@k | the accuracy of the most frequent parsed answer among k of the N, over all draws at once |

pass@k is eq. 1 of Chen et al. 2021 (arXiv 2107.03374). maj@k averages over the same draws, those
of k different answers, so that maj@1 is avg@N and maj@N is what the vote of all says.

Standard errors are taken over the means of prompts, because answers to one prompt are not
independent of each other: clustering by prompt, Miller 2024 (arXiv 2411.00640), section 2.2. The
mean avg_ended is over all answers that ended, a ratio of two sums over prompts, whose error is
that of its linear part (Cochran 1977, Sampling Techniques, section 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from winnow.observe.metrics import grouped

Floats = NDArray[np.float64]
LEVEL = 0.95
"""Coverage of the intervals."""
EXACT_ANSWERS = 128
"""Up to so many answers maj@k is exact; beyond, it is a mean over random draws."""
DRAWS = 2000


@dataclass(frozen=True, eq=False)
class PromptAnswers:
    """The scored answers to one prompt."""

    data_source: str
    accuracies: Sequence[float]
    """[N] 0..1"""
    parsed: Sequence[Hashable | None] | None = None
    """[N] the parsed answers; None where nothing could be read. Absent: no maj@k."""
    tokens: Sequence[int] = ()
    """[N] lengths."""
    truncated: Sequence[bool] = ()
    """[N] True where the limit ended the answer."""
    parts: Sequence[Mapping[str, float]] = ()
    """[N] the parts of the scores."""
    extras: Sequence[Mapping[str, object]] = ()
    """[N] what else the scorer said."""
    greedy: Sequence[float] = ()
    """Accuracies of greedy answers, which repeat where rows ask the same."""
    failed: int = 0
    """Answers whose scoring failed; they count as wrong."""

    @property
    def unread(self) -> int:
        """The number of answers in which the scorer found nothing to compare."""
        return sum(each is None for each in self.parsed or ())


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its standard error."""

    mean: float
    standard_error: float
    """The error over prompts: answers to one are not independent. NaN for a single prompt."""
    prompts: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of a share: Wilson's at the effective number of independent answers.

        That number is mean·(1-mean)/standard_error², or the number of prompts where all agree,
        so that 30 right ones of 30 do not pretend to certainty. The bound is Student's for
        prompts - 1 degrees of freedom (Korn and Graubard 1998), because 30 prompts are few.
        """
        p, n = self.mean, float(self.prompts)
        spread = p * (1 - p)
        if self.standard_error > 0 and spread > 0:
            n = spread / self.standard_error**2
        t = two_sided_bound(1 - LEVEL, max(self.prompts - 1, 1))
        centre = (p + t**2 / (2 * n)) / (1 + t**2 / n)
        half = t / (1 + t**2 / n) * math.sqrt(max(spread, 0.0) / n + t**2 / (4 * n**2))
        return max(centre - half, 0.0), min(centre + half, 1.0)


def pass_at_k(n: ArrayLike, correct: ArrayLike, k: int) -> Floats:
    """Compute the unbiased pass@k of each prompt, by a product that neither over- nor underflows.

    Example: `pass_at_k([4], [1], 2)` is `[0.5]`.
    """
    answers, right = np.broadcast_arrays(
        np.asarray(n, dtype=np.int64), np.asarray(correct, dtype=np.int64)
    )
    assert np.all((k >= 1) & (k <= answers)), f"pass@k: k is {k}, not in 1..N"
    assert np.all((right >= 0) & (right <= answers)), "pass@k: right answers are not in 0..N"
    # C(N-c, k) / C(N, k) = product over j < k of (N-c-j) / (N-j); it is 0 once N-c-j is.
    drawn = np.arange(k)
    wrong = np.maximum((answers - right)[..., None] - drawn, 0)
    ratios = wrong / (answers[..., None] - drawn)
    return np.asarray(1.0 - ratios.prod(axis=-1), dtype=np.float64)


def maj_at_k(
    accuracies: Sequence[float],
    parsed: Sequence[Hashable | None],
    ks: Sequence[int],
    seed: int | Sequence[int] = 0,
    exact_answers: int = EXACT_ANSWERS,
) -> Floats:
    """Compute the maj@k of one prompt for each k: its mean over all draws of k different answers.

    The most frequent parsed answer wins and brings the mean accuracy of the answers that say it;
    equally frequent ones share: each brings its part. What could not be parsed has no vote; where
    nobody has one, the draw brings 0. `seed` decides random draws, where there are more than
    `exact_answers` answers.

    Example: `maj_at_k([1, 1, 0], ["a", "a", "b"], [1, 2, 3])` is `[2/3, 2/3, 1]`.
    """
    n = len(parsed)
    assert all(1 <= k <= n == len(accuracies) for k in ks), f"maj@k: {list(ks)} of {n} answers"
    classes: dict[Hashable, int] = {}
    labels = [-1 if p is None else classes.setdefault(p, len(classes)) for p in parsed]
    place = np.array(labels, dtype=np.int64) + 1
    sizes = np.bincount(place, minlength=len(classes) + 1)
    marks = np.bincount(place, weights=accuracies, minlength=len(classes) + 1)
    worth = marks[1:] / sizes[1:]  # [D]
    if n <= exact_answers:
        won = _exact_maj(sizes[1:].tolist(), worth.tolist(), int(sizes[0]))
        return np.array([won[k - 1] for k in ks], dtype=np.float64)
    generator = np.random.default_rng(seed)
    return np.array([_sampled_maj(sizes, worth, k, generator) for k in ks])


def majority_accuracy(accuracies: Sequence[float], parsed: Sequence[Hashable | None]) -> float:
    """Compute the maj@N of one prompt with N answers: `maj_at_k` for the vote of all of them.

    Example: `majority_accuracy([1, 0, 0], ["a", "b", None])` is 0.5: two tie at one vote.
    """
    pairs = zip(parsed, accuracies, strict=True)
    worth = grouped((answer, accuracy) for answer, accuracy in pairs if answer is not None)
    most = max(map(len, worth.values()), default=0)
    means = [sum(marks) / most for marks in worth.values() if len(marks) == most]
    return sum(means) / len(means) if means else 0.0


def vote_of(pred: object) -> str | None:
    """Return an answer's vote in the majority; None where nothing could be read."""
    return None if pred is None or pred == "" else pred if isinstance(pred, str) else repr(pred)


def finite_numbers(values: Sequence[object]) -> list[float] | None:
    """Return values of a scorer as floats; None if any is not a finite number."""
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return None
    return [float(value) for value in values if isinstance(value, int | float)]


def _sampled_maj(
    sizes: NDArray[np.int64], worth: Floats, k: int, generator: np.random.Generator
) -> float:
    """Estimate maj@k from `DRAWS` random draws; `sizes` [1 + D] begins with the unparsed."""
    votes = generator.multivariate_hypergeometric(sizes, k, size=DRAWS)[:, 1:]  # [R, D]
    most = votes.max(axis=1, keepdims=True, initial=0)
    wins = (votes == most) & (most > 0)
    return float(np.mean((wins @ worth) / np.maximum(wins.sum(axis=1), 1)))


def _exact_maj(sizes: Sequence[int], worth: Sequence[float], blank: int) -> Floats:
    """Compute maj@1 … maj@N of classes of these sizes from the draws in which m votes win.

    In polynomials in x, whose power is the number of answers drawn: a class that gets fewer than m
    votes is sum over v < m of C(size, v) x^v, and one that gets m is C(size, m) x^m, here times u
    for a class that ties. `won` sums over the class whose worth is counted. A draw with t others
    on m votes is worth 1 / (t + 1) of it, which is the integral of u^t from 0 to 1: Gauss-Legendre
    nodes give it exactly. All terms are positive, so nothing cancels.
    """
    n = blank + sum(sizes)
    total = np.zeros(n + 1)
    for m in range(1, max(sizes, default=0) + 1):
        big = [(size, value) for size, value in zip(sizes, worth, strict=True) if size >= m]
        rest = n - sum(size for size, _ in big)  # too small for m votes
        nodes, weights = np.polynomial.legendre.leggauss((len(big) + 1) // 2)
        u = (nodes[:, None] + 1) / 2
        lost = np.zeros((len(u), n + 1))
        lost[:, : rest + 1] = _binomials(rest, rest + 1)
        won = np.zeros_like(lost)
        for size, value in big:
            fewer = _binomials(size, m)
            top = np.append(np.zeros(m), float(math.comb(size, m)))
            tied = _multiply(lost, top)
            won = _multiply(won, fewer) + u * _multiply(won, top) + value * tied
            lost = _multiply(lost, fewer) + u * tied
        total += weights / 2 @ won
    return np.asarray(total[1:] / _binomials(n, n + 1)[1:])


def _binomials(n: int, terms: int) -> Floats:
    """List C(n, 0), C(n, 1), … of so many terms."""
    return np.array([math.comb(n, v) for v in range(terms)], dtype=np.float64)


def _multiply(polynomials: Floats, factor: Floats) -> Floats:
    """Multiply the polynomials of each row by one, cut off behind the last power."""
    return np.array([np.convolve(row, factor)[: row.size] for row in polynomials])


def mean_of(per_prompt: ArrayLike) -> Estimate:
    """Average over prompts, of which there is at least one, with the standard error of the mean."""
    values = np.asarray(per_prompt, dtype=np.float64)
    assert values.size, "an evaluation needs at least one prompt"
    error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else math.nan
    return Estimate(float(values.mean()), error, values.size)


def ratio_of(sums: ArrayLike, counts: ArrayLike) -> Estimate | None:
    """Divide the total of sums by that of counts, each [P] of a prompt; None if nothing counts.

    Example: `ratio_of([1, 0], [1, 3])` is 0.25 with the standard error 0.375.
    """
    total, size = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if not size.any():
        return None
    ratio = float(total.sum() / size.sum())
    residuals = mean_of((total - ratio * size) / size.mean())
    return Estimate(ratio, residuals.standard_error, residuals.prompts)


def default_ks(n: int) -> tuple[int, ...]:
    """List the powers of two up to N, and N itself."""
    powers = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return tuple(dict.fromkeys([*powers, n]))


@dataclass(frozen=True)
class SourceFigures:
    """The figures of prompts of one data source, or of all."""

    prompts: Sequence[PromptAnswers]
    figures: Mapping[str, Estimate]
    """`avg@N`, `std@N`, `pass@K`, `maj@K`."""

    @classmethod
    def compute(cls, members: Sequence[tuple[int, PromptAnswers]], seed: int) -> SourceFigures:
        """Compute the figures of prompts taken as one source, each given with its place."""
        accuracies = [np.asarray(prompt.accuracies, dtype=np.float64) for _, prompt in members]
        sizes = np.array([len(values) for values in accuracies])
        correct = np.array([int((values >= 1).sum()) for values in accuracies])
        n = int(sizes.min())
        ks = default_ks(n)
        figures = {
            f"avg@{n}": mean_of([values.mean() for values in accuracies]),
            f"std@{n}": mean_of([values.std() for values in accuracies]),
            **{f"pass@{k}": mean_of(pass_at_k(sizes, correct, k)) for k in ks},
        }
        if all(prompt.parsed is not None for _, prompt in members):
            majorities = [
                maj_at_k(prompt.accuracies, prompt.parsed or (), ks[1:], [seed, place])
                for place, prompt in members
            ]
            columns = zip(*majorities, strict=True)
            figures |= {f"maj@{k}": mean_of(c) for k, c in zip(ks[1:], columns, strict=True)}
        return cls([prompt for _, prompt in members], figures)

    @property
    def answers(self) -> int:
        """Answers to each prompt; to the one with the fewest, where they differ."""
        return min(len(prompt.accuracies) for prompt in self.prompts)

    @property
    def average(self) -> Estimate:
        """The estimate avg@N."""
        return self.figures[f"avg@{self.answers}"]

    @property
    def greedy(self) -> Estimate | None:
        """The share of prompts whose greedy answer is right; None where none was asked for."""
        if not all(prompt.greedy for prompt in self.prompts):
            return None
        return mean_of([np.mean(np.asarray(prompt.greedy) >= 1) for prompt in self.prompts])

    @property
    def truncated(self) -> Estimate:
        """The share of answers that the limit ended."""
        return mean_of([np.mean(prompt.truncated) for prompt in self.prompts])

    @property
    def ended(self) -> Estimate | None:
        """The mean accuracy of answers that the limit did not end; None where it ended all."""
        ended = [
            [each for each, cut in zip(p.accuracies, p.truncated, strict=True) if not cut]
            for p in self.prompts
        ]
        return ratio_of([sum(each) for each in ended], [len(each) for each in ended])

    @property
    def tokens(self) -> Estimate:
        """The mean length of an answer."""
        return mean_of([np.mean(prompt.tokens) for prompt in self.prompts])


def summarise(prompts: Sequence[PromptAnswers], seed: int = 0) -> dict[str, SourceFigures]:
    """Compute the figures of each data source.

    N is the smallest number of answers to a prompt of the source; k runs through `default_ks(N)`,
    maj@k starts at 2, and needs parsed answers throughout. Random draws of a prompt depend on
    `seed` and its place alone.
    """
    by_source = grouped((prompt.data_source, (n, prompt)) for n, prompt in enumerate(prompts))
    return {source: SourceFigures.compute(members, seed) for source, members in by_source.items()}


# Student's t without scipy, which transformers imports wherever it is installed: 0.37 s of CPU and
# 44 MB more in each process that loads a model.
_gauss_legendre = cache(np.polynomial.legendre.leggauss)


def two_sided_p(t: float, degrees: int) -> float:
    """Return the chance of a |T| as large as |t|, for `degrees` of freedom, at least 1.

    With t = sqrt(degrees) / tan(x) the density of x goes as sin(x)^(degrees - 1), which
    Gauss-Legendre integrates over the 12 standard deviations that hold all but e^-72 of it.

    Example: `two_sided_p(12.7062, 1)` is about 0.05.
    """
    assert degrees >= 1, "a t distribution has at least one degree of freedom"
    nodes, weights = _gauss_legendre(64)
    high = math.atan2(math.sqrt(degrees), abs(t))  # exact for a large t, as pi/2 - atan(t) is not
    half = min(12 / math.sqrt(degrees), high) / 2
    integral = half * float(weights @ np.sin(high - half * (1 + nodes)) ** (degrees - 1))
    log_front = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    return min(2 * math.exp(log_front) / math.sqrt(math.pi) * integral, 1.0)


@cache
def two_sided_bound(p: float, degrees: int) -> float:
    """Return the t that |T| exceeds with the chance `p`: 0.05 gives a 95 % interval's bound.

    Example: `two_sided_bound(0.05, 29)` is about 2.045.
    """
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > p:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if two_sided_p(middle, degrees) > p else (low, middle)
    return middle
