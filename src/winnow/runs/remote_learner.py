"""A learning side on several ranks: `LearnerWorker` is one of them, `RemoteLearner` asks them here.

Every rank has a `Learner` over models that are sharded over all, and is asked the same at the same
time. Rank 0 answers for all. Groups of answers go there, figures come back.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from winnow.config.roles import POLICY_STATE, Roles
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, Megatron
from winnow.data.tokenizer import load_tokenizer
from winnow.errors import CheckpointError
from winnow.learning.batch import TokenColumn, sample_lengths
from winnow.learning.canary import Canary, CanaryScores
from winnow.learning.fsdp2 import Exported, FSDP2Strategy
from winnow.learning.imitation import Imitator
from winnow.learning.learner import Learned
from winnow.learning.shards import (
    State,
    on_host,
    raise_on_all,
    read_shards,
    write_model,
    write_shards,
)
from winnow.models.causal_lm import model_writer
from winnow.models.lora import adapter_writer
from winnow.observe.files import sync, system_error
from winnow.observe.metrics import Metrics, Number, Stopwatch
from winnow.observe.profile import profiler_of
from winnow.rollout.engine import WeightUpdate
from winnow.rollout.weights import BUCKET_BYTES, buckets, store_bucket, tensors
from winnow.runs.build_learner import make_learner
from winnow.runs.checkpoint import (
    FileEntry,
    Snapshot,
    file_entry,
    this_machine,
    verify_share,
)
from winnow.runs.loading import check_finite, load_policy_model
from winnow.runs.metrics import Passes
from winnow.runs.scoring_ranks import join_ranks
from winnow.runs.state import Save
from winnow.types import FloatArray, Group
from winnow.workers.array_refs import Handle, SplitResult, left_here
from winnow.workers.group import WorkerGroup
from winnow.workers.host import RankInfo

if TYPE_CHECKING:
    from winnow.learning.megatron import MegatronStrategy

    RanksStrategy = FSDP2Strategy | MegatronStrategy

_OF_TOKENS = "old_logprobs", "entropies"


@dataclass(frozen=True)
class RankFacts:
    """Facts of the learning side that the driver needs."""

    passes: Passes
    learner: Mapping[str, Any]
    """The learner's state."""
    machine: Mapping[str, str | int]
    """Facts that the bits depend on."""


@dataclass(frozen=True, eq=False)
class StepReply:
    """The results of a step."""

    learned: Learned
    """Without what is [T]."""
    metrics: Metrics
    seconds: Mapping[str, Number]
    """By phase, on rank 0."""
    learner: Mapping[str, Any]
    """The learner's state."""


class SavingRank:
    """A rank of strategies that learn, which a subclass makes; a worker of a `WorkerGroup`."""

    role: ClassVar[str]
    """Its name in `Roles`."""

    def __init__(self, rank: RankInfo, config: Config, replicas: int) -> None:
        self._is_first, self._rank, self._ranks = rank.rank == 0, rank.rank, rank.size
        self._folder = Roles(config)[self.role].saved_in or self.role
        joined = join_ranks(rank, config.run.threads, replicas)
        self._mesh, self._host_mesh = joined
        # Of its own, so that saving and the next step do not take each other's messages.
        self._saving = dist.new_group(backend="gloo")
        self._strategies: dict[str, RanksStrategy] = {}
        self._copied: State = {}

    def copy(self) -> None:
        """Copy all that learns, for `write`, so that the next step may change it."""
        states = {role: s.state_dict() for role, s in self._strategies.items()}
        self._copied = on_host(states, self._host_mesh)

    async def write(self, checkpoint: str) -> dict[str, FileEntry] | tuple[int, str]:
        """Write what was copied into a checkpoint's folder, beside whatever else the ranks do.

        Returns:
            The files that this rank wrote, on disk; or what the system said when it refused a
            write: its number, and the path.
        """
        try:
            return await asyncio.to_thread(self._write, Path(checkpoint))
        except (OSError, RuntimeError, SafetensorError) as error:
            refusal = system_error(error)
            if refusal is None or refusal.errno is None:
                raise
            return refusal.errno, str(refusal.filename or checkpoint)

    def _write(self, checkpoint: Path) -> dict[str, FileEntry]:
        written = self._written(checkpoint)
        for path in written:
            sync(path)
        return {str(path.relative_to(checkpoint)): file_entry(path) for path in written}

    def _written(self, checkpoint: Path) -> list[Path]:
        """Write what was copied, and forget it; returns this rank's files."""
        copied, self._copied = self._copied, {}
        folder = checkpoint / self._folder
        write_shards(copied, folder, self._saving)
        metadata = [folder / ".metadata"] if self._is_first else []
        return [*folder.glob(f"__{self._rank}_*"), *metadata]

    def restore(self, checkpoint: str) -> None:
        """Check the checkpoint's files and load what `write` wrote, on any number of ranks.

        Raises:
            CheckpointError: a file is damaged, or of another model.
        """
        fault: CheckpointError | None = None
        try:
            verify_share(Path(checkpoint), self._rank, self._ranks, self._folder)
        except CheckpointError as error:
            fault = error
        raise_on_all(fault, self._saving)
        mesh, strategies = self._host_mesh, self._strategies
        blank = {role: on_host(s.blank_state(), mesh) for role, s in strategies.items()}
        read_shards(blank, Path(checkpoint) / self._folder, self._saving)
        for role, strategy in strategies.items():
            strategy.load_state_dict(blank[role])

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _book_memory(self, metrics: Metrics) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._mesh.device_type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        peaks: list[int] = [0] * self._ranks
        dist.all_gather_object(peaks, peak)
        metrics.max("ranks/peak_gib", max(peaks) / 2**30)


