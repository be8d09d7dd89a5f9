"""The driver's end of models on ranks: learner, critic and reference, each a group of workers."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from winnow.checkpoints.checkpoint import FileEntry, Snapshot
from winnow.checkpoints.run_state import ModelStates
from winnow.config.roles import POLICY_STATE
from winnow.errors import CheckpointError
from winnow.learning.batch import sample_lengths
from winnow.learning.canary import Canary, CanaryScores
from winnow.learning.data_parallel import TokenColumn
from winnow.learning.fsdp2 import Exported
from winnow.learning.learner import AnyLearner, Learned
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.ranks.workers import RankFacts, StepReply
from winnow.rollout.weights import WeightUpdate, unpack_tensors
from winnow.types import FloatArray, Group, IntArray
from winnow.workers.array_refs import SplitResult
from winnow.workers.group import WorkerGroup


def joined(
    groups: Sequence[Group], learned: Learned, parts: Sequence[Mapping[str, FloatArray]]
) -> Learned:
    """Bring in the numbers [T] that ranks have of their samples, by share of the batch."""
    columns: dict[str, Any] = {}
    for name in parts[0] if parts else ():
        assert learned.holders is not None
        column = TokenColumn(learned.holders, [part[name] for part in parts])
        columns[name] = column.of(np.arange(len(learned.holders)), sample_lengths(groups))
    return replace(learned, **columns)


class RemoteLearner:
    """A `Learner`, and the `ModelStates` of a run, over the ranks of a group of `LearnerWorker`s.

    Raises:
        WinnowError: as calls of `WorkerGroup`; so do all methods that ask the ranks.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.facts: RankFacts = self.call("facts")
        self._state = self.facts.learner
        self._steps = self.begun = 0

    @property
    def progress(self) -> int:
        """Moves with each step, and with each pass and update of a rank."""
        return self._steps + sum(each or 0 for each in self._group.progress)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on all ranks; returns rank 0's result."""
        return self._group.call_blocking(method, *args, **kwargs)[0]

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch, **columns: Any
    ) -> Learned:
        """Train on a step's groups, with what `Learner.learn` may be given besides.

        The time that rank 0 books under its phases is booked here, too; `ranks` is what is left,
        the way there and back.
        """
        self.begun += 1
        with watch.phase("ranks"):
            replies = self._group.call_blocking("learn", list(groups), step, **columns)
        inline = [each.inline if isinstance(each, SplitResult) else each for each in replies]
        reply: StepReply = inline[0][1]
        watch.rebook("ranks", reply.seconds)
        metrics.merge(reply.metrics)
        self._state = reply.learner
        self._steps += 1
        learned = joined(groups, reply.learned, [tokens for tokens, _, _ in inline if tokens])
        if targets := [each for _, _, each in inline if each]:
            returns, masks = zip(*targets, strict=True)
            learned = replace(learned, targets=(returns, masks))
        return learned

    def held_out(self, groups: Sequence[Group]) -> float:
        """Return the loss of demonstrations, as `Imitator.held_out` does."""
        return cast(float, self.call("held_out", list(groups)))

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.call("load_learner", dict(state))
        self._state = state

    def trained(self, version: int) -> WeightUpdate:
        """Export the tensors that are trained, by names of parameters, for an engine over them."""
        stored = self._group.call_blocking("export", version, "trained")
        return WeightUpdate(version, tensors=unpack_tensors(stored))

    def weights(self, version: int, what: Exported = "all") -> WeightUpdate:
        """Export all weights, by Hugging Face names, an adapter merged, in the model's type; or the
        adapter by PEFT's names.

        In buckets that lie with the ranks: they need not come to this process.
        """
        return WeightUpdate(version, stored=self._group.call_blocking("export", version, what))

    def canary(self, canary: Canary) -> CanaryScores:
        scores: CanaryScores = self.call("canary", canary)
        return scores

    def copy(self) -> Snapshot:
        self.call("copy")
        write = partial(write_on_ranks, self._group)
        return Snapshot({}, save_model=lambda folder: None, save_ranks=write)

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        if not (checkpoint / POLICY_STATE).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no {POLICY_STATE}: it was saved by trainer/strategy=single; "
                "use that, or another checkpoint"
            )
        self.call("restore", str(checkpoint))


