"""One rank of a learning side that is sharded over several.

Every rank has a `Learner` over models that are sharded over all, and is asked the same at the same
time. Rank 0 answers for all.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.data.tokenizer import load_tokenizer
from winnow.learning.canary import Canary
from winnow.learning.fsdp2 import FSDP2Strategy, State, on_host, read_shards, write_shards
from winnow.learning.learner import Learned
from winnow.models.causal_lm import model_writer
from winnow.models.lora import adapter_writer
from winnow.observe.files import system_error
from winnow.observe.metrics import Metrics, Number, Stopwatch
from winnow.rollout.engine import WeightUpdate
from winnow.rollout.weights import BUCKET_BYTES, Bucket, buckets, split_bucket
from winnow.runs.build_learner import make_learner
from winnow.runs.checkpoint import this_machine
from winnow.runs.metrics import Passes
from winnow.runs.model_factory import ShardedModels
from winnow.runs.state import Save
from winnow.types import FloatArray, Group
from winnow.workers.array_refs import SplitResult, fetch
from winnow.workers.protocol import RankInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RankFacts:
    """Facts of the learning side that the driver needs."""

    passes: Passes
    notes: tuple[str, ...]
    learner: Mapping[str, Any]
    """The learner's state."""
    machine: Mapping[str, str | int]
    """Facts that the bits depend on."""


@dataclass(frozen=True, eq=False)
class StepReply:
    """The results of a step."""

    learned: Learned
    metrics: Metrics
    seconds: Mapping[str, Number]
    """By phase, on rank 0."""
    learner: Mapping[str, Any]
    """The learner's state."""


RANKS = "ranks"
"""A checkpoint's folder of the state that ranks hold."""


