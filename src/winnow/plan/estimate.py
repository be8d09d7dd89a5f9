"""From what a rank did on fake tensors to a step's seconds, a run's hours and what an engine holds.

What can be executed is not computed here. What is: the roofline of operations that were seen, the
engine's memory and speed (its code is not run), and what lies between processes. Seconds are lower
bounds: each operation at the peak of its GPU, collectives of weights behind the arithmetic.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor
from torch.utils._pytree import tree_leaves

from winnow.config.model import NoAdapter
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.rules import longest_tokens
from winnow.config.trainer import Fsdp2, Megatron, Sharded
from winnow.errors import ConfigError
from winnow.learning.balance import Deal, deal, work
from winnow.learning.batch import cut_updates
from winnow.learning.shards import MODEL_FILE_BYTES
from winnow.models.folders import torch_dtype
from winnow.observe.gpus import GPU_NAMES, GPUS, Gpu
from winnow.observe.rollouts import read_rollouts, rollout_files
from winnow.plan.rank import (
    RankPlan,
    micro_lengths,
    sharding_apart,
    stages_of,
    tokens_apart,
    update_micro_batches,
)
from winnow.plan.tracker import Phase, local_bytes
from winnow.rollout.embedded.slots import cache_bytes
from winnow.types import IntArray

GIB = 2**30
RESERVED_GIB = 2.0
"""A CUDA context, NCCL's buffers and kernels' workspace, beside tensors; not measured."""
USABLE = 0.95
"""Share of a GPU's memory that tensors fill before what is free is in pieces too small."""
NETWORK_GB_S, DISK_GB_S = 50.0, 2.0
"""Between nodes, for each GPU (400 Gb/s), and writing of each node."""
ENGINE_GB_S, HASH_GB_S = 1.06, 1.77
"""An engine's fetching and checking (benchmarks/results/publication.md); sha256 of a core."""
VLLM_UTILIZATION = 0.92
"""Share of a GPU that vLLM takes where the recipe does not say (its gpu_memory_utilization)."""
ON_HOST = "weights", "gradients", "optimizer state"
"""Roles of what an offloaded model keeps in the host's memory."""
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
        """The most that a rank's tensors may take on a GPU."""
        return self.gpu.memory_gib * USABLE - RESERVED_GIB

    def seconds(self, phase: Phase) -> float:
        """Return the roofline of a phase: of each operation its FLOP or its bytes, at peak."""
        peaks, bandwidth = (self.gpu.float32, self.gpu.bfloat16), self.gpu.memory_gb_s * 1e9
        return sum(
            times * max(flop / (peaks[is_half] * 1e12), moved / bandwidth)
            for (flop, moved, is_half), times in phase.work.items()
        )

    def rate(self, ranks: int, links: int = 1) -> float:
        """Return the bytes a second that each of some ranks exchanges with the others.

        Args:
            links: to the network of a node, that what they send goes over.
        """
        within = self.gpu.link_gb_s
        return 1e9 * (within if ranks <= self.per_node else min(within, NETWORK_GB_S * links))


def find_gpu(given: str) -> tuple[str, Gpu]:
    """Find a GPU by its name, such as `h100`, `a100-40` or `rtx-4090`; its GiB may follow.

    Raises:
        ConfigError: no such GPU is known.
    """
    known = dict(zip(GPU_NAMES, GPUS.values(), strict=True))
    found = known | {f"{name}-{gpu.memory_gib:g}": gpu for name, gpu in known.items()}
    if given.lower() not in found:
        raise ConfigError(f"--gpu {given} is not known; choose from {', '.join(known)}")
    return given.lower(), found[given.lower()]


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


def kept_lengths(config: Config, run: Path) -> tuple[IntArray, IntArray]:
    """Read tokens of prompts and answers [B] of a run's newest steps, whatever became of them.

    Fewer answers than a step of the recipe takes are repeated, and longer ones than it lets be
    written are cut.

    Raises:
        ConfigError: the run kept none.
        WinnowError: a file is damaged.
    """
    count, tables = config.sampling.groups_per_step * config.rollout.n, list[Any]()
    for _, file in reversed(rollout_files(run / "rollouts")):
        rows = read_rollouts(file).select(["kind", "prompt_tokens", "response_tokens"])
        tables.append(rows.filter(pc.equal(rows["kind"], "sampled")))
        if sum(map(len, tables)) >= count:
            break
    if not sum(map(len, tables)):
        raise ConfigError(f"--lengths {run} has no answers in its rollouts/; name a run's folder")
    table = pa.concat_tables(tables, promote_options="permissive")
    prompts, answers = (np.resize(table[name].to_numpy(), count) for name in table.column_names[1:])
    limits = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    return prompts.clip(1, limits[0]).astype(int), answers.clip(1, limits[1]).astype(int)


