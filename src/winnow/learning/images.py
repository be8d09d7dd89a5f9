"""Images of packed samples: their tokens in a micro-batch, and the vision tower's features.

A tower runs once on each image of a pass, however many answers and micro-batches show it. Learning
cuts the graph there: gradients of the features are summed over the micro-batches, and the tower's
backward pass runs once on the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from winnow.models.vision import rope_positions
from winnow.types import Answer, Image, IntArray, Prompt, join_images


@dataclass(frozen=True, eq=False)
class MicroImages:
    """The images of a micro-batch; may be none, if others of the batch have some."""

    images: tuple[Image, ...]
    """Distinct ones: an image of n answers is there once."""
    places: Tensor
    """[P] int64: the tokens that stand for images."""
    rows: Tensor
    """[P] int64: their rows among the tokens of `images`, one image behind the other."""
    rope: Tensor
    """[3, T] int64: coordinates of all tokens (`winnow.models.vision`)."""
    features: Tensor | None = None
    """[1 + D, M, H] of the tokens of `images`, once the vision tower has run."""

    def to(self, device: torch.device, non_blocking: bool = False) -> MicroImages:
        """Return a copy without features on `device`."""
        tensors = (self.places, self.rows, self.rope)
        return MicroImages(self.images, *(t.to(device, non_blocking=non_blocking) for t in tensors))


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

    def put_into(self, micro: MicroImages) -> MicroImages:
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


def place_images(
    samples: Sequence[tuple[Image, ...]],
    offsets: IntArray,
    positions: IntArray,
    first_tokens: IntArray,
) -> MicroImages:
    """Place the images of some samples among the tokens of a micro-batch.

    Args:
        samples: images of each, placed in the sample.
        offsets, positions: the micro-batch's.
        first_tokens: the first token of each context.
    """
    starts = zip(samples, offsets.tolist(), strict=False)
    placed = [(image, start + image.start) for images, start in starts for image in images]
    distinct = {image.digest: image for image, _ in placed}
    firsts = dict(zip(distinct, accumulate(map(len, distinct.values()), initial=0), strict=False))
    ends = np.append(first_tokens, offsets[-1])
    none = np.empty(0, np.int64)
    places = [np.arange(start, start + len(image)) for image, start in placed]
    rows = [firsts[image.digest] + np.arange(len(image)) for image, _ in placed]
    spans = [(i, at, int(ends[np.searchsorted(ends, at, "right")])) for i, at in placed]
    return MicroImages(
        images=tuple(distinct.values()),
        places=torch.from_numpy(np.concatenate([none, *places])),
        rows=torch.from_numpy(np.concatenate([none, *rows])),
        rope=torch.from_numpy(rope_positions(positions, spans)),
    )


def sample_images(prompt: Prompt, answer: Answer) -> tuple[Image, ...]:
    """Place the images of a prompt and of its answer in the sample."""
    parts = [(len(prompt.token_ids), prompt.images)]
    return join_images([*parts, *((len(s), s.images) for s in answer.trajectory.segments)])