class LearnerWorker(SavingRank):
    """One rank of the learning side; a worker of a `WorkerGroup`.

    Args:
        rank: its place.
        config: the recipe.
        path: the policy's folder, a model's or a checkpoint's with an adapter.
        start: folder of the model that the run began with; where an adapter in `path` belongs to
            it, the model lies there now.
        vocabulary: ids that the tokenizer has.
        tokenizer: its folder; it is saved with the model.

    Raises:
        ModelError: a model of the recipe cannot be loaded.
    """

    role: ClassVar[str] = "policy"

    def __init__(
        self,
        rank: RankInfo,
        config: Config,
        path: str,
        start: str | None,
        vocabulary: int,
        tokenizer: str,
    ) -> None:
        strategy = config.trainer.strategy
        assert isinstance(strategy, Fsdp2 | Megatron)
        super().__init__(rank, config, strategy.replicas if isinstance(strategy, Fsdp2) else 1)
        self._profiler = profiler_of(config, "learner", rank.rank)
        model = load_policy_model(
            config.model, path, torch.device("cpu"), config.run.seed, start, hollow=True
        )
        self._learning = make_learner(config, model, vocabulary, start, self._mesh)
        check_finite(path, self._learning.policy.held())
        strategies = {"policy": self._learning.policy, **self._learning.others}
        self._strategies = cast("dict[str, RanksStrategy]", strategies)
        assert rank.store is not None
        self._store = rank.store
        self._bucket_bytes, self._exported = min(strategy.bucket_mb << 20, BUCKET_BYTES), 0
        self._model: dict[str, Tensor] = {}
        self._save_model: Save | None = None
        if self._is_first:
            writer = adapter_writer if self._learning.policy.has_adapter else model_writer
            self._save_model = writer(
                model, load_tokenizer(tokenizer, config.model.trust_remote_code)
            )

    @property
    def progress(self) -> int:
        """Moves with each pass and update, and each bucket of weights."""
        return self._learning.learner.progress + self._exported

    def facts(self) -> RankFacts:
        """Return what the driver needs before the first step."""
        learning = self._learning
        machine = this_machine(learning.policy.device)
        return RankFacts(learning.passes, learning.learner.state_dict(), machine)

    def learn(
        self, groups: Sequence[Group], step: int, **given: Any
    ) -> SplitResult | tuple[dict[str, FloatArray], StepReply | None, tuple[Any, ...]]:
        """Train on a step's groups, as `Learner.learn` does.

        Returns:
            The numbers [T] of `Learned` that there are, of this rank's samples (nothing where a
            rank before it has the same samples); on rank 0 all else; and what a critic elsewhere is
            to learn of these samples, which stays here.
        """
        if self._profiler is not None:
            self._profiler.begin(step)
        self._store.clear()  # engines have the weights
        metrics, watch = Metrics(), Stopwatch()
        learned = self._learning.learner.learn(groups, step, metrics, watch, **given)
        self._book_memory(metrics)
        if self._profiler is not None:
            self._profiler.end()
        own: dict[str, FloatArray] = {}
        peers = self._learning.policy.sharder.peers
        if peers.is_first:
            numbers = {name: getattr(learned, name) for name in _OF_TOKENS}
            own = {name: values for name, values in numbers.items() if values is not None}
        if not self._is_first:
            reply = None
        else:
            learned_here = replace(learned, old_logprobs=None, entropies=None, targets=None)
            state = self._learning.learner.state_dict()
            reply = StepReply(learned_here, metrics, watch.seconds(), state)
        if learned.targets is None or not peers.is_first:
            return own, reply, ()
        targets, block = left_here(*(part for (part,) in learned.targets))
        return SplitResult((own, reply, targets), block)

    def held_out(self, groups: Sequence[Group]) -> float:
        """Return the loss of demonstrations, as `Imitator.held_out` does."""
        learner = self._learning.learner
        assert isinstance(learner, Imitator)
        return learner.held_out(groups)

    def load_learner(self, state: Mapping[str, Any]) -> None:
        """Give the learner the state that it had."""
        self._learning.learner.load_state_dict(state)

    def canary(self, canary: Canary) -> CanaryScores:
        """Compute the policy's log-probs of fixed sequences, shared out over the ranks."""
        return canary.expected(self._learning.policy)

    def export(self, version: int, what: Exported) -> Handle:
        """Leave this rank's share of the policy's weights, or of some of them, in its store.

        Returns:
            A handle of the list of them: every n-th bucket, as large as those of the other ranks.
        """
        policy = self._strategies["policy"]
        weights = policy.export_weights(adapter_only=what == "adapter")
        if what == "trained":
            weights = policy.export_trained()
        # A multiple of every element's size, so that no bucket has room left but the last.
        total = policy.exported_bytes(what)
        rounds = math.ceil(total / (self._ranks * self._bucket_bytes))
        parts = 8 * self._ranks * max(rounds, 1)
        size = 8 * math.ceil(total / parts)
        self._store.clear()
        stored = []
        for bucket in buckets(WeightUpdate(version, weights), size, self._rank, self._ranks):
            stored.append(store_bucket(bucket, self._store))
            self._exported += 1
        return self._store.put(stored)

    def copy(self) -> None:
        """Copy all that learns, for `write`, so that the next step may change it."""
        self._store.clear()
        super().copy()
        policy = self._strategies["policy"]
        if not policy.has_adapter:
            self._model = on_host(policy.export_shards(), self._host_mesh)
            return
        for name, tensor in policy.export_weights(adapter_only=True):
            if self._is_first:
                self._model[name] = tensor.detach().to("cpu", copy=True)

    def _written(self, checkpoint: Path) -> list[Path]:
        # First what all ranks do together: one that failed before would leave the others waiting.
        model, self._model = self._model, {}
        written = super()._written(checkpoint)
        policy = self._strategies["policy"]
        if not policy.has_adapter:
            written += write_model(policy.model, model, checkpoint / "model", self._saving)
            model = {}  # what is left to write is not weights
        if self._save_model is not None:
            written += _written_beside(self._save_model, model, checkpoint / "model")
        return written

    def close(self) -> None:
        """Leave the process group."""
        if self._profiler is not None:
            self._profiler.close()
        super().close()


