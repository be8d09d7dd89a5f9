"""Pack groups into batches, and cut batches into mini-batches and micro-batches.

    groups ─pack─► Batch ─cut_updates─► groups of an update ─micro_batches─► [MicroBatch, …]
                     ▲                                                            │
                     └──── columns["old"] ◄── gather_tokens ◄── values [T] ◄──────┘

Samples are packed end to end, never padded. Everything per token is aligned with `token_ids`:
entry t is about token t given those before it, so the log-prob of token t comes from the hidden
state at t - 1, and the first token of a sample, which nothing precedes, is never in a mask.
The divisors of a loss are counted once an update, so that micro-batches just add up.

Shapes: `T` packed tokens, `B` samples of the object at hand (the whole batch or a micro-batch),
`S` scored tokens (gen_mask true) of a micro-batch. A token is one int64 id; log-probs are nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.types import Answer, Group, IntArray, Prompt, Score, Segment, Trajectory


@dataclass(frozen=True, eq=False)
class Batch:
    """The groups of one step, packed on the CPU; samples of a group are neighbours.

    Example: a prompt of 3 tokens with answers of 2 and 1 gives `offsets` [0, 5, 9], `groups`
    [0, 0] and `gen_mask` [F F F T T  F F F T].
    """

    token_ids: Tensor
    """[T] int64: each sample's prompt, then its trajectory."""
    positions: Tensor
    """[T] int64, position of the token in its sample."""
    offsets: Tensor
    """[B+1] int64: sample b is [offsets[b], offsets[b+1])."""
    prompt_lengths: Tensor
    """[B] int64, tokens."""
    groups: Tensor
    """[B] int64: ordinal of the sample's group in the sequence that was packed."""
    gen_mask: Tensor
    """[T] bool: the policy wrote this token."""
    loss_mask: Tensor
    """[T] bool: the part of gen_mask that learns."""
    behav: Tensor
    """[T] fp32, nats: log-prob under the policy that sampled the token; 0 off gen_mask."""
    rewards: Tensor
    """[B] float64."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[T] each: results that stay with the batch (`old`, `advantages`, …); put in by the loop."""

    @property
    def n_samples(self) -> int:
        """The number of samples (B)."""
        return len(self.rewards)

    @property
    def n_groups(self) -> int:
        """The number of groups that were packed."""
        return int(self.groups[-1]) + 1 if self.n_samples else 0


@dataclass(frozen=True)
class Counts:
    """The divisors of an update's losses: integers over all its micro-batches and ranks."""

    tokens: int
    """Tokens in loss_mask."""
    samples: int
    """Samples with such a token."""
    groups: int
    """Groups with such a token."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole samples that are run at once, with all that their loss needs. Immutable snapshot."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, position of the token in its sample."""
    offsets: Tensor
    """[B+1] int64: sample b is [offsets[b], offsets[b+1])."""
    sample_index: Tensor
    """[T] int64: the token's sample, of the B here."""
    gen_mask: Tensor
    """[T] bool"""
    loss_mask: Tensor
    """[T] bool"""
    scored_positions: Tensor
    """[S] int64, ascending: where gen_mask is true. The logits of token i come from the hidden
    state at i - 1, so only these meet the vocabulary."""
    behav: Tensor
    """[T] fp32, nats; 0 off gen_mask."""
    columns: Mapping[str, Tensor]
    """[T] each: the batch's columns at the time of the cut."""
    group_tokens: Tensor
    """[B] int64: tokens in loss_mask of the sample's group over the whole update."""
    samples: Tensor
    """[B] int64: the samples' places in the batch."""
    source: Tensor
    """[T] int64: the tokens' places in the batch."""
    lengths: tuple[int, ...]
    """[B] tokens of each sample, known to the host without asking the device."""
    counts: Counts
    """Counts of the whole update."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with every tensor on `device`; itself when it is there already."""
        if self.token_ids.device == device:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.to(device, non_blocking=True)
        values["columns"] = {
            name: value.to(device, non_blocking=True) for name, value in self.columns.items()
        }
        return MicroBatch(**values)


