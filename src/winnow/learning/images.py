"""Images of packed samples: their tokens in a micro-batch, and the vision tower's features.

A tower encodes each image of a pass once, however many answers and micro-batches show it. Learning
cuts the graph there: gradients of the features are summed over the micro-batches, and the tower's
backward pass runs once on the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from winnow.learning.data_parallel import DataParallel
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

    The tower runs in chunks of images. Activations are kept for the backward pass of a single
    chunk; of several chunks the features alone are, and the backward pass runs the tower again.

    Args:
        shown: images of each micro-batch.
        chunk_tokens: image tokens that a chunk may have; an image of more is a chunk of its own.
        dp: ranks that run the tower together, in equally many chunks.
        runner: a `ModelRunner`, called with the images of a chunk, which may be none.
    """

    def __init__(
        self, shown: Iterable[MicroImages], chunk_tokens: int, dp: DataParallel, runner: nn.Module
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

    def put_into(self, micro: MicroImages) -> MicroImages:
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
