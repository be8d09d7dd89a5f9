"""Pack groups into batches, cut these into mini-batches and micro-batches, and share them out.

    groups ─pack─► Batch ─split_updates─► groups of an update ─micro_batches─► [MicroBatch, …]
                     ▲                                                            │
                     └──── columns["old"] ◄── gather_tokens ◄── values [T] ◄──────┘

Samples are packed end to end, never padded. A sample whose conversation was rendered anew has
several contexts (`Segment.restarts`): tokens attend and count positions within theirs alone, and
all else takes the sample as one. Everything per token is aligned with `token_ids`:
entry t is about token t given those before it, so the log-prob of token t comes from the hidden
state at t - 1, and the first token of a sample, which nothing precedes, is never in a mask.
The divisors of a loss are counted once an update, so that micro-batches just add up. On ranks each
has the tokens of its local samples (`MicroBatchSharder.pack`); for an update they are exchanged.

Shapes: `T` packed tokens, `B` samples of the object at hand (the whole batch or a micro-batch),
`S` scored tokens (gen_mask true) of a micro-batch. A token is one int64 id; log-probs
are nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.algorithms.aggregation import UpdateCounts
from winnow.learning.balance import Assignment, assign, assign_groups, repeated_share
from winnow.learning.data_parallel import SINGLE_PROCESS, DataParallel, TokenColumn, token_places
from winnow.learning.shared_prompts import SharedPrompts, share_prompts
from winnow.models.vision import PlacedImages, place_images
from winnow.observe.metrics import Metrics
from winnow.types import (
    Answer,
    BoolArray,
    Group,
    Image,
    IntArray,
    Prompt,
    Score,
    Segment,
    Trajectory,
    join_images,
)
from winnow.workers.array_refs import fetch_arrays

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Batch:
    """The groups of one step, packed on the CPU; samples of a group are neighbours.

    On several ranks each holds the tokens of its local samples (`holders`): T counts these, every
    other sample is empty, and a sum over tokens is partial until `dp` reduces it.

    Example: a prompt of 3 tokens with answers of 2 and 1 gives `offsets` [0, 5, 9], `groups`
    [0, 0] and `gen_mask` [F F F T T  F F F T].
    """

    token_ids: Tensor
    """[T] int64: each sample's prompt, then its trajectory."""
    positions: Tensor
    """[T] int64, position of the token in its context."""
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
    images: tuple[tuple[Image, ...], ...] = ()
    """[B] images of each sample, wherever its tokens are, placed in the sample; empty if no sample
    has any."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, or [T, …]: what stays with the batch (`old`, `routes`, …); put in by the loop."""
    dp: DataParallel = SINGLE_PROCESS
    """Collectives with the ranks that have the other samples' tokens."""
    holders: IntArray | None = None
    """[B] the share that has a sample's tokens; None where all are here."""
    all_lengths: IntArray | None = None
    """[B] tokens of each sample, wherever they are; None where all are here."""

    @property
    def lengths(self) -> IntArray:
        """[B] tokens of each sample, wherever they are."""
        local_lengths: IntArray = np.diff(self.offsets.numpy())
        return local_lengths if self.all_lengths is None else self.all_lengths

    @property
    def samples(self) -> IntArray:
        """[b] the samples whose tokens are here."""
        return np.flatnonzero(np.diff(self.offsets.numpy()))

    @property
    def _places(self) -> Tensor:
        """[T] the tokens' places in the whole step."""
        starts, samples = np.cumsum(self.lengths) - self.lengths, self.samples
        return torch.from_numpy(token_places(starts[samples], self.lengths[samples]))

    def gathered(self, values: Tensor) -> Tensor:
        """Gather the numbers [T] of all samples' tokens on every rank; used only where needed."""
        if self.holders is None:
            return values
        # As sums of one number and zeros, which are exact; of bytes where they are true or false.
        numbers = values.to(torch.uint8) if values.dtype == torch.bool else values
        full = torch.zeros(int(self.lengths.sum()), dtype=numbers.dtype)
        full[self._places] = numbers
        return self.dp.all_reduce(full).to(values.dtype)

    def local_part(self, values: Tensor) -> Tensor:
        """Cut the numbers of the local tokens [T] out of those of all samples' tokens."""
        return values if self.holders is None else values[self._places]

    def from_column(self, column: TokenColumn) -> Tensor:
        """Read the numbers of the local tokens [T] out of a column that lies in parts."""
        return torch.from_numpy(column.of(self.samples, self.lengths))

    @property
    def n_samples(self) -> int:
        """The number of samples (B)."""
        return len(self.rewards)

    @property
    def n_groups(self) -> int:
        """The number of groups that were packed."""
        return int(self.groups[-1]) + 1 if self.n_samples else 0


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole samples that are run at once, with all that their loss needs. Immutable snapshot."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, position of the token in its context."""
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
    host_positions: IntArray
    """The same, known to the host without asking the device."""
    behav: Tensor
    """[T] fp32, nats; 0 off gen_mask."""
    columns: Mapping[str, Tensor]
    """[T] each, or [T, …]: the batch's columns at the time of the cut."""
    group_tokens: Tensor
    """[B] int64: tokens in loss_mask of the sample's group over the whole update."""
    samples: Tensor
    """[B] int64: the samples' places in the batch."""
    source: Tensor
    """[T] int64: the tokens' places in the batch."""
    lengths: tuple[int, ...]
    """[B] tokens of each sample, known to the host without asking the device."""
    contexts: tuple[int, ...]
    """Tokens of each context: a sample, or a part of it up to a restart."""
    counts: UpdateCounts
    """UpdateCounts of the whole update."""
    images: PlacedImages | None = None
    """Among the tokens that are run; None if no sample of the batch has images."""
    shared: SharedPrompts | None = None
    """The tokens that are run; None: all of them, each context by itself."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with every tensor on `device`; itself when it is there already."""
        if self.token_ids.device == device:
            return self

        def moved(value: Any) -> Any:
            moves = isinstance(value, Tensor | PlacedImages | SharedPrompts)
            return value.to(device, non_blocking=True) if moves else value

        values = {f.name: moved(getattr(self, f.name)) for f in fields(self)}
        columns = {name: moved(value) for name, value in self.columns.items()}
        return MicroBatch(**values | {"columns": columns})


