"""Student's t distribution in float64, for intervals and paired tests.

Own code instead of scipy, because transformers imports scipy.optimize wherever scipy is installed:
0.37 s of CPU and 44 MB more in each process that loads a model.

The distribution function is a regularised incomplete beta function, computed by its continued
fraction (Abramowitz and Stegun 26.7.1 and 26.5.8, evaluated by Lentz's method).
"""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300
_CLOSE = 1e-15
_MOST_TERMS = 10_000


def two_sided_p(t: float, degrees: int) -> float:
    """Return the chance of a |T| as large as |t|, for `degrees` of freedom, at least 1.

    Example: `two_sided_p(12.7062, 1)` is about 0.05.
    """
    assert degrees >= 1, "a t distribution has at least one degree of freedom"
    if math.isinf(t):
        return 0.0
    whole = degrees + t * t
    return _incomplete_beta(degrees / whole, t * t / whole, degrees / 2, 0.5)


@lru_cache(maxsize=256)
def two_sided_bound(p: float, degrees: int) -> float:
    """Return the t that |T| exceeds with the chance `p`: 0.05 gives a 95 % interval's bound.

    Example: `two_sided_bound(0.05, 29)` is about 2.045.
    """
    assert 0 < p < 1, "a chance lies between 0 and 1"
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if two_sided_p(middle, degrees) > p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """Compute I_x(a, b); `rest` is 1 - x, which x near 1 would lose."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    # The fraction converges fast on this side; on the other, I_x(a, b) = 1 - I_(1-x)(b, a).
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(rest, x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log(rest)
    return math.exp(log_front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """Evaluate 1 + d1 / (1 + d2 / (1 + …)) of A&S 26.5.8."""
    value = numerator = 1.0
    denominator = 0.0
    for term in range(1, _MOST_TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominator = 1 / ((1 + d * denominator) or _TINY)
        numerator = (1 + d / numerator) or _TINY
        change = numerator * denominator
        value *= change
        if abs(change - 1) < _CLOSE:
            break
    return value
