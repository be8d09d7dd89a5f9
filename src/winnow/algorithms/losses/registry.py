"""The table of policy losses by their names in a recipe, and the one way to call them.

A loss's module is imported when the loss is first computed. A new loss is a function of the form
that `winnow.algorithms.losses` describes, a line in `POLICY_LOSSES`, and a section in
`config/algorithm.py` that holds its options and their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.algorithms import imported_late
from winnow.algorithms.losses import Loss, LossTokens


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and what it asks for."""

    function: Callable[..., Loss]
    """(logp, old, advantage, tokens, **options) -> (loss [T], figures)."""
    select: Callable[..., Tensor] | None = None
    """(old, advantage, mask, draws, **options) -> [T] bool, over the whole mini-batch, once an
    update; for `LossTokens.selected` where the option `selection` is "update"."""
    uses_old: bool = True
    """False if `old` does not enter the loss; the figure `approx_kl` reads it in any case."""

    def __call__(
        self,
        logp: Tensor,
        old: Tensor,
        advantage: Tensor,
        tokens: LossTokens,
        options: Mapping[str, Any],
    ) -> Loss:
        """Return the loss [T], 0 on tokens that do not count, and its figures.

        Args:
            logp, old, advantage: [T]; only logp carries a gradient. Tokens that do not count are
                not read.
            tokens: of the micro-batch.
            options: of the loss's section of the recipe.
        """
        columns = (torch.where(tokens.mask, column, 0.0) for column in (logp, old, advantage))
        return self.function(*columns, tokens, **options)


_REINFORCE = imported_late("losses.clipped:reinforce")
POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(imported_late("losses.clipped:ppo_clip")),
    "gspo": PolicyLoss(imported_late("losses.sequence:gspo")),
    "cispo": PolicyLoss(imported_late("losses.clipped:cispo")),
    "sapo": PolicyLoss(imported_late("losses.clipped:sapo")),
    "gmpo": PolicyLoss(imported_late("losses.sequence:gmpo")),
    "clip_cov": PolicyLoss(
        imported_late("losses.covariance:clip_cov"),
        select=imported_late("losses.covariance:clip_cov_select"),
    ),
    "kl_cov": PolicyLoss(
        imported_late("losses.covariance:kl_cov"),
        select=imported_late("losses.covariance:kl_cov_select"),
    ),
    "dppo_tv": PolicyLoss(imported_late("losses.clipped:dppo_tv")),
    "dppo_kl": PolicyLoss(imported_late("losses.clipped:dppo_kl")),
    "dro": PolicyLoss(imported_late("losses.clipped:dro")),
    "gpg": PolicyLoss(_REINFORCE, uses_old=False),
    "reinforce": PolicyLoss(_REINFORCE, uses_old=False),
}
