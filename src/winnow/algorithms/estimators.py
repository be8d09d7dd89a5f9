"""The table of advantage estimators by their names in a recipe, and the one way to call them.

`ESTIMATORS` says what each needs beyond rewards, so that a step computes nothing else. A new
estimator is a function of the form that `winnow.algorithms.advantages` describes, a line in the
table, and a section in `config/algorithm.py` that holds its options and their defaults.

Shapes: `T` packed tokens, `B` samples of a whole step: whitening and group statistics see all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from winnow.algorithms import imported_late
from winnow.algorithms.advantages import AdvantageInputs, gpg, grpo, grpo_passk, opo, rloo, spread

Need = Literal["components", "greedy", "values", "probs"]
FIELDS: Mapping[Need, tuple[str, ...]] = {
    "components": ("components",),
    "greedy": ("greedy_rewards",),
    "values": ("values",),
    "probs": ("prob", "prob_square_sum"),
}
"""The inputs that a need stands for."""


@dataclass(frozen=True)
class Estimator:
    """An estimator, what it asks for, and over which tokens a sample's mean is taken."""

    name: str
    """Its name in a recipe."""
    function: Callable[..., Tensor | tuple[Tensor, Tensor]]
    """(inputs, **options) -> advantages [B] or [T], or these and returns [T] for a critic."""
    needs: frozenset[Need] = frozenset()
    """Inputs beyond rewards: a step computes these and no others."""
    min_group: int = 1
    """Fewest answers a prompt may have."""
    whitens: bool = False
    """True if advantages are over loss_mask, not gen_mask."""

    @property
    def takes_components(self) -> bool:
        """True if it reads the parts of the reward; one of a user's own may, at no cost."""
        return "components" in self.needs or self.name == "custom"


@dataclass(frozen=True, eq=False)
class Advantages:
    """The advantages of a step."""

    tokens: Tensor
    """[T] fp32: 0 off gen_mask, and off loss_mask where the estimator whitens."""
    samples: Tensor
    """[B] float64, for the records: the sample's one number, or the mean over its tokens."""
    returns: Tensor | None = None
    """[T] fp32: what a critic learns, 0 off gen_mask; None without values."""


_ALL = (
    Estimator("grpo", grpo),
    Estimator("grpo_passk", grpo_passk, min_group=2),
    Estimator("rloo", rloo),
    Estimator("opo", opo),
    Estimator(
        "reinforce_plus_plus", imported_late("token_advantages:reinforce_plus_plus"), whitens=True
    ),
    Estimator(
        "reinforce_plus_plus_baseline",
        imported_late("token_advantages:reinforce_plus_plus_baseline"),
        whitens=True,
    ),
    Estimator("remax", imported_late("token_advantages:remax"), frozenset({"greedy"})),
    Estimator("gpg", gpg),
    Estimator(
        "gdpo", imported_late("token_advantages:gdpo"), frozenset({"components"}), whitens=True
    ),
    Estimator(
        "optimal_token_baseline",
        imported_late("token_advantages:optimal_token_baseline"),
        frozenset({"probs"}),
        min_group=2,
    ),
    Estimator("gae", imported_late("token_advantages:gae"), frozenset({"values"}), whitens=True),
)
ESTIMATORS: Mapping[str, Estimator] = {estimator.name: estimator for estimator in _ALL}


def estimate(
    estimator: Estimator, inputs: AdvantageInputs, options: Mapping[str, Any]
) -> Advantages:
    """Check the inputs of a step, call an estimator, and lay out what it returns.

    Args:
        options: of its section of the recipe.

    Raises:
        ValueError: an input that is missing or not finite, a group that is too small, or options
            that do not fit the inputs.
    """
    _check(estimator, inputs)
    found = estimator.function(inputs, **options)
    values, returns = found if isinstance(found, tuple) else (found, None)
    if returns is None and values.shape == inputs.rewards.shape:
        return Advantages(spread(values, inputs, inputs.gen_mask).float(), values.double())
    mask = inputs.loss_mask if estimator.whitens else inputs.gen_mask
    sums_B = torch.zeros(len(inputs.rewards), dtype=torch.float64, device=values.device)
    sums_B.index_add_(0, inputs.sample_index[mask], values[mask].double())
    mean_B = sums_B / inputs.token_counts(mask).clamp(min=1)
    return Advantages(values.float(), mean_B, None if returns is None else returns.float())


def _check(estimator: Estimator, inputs: AdvantageInputs) -> None:
    for field in ("rewards", "token_rewards", *(f for n in estimator.needs for f in FIELDS[n])):
        given = getattr(inputs, field)
        if given is None or (field == "components" and not given):
            raise ValueError(f"algorithm/advantage={estimator.name} needs {field}, got none")
        for values in given.values() if field == "components" else (given,):
            if values.shape == inputs.gen_mask.shape:
                values = values[inputs.gen_mask]
            if not bool(torch.isfinite(values).all()):
                raise ValueError(
                    f"{field} must be finite, got NaN or infinity; check the scorer and the models"
                )
    numbers, sizes = torch.unique(inputs.groups, return_counts=True)
    if bool((sizes < estimator.min_group).any()):
        small = int((sizes < estimator.min_group).nonzero()[0])
        raise ValueError(
            f"{estimator.name} needs at least {estimator.min_group} answers to a prompt, group "
            f"{int(numbers[small])} has {int(sizes[small])}; raise rollout.n or choose another "
            "advantage"
        )
