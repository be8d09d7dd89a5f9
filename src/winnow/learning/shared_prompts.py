"""Prompts that are run once for all answers of a micro-batch that follow them.

A model sees no difference: a token's hidden states depend on the tokens before it alone, and behind
a prompt each answer attends to its keys and values (`winnow.models.packed_attention`). Masks,
columns and log-probs keep their places; the states of a prompt's copy are read where its first copy
has run, and gradients of all of them meet there.

Shapes: `T` packed tokens of a micro-batch, `U` of them that are run, `C` contexts, `S` sequences
that are run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from winnow.models.vision import PlacedImages
from winnow.types import Image, IntArray


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """The tokens of a micro-batch that are run, and where the states of the others are.

    Example: a prompt of 3 tokens with answers of 2 and 1, packed as [p p p a a p p p b], has
    `tokens` [0 1 2 3 4 8], `rows` [0 1 2 3 4 0 1 2 5], `lengths` (3, 2, 1) and `prefixes`
    (-1, 0, 0).
    """

    tokens: Tensor
    """[U] int64, ascending: the packed tokens that are run."""
    rows: Tensor
    """[T] int64: which of the U has a token's state."""
    lengths: tuple[int, ...]
    """[S] tokens of each sequence: a prompt, what follows it, or a context that shares none."""
    prefixes: tuple[int, ...]
    """[S] the prompt that a sequence follows; -1 for none."""

    def to(self, device: torch.device, non_blocking: bool = False) -> SharedPrompts:
        """Return a copy on `device`."""
        tokens, rows = (t.to(device, non_blocking=non_blocking) for t in (self.tokens, self.rows))
        return replace(self, tokens=tokens, rows=rows)

    def place_images(self, images: PlacedImages) -> PlacedImages:
        """Place images among the tokens that are run; those of other copies are left out."""
        places = torch.full((len(self.rows),), -1).index_copy_(
            0, self.tokens, torch.arange(len(self.tokens))
        )
        shown = tuple(image for image in images.images if places[image.start] >= 0)
        at = places[images.places]
        return PlacedImages(shown, at[at >= 0], images.rope[:, self.tokens])


def share_prompts(
    token_ids: IntArray,
    starts: IntArray,
    prompts: IntArray,
    groups: IntArray,
    images: Sequence[Image] = (),
) -> SharedPrompts | None:
    """Find contexts of a group that begin with the same prompt, in tokens and images.

    Args:
        token_ids: [T]
        starts: [C] the first token of each context, ascending.
        prompts: [C] tokens of each one's prompt.
        groups: [C] ordinals.
        images: placed among the T.

    Returns:
        None if nothing is shared.
    """
    stops = np.append(starts, len(token_ids))[1:]  # none of an empty micro-batch
    ends = np.minimum(starts + prompts, stops)
    bounds = [*zip(starts.tolist(), ends.tolist(), stops.tolist(), strict=True)]
    keys = []
    for (start, end, _), group in zip(bounds, groups.tolist(), strict=True):
        shown = [(i.start - start, i.digest) for i in images if start <= i.start < end]
        crosses = any(i.start < end < i.start + len(i) for i in images)
        keys.append((group, token_ids[start:end].tobytes(), *shown, *[start] * crosses))
    counts = Counter(keys)
    source, lengths, prefixes = np.arange(len(token_ids)), list[int](), list[int]()
    first = dict[object, tuple[int, int]]()
    for (start, end, stop), key in zip(bounds, keys, strict=True):
        if counts[key] == 1:
            end = stop  # a context that shares nothing is one sequence
        if key not in first:
            first[key] = start, len(lengths)
            lengths.append(end - start)
            prefixes.append(-1)
        copied, number = first[key]
        source[start:end] = np.arange(copied, copied + end - start)
        if stop > end:
            lengths.append(stop - end)
            prefixes.append(number)
    tokens = np.unique(source)
    if len(tokens) == len(source):
        return None
    rows = torch.from_numpy(np.searchsorted(tokens, source))
    return SharedPrompts(torch.from_numpy(tokens), rows, tuple(lengths), tuple(prefixes))
