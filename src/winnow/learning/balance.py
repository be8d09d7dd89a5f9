"""Deal the samples of an update out to ranks that wait for each other at each micro-batch.

Ranks run in step: the k-th micro-batch of all of them takes as long as it takes the rank with most
work in it. So what counts is not how even the ranks' sums are but how even each round of
micro-batches is, under a budget of tokens. The samples are packed into all micro-batches at once:

- as few rounds as hold the tokens, since each round gathers all weights;
- each round has a level, the work that none of its micro-batches passes, and the sum of the levels
  is the time; a level is searched for below which the samples do not fit any more. Either each
  round's is that level or its own longest sample, or all rounds but the last are full, which then
  holds what is left;
- longest first, a sample goes where there are fewest tokens left that it fits into (best fit
  decreasing). Where the levels also hold them when each goes where most tokens are left, it does.

A level that samples fit under is no proof that no lower one is possible; `benchmarks.lockstep`
has a bound beside what is reached. All is computed from lengths, in integers: each rank finds the
same.

Shapes: `B` samples, longest first, `R` ranks, `K` micro-batches of each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from winnow.types import IntArray

_ATTENTION = 12
"""A layer takes about 12 H^2 products for a token, and 2 H for each token before it (half of a
sample's length in the mean), so that a sample of n tokens costs as 12 H n + n^2."""
_STEPS = 128
"""Levels are searched for to one part in so many."""
LEAST_REPEATED = 0.2
"""Share of a batch's tokens from which on copies of prompts cost more than the additional calls of
attention without them (benchmarks/shared_prompts.py)."""
_EVEN = 0.99
"""A lockstep that is not improved on."""


def estimate_work(lengths: IntArray, width: int) -> IntArray:
    """Estimate the work [B] of samples of so many tokens in a model of this width (H)."""
    return lengths * (_ATTENTION * width + lengths)


@dataclass(frozen=True, eq=False)
class Assignment:
    """The micro-batch of each sample."""

    places: IntArray
    """[B]: rank * K + micro-batch."""
    work: IntArray
    """[R, K] of each micro-batch; 0 for an empty one."""

    @property
    def spread(self) -> float:
        """The heaviest rank's work over the mean; 1 is perfect balance."""
        work_R = self.work.sum(1)
        return float(work_R.max() / work_R.mean()) if work_R.any() else 1.0

    @property
    def capacity(self) -> int:
        """The work that the ranks could do in the time they take together."""
        return int(len(self.work) * self.work.max(0).sum())

    @property
    def lockstep(self) -> float:
        """The share of the ranks' time in which they do not wait for each other."""
        return float(self.work.sum() / self.capacity) if self.capacity else 1.0

    @property
    def idle_share(self) -> float:
        """The share of all micro-batches that is empty."""
        return float((self.work == 0).mean()) if self.work.size else 0.0


def assign(
    lengths_B: IntArray,
    max_tokens: int,
    ranks: int = 1,
    width: int = 1,
    work_B: IntArray | None = None,
) -> Assignment:
    """Deal samples out to `ranks`, each with as many micro-batches as another.

    Args:
        lengths_B: tokens, the samples with most work first.
        max_tokens: of a micro-batch; a longer sample gets one to itself.
        width: of the model (H), which says from what length on attention costs most.
        work_B: of each sample; None estimates it by the length.
    """
    if work_B is None:
        work_B = estimate_work(lengths_B, width)
    if ranks == 1 or not len(lengths_B):
        places = _pack_in_order(lengths_B, max_tokens)
        rounds = int(places.max(initial=-1)) + 1
    else:
        tokens_B = np.minimum(lengths_B, max_tokens)
        short = _ATTENTION * width * max_tokens
        slots = _pack_rounds(work_B, tokens_B, max_tokens, ranks, short)
        rounds = int(slots.max()) // ranks + 1
        rank_of = _even_sums(_sums(slots, work_B, rounds * ranks).reshape(rounds, ranks))
        places = rank_of.ravel()[slots] * rounds + slots // ranks
    return Assignment(places, _sums(places, work_B, ranks * rounds).reshape(ranks, rounds))


def repeated_share(lengths_B: IntArray, prompts_B: IntArray, groups_B: IntArray) -> float:
    """Return the share of a batch's tokens that are copies of a prompt that another answer has."""
    _, first = np.unique(groups_B, return_index=True)
    copies = prompts_B.sum() - prompts_B[first].sum()
    return float(copies / max(int(lengths_B.sum()), 1))


def assign_groups(
    lengths_B: IntArray,
    prompts_B: IntArray,
    groups_B: IntArray,
    max_tokens: int,
    ranks: int = 1,
    width: int = 1,
) -> Assignment:
    """Deal samples out where those of a group in one micro-batch run their prompt once.

    A group is cut into pieces, which are dealt out as samples are: into as few as `max_tokens`
    allows, or on several ranks into more and smaller ones if all are done sooner so.

    Args:
        lengths_B: tokens, in descending order.
        prompts_B: those of them that are the prompt's.
        groups_B: ordinals; a group has one prompt.
        max_tokens, ranks, width: as `assign` takes them.
    """
    most, best = int(np.bincount(groups_B, minlength=1).max()), None
    while True:
        piece_of, tokens_I = _cut_groups(lengths_B, prompts_B, groups_B, max_tokens, most)
        # Each answer sees the prompt, which itself is run once.
        work_B = estimate_work(lengths_B, width) - estimate_work(prompts_B, width)
        prompts_I = np.empty_like(tokens_I)
        prompts_I[piece_of] = prompts_B
        work_I = _sums(piece_of, work_B, len(tokens_I)) + estimate_work(prompts_I, width)
        order = np.argsort(-work_I, kind="stable")
        dealt = assign(tokens_I[order], max_tokens, ranks, width, work_I[order])
        places = np.empty_like(order)
        places[order] = dealt.places
        assignment = Assignment(places[piece_of], dealt.work)
        if best is None or assignment.capacity < best.capacity:
            best = assignment
        if ranks == 1 or most <= 1 or assignment.lockstep >= _EVEN:
            return best
        most = -(-most // 2)


def _cut_groups(
    lengths_B: IntArray, prompts_B: IntArray, groups_B: IntArray, max_tokens: int, most: int
) -> tuple[IntArray, IntArray]:
    """Cut groups into pieces of at most `most` samples, each with a copy of the prompt.

    Returns:
        The piece of each sample [B], and the tokens of each piece.
    """
    piece_of, open_pieces = np.empty_like(lengths_B), dict[int, int]()
    tokens, sizes = list[int](), list[int]()
    numbers = zip(lengths_B.tolist(), prompts_B.tolist(), groups_B.tolist(), strict=True)
    for i, (length, prompt, group) in enumerate(numbers):
        piece = open_pieces.get(group, -1)
        if piece < 0 or sizes[piece] == most or tokens[piece] + length - prompt > max_tokens:
            piece = open_pieces[group] = len(tokens)
            tokens.append(prompt)
            sizes.append(0)
        tokens[piece] += length - prompt
        sizes[piece] += 1
        piece_of[i] = piece
    return piece_of, np.array(tokens, dtype=np.int64)


def _sums(places_B: IntArray, work_B: IntArray, size: int) -> IntArray:
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, places_B, work_B)
    return sums


def _even_sums(work_KR: IntArray) -> IntArray:
    """Return a rank [K, R] for each slot: the round's heaviest for that with least so far."""
    rank_of, sums_R = np.empty_like(work_KR), np.zeros_like(work_KR[0])
    for ranks_R, work_R in zip(rank_of, work_KR, strict=True):
        heaviest, least = np.argsort(-work_R, kind="stable"), np.argsort(sums_R, kind="stable")
        ranks_R[heaviest] = least
        sums_R[least] += work_R[heaviest]
    return rank_of


def _pack_in_order(lengths_B: IntArray, max_tokens: int) -> IntArray:
    """Fill one rank's micro-batches in order, a new one whenever the next sample has no room."""
    places = np.empty(len(lengths_B), dtype=np.int64)
    place = filled = 0
    for i, length in enumerate(lengths_B.tolist()):
        if filled and filled + length > max_tokens:
            place, filled = place + 1, 0
        places[i] = place
        filled += length
    return places


def _pack_rounds(
    work_B: IntArray, tokens_B: IntArray, max_tokens: int, ranks: int, short: int
) -> IntArray:
    """Return each sample's slot [B], round * R + place in the round, in the fewest rounds.

    Args:
        tokens_B: at most `max_tokens` each.
        short: work of a full micro-batch whose samples are short.
    """
    # The work of one sample of all the tokens, or of one that is longer: nothing holds more.
    most = max(int(work_B[0]), short + max_tokens**2)
    pack = partial(_pack, work_B, tokens_B, max_tokens, ranks)
    for rounds in itertools.count(-(-int(tokens_B.sum()) // (ranks * max_tokens))):
        longest = np.zeros(rounds, dtype=np.int64)
        longest[: -(-len(work_B) // ranks)] = work_B[::ranks][:rounds]
        full = np.full(rounds - 1, max(int(work_B[0]), short))
        forms: list[Callable[[int], Any]]
        forms = [partial(np.maximum, longest), partial(np.append, full)]
        candidates = [_lowest_level(form, most, pack) for form in forms[:rounds]]
        if packed := [each for each in candidates if each is not None]:
            best = min(packed, key=attrgetter("time"))
            even = pack(best.levels, fullest=False)
            return best.slots if even is None or even.time > best.time else even.slots
    raise AssertionError("one sample a micro-batch fits")


class _Packed(NamedTuple):
    time: int
    lockstep: float
    levels: IntArray
    slots: IntArray


def _lowest_level(
    form: Callable[[int], IntArray], most: int, pack: Callable[[IntArray], _Packed | None]
) -> _Packed | None:
    """Bisect for the lowest level at which all samples fit; None where they never do."""
    best, low, high = pack(form(most)), 0, most
    while best is not None and high - low > most // _STEPS and best.lockstep < _EVEN:
        level = (low + high) // 2
        tried = pack(form(level))
        if tried is None:
            low = level
        else:
            best, high = min(best, tried, key=attrgetter("time")), level
    return best


def _pack(
    work_B: IntArray,
    tokens_B: IntArray,
    max_tokens: int,
    ranks: int,
    levels_K: IntArray,
    fullest: bool = True,
) -> _Packed | None:
    """Pack samples into `ranks` micro-batches a round, none of which passes its round's level.

    Returns None if a sample fits nowhere.
    """
    all_work = int(work_B.sum())
    if ranks * int(levels_K.sum()) < all_work:
        return None
    remaining, room = np.repeat(levels_K, ranks), np.full(len(levels_K) * ranks, max_tokens)
    slots = np.empty(len(work_B), dtype=np.int64)
    for i, (cost, tokens) in enumerate(zip(work_B.tolist(), tokens_B.tolist(), strict=True)):
        fits = (remaining >= cost) & (room >= tokens)
        slot = int(np.where(fits, room if fullest else -room, max_tokens + 1).argmin())
        if not fits[slot]:
            return None
        slots[i] = slot
        remaining[slot] -= cost
        room[slot] -= tokens
    time = int((levels_K.repeat(ranks) - remaining).reshape(-1, ranks).max(1).sum())
    return _Packed(time, all_work / (ranks * time), levels_K, slots)
