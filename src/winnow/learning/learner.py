"""One step of learning from its groups: passes, advantages, updates.

    groups ─pack─► batch ─► passes: old │ ref │ values [T]
                     ├─► correction: weights [T], loss_mask
                     ├─► rewards less KL ─► advantages, returns [T]
                     └─► updates: mini-batch → micro-batches → one step of critic and policy

The parts are chosen when the learner is built: a step computes only what its algorithm needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from winnow.errors import TrainingError
from winnow.learning.advantage import AdvantageStage, correct_batch
from winnow.learning.batch import Batch, split_updates
from winnow.learning.critic import Critic, value_figures
from winnow.learning.data_parallel import TokenColumn
from winnow.learning.policy import Policy
from winnow.learning.routes import load_figures, token_routes
from winnow.learning.strategy import Strategy, run_pass
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.types import ROUTES, FloatArray, Group, IntArray


@dataclass(frozen=True)
class LearnerSettings:
    """The cut of a step into updates, and the limits at which learning has failed."""

    groups_per_update: int
    epochs: int
    microbatch_tokens: int
    overlong_filtering: bool
    max_skipped_updates: int
    seed: int
    lr: Callable[[int], float]
    """The policy's learning rate, by step."""
    critic_lr: Callable[[int], float] | None = None
    """The critic's, where there is one."""
    critic_microbatch_tokens: int | None = None
    """None takes `microbatch_tokens`."""
    critic_max_skipped_updates: int = 5
    critic_warmup_steps: int = 0
    """The number of first steps in which only the critic learns."""

    def updates(self, n_groups: int, step: int) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Yield a seed and the ordinals of its groups for each update of a step."""
        for epoch in range(self.epochs):
            seed = self.seed, step, epoch
            for place, update in enumerate(split_updates(n_groups, self.groups_per_update, seed)):
                yield (*seed, place), update


@dataclass(frozen=True, eq=False)
class Learned:
    """Facts of a batch for its step's record; `B` samples, in the order of groups and answers."""

    advantages: FloatArray
    """[B]"""
    prompt_lengths: IntArray
    """[B] tokens."""
    packed_tokens: int
    """Tokens of prompts and answers (T)."""
    old_logprobs: FloatArray | None = None
    """[T] nats: the trainer's, before the updates; None where the step took no pass for all."""
    entropies: FloatArray | None = None
    """[T] nats, of the same pass."""
    mismatch: FloatArray | None = None
    """[B] nats: mean distance of the sampler's log-probs from those, over a sample's tokens."""
    targets: tuple[Sequence[Any], Sequence[Any]] | None = None
    """[T] returns and loss_mask, for a critic on other ranks: arrays or references to them, by
    share."""
    holders: IntArray | None = None
    """[B] the ranks' shares that have a sample's part of what is [T], on ranks: here is that of
    this one's."""


class AnyLearner(Protocol):
    """A `Learner`, or a stand-in for those of several ranks."""

    @property
    def progress(self) -> int:
        """A number that moves with each pass and update."""

    @property
    def begun(self) -> int:
        """The number of steps of which an update may have changed weights."""

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Train on the groups of a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a step, without models and optimizers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""