def memory_figures(rank: RankPlan, config: Config, machine: Machine) -> Figures:
    """Say what a rank holds at its peak, and what for."""
    offloads = getattr(config.trainer.strategy, "offload", False)
    without = ON_HOST if offloads else ()
    peaks = {name: rank.tracker.peak(name, without) for name in rank.tracker.phases}
    del peaks["start"]
    phase = max(peaks, key=lambda name: peaks[name].bytes)
    roles, tensors = Counter[str](), Counter[str]()
    for held, size in peaks[phase].held:
        name = re.sub(r"\.\d+(?=[. ]|$)", ".*", held.made_by)
        shape = "" if held.role in ON_HOST else f" {list(held.shape)}"
        roles[held.role] += size
        tensors[f"{held.role}: {name}{shape}"] += size
    return {
        "peak_gib": peaks[phase].bytes / GIB,
        "peak_within": phase,
        "limit_gib": machine.limit_gib,
        "host_gib": rank.tracker.held_at_end(ON_HOST) / GIB if offloads else 0.0,
        "peaks_gib": {name: peak.bytes / GIB for name, peak in peaks.items()},
        "roles_gib": {role: size / GIB for role, size in roles.most_common()},
        "tensors_gib": {name: size / GIB for name, size in tensors.most_common(8)},
    }


def learning_figures(
    rank: RankPlan, config: Config, machine: Machine, lengths_B: IntArray
) -> Figures:
    """Deal a step's samples out; return lockstep, and a rank's FLOP, traffic and seconds a step."""
    strategy, trainer, width = config.trainer.strategy, config.trainer, rank.shape.hidden_size
    assert isinstance(strategy, Fsdp2 | Megatron)
    ranks, most = shares_of(strategy), trainer.microbatch_tokens
    updates = deals = _deals(config, lengths_B, ranks, most, width)
    rounds = sum(found.work.shape[1] for found in deals)
    levels = sum(int(found.work.max(0).sum()) for found in deals)
    full = work(np.array(micro_lengths(config, most)), width).sum()
    sent, stages = Counter[str](), stages_of(strategy)
    seconds, petaflop = dict[str, float](), 0.0
    for name, phase in list(rank.tracker.phases.items())[1:]:
        # Some micro-batches were run of an update, and one of a pass.
        times, scale, flushes = rounds, levels / full, 1
        if name.endswith("update"):
            ran, flushes = update_micro_batches(config), len(updates)
            times, scale = (factor * trainer.epochs / ran for factor in (times, scale))
        elif name.endswith("optimizer"):
            times = scale = len(updates) * trainer.epochs
            flushes = 0
        apart = beside = 0.0
        for kind, size in phase.sent.items():
            sent[kind] += int(size * times)
            waits, taken = _exchange(strategy, machine, kind, size * times)
            apart, beside = apart + waits * taken, beside + (not waits) * taken
        # Each time that it fills and drains a stage waits for all others (1F1B's bubble).
        idle = 1 + flushes * (stages - 1) / rounds
        seconds[name] = idle * (max(machine.seconds(phase) * scale, beside) + apart)
        petaflop += scale * sum(flop * times for (flop, *_), times in phase.work.items()) / 1e15
    return {
        "lockstep": sum(int(d.work.sum()) for d in deals) / sum(d.capacity for d in deals),
        "micro_batches": rounds,
        **({"bubble": 1 - 1 / (1 + len(updates) * (stages - 1) / rounds)} if stages > 1 else {}),
        "petaflop": petaflop,
        "sent_gib": {kind: size / GIB for kind, size in sent.items()},
        "seconds": seconds,
    }


def _deals(config: Config, lengths_B: IntArray, ranks: int, most: int, width: int) -> list[Deal]:
    """Deal the samples of each update of a step out to ranks."""
    groups, n = config.sampling.groups_per_step, config.rollout.n
    updates = cut_updates(groups, config.groups_per_update, (config.run.seed, 1, 0))
    own = (np.sort(lengths_B.reshape(groups, n)[update].ravel())[::-1] for update in updates)
    return [deal(lengths, most, ranks, width) for lengths in own]


def shares_of(strategy: Fsdp2 | Megatron) -> int:
    """Return the number of shares that an update's samples are dealt to."""
    return strategy.data if isinstance(strategy, Megatron) else strategy.ranks // strategy.sequence


