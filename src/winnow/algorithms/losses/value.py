"""What a critic's values lose, and what the metrics say about them.

The loss is one number a token; `aggregation` makes a mean of it. Diagnostics are sums, so that
those of micro-batches and ranks add up.

Shapes: `T` packed tokens. V are values before a token, `old` those before the step's first
update; all are in units of the reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLAT_TOLERANCE = 1e-12
"""A variance below this share of the mean square is float noise: values equal to 1e-6."""


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None = 0.5) -> Tensor:
    """0.5 max((V - ret)^2, (clip(V, old - clip, old + clip) - ret)^2) [T].

    A value that has moved further than `clip` from `old`, towards the return, has no gradient;
    one that has moved away from it keeps its own. (Clipping as in the code of PPO, arXiv
    1707.06347; Huang et al., "The 37 implementation details of PPO", detail 9.)

    Args:
        values, old, returns: [T]; only `values` should carry a gradient.
        clip: above 0; None leaves the clipped term out.

    Raises:
        ValueError: a clip that is not above 0.
    """
    plain, clipped = _terms(values, old, returns, clip)
    return 0.5 * (plain if clipped is None else torch.maximum(plain, clipped))


def value_diagnostics(
    values: Tensor,
    old: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = 0.5,
) -> dict[str, Tensor]:
    """Sums over `mask` [T], in float64 and without gradient.

    Returns:
        Scalars. `clip_share`: the clipped term is the larger one. And what
        `explained_variance` takes: `returns`, `return_squares`, `errors` and `error_squares`,
        an error being return - value.
    """
    with torch.no_grad():
        plain, clipped = _terms(values, old, returns, clip)
        share = mask.new_zeros(()) if clipped is None else (mask & (clipped > plain)).sum()
        # Before the difference, so that what stands outside the mask cannot make a NaN.
        returns_T = torch.where(mask, returns, 0.0).double()
        errors_T = returns_T - torch.where(mask, values, 0.0).double()
        return {
            "clip_share": share.double(),
            "returns": returns_T.sum(),
            "return_squares": returns_T.square().sum(),
            "errors": errors_T.sum(),
            "error_squares": errors_T.square().sum(),
        }


def explained_variance(
    tokens: int, returns: float, return_squares: float, errors: float, error_squares: float
) -> float:
    """1 - Var(ret - V) / Var(ret) from the sums of `value_diagnostics`, over all parts together.

    1 for perfect values, 0 for a constant, negative for worse than that. Of returns that do not
    vary (`FLAT_TOLERANCE`) it is 1 where the errors do not vary either, else 0; of no tokens 0.

    Args:
        tokens: how many were summed.
        returns, return_squares, errors, error_squares: their sums, in float64.
    """
    if tokens == 0:
        return 0.0
    spread = _variance(tokens, returns, return_squares)
    left = _variance(tokens, errors, error_squares)
    if spread == 0.0:
        # A constant error is noise beside the returns that it was taken from.
        return float(left <= FLAT_TOLERANCE * return_squares / tokens)
    return 1 - left / spread


def _terms(
    values: Tensor, old: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor | None]:
    """Squared errors [T] of the values and of the clipped values."""
    plain = (values - returns).square()
    if clip is None:
        return plain, None
    if not clip > 0:
        raise ValueError(f"clip must be above 0, got {clip}")
    near = torch.minimum(torch.maximum(values, old - clip), old + clip)
    return plain, (near - returns).square()


def _variance(n: int, total: float, squares: float) -> float:
    """The population's variance; 0 where it is float noise."""
    mean_square = squares / n
    variance = mean_square - (total / n) ** 2
    return variance if variance > FLAT_TOLERANCE * mean_square else 0.0
