"""The value loss of a critic, and the share of the returns' variance that its values explain.

Shapes: `T` packed tokens. Values are those before a token, `old` those before the step's first
update; all are in units of the reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.algorithms.losses import Loss

FLAT_TOLERANCE = 1e-12
"""A variance below this share of the mean square is float noise: values equal to 1e-6."""


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> Loss:
    """0.5 max((V - ret)^2, (clip(V, old - clip, old + clip) - ret)^2) [T].

    A value that has moved further than `clip` from `old`, towards the return, has no gradient;
    one that has moved away from it keeps its own. (Clipping as in the code of PPO, arXiv
    1707.06347; Huang et al., "The 37 implementation details of PPO", detail 9.)

    Args:
        values, old, returns: [T]; only `values` should carry a gradient.
        mask: [T] bool, the counted tokens.
        clip: above 0; None leaves the clipped term out.

    Returns:
        The loss, and `clip_share`, the tokens whose clipped term is the larger one.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, {"clip_share": mask.new_zeros(()).double()}
    near = torch.minimum(torch.maximum(values, old - clip), old + clip)
    clipped = (near - returns).square()
    clip_share = (mask & (clipped > plain)).sum().double()
    return 0.5 * torch.maximum(plain, clipped), {"clip_share": clip_share}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(ret - V) / Var(ret) over the tokens in `mask` [T], in float64.

    1 for perfect values, 0 for a constant, negative for worse than that. Where returns do not
    vary (`FLAT_TOLERANCE`) it is 1 if the errors do not vary either, else 0; 0 for no tokens.
    """
    tokens = int(mask.sum())
    if tokens == 0:
        return 0.0
    # Masked before the difference: what stands outside the mask may be infinite.
    returns_T = torch.where(mask, returns, 0.0).double()
    errors_T = returns_T - torch.where(mask, values, 0.0).double()
    spread, left = _variance(returns_T, tokens), _variance(errors_T, tokens)
    if spread == 0.0:
        # A constant error is noise beside the returns that it was taken from.
        return float(left <= FLAT_TOLERANCE * float(returns_T.square().sum()) / tokens)
    return 1 - left / spread


def _variance(values: Tensor, n: int) -> float:
    """The population's variance of n numbers [T], 0 elsewhere; 0 where it is float noise."""
    mean_square = float(values.square().sum()) / n
    variance = mean_square - (float(values.sum()) / n) ** 2
    return variance if variance > FLAT_TOLERANCE * mean_square else 0.0