def pack(
    groups: Sequence[Group],
    overlong_filtering: bool = False,
    local_samples: BoolArray | None = None,
) -> Batch:
    """Lay all answers of all groups end to end, each behind a copy of its prompt.

    Args:
        groups: in the order that `Batch.groups` will count.
        overlong_filtering: take truncated answers out of loss_mask (DAPO, arXiv 2503.14476,
            section 3.4); they keep their reward, and so their part in the group's statistics.
        local_samples: [B] the samples to be laid out, and to be read at all; the others stay empty.

    Raises:
        ValueError: a prompt without a token, whose answer's first token has no context.
    """
    rows = [(g, group.prompt, answer) for g, group in enumerate(groups) for answer in group.answers]
    segments, no_logprobs = list[Segment](), np.empty(0, np.float32)
    segments_per_sample: list[int] = []
    for place, (_, prompt, answer) in enumerate(rows):
        if not len(prompt.token_ids):
            raise ValueError(f"prompt {prompt.uid} has no tokens; a prompt needs at least one")
        if local_samples is not None and not local_samples[place]:
            segments_per_sample.append(0)
            continue
        first = Segment(prompt.token_ids, no_logprobs, (), "environment", restarts=True)
        segments += [first, *answer.trajectory.segments]
        segments_per_sample.append(1 + len(answer.trajectory.segments))

    pieces = [segment.token_ids for segment in segments]
    behav = [segment.logprobs for segment in segments if segment.source == "model"]
    written = [segment.source == "model" for segment in segments]
    piece_lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    first_piece = np.concatenate([[0], np.cumsum(segments_per_sample, dtype=np.int64)])
    piece_offsets = np.concatenate([[0], np.cumsum(piece_lengths)])
    offsets = piece_offsets[first_piece]
    lengths = np.diff(offsets)
    starts = piece_offsets[:-1][[segment.restarts for segment in segments]]
    starts_T = np.repeat(starts, np.diff(starts, append=offsets[-1]))
    gen_mask = np.repeat(np.array(written, dtype=bool), piece_lengths)
    loss_mask = gen_mask.copy()
    if overlong_filtering:
        complete = [not answer.trajectory.truncated for _, _, answer in rows]
        loss_mask &= np.repeat(np.array(complete, dtype=bool), lengths)
    parts = ([(len(p.token_ids), p.images), (0, a.trajectory.images)] for _, p, a in rows)
    images = tuple(map(join_images, parts))
    token_ids = np.concatenate([np.empty(0, np.int64), *pieces], dtype=np.int64)
    behav_T = np.zeros(len(gen_mask), dtype=np.float32)
    behav_T[gen_mask] = np.concatenate(behav) if behav else 0.0
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(np.arange(offsets[-1]) - starts_T),
        offsets=torch.from_numpy(offsets),
        prompt_lengths=torch.tensor([len(p.token_ids) for _, p, _ in rows], dtype=torch.int64),
        groups=torch.tensor([g for g, _, _ in rows], dtype=torch.int64),
        gen_mask=torch.from_numpy(gen_mask),
        loss_mask=torch.from_numpy(loss_mask),
        behav=torch.from_numpy(behav_T),
        rewards=torch.tensor([a.score.reward for _, _, a in rows], dtype=torch.float64),
        images=images if any(images) else (),
    )


