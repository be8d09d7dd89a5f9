"""How a critic's values are fitted to the returns."""

from __future__ import annotations

from pydantic import Field

from winnow.config.aggregation import Aggregation
from winnow.config.base import Section


class ValueLossConfig(Section):
    """Half the squared error of the values, clipped around those before the step."""

    clip: float | None = Field(0.5, gt=0)
    """How far from its old value a value may move and still lower the loss; null: any way."""
    aggregation: Aggregation = "token-mean"
    """What "mean" means in the loss."""