def write_on_ranks(group: WorkerGroup, checkpoint: Path) -> dict[str, FileEntry]:
    """Have a group of `SavingRank`s write; returns the entries of their files.

    Raises:
        OSError: the disk is full, or not writable.
        WinnowError: as calls of `WorkerGroup`.
    """
    entries: dict[str, FileEntry] = {}
    for reply in group.call_blocking("write", str(checkpoint)):
        if isinstance(reply, tuple):
            number, path = reply
            raise OSError(number, os.strerror(number), path)
        entries |= reply
    return entries


class AssistedLearner:
    """A learner and its `ModelStates` with a reference, a critic or both on ranks of their own.

    Raises:
        WinnowError: as calls of `WorkerGroup`.
    """

    def __init__(
        self,
        learner: AnyLearner,
        model_states: ModelStates,
        reference: WorkerGroup | None,
        critic: WorkerGroup | None,
    ) -> None:
        self._learner, self._model_states = learner, model_states
        self._reference, self._critic, self._skipped = reference, critic, 0

    @property
    def progress(self) -> int:
        """Moves with each pass and update."""
        groups = [each for each in (self._reference, self._critic) if each is not None]
        return self._learner.progress + sum(n or 0 for group in groups for n in group.progress)

    @property
    def begun(self) -> int:
        """The number of steps of which an update may have changed weights."""
        return self._learner.begun

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Train on the groups of a step; a critic learns after the policy."""
        bare, columns = [group.without_extras for group in groups], dict[str, TokenColumn]()
        if self._reference is not None:
            with watch.phase("reference"):
                columns["ref"] = _column(self._reference.call_blocking("logprobs", bare))
        if self._critic is None:
            return self._learner.learn(groups, step, metrics, watch, **columns)
        with watch.phase("values"):
            columns["values"] = _column(self._critic.call_blocking("values", bare, step))
        learned = self._learner.learn(groups, step, metrics, watch, **columns)
        assert learned.targets is not None
        holders = learned.holders
        if holders is None:
            holders = np.zeros(len(learned.advantages), np.int64)
        targets = [TokenColumn(holders, parts) for parts in learned.targets]
        with watch.phase("update"):
            figures, self._skipped = self._critic.call_blocking("learn", step, *targets)[0]
        metrics.merge(figures)
        return learned

    def state_dict(self) -> dict[str, Any]:
        state = self._learner.state_dict()
        if self._critic is not None:
            state["skipped_in_a_row"] = {**state["skipped_in_a_row"], "critic": self._skipped}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._learner.load_state_dict(state)
        if self._critic is not None:
            self._skipped = state["skipped_in_a_row"]["critic"]
            self._critic.call_blocking("load_learner", self._skipped)

    def copy(self) -> Snapshot:
        if self._critic is None:
            return self._model_states.copy()
        critic = self._critic
        critic.call_blocking("copy")
        snapshot = self._model_states.copy()

        def save_ranks(checkpoint: Path) -> dict[str, FileEntry]:
            entries = snapshot.save_ranks(checkpoint)
            return {**entries, **write_on_ranks(critic, checkpoint)}

        return replace(snapshot, save_ranks=save_ranks)

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        self._model_states.restore(checkpoint, state)
        if self._critic is not None:
            self._critic.call_blocking("restore", str(checkpoint))


def _column(replies: Sequence[SplitResult]) -> TokenColumn:
    """Make a column [T] of the replies of ranks: the samples' holders, and each one's numbers."""
    return TokenColumn(replies[0].inline[0], [each.inline[1] for each in replies])


def asking(
    ranks: WorkerGroup, max_tokens: int
) -> Callable[[Sequence[IntArray]], Awaitable[list[float]]]:
    """Return what asks a group of `RewardModelWorker`s for the numbers of sequences."""

    async def forward(sequences: Sequence[IntArray]) -> list[float]:
        answers = await ranks.call("score", list(sequences), max_tokens)
        return cast("list[float]", answers[0])

    return forward