class LearnerWorker:
    """One rank of the learning side; a worker of a `WorkerGroup`.

    Args:
        rank: its place.
        config: the recipe.
        path, start, vocabulary: as `ShardedModels` takes them.
        tokenizer: its folder; it is saved with the model.

    Raises:
        ModelError: a model of the recipe cannot be loaded.
    """

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
        assert isinstance(strategy, Fsdp2)
        self._is_first = rank.rank == 0
        mesh, self._host_mesh = _join(rank, config.run.threads, strategy.replicas)
        # Of its own, so that saving and the next step do not take each other's messages.
        self._saving = dist.new_group(backend="gloo")
        self._learning = make_learner(
            config, ShardedModels(config, path, start, mesh, vocabulary), start
        )
        self._bucket_bytes = min(strategy.bucket_mb << 20, BUCKET_BYTES)
        self._export: Iterator[Bucket] = iter(())
        self._copied: State = {}
        self._model: dict[str, Tensor] = {}
        self._save_model = self._writer(tokenizer, config) if self._is_first else None

    @property
    def progress(self) -> int:
        """Moves with each pass and update."""
        return self._learning.learner.progress

    def facts(self) -> RankFacts:
        """Return what the driver needs before the first step."""
        learning = self._learning
        machine = this_machine(learning.policy.device)
        return RankFacts(learning.passes, learning.notes, learning.learner.state_dict(), machine)

    def learn(self, groups: Sequence[Group], step: int) -> StepReply | None:
        """Train on a step's groups, as `Learner.learn` does."""
        metrics, watch = Metrics(), Stopwatch()
        with watch.phase("batch"):
            fetch(groups)
        learned = self._learning.learner.learn(groups, step, metrics, watch)
        self._book_memory(metrics)
        if not self._is_first:
            return None
        return StepReply(learned, metrics, watch.seconds(), self._learning.learner.state_dict())

    def load_learner(self, state: Mapping[str, Any]) -> None:
        """Give the learner the state that it had."""
        self._learning.learner.load_state_dict(state)

    def canary(self, canary: Canary) -> list[FloatArray]:
        """Compute the policy's log-probs of fixed sequences; every rank runs all of them."""
        return canary.expected(self._learning.policy)

    def begin_export(self, version: int, whole: bool) -> None:
        """Begin to hand out the policy's weights, all or those trained; `next_bucket` goes on."""
        policy = self._strategies()["policy"]
        weights = policy.export_weights() if whole else policy.export_trained()
        # Cut alike on every rank: all gather what is in a bucket when rank 0 is asked for it.
        update = WeightUpdate(version, weights)
        self._export = buckets(update, self._bucket_bytes, is_here=self._is_first)

    def next_bucket(self) -> SplitResult | None:
        """Return some of the weights on rank 0, nothing elsewhere and after the last."""
        bucket = next(self._export, None)
        return split_bucket(bucket) if self._is_first and bucket is not None else None

    def copy(self) -> None:
        """Copy all that learns, for `write`, so that the next step may change it."""
        strategies = self._strategies()
        states = {role: s.state_dict() for role, s in strategies.items()}
        self._copied = on_host(states, self._host_mesh)
        policy = strategies["policy"]
        for name, tensor in policy.export_weights(adapter_only=policy.has_adapter):
            if self._is_first:
                self._model[name] = tensor.detach().to("cpu", copy=True)

    async def write(self, checkpoint: str) -> tuple[int, str] | None:
        """Write what was copied into a checkpoint's folder, beside whatever else the ranks do.

        Returns:
            What the system said when it refused a write: its number, and the path.
        """
        (copied, self._copied), (model, self._model) = (self._copied, {}), (self._model, {})
        try:
            await asyncio.to_thread(self._write, Path(checkpoint), copied, model)
        except (OSError, RuntimeError, SafetensorError) as error:
            refusal = system_error(error)
            if refusal is None or refusal.errno is None:
                raise
            return refusal.errno, str(refusal.filename or checkpoint)
        return None

    def _write(self, checkpoint: Path, copied: State, model: dict[str, Tensor]) -> None:
        # First what all ranks do together: one that failed before would leave the others waiting.
        write_shards(copied, checkpoint / RANKS, self._saving)
        if self._save_model is not None:
            self._save_model(model, checkpoint / "model")

    def restore(self, folder: str) -> None:
        """Load what `write` wrote, on any number of ranks.

        Raises:
            CheckpointError: the folder is damaged, or of another model.
        """
        strategies = self._strategies()
        blank = {role: on_host(s.blank_state(), self._host_mesh) for role, s in strategies.items()}
        read_shards(blank, Path(folder))
        for role, strategy in strategies.items():
            strategy.load_state_dict(blank[role])

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _strategies(self) -> dict[str, FSDP2Strategy]:
        learning = self._learning
        found = {}
        for role, strategy in {"policy": learning.policy, **learning.others}.items():
            assert isinstance(strategy, FSDP2Strategy)
            found[role] = strategy
        return found

    def _writer(self, tokenizer: str, config: Config) -> Save:
        policy = self._strategies()["policy"]
        model = cast("PreTrainedModel", policy.model)
        read = load_tokenizer(tokenizer, config.model.trust_remote_code)
        return (adapter_writer if policy.has_adapter else model_writer)(model, read)

    def _book_memory(self, metrics: Metrics) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._learning.policy.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        metrics.max("ranks/peak_gib", max(peaks) / 2**30)


def _join(rank: RankInfo, threads: int | None, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Meet the other ranks; returns a mesh of their devices, and one of their hosts."""
    if rank.device_index is not None:
        torch.cuda.set_device(rank.device_index)
    elif threads is not None:
        torch.set_num_threads(threads)
    kind = "cpu" if rank.device_index is None else "cuda"
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{rank.master_address}:{rank.master_port}",
            rank=rank.rank,
            world_size=rank.size,
        )
    mesh = _mesh(kind, rank.size, replicas)
    return mesh, mesh if kind == "cpu" else _mesh("cpu", rank.size, replicas)


def _mesh(kind: str, ranks: int, replicas: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(kind, (ranks,))
    shape = replicas, ranks // replicas
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