def sample_lengths(groups: Sequence[Group]) -> IntArray:
    """Count the tokens [B] of each answer with its prompt, without a look at them."""
    answers = ((g.prompt, answer.trajectory) for g in groups for answer in g.answers)
    lengths = [len(p.token_ids) + sum(map(len, t.segments)) for p, t in answers]
    return np.array(lengths, dtype=np.int64)


def pack_sequences(
    sequences: Iterable[IntArray], last: int | None = None, images: Sequence[tuple[Image, ...]] = ()
) -> Batch:
    """Pack bare sequences, each as a prompt with its last tokens as the answer.

    Args:
        sequences: token ids [L] each.
        last: the most tokens of an answer; None leaves one token to the prompt.
        images: of each sequence, within its prompt; empty: there are none.

    Raises:
        ValueError: a sequence without a token.
    """
    groups = []
    for place, ids in enumerate(sequences):
        start = 1 if last is None else max(1, len(ids) - last)
        rest = Segment(ids[start:], np.zeros(len(ids[start:]), np.float32), ())
        answer = Answer(Trajectory((rest,), "stop"), Score(0.0, 0.0))
        shown = images[place] if images else ()
        prompt = Prompt(str(place), ids[:start], "", "", None, images=shown)
        groups.append(Group(place, prompt, (answer,)))
    return pack(groups)


