"""The stage of a step that rejects and weighs tokens before the updates, from `old` and `behav`.

In fused and bypass mode `learning.objective` does it instead, in the update's own forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from winnow.algorithms.correction import correct
from winnow.learning.batch import Batch, sample_tokens
from winnow.observe.metrics import Metrics


class CorrectionStage:
    """Takes rejected tokens out of loss_mask and fills the column `weight`.

    Args:
        options: of `correct`, by keyword.
        normalize: divide the weights by their mean over the step.
    """

    def __init__(self, options: Mapping[str, Any], normalize: bool) -> None:
        self._options, self._normalize = options, normalize

    def __call__(self, batch: Batch, metrics: Metrics) -> Batch:
        """Return the batch with its narrower loss_mask; books `correction/…`."""
        found = correct(
            batch.columns["old"],
            batch.behav,
            batch.gen_mask,
            batch.loss_mask,
            batch.offsets,
            normalize=self._normalize,
            **self._options,
        )
        book_correction(
            metrics,
            {name: float(total) for name, total in found.sums.items()},
            tokens=int(batch.loss_mask.sum()),
            samples=int((sample_tokens(batch, np.arange(batch.n_samples)) > 0).sum()),
        )
        if found.weights is not None:
            batch.columns["weight"] = found.weights
        return dataclasses.replace(batch, loss_mask=found.loss_mask)


def book_correction(
    metrics: Metrics, sums: Mapping[str, float], *, tokens: int, samples: int
) -> None:
    """Book the shares of rejected tokens and samples, and the mean weight of the tokens left.

    Args:
        sums: of `Corrected.sums`.
        tokens, samples: how many were to learn before the correction.
    """
    left = tokens - sums["rejected_tokens"]
    metrics.mean_of("correction/rejected_tokens", sums["rejected_tokens"], tokens)
    metrics.mean_of("correction/rejected_samples", sums["rejected_samples"], samples)
    if "weight" in sums:
        metrics.mean_of("correction/weight", sums["weight"], left)
        metrics.mean_of("correction/weight_bound", sums["weight_bound"], left)
