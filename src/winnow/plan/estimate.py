"""From what a rank did on fake tensors to a step's seconds, a run's hours and what an engine holds.

What can be executed is not computed here. What is: the roofline of operations that were seen, the
engine's memory and speed (its code is not run), and what lies between processes. Seconds are lower
bounds: each operation at the peak of its GPU, collectives of weights behind the arithmetic.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from winnow.config.trainer import Megatron, Sharded
from winnow.errors import ConfigError
from winnow.learning.balance import Assignment, assign, estimate_work
from winnow.learning.batch import split_updates
from winnow.learning.shards import MODEL_FILE_BYTES
from winnow.models.folders import torch_dtype
from winnow.observe.gpus import GPU_NAMES, GPUS, Gpu
from winnow.observe.rollouts import read_rollouts, rollout_files
from winnow.plan.rank import RankPlan, RankRun, cut_update, micro_lengths, stages_of
from winnow.plan.tracker import Peak, Phase, local_bytes
from winnow.rollout.embedded.slots import cache_bytes
from winnow.run.step_metrics import StepTokens
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

    def phase_seconds(
        self, strategy: Sharded | Megatron, phase: Phase, times: float, scale: float
    ) -> float:
        """Return the least seconds of a phase: `times` its traffic, `scale` times its work."""
        waiting = hidden = 0.0
        for kind, size in phase.sent.items():
            waits, taken = self._exchange(strategy, kind, size * times)
            waiting, hidden = waiting + waits * taken, hidden + (not waits) * taken
        return max(self.seconds(phase) * scale, hidden) + waiting

    def _exchange(self, strategy: Sharded | Megatron, kind: str, size: float) -> tuple[bool, float]:
        """Return whether arithmetic waits for a collective of so many bytes, and its seconds."""
        if isinstance(strategy, Megatron):
            if kind in ("send", "recv"):
                return False, size / self.rate(strategy.ranks)
            if kind in ("reduce", "broadcast"):  # of parameters, over the ranks that hold the same
                return True, size / self.rate(strategy.ranks // strategy.pipeline)
            over = strategy.expert if kind.startswith("alltoall") else strategy.tensor
            return True, (1 + kind.startswith("allreduce")) * size / self.rate(over)
        if kind.startswith("alltoall"):
            return True, size / self.rate(getattr(strategy, "sequence", 1))
        if kind.startswith("allreduce"):  # by all ranks of a node, over the replicas of each
            return False, 2 * size / self.rate(strategy.ranks)
        # In rings through whole nodes.
        return False, size / self.rate(strategy.ranks // strategy.replicas, self.per_node)

    def teraflop_s(self, config: Config) -> float:
        """Return the TFLOP a second of a GPU in the type that a recipe's policy computes in."""
        return self.gpu.float32 if config.model.dtype == "float32" else self.gpu.bfloat16

    def saving_seconds(self, written: float, hashed: float, ranks: int) -> float:
        """Return how long nodes of so many ranks write so many bytes, and each rank hashes its."""
        disks = math.ceil(ranks / self.per_node) * DISK_GB_S
        return written / (disks * 1e9) + hashed / (HASH_GB_S * 1e9)

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