def _exchange(
    strategy: Sharded | Megatron, machine: Machine, kind: str, size: float
) -> tuple[bool, float]:
    """Return whether arithmetic waits for a collective of so many bytes, and its seconds."""
    if isinstance(strategy, Megatron):
        if kind in ("send", "recv"):
            return False, size / machine.rate(strategy.ranks)
        if kind in ("reduce", "broadcast"):  # of parameters, over the ranks that hold the same
            return True, size / machine.rate(strategy.ranks // strategy.pipeline)
        over = strategy.expert if kind.startswith("alltoall") else strategy.tensor
        return True, (1 + kind.startswith("allreduce")) * size / machine.rate(over)
    if kind.startswith("alltoall"):
        return True, size / machine.rate(getattr(strategy, "sequence", 1))
    if kind.startswith("allreduce"):  # by all ranks of a node, over the replicas of each
        return False, 2 * size / machine.rate(strategy.ranks)
    # In rings through whole nodes.
    shards = strategy.ranks // strategy.replicas
    return False, size / machine.rate(shards, machine.per_node)


def apart_figures(
    role: str, rank: RankPlan, config: Config, machine: Machine, lengths_B: IntArray
) -> Figures:
    """Return what a rank of a model apart holds at its peak, and its seconds a step."""
    tracker, strategy = rank.apart[role], sharding_apart(config, role)
    without, trainer = ON_HOST if strategy.offload else (), config.trainer
    width, most = rank.shape.hidden_size, tokens_apart(config, role)
    whole = [deal(np.sort(lengths_B)[::-1], most, strategy.ranks, width)]
    updates = _deals(config, lengths_B, strategy.ranks, most, width)
    full = work(np.array(micro_lengths(config, most)), width).sum()
    peak = seconds = 0.0
    for name, phase in list(tracker.phases.items())[1:]:
        deals = updates if name.endswith("update") else whole
        times = float(sum(each.work.shape[1] for each in deals))
        scale = sum(int(each.work.max(0).sum()) for each in deals) / full
        if name.endswith("update"):
            passes = trainer.epochs / update_micro_batches(config)
            times, scale = times * passes, scale * passes
        elif name.endswith("optimizer"):
            times = scale = len(updates) * trainer.epochs
        sent = phase.sent.items()
        sending = sum(_exchange(strategy, machine, kind, size * times)[1] for kind, size in sent)
        seconds += max(machine.seconds(phase) * scale, sending)
        peak = max(peak, tracker.peak(name, without).bytes / GIB)
    roles = Roles(config)
    return {
        "ranks": strategy.ranks,
        "peak_gib": peak,
        "beside_policy": roles[role].place == roles["policy"].place,
        "seconds": seconds,
    }


def shares_gpus(config: Config) -> bool:
    """Return whether an engine's GPU holds a rank as well."""
    roles = Roles(config)
    return roles["policy"].place == roles["rollout"].place or "rollout" not in roles


def gpus_beside(config: Config) -> dict[str, int]:
    """Return the GPUs that ranks of the policy leave to others, by pool; most of its roles."""
    roles, found = Roles(config), dict[str, int]()
    for role in roles:
        if role.gpus and role.place != roles["policy"].place:
            found[role.place] = max(found.get(role.place, 0), role.gpus)
    return found


def engine_figures(rank: RankPlan, config: Config, machine: Machine, rank_gib: float) -> Figures:
    """Return what an engine holds on each of its GPUs.

    Args:
        rank_gib: what a rank takes on the same GPU, if they share one.
    """
    engine, dtype = config.rollout.engine, torch_dtype(config.model.dtype)
    utilization = getattr(engine, "extra", {}).get("gpu_memory_utilization", VLLM_UTILIZATION)
    alone = machine.gpu.memory_gib * float(utilization) - RESERVED_GIB
    is_beside = shares_gpus(config) and not getattr(engine, "sleep", False)
    room = min(alone, machine.limit_gib - rank_gib * is_beside)
    heads = getattr(rank.shape, "num_key_value_heads", None) or rank.shape.num_attention_heads
    whole = rank.parameters["policy"] * dtype.itemsize / GIB
    row = cache_bytes(rank.shape, dtype, longest_tokens(config)) / GIB
    half = alone / 2  # for weights; one answer at a time would fit, but take for ever
    enough = (n for n in (1, 2, 4, 8) if max(whole / n, row / min(n, heads)) <= half)
    split = getattr(engine, "tensor_parallel", 1)
    weights, row = whole / split, row / min(split, heads)
    cache = getattr(engine, "cache_gib", None) or max(room - weights, 0.0)
    fits = weights + max(cache, row) <= room
    return {
        "engines": max(Roles(config)["rollout"].count, 1),
        "gpus_each": split,
        "gpus_advised": next(enough, None),
        "weights_gib": weights,
        "cache_gib": cache,
        "room_gib": max(room, 0.0),
        "longest_row_gib": row,
        "fits": bool(fits),
        "rows": min(int(cache / row), int(getattr(engine, "slots", 1))) if fits else 0,
    }


def engine_change(engine: Figures, config: Config, machine: Machine) -> list[str] | None:
    """Return overrides after which an engine that does not fit does; None if none are known.

    A smaller cache where the longest answer fits in, and weights take no more than half; else
    engines over several GPUs, of which a run that has none of its own gives them half.
    """
    free, split = engine["room_gib"] - engine["weights_gib"], engine["gpus_advised"]
    if free >= engine["longest_row_gib"] and engine["gpus_each"] >= (split or 1):
        return [f"rollout.engine.cache_gib={math.floor(free * 10) / 10:g}"]
    if split is None:
        return None
    given = ["rollout/engine=vllm", f"rollout.engine.tensor_parallel={split}"]
    if shares_gpus(config):
        half = machine.nodes * machine.per_node // 2
        given.append(f"rollout.engine.processes={half // split}")
    return [*given, "rollout.engine.cache_gib=null"]


def rollout_seconds(
    engine: Figures,
    rank: RankPlan,
    config: Config,
    machine: Machine,
    prompts_B: IntArray,
    answers_B: IntArray,
) -> float:
    """Return the least seconds to write answers: weights and half of the rows read at each token.

    As many answers are written at once as the cache holds of this length.
    """
    share = (prompts_B + answers_B).mean() / longest_tokens(config)
    row = engine["longest_row_gib"] * share
    rows = min(engine["cache_gib"] / row, getattr(config.rollout.engine, "slots", np.inf))
    read = (engine["weights_gib"] + rows * row / 2) * GIB / (machine.gpu.memory_gb_s * 1e9)
    peak = machine.gpu.float32 if config.model.dtype == "float32" else machine.gpu.bfloat16
    computed = 2 * rank.learning.passes.parameters * rows / engine["gpus_each"] / (peak * 1e12)
    ticks = max(answers_B.sum() / engine["engines"] / rows, answers_B.max())
    return float(max(read, computed) * ticks)


def transfer_figures(rank: RankPlan, config: Config, machine: Machine) -> Figures:
    """Return bytes and seconds of a publication and of a checkpoint.

    All ranks gather each tensor together; engines fetch and check all of them, side by side. Of a
    checkpoint each rank writes and hashes its own rows, those of the model twice, as its files are
    put together from them: each by one rank. The next step goes on meanwhile.
    """
    strategy, learning, adapter = config.trainer.strategy, rank.learning, config.model.adapter
    assert isinstance(strategy, Fsdp2 | Megatron)
    policy, is_adapter = cast(Any, learning.policy), not isinstance(adapter, NoAdapter)
    sent = policy.exported_bytes(
        "adapter" if getattr(adapter, "publish", "") == "adapter" else "all"
    )
    model = policy.exported_bytes("adapter" if is_adapter else "all")
    if isinstance(strategy, Megatron):  # masters and two moments, of each parameter one owner's
        state = 12 * sum(rank.parameters[role] for role in ("policy", *learning.others))
    else:
        states = [each.state_dict() for each in (policy, *learning.others.values())]
        rows = sum(local_bytes(t) for t in tree_leaves(states) if isinstance(t, Tensor))
        state = rows * strategy.ranks // strategy.replicas
    own_files = math.ceil(model / MODEL_FILE_BYTES / strategy.ranks)
    hashed = state / strategy.ranks + min(own_files * MODEL_FILE_BYTES, model)
    nodes = math.ceil(strategy.ranks / machine.per_node)
    gathered = sent / machine.rate(strategy.ranks, machine.per_node)
    written = (state + 2 * model) / (nodes * DISK_GB_S * 1e9)
    seconds = written + hashed / (HASH_GB_S * 1e9)
    if "critic" in rank.apart:  # whose ranks write after the others: masters and two moments
        saved, ranks = 12 * rank.parameters["critic"], sharding_apart(config, "critic").ranks
        state += saved
        disks = math.ceil(ranks / machine.per_node) * DISK_GB_S
        seconds += saved / (disks * 1e9) + saved / ranks / (HASH_GB_S * 1e9)
    return {
        "publication_gib": sent / GIB,
        "publication_seconds": gathered + sent / (ENGINE_GB_S * 1e9),
        "checkpoint_gib": (state + model) / GIB,
        "checkpoint_seconds": seconds,
    }