def split_updates(
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


@dataclass(frozen=True, eq=False)
class UpdateShares:
    """An update, dealt out to ranks; `assignment` says how evenly."""

    assignment: Assignment
    _batch: Batch
    _samples: IntArray
    """Places in the batch, longest first."""
    group_tokens: IntArray
    """By ordinal of the group: tokens in loss_mask."""
    counts: UpdateCounts
    shares_prompts: bool

    def micro_batches(self, rank: int) -> list[MicroBatch]:
        """Cut the micro-batches of one rank, without a look at the tokens of others."""
        per_rank = self.assignment.work.shape[1]
        places = range(rank * per_rank, (rank + 1) * per_rank)
        parts = (self._samples[self.assignment.places == place] for place in places)
        batch = self._batch if self._batch.holders is None else _exchange(self._batch, self.runs())
        return [_make_micro_batch(batch, part, self) for part in parts]

    def runs(self) -> IntArray:
        """[B] the rank that runs each sample; -1 for those of other updates."""
        runs = np.full(self._batch.n_samples, -1)
        runs[self._samples] = self.assignment.places // max(self.assignment.work.shape[1], 1)
        return runs


def split_update(
    batch: Batch,
    groups: Iterable[int],
    max_tokens: int,
    ranks: int = 1,
    width: int = 1,
    shares_prompts: bool = False,
) -> UpdateShares:
    """Deal an update out to `ranks`, which run in step; counts are those of the whole.

    Args:
        groups: ordinals of the update's groups, each once, in any order.
        max_tokens: tokens of a micro-batch that are run.
        width: of the model (H), which says from what length on attention costs most.
        shares_prompts: run a prompt once for those of its answers that are in one micro-batch.
    """
    in_update = np.zeros(batch.n_groups, dtype=bool)
    in_update[list(groups)] = True
    groups_B, lengths_B = batch.groups.numpy(), batch.lengths
    samples = np.flatnonzero(in_update[groups_B])
    samples = samples[np.argsort(-lengths_B[samples], kind="stable")]
    tokens = batch.dp.all_reduce(torch.from_numpy(count_loss_tokens(batch, samples))).numpy()
    group_tokens = np.zeros(batch.n_groups, dtype=np.int64)
    np.add.at(group_tokens, groups_B[samples], tokens)
    counts = UpdateCounts(
        tokens=int(tokens.sum()),
        samples=int((tokens > 0).sum()),
        groups=int((group_tokens > 0).sum()),
    )
    if shares_prompts:
        shapes = lengths_B[samples], batch.prompt_lengths.numpy()[samples], groups_B[samples]
        dealt = assign_groups(*shapes, max_tokens, ranks, width)
    else:
        dealt = assign(lengths_B[samples], max_tokens, ranks, width)
    return UpdateShares(dealt, batch, samples, group_tokens, counts, shares_prompts)


def micro_batches(batch: Batch, groups: Iterable[int], max_tokens: int) -> list[MicroBatch]:
    """Cut the samples of an update into micro-batches of at most `max_tokens` packed tokens.

    Samples of like length run together, longest first; ties keep the batch's order. A sample
    longer than `max_tokens` gets a micro-batch to itself. How samples fall together changes
    nothing in what is learnt.

    Args:
        groups: ordinals of the update's groups, each once, in any order.
        max_tokens: bounds memory.
    """
    return split_update(batch, groups, max_tokens).micro_batches(0)


def all_micro_batches(batch: Batch, max_tokens: int) -> list[MicroBatch]:
    """Cut the whole batch into micro-batches, for passes that learn nothing (`old`, `ref`)."""
    return micro_batches(batch, range(batch.n_groups), max_tokens)


def gather_tokens(
    batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
) -> Tensor:
    """Bring values [T] of each micro-batch back into the batch's order.

    Returns:
        [T] of the batch on the CPU, in the values' dtype; 0 where no micro-batch reaches. Of a
        batch that lies with several ranks, of the samples that this one has run.
    """
    assert len(microbatches) == len(values), "one tensor a micro-batch"
    dtype = values[0].dtype if values else torch.float32
    size = len(batch.token_ids)
    if batch.holders is not None:
        size = sum(sum(micro.lengths) for micro in microbatches)
    out = torch.zeros(size, dtype=dtype)
    for micro, value in zip(microbatches, values, strict=True):
        out[micro.source.cpu()] = value.detach().cpu()
    return out


class MicroBatchSharder:
    """Pack a rank's samples of a step, cut its micro-batches, and gather their outputs.

    A rank holds the samples that it runs when a model passes over the whole step (`pack`). An
    update deals its samples anew, for its own balance, and they go with all their columns to the
    ranks that run them. The split changes nothing in what is learnt. A batch that was packed whole
    stays whole: each rank cuts its share of it, and what is gathered is gathered everywhere.

    On a mesh each rank gets its share of the samples, and all ranks call all methods but `figures`;
    without one this process gets everything. Ranks that are together get the same micro-batches.

    Args:
        mesh, together: as `DataParallel` takes them.
        width: of the model (H), which says from what length on attention costs most.
    """

    def __init__(
        self, mesh: DeviceMesh | None = None, width: int = 1, together: int | IntArray = 1
    ) -> None:
        self.dp, self._width = DataParallel(mesh, together), width
        self._figures, self._ran = Metrics(), np.empty(0, np.int64)
        self._least_repeated = math.inf

    def pack(
        self, groups: Sequence[Group], max_tokens: int, overlong_filtering: bool = False
    ) -> Batch:
        """Pack the samples of a step that this process holds, and fetch no others.

        Args:
            max_tokens: of a micro-batch of the passes: those with this budget need no exchange.
            overlong_filtering: as the function `pack` takes it.

        Raises:
            WorkerError: tokens of an answer are lost.
        """
        if self.dp.mesh is None:
            return pack(groups, overlong_filtering)
        lengths_B = sample_lengths(groups)
        empty = pack(groups, local_samples=np.zeros(len(lengths_B), dtype=bool))
        spread = replace(empty, all_lengths=lengths_B)
        holders = self._share(spread, range(spread.n_groups), max_tokens).runs()
        is_local = holders == self.dp.share
        places = iter(is_local.tolist())
        fetch_arrays(a.trajectory for g in groups for a in g.answers if next(places))
        local = pack(groups, overlong_filtering, is_local)
        return replace(local, dp=self.dp, holders=holders, all_lengths=lengths_B)

    def sharing_prompts(self, least_repeated: float) -> Self:
        """Return a sharder that has prompts run once where so many tokens are copies of them."""
        sharder = copy(self)
        sharder._least_repeated = least_repeated
        return sharder

    def cut_update(self, batch: Batch, groups: Iterable[int], max_tokens: int) -> list[MicroBatch]:
        """Cut this process's micro-batches of an update; counts are those of the whole update."""
        shares = self._share(batch, groups, max_tokens)
        if self.dp.mesh is not None:
            dealt = shares.assignment
            self._figures.mean("ranks/spread", dealt.spread)
            self._figures.mean("ranks/lockstep", dealt.lockstep, dealt.capacity)
            self._figures.mean("ranks/idle", dealt.idle_share)
        return shares.micro_batches(self.dp.share)

    def all_micro_batches(self, batch: Batch, max_tokens: int) -> list[MicroBatch]:
        """Cut this process's micro-batches of the whole step, for passes that learn nothing."""
        shares = self._share(batch, range(batch.n_groups), max_tokens)
        self._ran = shares.runs()
        return shares.micro_batches(self.dp.share)

    def gather(
        self, batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
    ) -> Tensor:
        """Return the outputs of all ranks' micro-batches for the local tokens, [T] on the CPU.

        Args:
            microbatches: those that `all_micro_batches` cut last.
        """
        local_values = gather_tokens(batch, microbatches, values)
        if batch.holders is None:
            # As sums of one number and zeros, which are exact: the same bits on every rank.
            return self.dp.all_reduce(local_values) if microbatches else local_values
        return self.dp.all_to_all([local_values], batch.lengths, self._ran, batch.holders)[0]

    def figures(self) -> Metrics:
        """Report how even the shares of the updates were since the last call.

        `ranks/lockstep` is the share of their time in which ranks do not wait for each other,
        `ranks/spread` the heaviest rank's work over the mean, `ranks/idle` the share of empty
        micro-batches; without a mesh there are none.
        """
        figures, self._figures = self._figures, Metrics()
        return figures

    def _share(self, batch: Batch, groups: Iterable[int], max_tokens: int) -> UpdateShares:
        shapes = batch.lengths, batch.prompt_lengths.numpy(), batch.groups.numpy()
        shares = repeated_share(*shapes) >= self._least_repeated
        return split_update(batch, groups, max_tokens, self.dp.shares, self._width, shares)


NO_SHARDING = MicroBatchSharder()


def count_loss_tokens(batch: Batch, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the tokens of each of these samples in loss_mask: [len(samples)]."""
    # A byte is read for a token and nothing is made: all ranks count all samples of an update.
    mask, offsets = batch.loss_mask.numpy(), batch.offsets.numpy()
    bounds = zip(offsets[samples].tolist(), offsets[samples + 1].tolist(), strict=True)
    counted = (np.count_nonzero(mask[start:stop]) for start, stop in bounds)
    return np.fromiter(counted, np.int64, len(samples))


def _exchange(batch: Batch, runs: IntArray) -> Batch:
    """Exchange samples so that each rank has those that it runs [B], with their columns."""
    assert batch.holders is not None
    names = list(batch.columns)
    tensors = [batch.token_ids, batch.positions, batch.gen_mask, batch.loss_mask, batch.behav]
    tensors += [batch.columns[name] for name in names]
    received = batch.dp.all_to_all(tensors, batch.lengths, batch.holders, runs)
    token_ids, positions, gen_mask, loss_mask, behav, *columns = received
    lengths = np.where(runs == batch.dp.share, batch.lengths, 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return replace(
        batch,
        token_ids=token_ids,
        positions=positions,
        offsets=torch.from_numpy(offsets),
        gen_mask=gen_mask,
        loss_mask=loss_mask,
        behav=behav,
        columns=dict(zip(names, columns, strict=True)),
        holders=runs,
    )


def _make_micro_batch(batch: Batch, samples: IntArray, update: UpdateShares) -> MicroBatch:
    starts, groups = batch.offsets.numpy(), batch.groups.numpy()
    if update.shares_prompts:  # a group's samples are neighbours, where its first one is
        _, first, group = np.unique(groups[samples], return_index=True, return_inverse=True)
        samples = samples[np.argsort(first[group], kind="stable")]
    lengths = starts[samples + 1] - starts[samples]
    source = torch.from_numpy(token_places(starts[samples], lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    gen_mask = batch.gen_mask[source]
    scored_positions = gen_mask.nonzero().squeeze(1)
    positions = batch.positions[source]
    first_tokens = np.flatnonzero(positions.numpy() == 0)
    token_ids, shared, images, placed = batch.token_ids[source], None, None, tuple[Image, ...]()
    if batch.images:
        parts = zip(lengths.tolist(), (batch.images[i] for i in samples.tolist()), strict=True)
        ends = np.append(first_tokens[1:], offsets[-1])
        placed = join_images(parts)
        images = place_images(positions.numpy(), placed, ends)
    if update.shares_prompts:
        owners = samples[np.searchsorted(offsets, first_tokens, "right") - 1]
        pair = batch.prompt_lengths.numpy()[owners], groups[owners]
        shared = share_prompts(token_ids.numpy(), first_tokens, *pair, placed)
        if shared is not None and images is not None:
            images = shared.place_images(images)
    return MicroBatch(
        token_ids=token_ids,
        positions=positions,
        offsets=torch.from_numpy(offsets),
        sample_index=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        gen_mask=gen_mask,
        loss_mask=batch.loss_mask[source],
        scored_positions=scored_positions,
        host_positions=scored_positions.numpy(),
        behav=batch.behav[source],
        columns={name: column[source] for name, column in batch.columns.items()},
        group_tokens=torch.from_numpy(update.group_tokens[groups[samples]]),
        samples=torch.from_numpy(samples),
        source=source,
        lengths=tuple(lengths.tolist()),
        contexts=tuple(np.diff(first_tokens, append=offsets[-1]).tolist()),
        counts=update.counts,
        images=images,
        shared=shared,
    )