@dataclass(frozen=True)
class RecipeEstimate:
    """Figures of a recipe whose ranks were run: what it takes on a machine, and why it would fail.

    Of several stages those of the rank that holds most, and of the one that takes longest.
    """

    config: Config
    machine: Machine
    stages: Sequence[RankPlan]
    prompts_B: IntArray
    answers_B: IntArray
    """Tokens of a step's prompts and answers."""
    price: float | None = None
    """Price of a GPU for an hour."""

    def figures(self) -> Figures:
        """Return all figures, by the names of JSON."""
        return {
            "faults": list(self.faults()),
            "memory": self.memory,
            **({"apart": self.apart} if self.apart else {}),
            "learning": self.learning,
            "engine": self.engine,
            "transfers": self.transfers,
            "run": self.run,
        }

    def faults(self) -> Iterator[str]:
        """Yield a line for each reason why the recipe would fail on these GPUs."""
        memory, engine = self.memory, self.engine
        room = f"and a GPU has room for {self.machine.limit_gib:.1f}"
        if memory["peak_gib"] > self.machine.limit_gib:
            name, gib = next(iter(memory["tensors_gib"].items()))
            yield (
                f"a rank holds {memory['peak_gib']:,.1f} GiB in the {memory['peak_within']}, most "
                f"for {name} ({gib:,.1f}), {room}"
            )
        for role, each in self.apart.items():
            # Processes that share a GPU keep what each took at its peak.
            shared = memory["peak_gib"] * each["beside_policy"]
            if each["peak_gib"] + shared > self.machine.limit_gib:
                key = "reward.model" if role == "reward_model" else role
                yield (
                    f"a rank of the {role} holds {each['peak_gib']:,.1f} GiB"
                    f"{f' beside {shared:,.1f} of the policy' if shared else ''}, {room}; raise "
                    f"{key}.strategy.ranks, or set {key}.strategy.offload=true"
                )
        if not engine["fits"]:
            cache = max(engine["cache_gib"], engine["longest_row_gib"])
            yield (
                f"an engine of {engine['gpus_each']} GPU needs {engine['weights_gib']:.1f} GiB for "
                f"weights and {cache:.1f} for keys and values on each, and has "
                f"{engine['room_gib']:.1f}{' beside a rank' if shares_gpus(self.config) else ''}"
            )

    @property
    def rank(self) -> RankPlan:
        """The rank of the first stage."""
        return self.stages[0]

    @cached_property
    def memory(self) -> Figures:
        """The peak of a rank, and what it holds then."""
        offloads = getattr(self.rank.strategy, "offload", False)
        ranks = [(rank.tracker, _peaks(rank)) for rank in self.stages]
        tracker, peaks = max(ranks, key=lambda each: max(peak.bytes for peak in each[1].values()))
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
            "limit_gib": self.machine.limit_gib,
            "host_gib": tracker.held_at_end(ON_HOST) / GIB if offloads else 0.0,
            "peaks_gib": {name: peak.bytes / GIB for name, peak in peaks.items()},
            "roles_gib": {role: size / GIB for role, size in roles.most_common()},
            "tensors_gib": {name: size / GIB for name, size in tensors.most_common(8)},
        }

    @cached_property
    def learning(self) -> Figures:
        """Lockstep of a step's samples dealt out, and a rank's FLOP, traffic and seconds a step."""
        taken = map(self._learning_of, self.stages)
        return max(taken, key=lambda figures: sum(figures["seconds"].values()))

    def _learning_of(self, rank: RankPlan) -> Figures:
        deals = self._deals(rank)
        rounds, stages = _rounds(deals), stages_of(rank.strategy)
        sent, seconds, petaflop = Counter[str](), dict[str, float](), 0.0
        for name, phase, times, scale, once in self._phases(rank, deals, deals):
            sent.update({kind: int(size * times) for kind, size in phase.sent.items()})
            # Each time that it fills and drains a stage waits for all others (1F1B's bubble).
            flushes = {"update": len(deals), "optimizer": 0}.get(name.split()[-1], 1)
            seconds[name] = (1 + flushes * (stages - 1) / rounds) * once
            petaflop += scale * sum(flop * times for (flop, *_), times in phase.work.items()) / 1e15
        return {
            "lockstep": sum(int(d.work.sum()) for d in deals) / sum(d.capacity for d in deals),
            "micro_batches": rounds,
            **({"bubble": 1 - 1 / (1 + len(deals) * (stages - 1) / rounds)} if stages > 1 else {}),
            "petaflop": petaflop,
            "sent_gib": {kind: size / GIB for kind, size in sent.items()},
            "seconds": seconds,
        }

    @cached_property
    def apart(self) -> dict[str, Figures]:
        """By role, what a rank of a model apart holds at its peak, and its seconds a step."""
        return {role: self._separate_model(role, rank) for role, rank in self.rank.apart.items()}

    def _separate_model(self, role: str, rank: RankRun) -> Figures:
        ranks, width, roles = rank.strategy.ranks, self.rank.shape.hidden_size, Roles(self.config)
        lengths_B = np.sort(self.prompts_B + self.answers_B)[::-1]
        whole = assign(lengths_B, rank.max_tokens, ranks, width)
        phases = self._phases(rank, [whole], self._deals(rank))
        return {
            "ranks": ranks,
            "peak_gib": max(peak.bytes for peak in _peaks(rank).values()) / GIB,
            "beside_policy": roles[role].place == roles["policy"].place,
            "seconds": sum(seconds for *_, seconds in phases),
        }

    def _deals(self, rank: RankRun) -> list[Assignment]:
        """Deal the samples of each update of a step out to ranks."""
        strategy, sequence = rank.strategy, getattr(rank.strategy, "sequence", 1)
        shares = strategy.data if isinstance(strategy, Megatron) else strategy.ranks // sequence
        groups, seed = self.config.sampling.groups_per_step, self.config.run.seed
        updates = split_updates(groups, self.config.groups_per_update, (seed, 1, 0))
        lengths = (self.prompts_B + self.answers_B).reshape(groups, self.config.rollout.n)
        own = (np.sort(lengths[update].ravel())[::-1] for update in updates)
        return [assign(each, rank.max_tokens, shares, self.rank.shape.hidden_size) for each in own]

    def _phases(
        self, rank: RankRun, passes: list[Assignment], updates: list[Assignment]
    ) -> Iterator[tuple[str, Phase, float, float, float]]:
        """Yield a step's phases: rounds, the full micro-batches of work in these, least seconds.

        Args:
            passes: the step's samples as passes without gradients take them.
            updates: the same as updates do.
        """
        full_B = np.array(micro_lengths(self.config, rank.max_tokens))
        full = estimate_work(full_B, self.rank.shape.hidden_size).sum()
        epochs, ran = self.config.trainer.epochs, cut_update(self.config)
        for name, phase in list(rank.tracker.phases.items())[1:]:
            deals = updates if name.endswith("update") else passes
            times: float = _rounds(deals)
            scale = sum(int(each.work.max(0).sum()) for each in deals) / full
            if name.endswith("update"):  # several micro-batches were run of it, and one of a pass
                times, scale = times * epochs / ran, scale * epochs / ran
            elif name.endswith("optimizer"):
                times = scale = len(updates) * epochs
            seconds = self.machine.phase_seconds(rank.strategy, phase, times, scale)
            yield name, phase, times, scale, seconds

    @cached_property
    def engine(self) -> Figures:
        """Memory of an engine, and the least seconds in which engines write a step's answers."""
        rank, config, machine = self.rank, self.config, self.machine
        engine = engine_figures(rank, config, machine, self.memory["peak_gib"])
        if not engine["fits"]:
            return engine
        # At each token weights are read, and half of the rows of the answers that the cache holds.
        share = (self.prompts_B + self.answers_B).mean() / longest_tokens(config)
        row = engine["longest_row_gib"] * share
        rows = min(engine["cache_gib"] / row, getattr(config.rollout.engine, "slots", np.inf))
        read = (engine["weights_gib"] + rows * row / 2) * GIB / (machine.gpu.memory_gb_s * 1e9)
        computed = 2 * rank.learning.passes.parameters * rows / engine["gpus_each"]
        computed /= machine.teraflop_s(config) * 1e12
        ticks = max(self.answers_B.sum() / engine["engines"] / rows, self.answers_B.max())
        return engine | {"rollout_seconds": float(max(read, computed) * ticks)}

    @cached_property
    def transfers(self) -> Figures:
        """Bytes and seconds of a publication and of a checkpoint.

        All ranks gather each tensor together; engines fetch and check all of them, side by side. Of
        a checkpoint each rank writes and hashes its own rows, those of the model twice, as its
        files are put together from them: each by one rank. The next step goes on meanwhile.
        """
        rank, machine, strategy = self.rank, self.machine, self.rank.strategy
        policy, others = cast(Any, rank.learning.policy), rank.learning.others
        adapter = self.config.model.adapter
        publishes, has_adapter = getattr(adapter, "publish", ""), not isinstance(adapter, NoAdapter)
        sent = policy.exported_bytes("adapter" if publishes == "adapter" else "all")
        model = policy.exported_bytes("adapter" if has_adapter else "all")
        if isinstance(strategy, Megatron):  # masters and two moments, of each parameter one owner's
            state = 12 * sum(rank.parameters[role] for role in ("policy", *others))
        else:
            states = [each.state_dict() for each in (policy, *others.values())]
            rows = sum(local_bytes(t) for t in tree_leaves(states) if isinstance(t, Tensor))
            state = rows * strategy.ranks // strategy.replicas
        own_files = math.ceil(model / MODEL_FILE_BYTES / strategy.ranks)
        hashed = state / strategy.ranks + min(own_files * MODEL_FILE_BYTES, model)
        seconds = machine.saving_seconds(state + 2 * model, hashed, strategy.ranks)
        if "critic" in rank.apart:  # whose ranks write after the others: masters and two moments
            saved, ranks = 12 * rank.parameters["critic"], rank.apart["critic"].strategy.ranks
            state += saved
            seconds += machine.saving_seconds(saved, saved / ranks, ranks)
        gathered = sent / machine.rate(strategy.ranks, machine.per_node)
        return {
            "publication_gib": sent / GIB,
            "publication_seconds": gathered + sent / (ENGINE_GB_S * 1e9),
            "checkpoint_gib": (state + model) / GIB,
            "checkpoint_seconds": seconds,
        }

    @cached_property
    def run(self) -> Figures:
        """Tokens, hours and cost of all steps; tokens alone where an engine does not fit."""
        roles, beside = Roles(self.config), gpus_beside(self.config)
        steps, written = self.config.trainer.steps, int(self.answers_B.sum())
        run: Figures = {"mean_response": float(self.answers_B.mean()), "tokens": written * steps}
        if not self.engine["fits"]:
            return run
        asked = Counter({role: each["seconds"] for role, each in self.apart.items()})
        step = sum(self.learning["seconds"].values()) + self.transfers["publication_seconds"]
        # Answers are scored while others are written; reference and critic wait for all of them.
        step += max(self.engine["rollout_seconds"], asked["reward_model"])
        step += asked["reference"] + asked["critic"]
        packed = written + int(self.prompts_B.sum())
        tokens = StepTokens(written, packed, self.prompts_B.tolist(), self.answers_B.tolist())
        learning = roles["policy"].count
        places = {roles[name].place for name in ("rollout", "critic")}
        counted = learning + sum(beside.get(place, 0) for place in places)
        run["step_seconds"] = step
        computed = step * counted * self.machine.teraflop_s(self.config) * 1e12
        run["mfu"] = self.rank.learning.passes.flop(tokens) / computed
        run["hours"] = step * steps / 3600
        run["gpu_hours"] = run["hours"] * (learning + sum(beside.values()))
        return run if self.price is None else run | {"cost": run["gpu_hours"] * self.price}


def _peaks(rank: RankRun) -> dict[str, Peak]:
    """Return the peak of each phase on the device."""
    tracker, without = rank.tracker, ON_HOST if getattr(rank.strategy, "offload", False) else ()
    return {name: tracker.peak(name, without) for name in list(tracker.phases)[1:]}


def _rounds(deals: list[Assignment]) -> int:
    """Return how many micro-batches a rank has."""
    return sum(each.work.shape[1] for each in deals)
