"""An engine that drifts away from the trainer, for benchmarks/doctor.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.weights import WeightUpdate


class Drifting(TorchEngine):
    """Samples from weights that are off by noise which grows with each publication."""

    def __init__(self, *, model: Any, noise: float = 0.005, seed: int = 0, **given: Any) -> None:
        self._policy, self._noise = model, noise
        self._generator = torch.Generator().manual_seed(seed)
        super().__init__(copy.deepcopy(model), 256, 8192, **given)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take the policy's weights, and add noise of a size that grows with the version."""
        size = self._noise * update.version
        noisy = []
        for name, weight in self._policy.named_parameters():
            noise = torch.randn(weight.shape, generator=self._generator)
            noisy.append((name, weight.detach() + size * weight.detach().std() * noise))
        await super().load_weights(replace(update, tensors=noisy))