def pack(groups: Sequence[Group], overlong_filtering: bool = False) -> Batch:
    """Lay all answers of all groups end to end, each behind a copy of its prompt.

    Args:
        groups: in the order that `Batch.groups` will count.
        overlong_filtering: take truncated answers out of loss_mask (DAPO, arXiv 2503.14476,
            section 3.4); they keep their reward, and so their part in the group's statistics.

    Raises:
        ValueError: a prompt without a token, whose answer's first token has no context.
    """
    rows = [(g, group.prompt, answer) for g, group in enumerate(groups) for answer in group.answers]
    pieces: list[NDArray[np.int64]] = []
    written: list[bool] = []
    behav: list[NDArray[np.float32]] = []
    pieces_per_sample: list[int] = []
    for _, prompt, answer in rows:
        if not len(prompt.token_ids):
            raise ValueError(f"prompt {prompt.uid} has no tokens; a prompt needs at least one")
        segments = answer.trajectory.segments
        pieces.append(prompt.token_ids)
        written.append(False)
        for segment in segments:
            pieces.append(segment.token_ids)
            written.append(segment.source == "model")
            if written[-1]:
                behav.append(segment.logprobs)
        pieces_per_sample.append(1 + len(segments))

    piece_lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    first_piece = np.concatenate([[0], np.cumsum(pieces_per_sample, dtype=np.int64)])
    piece_offsets = np.concatenate([[0], np.cumsum(piece_lengths)])
    offsets = piece_offsets[first_piece]
    lengths = np.diff(offsets)
    gen_mask = np.repeat(np.array(written, dtype=bool), piece_lengths)
    loss_mask = gen_mask.copy()
    if overlong_filtering:
        kept = [not answer.trajectory.truncated for _, _, answer in rows]
        loss_mask &= np.repeat(np.array(kept, dtype=bool), lengths)
    behav_T = np.zeros(len(gen_mask), dtype=np.float32)
    behav_T[gen_mask] = np.concatenate(behav) if behav else 0.0
    return Batch(
        token_ids=torch.from_numpy(
            np.concatenate([np.empty(0, np.int64), *pieces], dtype=np.int64)
        ),
        positions=torch.from_numpy(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)),
        offsets=torch.from_numpy(offsets),
        prompt_lengths=torch.from_numpy(piece_lengths[first_piece[:-1]]),
        groups=torch.tensor([g for g, _, _ in rows], dtype=torch.int64),
        gen_mask=torch.from_numpy(gen_mask),
        loss_mask=torch.from_numpy(loss_mask),
        behav=torch.from_numpy(behav_T),
        rewards=torch.tensor([a.score.reward for _, _, a in rows], dtype=torch.float64),
    )


def pack_sequences(sequences: Iterable[IntArray]) -> Batch:
    """Pack bare sequences, each as a prompt of one token with the rest as its answer.

    Raises:
        ValueError: a sequence without a token.
    """
    groups = []
    for place, ids in enumerate(sequences):
        rest = Segment(ids[1:], np.zeros(len(ids[1:]), np.float32), ())
        answer = Answer(Trajectory((rest,), "stop"), Score(0.0, 0.0))
        groups.append(Group(place, Prompt(str(place), ids[:1], "", "", None), (answer,)))
    return pack(groups)


def cut_updates(
    n_groups: int, groups_per_update: int, seed: int | Sequence[int]
) -> list[list[int]]:
    """Shuffle the groups of a step and cut them into updates of whole groups.

    A full batch divides exactly. A short one is cut into round(n_groups / groups_per_update)
    updates, at least one, whose sizes differ by at most one group. The shuffle keeps groups that
    were carried over, which come first in admission order, from always being learnt from first.

    Args:
        seed: of the shuffle; a sequence such as (run seed, step, epoch) is one seed.

    Returns:
        For each update the ordinals of its groups; nothing when there is no group.
    """
    if n_groups == 0:
        return []
    n_updates = max(1, math.floor(n_groups / groups_per_update + 0.5))
    order = np.random.default_rng(seed).permutation(n_groups)
    return [part.tolist() for part in np.array_split(order, n_updates)]


def micro_batches(batch: Batch, groups: Iterable[int], max_tokens: int) -> list[MicroBatch]:
    """Cut the samples of an update into micro-batches of at most `max_tokens` packed tokens.

    Samples of like length run together, longest first; ties keep the batch's order. A sample
    longer than `max_tokens` gets a micro-batch of its own. How samples fall together changes
    nothing in what is learnt.

    Args:
        groups: ordinals of the update's groups, each once, in any order.
        max_tokens: bounds memory.
    """
    update = update_of(batch, groups)
    return cut(batch, update, update.samples, max_tokens)


@dataclass(frozen=True, eq=False)
class Update:
    """The samples of an update, and the divisors of its losses."""

    samples: NDArray[np.int64]
    """[B] the samples' places in the batch, longest first."""
    group_tokens: NDArray[np.int64]
    """[groups of the batch] tokens in loss_mask over the update."""
    counts: Counts


