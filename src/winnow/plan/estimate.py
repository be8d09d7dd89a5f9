"""Estimates from a simulated rank: seconds of a step, hours of a run, memory and speed of engines.

Memory and operations of ranks are recorded by the simulation. Computed here are the roofline of
the operations, the engines' memory and speed (their code is not run), and transfers between
processes. Collectives of weights overlap with computation. With the efficiency `PEAK` each
operation is at the peak of its GPU, and seconds are lower bounds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor
from torch.utils._pytree import tree_leaves

from winnow.builders.engines import engines_share_gpus, engines_sleep
from winnow.builders.lockstep import deal_updates, lockstep
from winnow.builders.placement import count_devices, make_pools
from winnow.config.model import NoAdapter
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.rules import max_sequence_tokens
from winnow.config.trainer import Megatron, RayCluster, Sharded
from winnow.errors import ConfigError
from winnow.learning.balance import Assignment, assign, estimate_work
from winnow.learning.shards import MODEL_FILE_BYTES
from winnow.models.folders import torch_dtype
from winnow.observe.gpus import GPU_NAMES, GPUS, Gpu
from winnow.observe.rollouts import list_step_files, read_rollouts
from winnow.plan.rank import PolicyRun, RankRun, count_microbatches, full_lengths
from winnow.plan.tracker import Peak, Phase, local_bytes
from winnow.rollout.embedded.cache_room import cache_bytes_per_slot, cache_room_gib
from winnow.rollout.vllm.worker import memory_share
from winnow.run.step_metrics import StepTokens
from winnow.types import IntArray

GIB = 2**30
RESERVED_GIB = 2.0
"""Assumed memory of the CUDA context, NCCL buffers and workspaces; not measured."""
USABLE_SHARE = 0.95
"""Share of a GPU's memory that tensors can fill, allowing for fragmentation."""
NETWORK_GB_S, DISK_GB_S = 50.0, 2.0
"""Network bandwidth per GPU between nodes (400 Gb/s), and write bandwidth per node."""
ENGINE_GB_S, HASH_GB_S = 1.06, 1.77
"""Fetching and checksumming of an engine (benchmarks/results/publication.md); sha256 of a core."""
HOST_ROLES = "weights", "gradients", "optimizer state"
"""Storage roles that an offloaded model keeps in host memory."""
Figures = dict[str, Any]
Layout = Sharded | Megatron


class Efficiency(NamedTuple):
    """Shares of a GPU's peaks that a run is expected to reach; docs/plan.md has their origin."""

    products: float = 0.8
    """Share of the peak arithmetic in matrix products."""
    attention: float = 0.75
    """Share of the peak arithmetic in attention kernels."""
    bandwidth: float = 0.35
    """Share of the memory bandwidth, in all other operations."""

    @classmethod
    def parse(cls, settings: Sequence[str]) -> Efficiency:
        """Parse settings such as `attention=0.4`.

        Raises:
            ConfigError: the name is unknown, or the value is not in (0, 1].
        """
        values = dict[str, float]()
        for setting in settings:
            name, _, value = setting.partition("=")
            with suppress(ValueError):
                values[name] = float(value)
            if name not in cls._fields or not 0 < values.get(name, 0) <= 1:
                names = ", ".join(cls._fields)
                raise ConfigError(f"--efficiency {setting}: use NAME=SHARE in (0, 1] of {names}")
        return cls(**values)


PEAK, EXPECTED = Efficiency(1.0, 1.0, 1.0), Efficiency()
"""Efficiencies of the columns *at least* and *expected*."""


