"""Ranks of the policy, the critic, the reference and a reward model, each a worker of its group.

    policy      has a `Learner` over models that are sharded over all ranks; rank 0 answers for all
    critic      groups ─► values of its samples, before the policy learns; returns and loss_mask of
                them ─► updates, after it; all [T] stay on their node
    reference   groups ─► log-probs of its samples, which stay on their node
    reward      token ids ─► numbers; a score depends neither on the ranks nor on which runs it

All ranks of a group are asked the same at the same time (`winnow.ranks.remote`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from winnow.checkpoints.checkpoint import FileEntry, describe_machine, file_entry, verify_rank_share
from winnow.checkpoints.run_state import Save
from winnow.config.judge import SequenceClassifier, scorer_sharding
from winnow.config.model import ShardedReference
from winnow.config.roles import Roles
from winnow.config.root import Config, RunConfig
from winnow.config.trainer import Fsdp2, Megatron, ShardedCritic
from winnow.data.tokenizer import load_tokenizer
from winnow.errors import CheckpointError
from winnow.learning.batch import Batch
from winnow.learning.canary import Canary, CanaryScores
from winnow.learning.data_parallel import TokenColumn, device_of
from winnow.learning.fsdp2 import Exported, FSDP2Strategy, Sharding, make_mesh
from winnow.learning.imitation import Imitator
from winnow.learning.learner import CriticLearner, Learned
from winnow.learning.shards import (
    State,
    copy_to_host,
    raise_on_all,
    read_shards,
    write_model,
    write_shards,
)
from winnow.learning.strategy import Strategy, local, run_pass, score_sequences
from winnow.models.causal_lm import load_causal_lm, model_writer
from winnow.models.folders import torch_dtype
from winnow.models.lora import adapter_writer
from winnow.models.value import load_reward_model
from winnow.observe.files import find_os_error, fsync_path
from winnow.observe.metrics import Metrics, Number, Stopwatch
from winnow.observe.profile import make_profiler
from winnow.ranks.learner import (
    critic_passes,
    load_role,
    make_critic,
    make_learner,
    make_settings,
    readout_options,
)
from winnow.ranks.models import check_finite, load_policy_model, use_deterministic_kernels
from winnow.rollout.weights import BUCKET_BYTES, WeightUpdate, pack_buckets, store_bucket
from winnow.run.step_metrics import StepFlop, peak_gib
from winnow.types import FloatArray, Group, IntArray
from winnow.workers.array_refs import Handle, SplitResult, make_refs
from winnow.workers.host import RankInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from winnow.learning.megatron import MegatronStrategy

    RanksStrategy = FSDP2Strategy | MegatronStrategy

_OF_TOKENS = "old_logprobs", "entropies"


@dataclass(frozen=True)
class RankFacts:
    """Facts of the learning side that the driver needs."""

    passes: StepFlop
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


class Rank:
    """One of the ranks that hold a model together; a worker of a `WorkerGroup`.

    Args:
        rank: its place.
        run: section of the recipe; its threads are those of a rank on the CPU.
        replicas: copies of the model, each sharded over ranks / replicas of them.
    """

    def __init__(self, rank: RankInfo, run: RunConfig, replicas: int) -> None:
        if rank.device_index is not None:
            if run.deterministic:
                use_deterministic_kernels()
            torch.cuda.set_device(rank.device_index)
        elif run.threads is not None:
            torch.set_num_threads(run.threads)
        kind = "cpu" if rank.device_index is None else "cuda"
        dist.init_process_group(
            "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{rank.master_address}:{rank.master_port}",
            rank=rank.rank,
            world_size=rank.size,
        )
        self._is_first = rank.rank == 0
        self._mesh = self._host_mesh = make_mesh(kind, rank.size, replicas)
        if kind != "cpu":
            self._host_mesh = make_mesh("cpu", rank.size, replicas)

    def release_memory(self) -> None:
        """Give GPU memory back that the next step alone needs, as an engine takes its turn."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class SavingRank(Rank):
    """A rank of strategies that learn, which a subclass makes."""

    role: ClassVar[str]
    """Its name in `Roles`."""

    def __init__(self, rank: RankInfo, config: Config, replicas: int) -> None:
        super().__init__(rank, config.run, replicas)
        self._rank, self._ranks = rank.rank, rank.size
        self._folder = Roles(config)[self.role].saved_in or self.role
        # Of its own, so that saving and the next step do not take each other's messages.
        self._saving = dist.new_group(backend="gloo")
        self._strategies: dict[str, RanksStrategy] = {}
        self._copied: State = {}

    def copy(self) -> None:
        """Copy all that learns, for `write`, so that the next step may change it."""
        states = {role: s.state_dict() for role, s in self._strategies.items()}
        self._copied = copy_to_host(states, self._host_mesh)

    async def write(self, checkpoint: str) -> dict[str, FileEntry] | tuple[int, str]:
        """Write what was copied into a checkpoint's folder, beside whatever else the ranks do.

        Returns:
            The files that this rank wrote, on disk; or what the system said when it refused a
            write: its number, and the path.
        """
        try:
            return await asyncio.to_thread(self._write, Path(checkpoint))
        except (OSError, RuntimeError, SafetensorError) as error:
            refusal = find_os_error(error)
            if refusal is None or refusal.errno is None:
                raise
            return refusal.errno, str(refusal.filename or checkpoint)

    def _write(self, checkpoint: Path) -> dict[str, FileEntry]:
        written = self._written(checkpoint)
        for path in written:
            fsync_path(path)
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
            verify_rank_share(Path(checkpoint), self._rank, self._ranks, self._folder)
        except CheckpointError as error:
            fault = error
        raise_on_all(fault, self._saving)
        mesh, strategies = self._host_mesh, self._strategies
        blank = {role: copy_to_host(s.blank_state(), mesh) for role, s in strategies.items()}
        read_shards(blank, Path(checkpoint) / self._folder, self._saving)
        for role, strategy in strategies.items():
            strategy.load_state_dict(blank[role])

    def _book_memory(self, metrics: Metrics) -> None:
        peaks: list[float] = [0.0] * self._ranks
        dist.all_gather_object(peaks, peak_gib(device_of(self._mesh)))
        metrics.max("ranks/peak_gib", max(peaks))


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
        self._profiler = make_profiler(config.trainer.profile, "learner", rank.rank)
        model = load_policy_model(
            config.model, path, torch.device("cpu"), config.run.seed, start, hollow=True
        )
        self._learning = make_learner(config, Roles(config), model, vocabulary, start, self._mesh)
        check_finite(f"model.path {path}", self._learning.policy.local_weights())
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
        machine = describe_machine(learning.policy.device)
        return RankFacts(learning.passes, learning.learner.state_dict(), machine)

    def learn(
        self, groups: Sequence[Group], step: int, **columns: Any
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
        learned = self._learning.learner.learn(groups, step, metrics, watch, **columns)
        self._book_memory(metrics)
        if self._profiler is not None:
            self._profiler.end()
        tokens: dict[str, FloatArray] = {}
        dp = self._learning.policy.sharder.dp
        if dp.is_first:
            numbers = {name: getattr(learned, name) for name in _OF_TOKENS}
            tokens = {name: values for name, values in numbers.items() if values is not None}
        if not self._is_first:
            reply = None
        else:
            summary = replace(learned, old_logprobs=None, entropies=None, targets=None)
            state = self._learning.learner.state_dict()
            reply = StepReply(summary, metrics, watch.seconds(), state)
        if learned.targets is None or not dp.is_first:
            return tokens, reply, ()
        targets, block = make_refs(*(part for (part,) in learned.targets))
        return SplitResult((tokens, reply, targets), block)

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
        return canary.score(self._learning.policy)

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
        for bucket in pack_buckets(WeightUpdate(version, weights), size, self._rank, self._ranks):
            stored.append(store_bucket(bucket, self._store))
            self._exported += 1
        return self._store.put(stored)

    def copy(self) -> None:
        """Copy all that learns, for `write`, so that the next step may change it."""
        self._store.clear()
        super().copy()
        policy = self._strategies["policy"]
        if not policy.has_adapter:
            self._model = copy_to_host(policy.export_shards(), self._host_mesh)
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
            written += _write_into(self._save_model, model, checkpoint / "model")
        return written

    def close(self) -> None:
        """Leave the process group."""
        if self._profiler is not None:
            self._profiler.close()
        super().close()


def _write_into(save: Save, weights: dict[str, Tensor], folder: Path) -> list[Path]:
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


class CriticWorker(SavingRank):
    """One rank of the critic; a worker of a `WorkerGroup`.

    Args:
        start: as `LearnerWorker` takes it.

    Raises:
        ModelError: it cannot be loaded.
    """

    role: ClassVar[str] = "critic"

    def __init__(self, rank: RankInfo, config: Config, start: str | None) -> None:
        sharding = config.critic.strategy
        assert isinstance(sharding, ShardedCritic)
        super().__init__(rank, config, sharding.replicas)
        options = Sharding(offload=sharding.offload)
        hold = partial(FSDP2Strategy, mesh=self._mesh, sharding=options)
        critic = make_critic(config, start, device_of(self._mesh), True, hold)
        self._strategies["critic"] = cast(FSDP2Strategy, critic.strategy)
        self._learner = CriticLearner(critic, make_settings(config))
        self._batch: Batch | None = None

    @property
    def progress(self) -> int:
        """Moves with each pass and update."""
        return self._learner.progress

    def passes(self) -> dict[str, Any]:
        """Return the fields of `StepFlop` that are a critic's."""
        return critic_passes(self._strategies["critic"])

    def values(self, groups: Sequence[Group], step: int) -> SplitResult:
        """Return who holds each sample, and values [T] of this rank's, in the step's order.

        Raises:
            TrainingError: they are not finite.
        """
        sharder = self._strategies["critic"].sharder
        batch = self._batch = sharder.pack(groups, self._learner.microbatch_tokens)
        self._learner.values(batch, step)
        (values,), block = make_refs(batch.columns["values"].numpy())
        return SplitResult((batch.holders, values), block)

    def learn(self, step: int, returns: TokenColumn, loss_mask: TokenColumn) -> tuple[Metrics, int]:
        """Take the updates of a step whose values were asked for.

        Args:
            returns, loss_mask: of the step's tokens.

        Returns:
            Figures, and the number of updates that were skipped in a row.

        Raises:
            TrainingError: as `CriticLearner.update` does.
        """
        assert self._batch is not None, "values come first"
        batch, self._batch = self._batch, None
        batch.columns["returns"] = batch.from_column(returns)
        batch = replace(batch, loss_mask=batch.from_column(loss_mask).bool())
        metrics = self._learner.update(batch, step)
        self._book_memory(metrics)
        return metrics, self._learner.skips.in_a_row

    def load_learner(self, skipped: int) -> None:
        """Take back the number of updates that were skipped in a row."""
        self._learner.skips.in_a_row = skipped


class ReferenceWorker(Rank):
    """One rank of the reference.

    Args:
        start, vocabulary: as `LearnerWorker` takes them.

    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, rank: RankInfo, config: Config, start: str | None, vocabulary: int) -> None:
        sharding = config.reference.strategy
        assert isinstance(sharding, ShardedReference)
        super().__init__(rank, config.run, sharding.replicas)
        device = device_of(self._mesh)
        model = load_role(load_causal_lm, config, "reference", start, device, True)
        readout = readout_options(config.rollout, config.trainer, config.model, vocabulary)
        options = Sharding(offload=sharding.offload)
        self._strategy = FSDP2Strategy(model.requires_grad_(False), self._mesh, options, **readout)
        self._max_tokens = config.trainer.token_budget
        self.progress = 0

    def logprobs(self, groups: Sequence[Group]) -> SplitResult:
        """Return who holds each sample, and log-probs [T] of this rank's, in the step's order."""
        batch = self._strategy.sharder.pack(groups, self._max_tokens)
        outputs = run_pass(self._strategy, batch, frozenset({"logprob"}), self._max_tokens)
        self.progress += 1
        (logprobs,), block = make_refs(outputs["logprob"].numpy())
        return SplitResult((batch.holders, logprobs), block)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a reward model that whoever makes its tokens needs."""

    embedded_tokens: int
    """Ids that it has an embedding of."""
    pad_token_id: int | None
    positions: int | None
    """Tokens that it takes, if that is known."""


def facts_of(path: str, model: PreTrainedModel) -> ModelFacts:
    """Check the weights that this process holds, and return what tokens they need.

    Raises:
        ModelError: one is NaN or infinite.
    """
    weights = ((name, local(parameter)) for name, parameter in model.named_parameters())
    check_finite(f"reward.model.path {path}", weights)
    config: Any = model.config
    text, positions = config.get_text_config(), getattr(config, "max_position_embeddings", None)
    limit = positions if isinstance(positions, int) else None
    return ModelFacts(text.vocab_size, text.pad_token_id, limit)


def scores_of(strategy: Strategy, sequences: Sequence[IntArray], max_tokens: int) -> list[float]:
    """Return a reward model's number for the token ids of each sequence; all its ranks call this.

    Args:
        max_tokens: packed tokens run at once; 1 runs each sequence alone.
    """
    return cast("list[float]", score_sequences(strategy, sequences, max_tokens).tolist())


class RewardModelWorker(Rank):
    """One rank of a reward model (`reward/model/strategy=fsdp2`).

    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, rank: RankInfo, config: Config) -> None:
        section, sharding = config.reward.model, scorer_sharding(config.reward.model)
        assert isinstance(section, SequenceClassifier)
        assert sharding is not None
        super().__init__(rank, config.run, sharding.replicas)
        dtype = torch_dtype(section.dtype or config.model.dtype)
        trust = config.model.trust_remote_code
        model = load_reward_model(section.path, dtype, torch.device("cpu"), trust, hollow=True)
        self._strategy = FSDP2Strategy(model, self._mesh, Sharding(offload=sharding.offload))
        self._facts = facts_of(section.path, model)
        self.progress = 0

    def facts(self) -> ModelFacts:
        """Return what tokens the model needs."""
        return self._facts

    def score(self, sequences: Sequence[IntArray], max_tokens: int) -> list[float] | None:
        """Return the numbers of sequences, as `scores_of` does; on rank 0 alone."""
        scores = scores_of(self._strategy, sequences, max_tokens)
        self.progress += 1
        return scores if self._is_first else None
