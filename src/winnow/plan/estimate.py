"""From what a rank did on fake tensors to a step's seconds, a run's hours and what an engine holds.

What can be executed is not computed here. What is: the roofline of operations that were seen, the
engine's memory and speed (its code is not run), and what lies between processes. Seconds are lower
bounds: each operation at the peak of its GPU, collectives of weights behind the arithmetic.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from winnow.config.root import Config
from winnow.config.rules import longest_tokens, workers_of
from winnow.config.trainer import Fsdp2, RayCluster
from winnow.errors import ConfigError
from winnow.learning.balance import deal, work
from winnow.learning.batch import cut_updates
from winnow.models.causal_lm import torch_dtype
from winnow.plan.rank import RankPlan, micro_lengths
from winnow.plan.tracker import Phase
from winnow.rollout.slots import cache_bytes
from winnow.runs.metrics import GPUS, Gpu
from winnow.types import IntArray

GIB = 2**30
RESERVED_GIB = 2.0
"""The part of a CUDA context, NCCL's buffers and kernels' workspace, beside tensors; assumed."""
USABLE = 0.95
"""Share of a GPU's memory that tensors fill before what is free is in pieces too small."""
NETWORK_GB_S, DISK_GB_S = 50.0, 2.0
"""Between nodes, for each GPU (400 Gb/s), and writing of each node."""
PUBLISH_GB_S, HASH_GB_S = 1.06, 1.77
"""A publication with checksums at both ends (benchmarks/results/publication.md); sha256 of a
core."""
VLLM_UTILIZATION = 0.92
"""Share of a GPU that vLLM takes where the recipe does not say (its gpu_memory_utilization)."""
ON_HOST = "weights", "gradients", "optimizer state"
"""Roles of what an offloaded model keeps in the host's memory."""
_UPDATES = 4
"""Updates of a step whose dealing is tried."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind."""

    name: str
    gpu: Gpu
    nodes: int
    per_node: int

    @property
    def limit_gib(self) -> float:
        """Memory that a rank's tensors may take on a GPU."""
        return self.gpu.memory_gib * USABLE - RESERVED_GIB

    def seconds(self, phase: Phase) -> float:
        """Return the roofline of a phase: of each operation its FLOP or its bytes, at peak."""
        peaks, bandwidth = (self.gpu.float32, self.gpu.bfloat16), self.gpu.memory_gb_s * 1e9
        return sum(
            times * max(flop / (peaks[is_half] * 1e12), moved / bandwidth)
            for (flop, moved, is_half), times in phase.work.items()
        )

    def rate(self, ranks: int) -> float:
        """Return the bytes a second that a rank exchanges with so many, itself included."""
        return 1e9 * (self.gpu.link_gb_s if ranks <= self.per_node else NETWORK_GB_S)


def find_gpu(given: str) -> tuple[str, Gpu]:
    """Find a GPU by its name, such as `h100-80`, `a100-40` (GiB) or `rtx-4090`.

    Raises:
        ConfigError: no such GPU is known.
    """
    known = {name.lower().replace(" ", "-"): gpu for name, gpu in GPUS.items()}
    name, _, gib = given.lower().rpartition("-")
    if given.lower() in known:
        return given, known[given.lower()]
    if name not in known or not gib.isdecimal() or not int(gib):
        raise ConfigError(f"--gpu {given} is not known; choose from {', '.join(known)}")
    return given, known[name]._replace(memory_gib=float(gib))


