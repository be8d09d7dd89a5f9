"""Images of packed samples: the vision tower's features and their gradients.

A tower encodes each image of a pass once, however many answers and micro-batches show it. Learning
cuts the graph there: gradients of the features are summed over the micro-batches, and the tower's
backward pass runs once on the sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from winnow.learning.data_parallel import DataParallel
from winnow.models.vision import PlacedImages
from winnow.types import Image


class EncodedImages:
    """The vision tower's features of the images of a pass, and the sum of their gradients.

    The tower runs in chunks of images. Activations are kept for the backward pass of a single
    chunk; of several chunks the features alone are, and the backward pass runs the tower again.

    Args:
        shown: images of each micro-batch.
        chunk_tokens: image tokens that a chunk may have; an image of more is a chunk of its own.
        dp: ranks that run the tower together, in equally many chunks.
        runner: a `ModelRunner`, called with the images of a chunk, which may be none.
    """

    def __init__(
        self, shown: Iterable[PlacedImages], chunk_tokens: int, dp: DataParallel, runner: nn.Module
    ) -> None:
        distinct = {image.digest: image for micro in shown for image in micro.images}
        chunks, room = list[tuple[Image, ...]](), 0
        for image in distinct.values():
            if len(image) > room:
                chunks.append(())
                room = chunk_tokens
            chunks[-1] += (image,)
            room -= len(image)
        count = max(1, *dp.all_gather(len(chunks)))
        self._chunks, self._runner = [*chunks, *[()] * (count - len(chunks))], runner
        weights = cast(Any, runner).model.base_model.visual.parameters()
        self._learns = torch.is_grad_enabled() and any(each.requires_grad for each in weights)
        self._leaves: dict[str, Tensor] = {}
        """[1 + D, M, H] of each image, by digest."""
        for chunk in self._chunks:
            with torch.set_grad_enabled(self._learns and count == 1):
                features = runner(chunk)
            # Gradients of a half-precision model are summed in fp32.
            exact = features.detach().to(torch.promote_types(features.dtype, torch.float32))
            self._blank = exact[:, :0]
            for image, leaf in zip(chunk, exact.split([*map(len, chunk)], dim=1), strict=True):
                self._leaves[image.digest] = leaf.requires_grad_(self._learns)
                leaf.grad = torch.zeros_like(leaf) if self._learns else None
        self._features = features if count == 1 else None  # with their graph

    def put_into(self, micro: PlacedImages) -> PlacedImages:
        """Return the images of a micro-batch with their features."""
        parts = [self._leaves[image.digest] for image in micro.images]
        return replace(micro, features=torch.cat([self._blank, *parts], dim=1))

    def backward(self) -> None:
        """Run the tower's backward pass on the gradients that the micro-batches left."""
        for chunk in self._chunks if self._learns else ():
            features = self._runner(chunk) if self._features is None else self._features
            parts = [cast(Tensor, self._leaves[image.digest].grad) for image in chunk]
            gradient = torch.cat([self._blank, *parts], dim=1)
            features.backward(gradient.to(features.dtype))