class Learner:
    """Turns groups into updates of a policy, and of a critic where there is one.

    Args:
        reference: the model that KL terms measure from; the policy's own strategy where that trains
            an adapter, which is then off while it answers as the reference.
        correction: options of `correct`, by keyword, to narrow and weigh a batch before anything is
            counted; None leaves it.
    """

    def __init__(
        self,
        policy: Policy,
        advantage: AdvantageStage,
        settings: LearnerSettings,
        *,
        reference: Strategy | None = None,
        critic: Critic | None = None,
        correction: Mapping[str, Any] | None = None,
    ) -> None:
        self._policy, self._reference = policy, reference
        self._advantage, self._settings, self._correction = advantage, settings, correction
        self._critic = None if critic is None else CriticLearner(critic, settings)
        self._skips = SkippedUpdates("actor", "", settings.max_skipped_updates)
        self._passes_and_updates = self.begun = 0
        self.updates_left = 0, 0
        """The policy's updates that a step has still to do, of all of it; 0 between updates."""

    @property
    def progress(self) -> int:
        """A number that moves with each pass and update."""
        critic = self._critic
        return self._passes_and_updates + (0 if critic is None else critic.progress)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a step; models and optimizers are the strategies'."""
        critic = self._critic
        skipped = {"critic": 0 if critic is None else critic.skips.in_a_row}
        return {
            "skipped_in_a_row": {"actor": self._skips.in_a_row, **skipped},
            "advantage": self._advantage.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._skips.in_a_row = state["skipped_in_a_row"]["actor"]
        if self._critic is not None:
            self._critic.skips.in_a_row = state["skipped_in_a_row"]["critic"]
        self._advantage.load_state_dict(state["advantage"])

    def learn(
        self,
        groups: Sequence[Group],
        step: int,
        metrics: Metrics,
        watch: Stopwatch,
        **remote_columns: TokenColumn,
    ) -> Learned:
        """Train on `groups`; books figures in `metrics` and seconds in `watch`.

        Args:
            remote_columns: columns of models on other ranks: `ref`, the log-probs of a reference,
                and `values`, those of a critic, which then gets targets.

        Raises:
            TrainingError: too many updates in a row had a non-finite gradient, a number that
                rewards are made of is not finite, or rewards or weights overflow.
        """
        with watch.phase("batch"):
            settings, sharder = self._settings, self._policy.strategy.sharder
            batch = sharder.pack(groups, settings.microbatch_tokens, settings.overlong_filtering)
            # The weights after step k have version k.
            batch.columns["age"] = token_ages(groups, batch, step - 1)
            if (shape := self._policy.strategy.replayed) is not None:
                batch.columns[ROUTES] = token_routes(groups, batch, shape)
            batch.columns.update({n: batch.from_column(c) for n, c in remote_columns.items()})
        self._passes(batch, step, metrics, watch)
        with watch.phase("batch"):
            old = batch.columns["old"].numpy() if self._policy.has_pass else None
            entropy = batch.columns.pop("entropy", None)  # no loss needs it
            mismatch = None if old is None else _mismatch(batch, old)
            if self._correction is not None:
                batch = correct_batch(batch, self._correction, metrics)
            advantages = self._advantage(groups, batch, metrics)
            if "values" in batch.columns:
                metrics.merge(value_figures(batch))
        self.begun += 1
        with watch.phase("update"):
            self._updates(groups, batch, step, metrics)
        metrics.merge(self._policy.strategy.sharder.figures())
        metrics.merge(load_figures(self._policy.strategy.expert_load()))
        samples_B = advantages.samples.numpy()
        metrics.spread("score/advantage", samples_B)
        targets = None
        if "values" in remote_columns:
            targets = [batch.columns["returns"].numpy()], [batch.loss_mask.numpy()]
        return Learned(
            samples_B.astype(np.float32),
            batch.prompt_lengths.numpy(),
            int(batch.lengths.sum()),
            old,
            None if entropy is None else entropy.numpy(),
            mismatch,
            targets,
            batch.holders,
        )

    def _passes(self, batch: Batch, step: int, metrics: Metrics, watch: Stopwatch) -> None:
        """Fill the columns that models compute: `old`, `ref`, `values`."""
        policy, reference, critic = self._policy, self._reference, self._critic
        tokens = self._settings.microbatch_tokens
        makes_pass = policy.objective.old in ("pass", "reuse")
        with watch.phase("old_logprobs" if makes_pass else "batch"):
            metrics.merge(policy.fill_old_logprobs(batch, tokens, "prob" in self._advantage.needs))
        self._passes_and_updates += 1
        if reference is not None:
            is_policy = reference is policy.strategy
            without = reference.adapter_off() if is_policy else contextlib.nullcontext()
            with watch.phase("reference"), without:
                # Without columns: its routers choose by themselves, the policy's among them.
                bare = replace(batch, columns={})
                outputs = run_pass(reference, bare, frozenset({"logprob"}), tokens)
            batch.columns["ref"] = outputs["logprob"]
            self._passes_and_updates += 1
        if critic is not None:
            with watch.phase("values"):
                critic.values(batch, step)

    def _updates(self, groups: Sequence[Group], batch: Batch, step: int, metrics: Metrics) -> None:
        settings, policy = self._settings, self._policy
        if self._critic is not None:
            metrics.merge(self._critic.update(batch, step))
        if step <= settings.critic_warmup_steps:
            return
        # They number samples independently of their places in the batch.
        numbers = [group.id << 16 | i for group in groups for i in range(len(group.answers))]
        keys, has_moved = torch.tensor(numbers, dtype=torch.int64), False
        self.updates_left = 0, 0  # of a step that an exception ended
        updates = list(settings.updates(batch.n_groups, step))
        for number, (seed, update) in enumerate(updates):
            self.updates_left = len(updates) - number, len(updates)
            draw_seed = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
            policy.select_tokens(batch, update, keys, int(draw_seed))
            micro = policy.strategy.sharder.cut_update(batch, update, settings.microbatch_tokens)
            stats = policy.update(micro, settings.lr(step), has_moved)
            metrics.merge(stats)
            has_moved |= self._skips.count(stats, step)
            self._passes_and_updates += 1
        self.updates_left = 0, len(updates)
        if has_moved:
            _check_weights(policy.strategy, "optim.lr", step)


class CriticLearner:
    """A critic's part of each step, beside a `Learner`'s policy or elsewhere.

    Args:
        settings: the policy's, as the cut into updates is the same.
    """

    def __init__(self, critic: Critic, settings: LearnerSettings) -> None:
        self._critic, self._settings = critic, settings
        self.microbatch_tokens = settings.critic_microbatch_tokens or settings.microbatch_tokens
        self.skips = SkippedUpdates("critic", "critic.", settings.critic_max_skipped_updates)
        self.progress = 0
        """A number that moves with each pass and update."""

    def values(self, batch: Batch, step: int) -> None:
        """Fill the column `values` [T], with the weights before the step.

        Raises:
            TrainingError: they are not finite.
        """
        self._critic.values(batch, self.microbatch_tokens)
        self.progress += 1
        if not all(batch.dp.all_gather(bool(batch.columns["values"].isfinite().all()))):
            raise TrainingError(
                f"step {step}: the critic's values are not finite; lower critic.optim.lr, or "
                "look for NaN weights in critic.path"
            )

    def update(self, batch: Batch, step: int) -> Metrics:
        """Take all updates of a step towards the column `returns`; returns `critic/…`.

        Raises:
            TrainingError: too many in a row had a non-finite gradient, or weights overflow.
        """
        metrics, strategy, rate = Metrics(), self._critic.strategy, self._settings.critic_lr
        assert rate is not None
        has_moved = False
        for _, update in self._settings.updates(batch.n_groups, step):
            micro = strategy.sharder.cut_update(batch, update, self.microbatch_tokens)
            stats = self._critic.update(micro, rate(step))
            metrics.merge(stats)
            has_moved |= self.skips.count(stats, step)
            self.progress += 1
        if has_moved:
            _check_weights(strategy, "critic.optim.lr", step)
        metrics.merge(strategy.sharder.figures())
        return metrics


class SkippedUpdates:
    """The number of a role's updates in a row that had a non-finite gradient.

    Args:
        prefix: of the role's settings.
        limit: number at which learning has failed.
    """

    def __init__(self, role: str, prefix: str, limit: int) -> None:
        self._role, self._prefix, self._limit = role, prefix, limit
        self.in_a_row = 0

    def count(self, stats: Metrics, step: int) -> bool:
        """Return whether the update changed the weights; one without a counted token does not.

        Raises:
            TrainingError: the limit is reached.
        """
        figures, role, where = stats.record(), self._role, self._prefix
        if not figures.get(f"{role}/updates"):
            return False
        skipped = bool(figures[f"{role}/skipped_updates"])
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self._limit:
            raise TrainingError(
                f"step {step}: {self.in_a_row} updates in a row had a gradient that is not finite "
                f"({where}optim.max_skipped_updates); lower {where}optim.lr, or look for NaN "
                f"weights in {where or 'model.'}path"
            )
        return not skipped


def _check_weights(moved: Strategy, field: str, step: int) -> None:
    """Refuse weights that an update has made too large to be numbers, before anything saves them.

    Raises:
        TrainingError: they are.
    """
    if not moved.weights_are_finite():
        raise TrainingError(
            f"step {step}: the weights overflowed in its updates and are not saved; lower {field}"
        )


def _mismatch(batch: Batch, old: FloatArray) -> FloatArray:
    """Return [B] mean |old - behav| over the tokens that the policy wrote."""
    samples, mismatch_B = batch.samples, torch.zeros(batch.n_samples)
    mask, starts = batch.gen_mask.numpy(), batch.offsets.numpy()[samples]
    distances = np.where(mask, np.abs(old - batch.behav.numpy()), 0.0)
    counts = np.maximum(np.add.reduceat(mask.astype(np.int64), starts), 1) if len(samples) else 1
    means = np.add.reduceat(distances, starts) / counts if len(samples) else distances
    mismatch_B[torch.from_numpy(samples)] = torch.from_numpy(np.asarray(means, np.float32))
    return batch.dp.all_reduce(mismatch_B).numpy()


def lr_at(
    step: int,
    *,
    total_steps: int,
    lr: float,
    warmup_steps: int = 0,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    final_lr_ratio: float = 0.0,
) -> float:
    """Return the learning rate of every update of `step`.

    Warm-up step k runs at lr * k / warmup_steps, so the peak is at step max(warmup_steps, 1).
    From there linear and cosine fall to lr * final_lr_ratio, which they would reach one step after
    the last, so that no step is spent on a rate of zero.

    Args:
        step: counted from 1, in steps (not updates).
        total_steps: of the run; later steps have the final rate.
        lr: the peak.
    """
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if schedule == "constant":
        return lr
    peak = max(warmup_steps, 1)
    done = min((step - peak) / max(total_steps + 1 - peak, 1), 1.0)
    remaining = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return lr * (final_lr_ratio + (1 - final_lr_ratio) * remaining)


def token_ages(groups: Sequence[Group], batch: Batch, version: int) -> Tensor:
    """Count the weight versions between each token's sampler and the policy that learns.

    Args:
        groups: those of which `batch` was packed.
        version: of the policy that learns.

    Returns:
        [T] int64; 0 off gen_mask.
    """
    versions: list[int] = []
    stops: list[int] = [0]
    answers = [answer for group in groups for answer in group.answers]
    for place in batch.samples.tolist():
        for segment in answers[place].trajectory.segments:
            start = stops[-1]
            for span in segment.spans:
                versions.append(span.version)
                stops.append(start + span.stop)
    ages_T = torch.zeros(len(batch.token_ids), dtype=torch.int64)
    ages_T[batch.gen_mask] = torch.from_numpy(
        version - np.repeat(np.array(versions, dtype=np.int64), np.diff(stops))
    )
    return ages_T