def _written_beside(save: Save, weights: dict[str, Tensor], folder: Path) -> list[Path]:
    """Have transformers write into a folder, of which it would delete the shards of a model that it
    did not write; returns its files."""
    draft = folder.with_name(f"{folder.name}.draft")
    save(weights, draft)
    names = [path.relative_to(draft) for path in draft.rglob("*") if path.is_file()]
    folder.mkdir(exist_ok=True)
    for path in draft.iterdir():
        path.replace(folder / path.name)
    draft.rmdir()
    return [folder / name for name in names]


def joined(
    groups: Sequence[Group], learned: Learned, parts: Sequence[Mapping[str, FloatArray]]
) -> Learned:
    """Bring in the numbers [T] that ranks have of their samples, by share of the batch."""
    found: dict[str, Any] = {}
    for name in parts[0] if parts else ():
        assert learned.holders is not None
        column = TokenColumn(learned.holders, [part[name] for part in parts])
        found[name] = column.of(np.arange(len(learned.holders)), sample_lengths(groups))
    return replace(learned, **found)


class RemoteLearner:
    """A `Learner`, and the `Tensors` of a run, over the ranks of a group of `LearnerWorker`s.

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
        return self._group.ask(method, *args, **kwargs)[0]

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch, **given: Any
    ) -> Learned:
        """Train on a step's groups, with what `Learner.learn` may be given besides.

        The time that rank 0 books under its phases is booked here, too; `ranks` is what is left,
        the way there and back.
        """
        self.begun += 1
        with watch.phase("ranks"):
            found = self._group.ask("learn", list(groups), step, **given)
        said = [each.told if isinstance(each, SplitResult) else each for each in found]
        reply: StepReply = said[0][1]
        watch.rebook("ranks", reply.seconds)
        metrics.merge(reply.metrics)
        self._state = reply.learner
        self._steps += 1
        learned = joined(groups, reply.learned, [own for own, _, _ in said if own])
        if targets := [each for _, _, each in said if each]:
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
        return WeightUpdate(version, tensors=tensors(self._shares(version, "trained")))

    def weights(self, version: int) -> WeightUpdate:
        """Export all weights, by Hugging Face names, an adapter merged, in the model's type.

        In buckets that lie with the ranks: they need not come to this process.
        """
        return WeightUpdate(version, shares=self._shares(version, "all"))

    def adapter(self, version: int) -> WeightUpdate:
        """Export the adapter by PEFT's names, in buckets that lie with the ranks."""
        return WeightUpdate(version, shares=self._shares(version, "adapter"))

    def _shares(self, version: int, what: Exported) -> list[Handle]:
        return self._group.ask("export", version, what)

    def canary(self, canary: Canary) -> CanaryScores:
        found: CanaryScores = self.call("canary", canary)
        return found

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
    for said in group.ask("write", str(checkpoint)):
        if isinstance(said, tuple):
            number, path = said
            raise OSError(number, os.strerror(number), path)
        entries |= said
    return entries
