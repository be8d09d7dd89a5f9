"""One step of learning from its groups: passes, advantages, updates.

    groups ─pack─► batch ─► passes: old │ ref │ values [T]
                     ├─► correction: weights [T], loss_mask
                     ├─► rewards less KL ─► advantages, returns [T]
                     └─► updates: mini-batch → micro-batches → one step of critic and policy

The parts are chosen when the learner is built: a step computes only what its algorithm needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from winnow.errors import TrainingError
from winnow.learning.advantage import AdvantageStage, correct_batch
from winnow.learning.batch import Batch, cut_updates, pack, token_ages
from winnow.learning.critic import Critic, value_figures
from winnow.learning.policy import Policy
from winnow.learning.strategy import Strategy, run_pass
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.types import FloatArray, Group, IntArray


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
    """[T] nats: the trainer's, before the updates; None where the step took no pass for them."""
    entropies: FloatArray | None = None
    """[T] nats, of the same pass."""
    mismatch: FloatArray | None = None
    """[B] nats: mean distance of the sampler's log-probs from those, over a sample's tokens."""


class AnyLearner(Protocol):
    """A `Learner`, or a stand-in for those of several ranks."""

    @property
    def progress(self) -> int:
        """A number that moves with each pass and update."""
        ...

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Train on the groups of a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a step, without models and optimizers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        ...


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
        self._policy, self._reference, self._critic = policy, reference, critic
        self._advantage, self._settings, self._correction = advantage, settings, correction
        self._skipped_in_a_row = {"actor": 0, "critic": 0}
        self.progress = 0
        """A number that moves with each pass and update."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a step; models and optimizers are the strategies'."""
        return {
            "skipped_in_a_row": dict(self._skipped_in_a_row),
            "advantage": self._advantage.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._skipped_in_a_row = dict(state["skipped_in_a_row"])
        self._advantage.load_state_dict(state["advantage"])

    def learn(
        self,
        groups: Sequence[Group],
        step: int,
        metrics: Metrics,
        watch: Stopwatch,
        ref: ArrayLike | None = None,
    ) -> Learned:
        """Train on `groups`; books figures in `metrics` and seconds in `watch`.

        Args:
            ref: [T] log-probs of a reference that is elsewhere, in the order of `pack`.

        Raises:
            TrainingError: too many updates in a row had a non-finite gradient, a number that
                rewards are made of is not finite, or rewards or weights overflow.
        """
        with watch.phase("batch"):
            batch = pack(groups, self._settings.overlong_filtering)
            # The weights after step k have version k.
            batch.columns["age"] = token_ages(groups, batch, step - 1)
            if ref is not None:
                batch.columns["ref"] = torch.from_numpy(np.array(ref))
        self._passes(batch, step, metrics, watch)
        with watch.phase("batch"):
            old = batch.columns["old"].numpy() if self._policy.has_pass else None
            entropy = batch.columns.pop("entropy", None)  # no loss asks for it
            mismatch = None if old is None else _mismatch(batch, old)
            if self._correction is not None:
                batch = correct_batch(batch, self._correction, metrics)
            advantages = self._advantage(groups, batch, metrics)
            if self._critic is not None:
                metrics.merge(value_figures(batch))
        with watch.phase("update"):
            self._updates(groups, batch, step, metrics)
        metrics.merge(self._policy.strategy.sharder.figures())
        samples_B = advantages.samples.numpy()
        metrics.spread("score/advantage", samples_B)
        return Learned(
            samples_B.astype(np.float32),
            batch.prompt_lengths.numpy(),
            len(batch.token_ids),
            old,
            None if entropy is None else entropy.numpy(),
            mismatch,
        )

    def _passes(self, batch: Batch, step: int, metrics: Metrics, watch: Stopwatch) -> None:
        """Fill the columns that models compute: `old`, `ref`, `values`."""
        policy, reference, critic = self._policy, self._reference, self._critic
        tokens = self._settings.microbatch_tokens
        with watch.phase("old_logprobs" if policy.has_pass else "batch"):
            metrics.merge(policy.old_logprobs(batch, tokens, "prob" in self._advantage.needs))
        self.progress += 1
        if reference is not None:
            is_policy = reference is policy.strategy
            without = reference.adapter_off() if is_policy else contextlib.nullcontext()
            with watch.phase("reference"), without:
                found = run_pass(reference, batch, frozenset({"logprob"}), tokens)
            batch.columns["ref"] = found["logprob"]
            self.progress += 1
        if critic is not None:
            with watch.phase("values"):
                critic.values(batch, self._settings.critic_microbatch_tokens or tokens)
            self.progress += 1
            if not bool(batch.columns["values"].isfinite().all()):
                raise TrainingError(
                    f"step {step}: the critic's values are not finite; lower critic.optim.lr, or "
                    "look for NaN weights in critic.path"
                )

    def _updates(self, groups: Sequence[Group], batch: Batch, step: int, metrics: Metrics) -> None:
        settings, policy, critic = self._settings, self._policy, self._critic
        cut = policy.strategy.sharder.update
        keys = _sample_keys(groups)
        has_moved = critic_has_moved = False
        for epoch in range(settings.epochs):
            seed = (settings.seed, step, epoch)
            updates = cut_updates(len(groups), settings.groups_per_update, seed)
            for place, update in enumerate(updates):
                policy.choose(batch, update, keys, _draw_seed(*seed, place))
                micro = cut(batch, update, settings.microbatch_tokens)
                if critic is not None:
                    assert settings.critic_lr is not None
                    own = settings.critic_microbatch_tokens
                    parts = micro if own is None else cut(batch, update, own)
                    stats = critic.update(parts, settings.critic_lr(step))
                    metrics.merge(stats)
                    critic_has_moved |= self._count_skips("critic", stats, step)
                    self.progress += 1
                if step > settings.critic_warmup_steps:
                    stats = policy.update(micro, settings.lr(step), has_moved)
                    metrics.merge(stats)
                    has_moved |= self._count_skips("actor", stats, step)
                self.progress += 1
        if has_moved:
            _check_weights(policy.strategy, "optim.lr", step)
        if critic is not None and critic_has_moved:
            _check_weights(critic.strategy, "critic.optim.lr", step)

    def _count_skips(self, role: str, stats: Metrics, step: int) -> bool:
        """Return whether the update changed the weights; one without a counted token does not."""
        figures = stats.record()
        if not figures.get(f"{role}/updates"):
            return False
        skipped = bool(figures[f"{role}/skipped_updates"])
        in_a_row = self._skipped_in_a_row[role] + 1 if skipped else 0
        self._skipped_in_a_row[role] = in_a_row
        limit, where = self._settings.max_skipped_updates, ""
        if role == "critic":
            limit, where = self._settings.critic_max_skipped_updates, "critic."
        if in_a_row >= limit:
            raise TrainingError(
                f"step {step}: {in_a_row} updates in a row had a gradient that is not finite "
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
            f"step {step}: the weights overflow after its updates, and are not saved; lower {field}"
        )


def _sample_keys(groups: Sequence[Group]) -> Tensor:
    """Number each sample [B], int64, independently of its place in the batch."""
    keys = [group.id << 16 | index for group in groups for index in range(len(group.answers))]
    return torch.tensor(keys, dtype=torch.int64)


def _draw_seed(*parts: int) -> int:
    """Make one 64-bit seed from several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _mismatch(batch: Batch, old: FloatArray) -> FloatArray:
    """Return [B] mean |old - behav| over the tokens that the policy wrote."""
    mask, starts = batch.gen_mask.numpy(), batch.offsets[:-1].numpy()
    distances = np.where(mask, np.abs(old - batch.behav.numpy()), 0.0)
    counts = np.maximum(np.add.reduceat(mask.astype(np.int64), starts), 1)
    return np.asarray(np.add.reduceat(distances, starts) / counts, np.float32)