def update_of(batch: Batch, groups: Iterable[int]) -> Update:
    """Collect the samples of some groups; ties in length keep the batch's order.

    Args:
        groups: ordinals, each once, in any order.
    """
    wanted = np.zeros(batch.n_groups, dtype=bool)
    wanted[list(groups)] = True
    groups_B = batch.groups.numpy()
    samples = np.flatnonzero(wanted[groups_B])
    lengths_B = np.diff(batch.offsets.numpy())
    samples = samples[np.argsort(-lengths_B[samples], kind="stable")]
    # Of these samples alone: a step has as many updates as it has mini-batches, and counting the
    # whole batch for each would take time by the square of its size.
    tokens = sample_tokens(batch, samples)
    group_tokens = np.zeros(batch.n_groups, dtype=np.int64)
    np.add.at(group_tokens, groups_B[samples], tokens)
    counts = Counts(
        tokens=int(tokens.sum()),
        samples=int((tokens > 0).sum()),
        groups=int((group_tokens > 0).sum()),
    )
    return Update(samples, group_tokens, counts)


def cut(
    batch: Batch, update: Update, samples: NDArray[np.int64], max_tokens: int
) -> list[MicroBatch]:
    """Cut some of an update's samples, in their order, into micro-batches; none for no samples."""
    lengths_B = np.diff(batch.offsets.numpy())
    parts = _by_budget(samples, lengths_B, max_tokens)
    return [_slice(batch, part, lengths_B, update) for part in parts]


def idle(batch: Batch, update: Update) -> MicroBatch:
    """Return a micro-batch of no samples, for a rank that waits for the others."""
    lengths_B = np.diff(batch.offsets.numpy())
    return _slice(batch, np.empty(0, np.int64), lengths_B, update)


def all_micro_batches(batch: Batch, max_tokens: int) -> list[MicroBatch]:
    """Cut the whole batch into micro-batches, for passes that learn nothing (`old`, `ref`)."""
    return micro_batches(batch, range(batch.n_groups), max_tokens)


def gather_tokens(
    batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
) -> Tensor:
    """Bring values [T] of each micro-batch back into the batch's order.

    Returns:
        [T] of the batch on the CPU, in the values' dtype; 0 where no micro-batch reaches.
    """
    assert len(microbatches) == len(values), "one tensor a micro-batch"
    dtype = values[0].dtype if values else torch.float32
    out = torch.zeros(len(batch.token_ids), dtype=dtype)
    for micro, value in zip(microbatches, values, strict=True):
        out[micro.source.cpu()] = value.detach().cpu()
    return out


def sample_tokens(batch: Batch, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the tokens of each of these samples in loss_mask: [len(samples)]."""
    source, offsets = _tokens_of(batch, samples, np.diff(batch.offsets.numpy())[samples])
    before = np.zeros(len(source) + 1, dtype=np.int64)
    np.cumsum(batch.loss_mask.numpy()[source], out=before[1:])
    return np.diff(before[offsets])


def _by_budget(
    samples: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int
) -> list[NDArray[np.int64]]:
    """Cut `samples`, in their order, whenever the next one would pass `max_tokens`."""
    cuts: list[int] = []
    filled = 0
    for i, length in enumerate(lengths[samples].tolist()):
        if filled and filled + length > max_tokens:
            cuts.append(i)
            filled = 0
        filled += length
    return np.split(samples, cuts) if len(samples) else []


def _tokens_of(
    batch: Batch, samples: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [T] the places of these samples' tokens in the batch, and [B+1] their own offsets."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    starts = batch.offsets.numpy()[samples]
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets


def _slice(
    batch: Batch,
    samples: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    update: Update,
) -> MicroBatch:
    lengths = lengths_B[samples]
    source_T, offsets = _tokens_of(batch, samples, lengths)
    source = torch.from_numpy(source_T)
    gen_mask = batch.gen_mask[source]
    return MicroBatch(
        token_ids=batch.token_ids[source],
        positions=batch.positions[source],
        offsets=torch.from_numpy(offsets),
        sample_index=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        gen_mask=gen_mask,
        loss_mask=batch.loss_mask[source],
        scored_positions=gen_mask.nonzero().squeeze(1),
        behav=batch.behav[source],
        columns={name: column[source] for name, column in batch.columns.items()},
        group_tokens=torch.from_numpy(update.group_tokens[batch.groups.numpy()[samples]]),
        samples=torch.from_numpy(samples),
        source=source,
        lengths=tuple(lengths.tolist()),
        counts=update.counts,
    )
