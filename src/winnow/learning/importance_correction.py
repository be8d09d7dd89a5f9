"""Correction before the updates: what to reject and how to weigh, from `old` and `behav`.

In fused and bypass mode this is the objective's affair instead (`workers.objective`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from winnow.algorithms.correction import correct, divided_by_mean
from winnow.learning.batch import Batch, sample_tokens
from winnow.observe.metrics import Metrics


class CorrectionStage:
    """Narrows loss_mask and adds the column `weight`.

    Args:
        options: of `correct`, by keyword.
        normalize: divide the weights by their mean over the step.
    """

    def __init__(self, options: Mapping[str, Any], normalize: bool) -> None:
        self._options, self._normalize = options, normalize

    def __call__(self, batch: Batch, metrics: Metrics) -> Batch:
        """The batch with what is left to learn from; books `correction/…`."""
        found = correct(
            batch.columns["old"],
            batch.behav,
            batch.gen_mask,
            batch.loss_mask,
            batch.offsets,
            **self._options,
        )
        book_correction(
            metrics,
            {name: float(total) for name, total in found.sums.items()},
            tokens=int(batch.loss_mask.sum()),
            samples=int((sample_tokens(batch, np.arange(batch.n_samples)) > 0).sum()),
        )
        if found.weights is not None:
            weights = found.weights
            if self._normalize:
                weights = divided_by_mean(weights, found.moments)
            batch.columns["weight"] = weights
        return dataclasses.replace(batch, loss_mask=found.loss_mask)


def book_correction(
    metrics: Metrics, sums: Mapping[str, float], *, tokens: int, samples: int
) -> None:
    """Shares of what was rejected and weighed: of all tokens that learn, samples with such a
    token, or of what is left."""
    left = tokens - sums["rejected_tokens"]
    metrics.mean_of("correction/rejected_tokens", sums["rejected_tokens"], tokens)
    metrics.mean_of("correction/rejected_samples", sums["rejected_samples"], samples)
    if "weight" in sums:
        metrics.mean_of("correction/weight", sums["weight"], left)
        metrics.mean_of("correction/weight_bound", sums["weight_bound"], left)
