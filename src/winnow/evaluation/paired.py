"""Paired comparison of two evaluations: is the difference more than luck?

Legend: `P` problems that both answered, `d` [P] the difference of their mean accuracies, B - A.

Pairing by problem takes out what both find hard, which is most of the noise (Miller 2024, arXiv
2411.00640, section 4). Two tests see whether d is centred on 0:

| test | rests on |
|---|---|
| Student's t | the mean of d being about normal |
| sign flips | signs alone: were A and B alike, each d could as well be -d; exact for few problems |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from winnow.evaluation.statistics import LEVEL, Floats
from winnow.evaluation.student import two_sided_bound, two_sided_p

EXACT_FLIPS = 14
"""Up to so many problems with a difference all sign patterns are counted: 16,384."""
FLIPS = 20_000
"""Random patterns beyond."""
_POWER_BOUND = 0.8416212335729143
"""The standard normal's quantile of 0.8: a power of four in five."""
_CLOSE = 1e-12


@dataclass(frozen=True)
class Paired:
    """Two evaluations over the same problems."""

    problems: int
    mean_a: float
    mean_b: float
    standard_error: float
    """Of the difference; NaN for a single problem."""
    p_t: float
    p_flip: float
    won: int
    """Problems on which B is better."""
    tied: int
    lost: int

    @property
    def difference(self) -> float:
        """B - A."""
        return self.mean_b - self.mean_a

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, by Student's t; everything for a single problem."""
        if not math.isfinite(self.standard_error):
            return -1.0, 1.0
        half = two_sided_bound(1 - LEVEL, self.problems - 1) * self.standard_error
        return self.difference - half, self.difference + half

    @property
    def visible(self) -> float:
        """The true difference that a comparison of this noise shows four times of five."""
        if self.problems < 2:
            return math.nan
        return (two_sided_bound(1 - LEVEL, self.problems - 1) + _POWER_BOUND) * self.standard_error

    @property
    def is_clear(self) -> bool:
        """Whether both tests tell the difference from luck, at 5 %."""
        low, high = self.interval
        return self.p_flip < 1 - LEVEL and not low <= 0 <= high


def paired(a: ArrayLike, b: ArrayLike, seed: int = 0) -> Paired:
    """Compare mean accuracies [P] of the same problems in the same order.

    Args:
        seed: of the random sign patterns.

    Raises:
        ValueError: there is no problem, or the lengths differ.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if left.shape != right.shape or left.ndim != 1 or not left.size:
        raise ValueError(f"paired: two equally long lists, not empty, got {left.shape}, "
                         f"{right.shape}")  # fmt: skip
    d = right - left
    d[np.abs(d) < _CLOSE] = 0.0  # such as 0.1 + 0.2 against 0.3
    count = d.size
    error = float(d.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return Paired(
        problems=count,
        mean_a=float(left.mean()),
        mean_b=float(right.mean()),
        standard_error=error,
        p_t=_p_of_t(float(d.mean()), error, count),
        p_flip=sign_flip_p(d, seed),
        won=int((d > 0).sum()),
        tied=int((d == 0).sum()),
        lost=int((d < 0).sum()),
    )


def sign_flip_p(differences: ArrayLike, seed: int = 0) -> float:
    """The share of sign patterns whose sum is as far from 0 as the one there is.

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
    reached = sum(int((np.abs(signs @ d) >= bound).sum()) for signs in _random_signs(d.size, seed))
    return (1 + reached) / (1 + FLIPS)


def _random_signs(width: int, seed: int, rows: int = 1000) -> Iterator[Floats]:
    """Patterns in blocks, which take less memory than all at once."""
    generator = np.random.default_rng(seed)
    for _ in range(FLIPS // rows):
        yield np.where(generator.random((rows, width)) < 0.5, -1.0, 1.0)


def _p_of_t(mean: float, error: float, count: int) -> float:
    if count < 2:
        return 1.0
    if error <= _CLOSE:
        return 1.0 if abs(mean) <= _CLOSE else 0.0
    return two_sided_p(mean / error, count - 1)