def drawn_lengths(config: Config, mean: float | None) -> tuple[IntArray, IntArray]:
    """Draw tokens of prompts and answers [B]: log-normal, with the tail of reasoning, to the limit.

    Args:
        mean: tokens of an answer before the cut; None takes a quarter of the limit.
    """
    limit = config.rollout.max_response_tokens
    count = config.sampling.groups_per_step * config.rollout.n
    mu, deviation = np.log(mean or limit / 4), 0.8
    answers = np.random.default_rng(0).lognormal(mu - deviation**2 / 2, deviation, count)
    prompts = np.full(count, max(config.data.max_prompt_tokens // 8, 1))
    return prompts, np.clip(answers, 1, limit).astype(np.int64)


def memory_figures(rank: RankPlan, config: Config, machine: Machine) -> Figures:
    """Say what a rank holds at its peak, and what for."""
    offloads = getattr(config.trainer.strategy, "offload", False)
    without = ON_HOST if offloads else ()
    peaks = {name: rank.tracker.peak(name, without) for name in rank.tracker.phases}
    del peaks["start"]
    phase = max(peaks, key=lambda name: peaks[name].bytes)
    roles: Counter[str] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for held, size in peaks[phase].held:
        name = re.sub(r"\.\d+(?=[. ]|$)", ".*", held.made_by)
        shape = "" if held.role in ON_HOST else f" {list(held.shape)}"
        roles[held.role] += size
        sizes[held.role, name + shape] += size
    return {
        "peak_gib": peaks[phase].bytes / GIB,
        "limit_gib": machine.limit_gib,
        "phase": phase,
        "host_gib": rank.tracker.held_at_end(ON_HOST) / GIB if offloads else 0.0,
        "roles_gib": {role: size / GIB for role, size in roles.most_common()},
        "tensors_gib": [[role, name, n / GIB] for (role, name), n in sizes.most_common()],
        "phases_gib": {name: peak.bytes / GIB for name, peak in peaks.items()},
    }


def learning_figures(
    rank: RankPlan, config: Config, machine: Machine, lengths_B: IntArray
) -> Figures:
    """Deal a step's samples out, and return lockstep, seconds by phase and bytes of collectives."""
    strategy, trainer, width = config.trainer.strategy, config.trainer, rank.shape.hidden_size
    assert isinstance(strategy, Fsdp2)
    groups, n = config.sampling.groups_per_step, config.rollout.n
    updates = cut_updates(groups, trainer.mini_batch_groups or groups, (config.run.seed, 1, 0))
    deals = []
    for update in updates[:_UPDATES]:
        own_B = lengths_B.reshape(groups, n)[update].ravel()
        ranks = strategy.ranks // strategy.sequence
        deals.append(deal(np.sort(own_B)[::-1], trainer.microbatch_tokens, ranks, width))
    each = len(updates) / len(deals)
    rounds = each * sum(found.work.shape[1] for found in deals)
    levels = each * sum(int(found.work.max(0).sum()) for found in deals)
    full = work(np.array(micro_lengths(config, trainer.microbatch_tokens)), width).sum()
    shards, sent, seconds = strategy.ranks // strategy.replicas, Counter[str](), Counter[str]()
    for name, phase in rank.tracker.phases.items():
        # Two micro-batches were run of an update, and one of a pass.
        times, scale = rounds, levels / full
        if name.endswith("update"):
            times, scale = (factor * trainer.epochs / 2 for factor in (times, scale))
        elif name.endswith("optimizer"):
            times = scale = len(updates) * trainer.epochs
        apart = beside = 0.0
        for kind, size in phase.sent.items() if name != "start" else ():
            sent[kind] += int(size * times)
            if kind.startswith("alltoall"):
                apart += size * times / machine.rate(strategy.sequence)
            else:
                reach = strategy.ranks if kind.startswith("allreduce") else shards
                beside += size * times / machine.rate(reach)
        seconds[name] = max(machine.seconds(phase) * scale, beside) + apart
    del seconds["start"]
    lockstep = sum(int(d.work.sum()) for d in deals) / sum(d.capacity for d in deals)
    sent_gib = {kind: size / GIB for kind, size in sent.items()}
    return {"lockstep": lockstep, "rounds": rounds, "sent_gib": sent_gib, "seconds": seconds}


def shares_gpus(config: Config) -> bool:
    """Return whether an engine's GPU holds a rank as well."""
    roles = config.cluster.roles if isinstance(config.cluster, RayCluster) else None
    is_colocated = roles is not None and roles.policy is not None and roles.policy == roles.rollout
    return is_colocated or not workers_of(config)["rollout"]


def engine_figures(
    rank: RankPlan, config: Config, machine: Machine, beside_gib: float, split: int
) -> Figures:
    """Return what an engine holds on each of the `split` GPUs that it is cut over.

    Args:
        beside_gib: what a rank takes on the same GPU meanwhile.
    """
    engine, dtype = config.rollout.engine, torch_dtype(config.model.dtype)
    utilization = getattr(engine, "extra", {}).get("gpu_memory_utilization", VLLM_UTILIZATION)
    room = machine.gpu.memory_gib * float(utilization) - RESERVED_GIB
    room = min(room, machine.limit_gib - beside_gib)
    weights = rank.parameters["policy"] * dtype.itemsize / split / GIB
    heads = getattr(rank.shape, "num_key_value_heads", None) or rank.shape.num_attention_heads
    row = cache_bytes(rank.shape, dtype, longest_tokens(config)) / min(split, heads) / GIB
    cache = getattr(engine, "cache_gib", None) or max(room - weights, 0.0)
    fits = weights + max(cache, row) <= room
    slots = int(getattr(engine, "slots", 1))
    return {
        "engines": max(workers_of(config)["rollout"], 1),
        "tensor_parallel": split,
        "weights_gib": weights,
        "cache_gib": cache,
        "room_gib": room,
        "row_gib": row,
        "fits": fits,
        "rows": min(int(cache / row), slots) if fits else 0,
    }


def rollout_seconds(
    engine: Figures, rank: RankPlan, config: Config, machine: Machine, answers_B: IntArray
) -> float:
    """Return the least seconds to write answers: weights and half of the rows read at each token.

    As many answers are written at once as the cache holds of this length.
    """
    share = (answers_B.mean() + config.data.max_prompt_tokens / 8) / longest_tokens(config)
    row = engine["row_gib"] * share
    rows = min(engine["cache_gib"] / row, getattr(config.rollout.engine, "slots", np.inf))
    read = (engine["weights_gib"] + rows * row / 2) * GIB / (machine.gpu.memory_gb_s * 1e9)
    peak = machine.gpu.float32 if config.model.dtype == "float32" else machine.gpu.bfloat16
    computed = 2 * rank.parameters["policy"] * rows / engine["tensor_parallel"] / (peak * 1e12)
    ticks = max(answers_B.sum() / engine["engines"] / rows, answers_B.max())
    return float(max(read, computed) * ticks)


def transfer_figures(rank: RankPlan, config: Config, machine: Machine) -> Figures:
    """Return bytes and seconds of a publication and of a checkpoint, as they work today."""
    strategy = config.trainer.strategy
    assert isinstance(strategy, Fsdp2)
    policy = rank.parameters["policy"] * torch_dtype(config.model.dtype).itemsize
    own = rank.tracker.held_at_end(("weights", "optimizer state"))
    shards = strategy.ranks // strategy.replicas
    state, on_node = own * shards, own * min(shards, machine.per_node)
    gathered = policy / machine.rate(strategy.ranks)
    written = (on_node + policy) / (DISK_GB_S * 1e9) + (state + policy) / (HASH_GB_S * 1e9)
    return {
        "publication": {
            "gib": policy / GIB,
            "seconds": gathered + policy / (PUBLISH_GB_S * 1e9),
        },
        "checkpoint": {"gib": (state + policy) / GIB, "seconds": written},
    }
