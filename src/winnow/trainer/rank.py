"""The learning side of a run on several ranks: what each of them does.

Every rank has a `Learner` over models that are sharded over all, and is asked the same at the same
time. Rank 0 answers; what it says holds for all.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from winnow.cluster.protocol import RankInfo
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.observe.names import Number
from winnow.trainer.build_learner import make_learner
from winnow.trainer.holders import OnRanks
from winnow.trainer.learner import Learned
from winnow.trainer.throughput import Passes
from winnow.types import Group
from winnow.workers.fsdp2 import FSDP2Strategy
from winnow.workers.saved_shards import State, on_host, read_shards, write_shards


@dataclass(frozen=True)
class RankFacts:
    """What the driver must know of the learning side."""

    passes: Passes
    notes: tuple[str, ...]
    learner: Mapping[str, Any]
    """The learner's state."""


@dataclass(frozen=True, eq=False)
class StepReply:
    """What a step has come to."""

    learned: Learned
    metrics: Metrics
    seconds: Mapping[str, Number]
    """By phase, on rank 0."""
    learner: Mapping[str, Any]
    """The learner's state."""


Bucket = list[tuple[str, np.ndarray[Any, Any], str]]
"""Weights by the parameter's name, as the bytes of their numbers, and their type's name."""


class LearnerRank:
    """One rank of the learning side; a worker of a `WorkerGroup`.

    Args:
        rank: its place.
        config: the recipe.
        path, start, vocabulary: as `OnRanks` takes them.

    Raises:
        ModelError: a model of the recipe cannot be loaded.
    """

    def __init__(
        self, rank: RankInfo, config: Config, path: str, start: str | None, vocabulary: int
    ) -> None:
        strategy = config.trainer.strategy
        assert isinstance(strategy, Fsdp2)
        self._is_first = rank.rank == 0
        is_cuda = rank.device_index is not None
        if rank.device_index is not None:
            torch.cuda.set_device(rank.device_index)
        elif config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            init_method=f"tcp://{rank.master_address}:{rank.master_port}",
            rank=rank.rank,
            world_size=rank.size,
        )
        mesh = _mesh("cuda" if is_cuda else "cpu", rank.size, strategy.replicas)
        self._host_mesh = _mesh("cpu", rank.size, strategy.replicas) if is_cuda else mesh
        # Of its own, so that saving and the next step do not take each other's messages.
        self._saving = dist.new_group(backend="gloo")
        self._learning = make_learner(config, OnRanks(config, path, start, mesh, vocabulary), start)
        self._bucket_bytes = strategy.bucket_mb << 20
        self._copied: State = {}
        self._export: Iterator[Bucket] = iter(())

    @property
    def progress(self) -> int:
        """Moves with each pass and update."""
        return self._learning.learner.progress

    def facts(self) -> RankFacts:
        """What the driver must know before the first step."""
        learning = self._learning
        return RankFacts(learning.passes, learning.notes, learning.learner.state_dict())

    def learn(self, groups: Sequence[Group], step: int) -> StepReply | None:
        """Train on a step's groups; see `Learner.learn`."""
        metrics, watch = Metrics(), Stopwatch()
        learned = self._learning.learner.learn(groups, step, metrics, watch)
        self._book_memory(metrics)
        if not self._is_first:
            return None
        return StepReply(learned, metrics, watch.seconds(), self._learning.learner.state_dict())

    def load_learner(self, state: Mapping[str, Any]) -> None:
        """Give the learner the state that it had."""
        self._learning.learner.load_state_dict(state)

    def begin_export(self) -> None:
        """Begin to hand out the trained weights; `next_bucket` goes on."""
        self._export = self._buckets()

    def next_bucket(self) -> Bucket | None:
        """Some of the weights, on rank 0; nothing elsewhere and after the last."""
        bucket = next(self._export, None)
        return bucket if self._is_first else None

    def copy(self) -> None:
        """Copy all that learns, for `write`, so that the next step may change it."""
        states = {role: s.state_dict() for role, s in self._strategies().items()}
        self._copied = on_host(states, self._host_mesh)

    async def write(self, folder: str) -> None:
        """Write what was copied, beside whatever else the ranks do.

        Raises:
            OSError: the disk is full, or not writable.
        """
        copied, self._copied = self._copied, {}
        await asyncio.to_thread(write_shards, copied, Path(folder), self._saving)

    def restore(self, folder: str) -> None:
        """Become what `write` wrote, on any number of ranks.

        Raises:
            CheckpointError: the folder is damaged, or of another model.
        """
        strategies = self._strategies()
        blank = {role: on_host(s.blank_state(), self._host_mesh) for role, s in strategies.items()}
        found = read_shards(blank, Path(folder))
        for role, strategy in strategies.items():
            state = found[role]
            strategy.load_state_dict({**state, "optimizer": state.get("optimizer", {})})

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

    def _buckets(self) -> Iterator[Bucket]:
        """Of about as many bytes as are gathered at once; as many of them on every rank."""
        policy = self._strategies()["policy"]
        bucket: Bucket = []
        held = 0
        for name, tensor in policy.export_trained():
            held += tensor.numel() * tensor.element_size()
            if self._is_first:
                bucket.append((name, _as_bytes(tensor), str(tensor.dtype).removeprefix("torch.")))
            if held >= self._bucket_bytes:
                yield bucket
                bucket, held = [], 0
        if held:
            yield bucket

    def _book_memory(self, metrics: Metrics) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._learning.policy.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        metrics.max("ranks/peak_gib", max(peaks) / 2**30)


def _mesh(kind: str, ranks: int, replicas: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(kind, (ranks,))
    shape = replicas, ranks // replicas
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def _as_bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's numbers as bytes, with its shape before them: numpy has no bfloat16."""
    flat = tensor.detach().cpu().contiguous()
    return flat.reshape(-1).view(torch.uint8).numpy().reshape(*tensor.shape, -1)
