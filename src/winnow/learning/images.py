"""Images of packed samples: the vision tower's features and their gradients.

A tower runs once on each image of a pass, however many answers and micro-batches show it. Learning
cuts the graph there: gradients of the features are summed over the micro-batches, and the tower's
backward pass runs once on the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from winnow.models.vision import PlacedImages
from winnow.types import Image


class EncodedImages:
    """The vision tower's features of the images of a pass, and the sum of their gradients.

    Args:
        images: distinct ones, by digest.
        features: [1 + D, M, H] of all their tokens, one image behind the other.
    """

    def __init__(self, images: Mapping[str, Image], features: Tensor) -> None:
        starts = accumulate(map(len, images.values()), initial=0)
        self._starts = dict(zip(images, starts, strict=False))
        self._features = features
        # Gradients of a half-precision model are summed in fp32.
        self._leaf = features.detach().to(torch.promote_types(features.dtype, torch.float32))
        self._leaf.requires_grad_(features.requires_grad)

    def put_into(self, micro: PlacedImages) -> PlacedImages:
        """Return the images of a micro-batch with their features."""
        parts = [self._leaf[:, :0]]
        for image in micro.images:
            start = self._starts[image.digest]
            parts.append(self._leaf[:, start : start + len(image)])
        return replace(micro, features=torch.cat(parts, dim=1))

    def backward(self) -> None:
        """Run the tower's backward pass on the gradients that the micro-batches left."""
        if self._features.requires_grad:
            gradient = self._leaf.grad
            if gradient is None:
                gradient = torch.zeros_like(self._leaf)
            self._features.backward(gradient.to(self._features.dtype))  # type: ignore[no-untyped-call]