@dataclass(frozen=True)
class Machine:
    """Nodes with GPUs of one kind."""

    name: str
    gpu: Gpu
    nodes: int
    """Number of nodes; 0: as many as the recipe needs."""
    per_node: int
    efficiency: Efficiency = EXPECTED

    @property
    def limit_gib(self) -> float:
        """Memory of a GPU that tensors can use."""
        return self.gpu.memory_gib * USABLE_SHARE - RESERVED_GIB

    def roofline_seconds(self, phase: Phase) -> float:
        """Return the roofline time of a phase: the larger of FLOP and bytes of each operation."""
        gpu, share = self.gpu, self.efficiency
        peaks = {"float32": gpu.float32 * share.products, "bfloat16": gpu.bfloat16 * share.products}
        peaks["attention"] = gpu.bfloat16 * share.attention
        return sum(
            times * max(flop / (peaks[unit] * 1e12), moved / self.memory_bytes_s)
            for (flop, moved, unit), times in phase.work.items()
        )

    @property
    def memory_bytes_s(self) -> float:
        """Memory bandwidth of a GPU that kernels reach."""
        return self.gpu.memory_gb_s * 1e9 * self.efficiency.bandwidth

    def phase_seconds(self, strategy: Layout, phase: Phase, times: float, scale: float) -> float:
        """Return the seconds of a phase.

        Args:
            times: factor of its collectives.
            scale: factor of its operations.
        """
        waiting = hidden = 0.0
        for kind, size in phase.sent.items():
            waits, taken = self._collective(strategy, kind, size * times)
            waiting, hidden = waiting + waits * taken, hidden + (not waits) * taken
        return max(self.roofline_seconds(phase) * scale, hidden) + waiting

    def _collective(self, strategy: Layout, kind: str, size: float) -> tuple[bool, float]:
        """Return whether computation waits for a collective of `size` bytes, and its seconds."""
        if isinstance(strategy, Megatron):
            if kind in ("send", "recv"):
                return False, size / self.link_bytes_s(strategy.ranks)
            if kind in ("reduce", "broadcast"):  # of parameters, over ranks that share them
                return True, size / self.link_bytes_s(strategy.ranks // strategy.pipeline)
            over = strategy.expert if kind.startswith("alltoall") else strategy.tensor
            return True, (1 + kind.startswith("allreduce")) * size / self.link_bytes_s(over)
        if kind.startswith("alltoall"):
            return True, size / self.link_bytes_s(getattr(strategy, "sequence", 1))
        if kind.startswith("allreduce"):  # between replicas, by all ranks of a node
            return False, 2 * size / self.link_bytes_s(strategy.ranks)
        # Rings traverse whole nodes.
        return False, size / self.link_bytes_s(strategy.ranks // strategy.replicas, self.per_node)

    def peak_tflop_s(self, config: Config) -> float:
        """Return the peak TFLOP/s of a GPU in the dtype of a recipe's policy."""
        return self.gpu.float32 if config.model.dtype == "float32" else self.gpu.bfloat16

    def write_seconds(self, total_bytes: float, hashed_bytes: float, ranks: int) -> float:
        """Return the seconds in which the nodes of `ranks` ranks write and each rank hashes."""
        disks = math.ceil(ranks / self.per_node) * DISK_GB_S
        return total_bytes / (disks * 1e9) + hashed_bytes / (HASH_GB_S * 1e9)

    def link_bytes_s(self, ranks: int, links: int = 1) -> float:
        """Return the bandwidth of each rank in a group of ranks.

        Args:
            links: network links of a node that the group uses.
        """
        link = self.gpu.link_gb_s
        return 1e9 * (link if ranks <= self.per_node else min(link, NETWORK_GB_S * links))


def find_gpu(name: str) -> tuple[str, Gpu]:
    """Find a GPU by name, such as `h100`, `a100-40` or `rtx-4090`, optionally with its GiB.

    Raises:
        ConfigError: the GPU is unknown.
    """
    known = dict(zip(GPU_NAMES, GPUS.values(), strict=True))
    by_name = known | {f"{key}-{gpu.memory_gib:g}": gpu for key, gpu in known.items()}
    if name.lower() not in by_name:
        raise ConfigError(f"--gpu {name} is unknown; choose from {', '.join(known)}")
    return name.lower(), by_name[name.lower()]


def read_lengths(config: Config, run: Path) -> tuple[IntArray, IntArray]:
    """Read lengths of prompts and answers [B] of a run's newest steps.

    Too few answers for a step of the recipe are repeated; lengths are clipped to its limits.

    Raises:
        ConfigError: the run has no saved answers.
        WinnowError: a file is damaged.
    """
    count, tables = config.sampling.groups_per_step * config.rollout.n, list[Any]()
    for _, file in reversed(list_step_files(run / "rollouts")):
        rows = read_rollouts(file).select(["kind", "prompt_tokens", "response_tokens"])
        tables.append(rows.filter(pc.equal(rows["kind"], "sampled")))
        if sum(map(len, tables)) >= count:
            break
    if not sum(map(len, tables)):
        raise ConfigError(f"--lengths {run} has no answers in rollouts/; pass the folder of a run")
    table = pa.concat_tables(tables, promote_options="permissive")
    prompts, answers = (np.resize(table[name].to_numpy(), count) for name in table.column_names[1:])
    limits = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    return prompts.clip(1, limits[0]).astype(int), answers.clip(1, limits[1]).astype(int)


def gpus_of_other_roles(config: Config) -> dict[str, int]:
    """Return GPUs reserved for other roles than the policy, by pool: the maximum of its roles."""
    roles, gpus = Roles(config), dict[str, int]()
    for role in roles:
        if role.gpus and role.pool_name != roles["policy"].pool_name:
            gpus[role.pool_name] = max(gpus.get(role.pool_name, 0), role.gpus)
    return gpus


def check_placement(config: Config, machine: Machine) -> None:
    """Check that a recipe's processes have as many GPUs as they take.

    Raises:
        ConfigError: names the keys to change.
    """
    roles, cluster, per_node = Roles(config), config.cluster, machine.per_node
    ranks, others = roles["policy"].count, sum(gpus_of_other_roles(config).values())
    gpus, given = machine.nodes * per_node, f"--nodes {machine.nodes} --gpus {per_node}"
    if ranks + others > gpus:
        used = [role for role in roles if role.gpus]
        raise ConfigError(
            f"{given} have {gpus} GPUs, and {' and '.join(role.count_text for role in used)} take "
            f"{ranks + others}; add GPUs, or lower {', '.join(role.key for role in used)}"
        )
    nodes, is_pooled = getattr(cluster, "nodes", 1), bool(getattr(cluster, "pools", {}))
    if not is_pooled and ranks > nodes * per_node:
        raise ConfigError(
            f"trainer.strategy.ranks={ranks} on {nodes} node{'s' * (nodes > 1)} need more than its "
            f"{per_node} GPUs; set cluster=ray cluster.nodes={math.ceil(ranks / per_node)}"
        )
    for pool in make_pools(roles, cast(RayCluster, cluster), True) if is_pooled else ():
        if pool.per_node * pool.devices > per_node:
            raise ConfigError(
                f"cluster.pools.{pool.name}.per_node={pool.per_node} take "
                f"{pool.per_node * pool.devices} GPUs, and a node has {per_node}; lower it, and "
                "raise nodes of the pool"
            )


def count_nodes(config: Config, per_node: int) -> int:
    """Return the number of nodes that a recipe's processes take."""
    cluster = config.cluster
    gpus = Roles(config)["policy"].count + sum(gpus_of_other_roles(config).values())
    pools: int = sum(pool.nodes for pool in getattr(cluster, "pools", {}).values())
    return max(int(getattr(cluster, "nodes", 1)), pools, math.ceil(gpus / per_node))


def estimate_engine(rank: PolicyRun, config: Config, machine: Machine, memory: Figures) -> Figures:
    """Estimate the memory of an engine on each of its GPUs.

    An engine takes what it would take in a run; it fits if ranks on its GPUs leave as much.

    Args:
        memory: figures of the ranks, which keep their peak on shared GPUs, or what is resident
            if engines sleep while ranks learn.
    """
    engine, roles, dtype = config.rollout.engine, Roles(config), torch_dtype(config.model.dtype)
    total, is_torch = machine.gpu.memory_gib, engine.name == "torch"
    shares = engines_share_gpus(roles)
    sleeps = engines_sleep(config.rollout.engine, config.trainer, config.cluster, roles)
    share, slots = getattr(engine, "memory_share", None), getattr(engine, "slots", 1)
    resident = memory["resident_gib"] * shares
    room = machine.limit_gib - (resident if sleeps else memory["peak_gib"] * shares)
    free = total - resident
    alone = memory_share(free, total, None if is_torch else share, None) * total - RESERVED_GIB
    heads = getattr(rank.shape, "num_key_value_heads", None) or rank.shape.num_attention_heads
    whole = rank.parameters["policy"] * dtype.itemsize / GIB
    row = cache_bytes_per_slot(rank.shape, dtype, max_sequence_tokens(config)) / GIB
    # Half of a GPU for weights, so that many answers fit.
    half = (memory_share(total, total, None, None) * total - RESERVED_GIB) / 2
    enough = (n for n in (1, 2, 4, 8) if max(whole / n, row / min(n, heads)) <= half)
    split = getattr(engine, "tensor_parallel", 1)
    weights, row = whole / split, row / min(split, heads)
    cache = alone - weights
    if is_torch:
        reserved = 0.0 if shares else None
        cache = cache_room_gib(free - RESERVED_GIB - weights, total, share, reserved, sleeps)
        cache = min(cache, slots * row)
    cache = cache if share is not None else min(cache, machine.limit_gib - resident - weights)
    cache = getattr(engine, "cache_gib", None) or max(cache, 0.0)
    room = room if is_torch else min(room, alone)
    fits = row <= cache and weights + cache <= room + 1e-9
    return {
        "engines": max(roles["rollout"].count, 1),
        "gpus_each": split,
        "gpus_advised": next(enough, None),
        "weights_gib": weights,
        "cache_gib": cache,
        "room_gib": max(room, 0.0),
        "longest_row_gib": row,
        "fits": bool(fits),
        "rows": min(int(cache / row), int(slots)) if fits else 0,
    }


def suggest_engines(engine: Figures, config: Config) -> Iterator[list[str]]:
    """Yield overrides that may make an engine fit, best first.

    A smaller cache if the longest answer fits and weights take no more than half of the GPU; else
    tensor-parallel engines, which take turns with the ranks on all GPUs, or get half of them.
    """
    free, split = engine["room_gib"] - engine["weights_gib"], engine["gpus_advised"]
    if free >= max(engine["longest_row_gib"], 0.1) and engine["gpus_each"] >= (split or 1):
        yield [f"rollout.engine.cache_gib={math.floor(free * 10) / 10:g}"]
    if split is None:
        return
    at, roles = "rollout.engine", Roles(config)
    vllm = ["rollout/engine=vllm", f"{at}.tensor_parallel={split}", f"{at}.cache_gib=null"]
    if not engines_share_gpus(roles):
        yield [*vllm, f"{at}.processes={max(roles['rollout'].gpus // split, 1)}"]
        return
    yield ["cluster.share_devices=true", *vllm, f"{at}.processes=null"]
    ranks = roles["policy"].count
    half = ranks // 2
    yield [f"trainer.strategy.ranks={ranks - half}", *vllm, f"{at}.processes={half // split}"]


@dataclass(frozen=True)
class RecipeEstimate:
    """Memory, time and cost of a recipe on a machine, from its simulated ranks.

    With pipeline stages, memory is that of the fullest rank and time that of the slowest.
    """

    config: Config
    machine: Machine
    stages: Sequence[PolicyRun]
    prompts_B: IntArray
    answers_B: IntArray
    """Tokens of each prompt and answer of a step."""
    price: float | None = None
    """Price of a GPU hour."""

    def figures(self) -> Figures:
        """Return all figures under the names of the JSON output."""
        return {
            "faults": list(self.faults()),
            "memory": self.memory,
            **({"apart": self.separate} if self.separate else {}),
            "learning": self.learning,
            "engine": self.engine,
            "transfers": self.transfers,
            "run": self.run,
        }

    def times(self) -> Figures:
        """Return the figures that depend on the machine's efficiency."""
        seconds = {role: {"seconds": each["seconds"]} for role, each in self.separate.items()}
        rollout = {name: self.engine[name] for name in ("rollout_seconds",) if name in self.engine}
        learning = {"seconds": self.learning["seconds"]}
        return {"learning": learning, "apart": seconds, "engine": rollout, "run": self.run}

    def faults(self) -> Iterator[str]:
        """Yield an error text for each reason why the recipe cannot run on these GPUs."""
        memory, engine = self.memory, self.engine
        is_shared = engines_share_gpus(Roles(self.config))
        limit = f"a GPU has {self.machine.limit_gib:.1f}"
        if memory["peak_gib"] > self.machine.limit_gib:
            name, gib = next(iter(memory["tensors_gib"].items()))
            yield (
                f"a rank needs {memory['peak_gib']:,.1f} GiB in the {memory['peak_within']}, most "
                f"for {name} ({gib:,.1f}); {limit}"
            )
        for role, each in self.separate.items():
            # The allocator of each process on a shared GPU keeps its peak.
            shared = memory["peak_gib"] * each["beside_policy"]
            if each["peak_gib"] + shared > self.machine.limit_gib:
                key = "reward.model" if role == "reward_model" else role
                yield (
                    f"a rank of the {role} needs {each['peak_gib']:,.1f} GiB"
                    f"{f' and the policy {shared:,.1f}' if shared else ''}; {limit}; raise "
                    f"{key}.strategy.ranks, or set {key}.strategy.offload=true"
                )
        if not engine["fits"]:
            cache = max(engine["cache_gib"], engine["longest_row_gib"])
            yield (
                f"an engine on {engine['gpus_each']} GPU needs {engine['weights_gib']:.1f} GiB of "
                f"weights and {cache:.1f} of KV cache per GPU; available are "
                f"{engine['room_gib']:.1f}{' next to a rank' if is_shared else ''}"
            )

    @property
    def rank(self) -> PolicyRun:
        """Simulated rank of the first stage."""
        return self.stages[0]

    @cached_property
    def memory(self) -> Figures:
        """Peak memory of a rank and its contents."""
        offloads = getattr(self.rank.strategy, "offload", False)
        ranks = [(rank.tracker, _device_peaks(rank)) for rank in self.stages]
        tracker, peaks = max(ranks, key=lambda each: max(peak.bytes for peak in each[1].values()))
        phase = max(peaks, key=lambda name: peaks[name].bytes)
        roles, tensors = Counter[str](), Counter[str]()
        for storage, size in peaks[phase].storages:
            name = re.sub(r"\.\d+(?=[. ]|$)", ".*", storage.made_by)
            shape = "" if storage.role in HOST_ROLES else f" {list(storage.shape)}"
            roles[storage.role] += size
            tensors[f"{storage.role}: {name}{shape}"] += size
        return {
            "peak_gib": peaks[phase].bytes / GIB,
            "peak_within": phase,
            "resident_gib": 0.0 if offloads else tracker.live_bytes(HOST_ROLES) / GIB,
            "limit_gib": self.machine.limit_gib,
            "host_gib": tracker.live_bytes(HOST_ROLES) / GIB if offloads else 0.0,
            "peaks_gib": {name: peak.bytes / GIB for name, peak in peaks.items()},
            "roles_gib": {role: size / GIB for role, size in roles.most_common()},
            "tensors_gib": {name: size / GIB for name, size in tensors.most_common(8)},
        }

    @cached_property
    def learning(self) -> Figures:
        """Load balance of a step, and a rank's FLOP, traffic and seconds per step."""
        stages = map(self._estimate_learning, self.stages)
        return max(stages, key=lambda figures: sum(figures["seconds"].values()))

    def _estimate_learning(self, rank: PolicyRun) -> Figures:
        deals = self._deal_updates(rank)
        rounds, stages = _count_rounds(deals), getattr(rank.strategy, "pipeline", 1)
        sent, seconds, petaflop = Counter[str](), dict[str, float](), 0.0
        for name, phase, times, scale, once in self._phase_costs(rank, deals, deals):
            sent.update({kind: int(size * times) for kind, size in phase.sent.items()})
            # 1F1B: the pipeline fills and drains once per flush.
            flushes = {"update": len(deals), "optimizer": 0}.get(name.split()[-1], 1)
            seconds[name] = (1 + flushes * (stages - 1) / rounds) * once
            petaflop += scale * sum(flop * times for (flop, *_), times in phase.work.items()) / 1e15
        return {
            "lockstep": lockstep(deals),
            "micro_batches": rounds,
            **({"bubble": 1 - 1 / (1 + len(deals) * (stages - 1) / rounds)} if stages > 1 else {}),
            "petaflop": petaflop,
            "sent_gib": {kind: size / GIB for kind, size in sent.items()},
            "seconds": seconds,
        }

    @cached_property
    def separate(self) -> dict[str, Figures]:
        """Peak memory and seconds per step of each model on separate ranks, by role."""
        return {role: self._separate(role, rank) for role, rank in self.rank.separate.items()}

    def _separate(self, role: str, rank: RankRun) -> Figures:
        ranks, width, roles = rank.strategy.ranks, self.rank.shape.hidden_size, Roles(self.config)
        lengths_B = np.sort(self.prompts_B + self.answers_B)[::-1]
        whole = assign(lengths_B, rank.max_tokens, ranks, width)
        phases = self._phase_costs(rank, [whole], self._deal_updates(rank))
        return {
            "ranks": ranks,
            "peak_gib": max(peak.bytes for peak in _device_peaks(rank).values()) / GIB,
            "beside_policy": roles[role].pool_name == roles["policy"].pool_name,
            "seconds": sum(seconds for *_, seconds in phases),
        }

    def _deal_updates(self, rank: RankRun) -> list[Assignment]:
        lengths_B, width = self.prompts_B + self.answers_B, self.rank.shape.hidden_size
        return deal_updates(self.config, lengths_B, rank.strategy, rank.max_tokens, width)

    def _phase_costs(
        self, rank: RankRun, passes: list[Assignment], updates: list[Assignment]
    ) -> Iterator[tuple[str, Phase, float, float, float]]:
        """Yield name, phase, factors of collectives and of operations, and seconds of each phase.

        Args:
            passes: deals of the step's samples in passes without gradients.
            updates: deals of the step's updates.
        """
        full_B = np.array(full_lengths(self.config, rank.max_tokens))
        full = estimate_work(full_B, self.rank.shape.hidden_size).sum()
        epochs, ran = self.config.trainer.epochs, count_microbatches(self.config)
        for name, phase in list(rank.tracker.phases.items())[1:]:
            deals = updates if name.endswith("update") else passes
            times: float = _count_rounds(deals)
            scale = sum(int(each.work.max(0).sum()) for each in deals) / full
            if name.endswith("update"):  # the simulation ran several micro-batches of it
                times, scale = times * epochs / ran, scale * epochs / ran
            elif name.endswith("optimizer") or ": images" in name:
                is_trained = "update" in name or "optimizer" in name
                times = scale = len(updates) * (epochs if is_trained else 1)
            seconds = self.machine.phase_seconds(rank.strategy, phase, times, scale)
            yield name, phase, times, scale, seconds

    @cached_property
    def engine(self) -> Figures:
        """Memory of an engine, and the seconds in which engines generate a step's answers."""
        rank, config, machine = self.rank, self.config, self.machine
        engine = estimate_engine(rank, config, machine, self.memory)
        if not engine["fits"]:
            return engine
        # Each decoding step reads the weights and half of the final KV cache of its rows.
        share = (self.prompts_B + self.answers_B).mean() / max_sequence_tokens(config)
        row = engine["longest_row_gib"] * share
        rows = min(engine["cache_gib"] / row, getattr(config.rollout.engine, "slots", np.inf))
        read = (engine["weights_gib"] + rows * row / 2) * GIB / machine.memory_bytes_s
        computed = 2 * rank.learning.passes.parameters * rows / engine["gpus_each"]
        computed /= machine.peak_tflop_s(config) * 1e12 * machine.efficiency.products
        ticks = max(self.answers_B.sum() / engine["engines"] / rows, self.answers_B.max())
        return engine | {"rollout_seconds": float(max(read, computed) * ticks)}

    @cached_property
    def transfers(self) -> Figures:
        """Bytes and seconds of a weight publication and of a checkpoint.

        All ranks gather each tensor; engines fetch and verify all of them in parallel. Each rank
        writes and hashes its shard of a checkpoint, and the model's rows again, since one rank
        assembles each model file. The next step runs meanwhile.
        """
        rank, machine, strategy = self.rank, self.machine, self.rank.strategy
        policy, others = cast(Any, rank.learning.policy), rank.learning.others
        adapter = self.config.model.adapter
        publishes, has_adapter = getattr(adapter, "publish", ""), not isinstance(adapter, NoAdapter)
        sent = policy.exported_bytes("adapter" if publishes == "adapter" else "all")
        model = policy.exported_bytes("adapter" if has_adapter else "all")
        if isinstance(strategy, Megatron):  # masters and two moments, without replicas
            state = 12 * sum(rank.parameters[role] for role in ("policy", *others))
        else:
            states = [each.state_dict() for each in (policy, *others.values())]
            rows = sum(local_bytes(t) for t in tree_leaves(states) if isinstance(t, Tensor))
            state = rows * strategy.ranks // strategy.replicas
        files = math.ceil(model / MODEL_FILE_BYTES / strategy.ranks)
        hashed = state / strategy.ranks + min(files * MODEL_FILE_BYTES, model)
        seconds = machine.write_seconds(state + 2 * model, hashed, strategy.ranks)
        if "critic" in rank.separate:  # written after the others: masters and two moments
            saved, ranks = 12 * rank.parameters["critic"], rank.separate["critic"].strategy.ranks
            state += saved
            seconds += machine.write_seconds(saved, saved / ranks, ranks)
        gathered = sent / machine.link_bytes_s(strategy.ranks, machine.per_node)
        return {
            "publication_gib": sent / GIB,
            "publication_seconds": gathered + sent / (ENGINE_GB_S * 1e9),
            "checkpoint_gib": (state + model) / GIB,
            "checkpoint_seconds": seconds,
        }

    @cached_property
    def run(self) -> Figures:
        """Tokens, hours and cost of all steps; only tokens if the engine does not fit."""
        roles, other_gpus = Roles(self.config), gpus_of_other_roles(self.config)
        steps, written = self.config.trainer.steps, int(self.answers_B.sum())
        run: Figures = {"mean_response": float(self.answers_B.mean()), "tokens": written * steps}
        if not self.engine["fits"]:
            return run
        separate = Counter({role: each["seconds"] for role, each in self.separate.items()})
        step = sum(self.learning["seconds"].values()) + self.transfers["publication_seconds"]
        # Scoring overlaps with sampling; reference and critic wait for all answers.
        step += max(self.engine["rollout_seconds"], separate["reward_model"])
        step += separate["reference"] + separate["critic"]
        packed = written + int(self.prompts_B.sum())
        tokens = StepTokens(written, packed, self.prompts_B.tolist(), self.answers_B.tolist())
        learning = roles["policy"].count
        run["step_seconds"] = step
        computed = (
            step * count_devices(roles, learning) * self.machine.peak_tflop_s(self.config) * 1e12
        )
        run["mfu"] = self.rank.learning.passes.flop(tokens) / computed
        run["hours"] = step * steps / 3600
        run["gpu_hours"] = run["hours"] * (learning + sum(other_gpus.values()))
        return run if self.price is None else run | {"cost": run["gpu_hours"] * self.price}


def _device_peaks(rank: RankRun) -> dict[str, Peak]:
    """Return the peak device memory of each phase."""
    tracker, without = rank.tracker, HOST_ROLES if getattr(rank.strategy, "offload", False) else ()
    return {name: tracker.peak(name, without) for name in list(tracker.phases)[1:]}


def _count_rounds(deals: list[Assignment]) -> int:
    """Return the number of micro-batches of a rank."""
    return sum(each.work.shape[1] for each in deals)
