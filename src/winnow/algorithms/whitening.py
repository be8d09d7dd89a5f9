"""Whitening: values in a mask to mean 0 and variance 1, over all ranks if they share moments.

A rank takes the `moments` of what it holds, merges them with those of the others (`combine`, or
`merge` for a list) and whitens its own part with the whole's.

Shapes: `T` packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

VAR_EPS = 1e-8
FLAT_TOLERANCE = 1e-6
"""A standard deviation up to this times the mean is float noise."""
LEAST_MEAN = 1e-4
"""A mean nearer to 0 counts as this: up to 1e-10 is noise around 0."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers; of none: zeros."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def variance(self) -> float:
        """With Bessel's correction; 0 for fewer than two numbers."""
        return self.m2 / (self.count - 1) if self.count > 1 else 0.0

    def combine(self, other: Moments) -> Moments:
        """Moments of both sets of numbers together (Chan, Golub & LeVeque, 1979)."""
        count = self.count + other.count
        if count == 0:
            return Moments()
        distance = other.mean - self.mean
        share = other.count / count
        return Moments(
            count,
            self.mean + distance * share,
            self.m2 + other.m2 + distance * distance * self.count * share,
        )


def merge(parts: Iterable[Moments]) -> Moments:
    """Moments of all parts together; of no part: zeros."""
    return reduce(Moments.combine, parts, Moments())


def moments(x: Tensor, mask: Tensor) -> Moments:
    """Moments of what `mask` [T] selects of x [T], in float64.

    Raises:
        ValueError: a number in the mask that is not finite, or shapes that differ.
    """
    if x.shape != mask.shape:
        raise ValueError(
            f"x and mask must have one shape, got {list(x.shape)} and {list(mask.shape)}"
        )
    chosen = x[mask].double()
    if not bool(torch.isfinite(chosen).all()):
        raise ValueError("what is whitened must be finite, got NaN or infinity in the mask")
    if not len(chosen):
        return Moments()
    mean = chosen.mean()
    return Moments(len(chosen), float(mean), float((chosen - mean).square().sum()))


_measure = moments  # `whiten` has an argument of that name.


def whiten(x: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) in the mask, 0 outside it.

    Numbers that are equal but for float noise (`FLAT_TOLERANCE`) become exactly 0, one alone
    too: its variance is 0 and it is its own mean.

    Args:
        x: [T], finite in the mask; what stands outside is never read.
        mask: [T] bool.
        moments: of the whole that x is a part of; None takes x alone.

    Returns:
        [T] in x's dtype.

    Raises:
        ValueError: a number in the mask that is not finite, or shapes that differ.
    """
    here = _measure(x, mask)
    whole = here if moments is None else moments
    if whole.variance <= (FLAT_TOLERANCE * max(abs(whole.mean), LEAST_MEAN)) ** 2:
        return torch.zeros_like(x)
    scaled = (x.double() - whole.mean) / (whole.variance + VAR_EPS) ** 0.5
    return torch.where(mask, scaled, 0.0).to(x.dtype)
