"""From what a rank did on fake tensors to a step's seconds, a run's hours and what does not fit.

What can be executed is not computed here. What is: the roofline of operations that were seen, the
engine's memory and speed (its code is not run), and what lies between processes. Seconds are
lower bounds: every operation at the peak of its GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winnow.config.root import Config
from winnow.config.rules import longest_tokens, workers_of
from winnow.config.trainer import Fsdp2, RayCluster
from winnow.learning.balance import deal, work
from winnow.learning.batch import cut_updates
from winnow.models.causal_lm import torch_dtype
from winnow.plan.machine import RESERVED_GIB, Machine
from winnow.plan.rank import RankPlan, micro_lengths
from winnow.plan.tracker import Peak
from winnow.rollout.slots import cache_bytes
from winnow.runs.metrics import Passes, StepTokens
from winnow.types import IntArray

GIB = 2**30
PUBLISH_GB_S = 1.06
"""A publication to an engine in another process, checksums at both ends
(benchmarks/results/publication.md)."""
HASH_GB_S = 1.77
"""sha256 of one core."""
VLLM_UTILIZATION = 0.92
"""Share of a GPU that vLLM takes where the recipe does not say (its gpu_memory_utilization)."""
_HOST = "weights", "gradients", "optimizer state"
"""Roles of what an offloaded model keeps in the host's memory."""
_UPDATES = 4
"""Updates of a step whose dealing is tried."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """The lengths of a step's samples."""

    prompts_B: IntArray
    responses_B: IntArray
    told: str
    """Where they come from."""


def drawn_samples(config: Config, mean_response: float | None) -> Samples:
    """Draw lengths as reasoning has them: log-normal with a long tail, cut at the limit.

    Args:
        mean_response: tokens; None takes a quarter of the limit.
    """
    limit = config.rollout.max_response_tokens
    mean, deviation = mean_response or limit / 4, 0.8
    count = config.sampling.groups_per_step * config.rollout.n
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
    responses = np.clip(drawn, 1, limit).astype(np.int64)
    prompt = max(config.data.max_prompt_tokens // 8, 1)
    told = f"drawn, log-normal, mean {responses.mean():,.0f}, prompts of {prompt:,}"
    return Samples(np.full(count, prompt), responses, told)


def memory_figures(rank: RankPlan, config: Config, machine: Machine) -> Figures:
    """Say what a rank holds at its peak, and what for."""
    strategy = config.trainer.strategy
    offloads = isinstance(strategy, Fsdp2) and strategy.offload
    without = _HOST if offloads else ()
    names = [name for name in rank.tracker.phases if name not in ("start", "micro-batch")]
    peaks = {name: rank.tracker.peak(without, [name]) for name in names}
    peak = max(peaks.values(), key=lambda each: each.bytes)
    roles: Counter[str] = Counter()
    for held, size in peak.held:
        roles[held.role] += size
    return {
        "peak_gib": peak.bytes / GIB,
        "limit_gib": machine.limit_gib,
        "phase": peak.phase,
        "host_gib": rank.tracker.held_at_end(_HOST) / GIB if offloads else 0.0,
        "roles": {role: size / GIB for role, size in roles.most_common()},
        "tensors": list(_tensors(peak)),
        "phases": {name: each.bytes / GIB for name, each in peaks.items()},
    }


def _tensors(peak: Peak) -> Iterator[Figures]:
    """List what is held, like with like, the largest first."""
    sizes: Counter[tuple[str, str, str, str]] = Counter()
    numbers: Counter[tuple[str, str, str, str]] = Counter()
    for held, size in peak.held:
        name = re.sub(r"\.\d+(?=[. ]|$)", ".*", held.made_by)
        shape = "" if held.role in _HOST else str(list(held.shape))
        key = held.role, name, shape, held.dtype
        sizes[key] += size
        numbers[key] += 1
    for key, size in sizes.most_common():
        yield {
            "gib": size / GIB,
            "count": numbers[key],
            **dict(zip(("role", "made_by", "shape", "dtype"), key, strict=True)),
        }


def dealing_figures(config: Config, samples: Samples, width: int) -> Figures:
    """Deal a step's samples to the ranks, as the learner would."""
    strategy = config.trainer.strategy
    ranks = strategy.ranks // strategy.sequence if isinstance(strategy, Fsdp2) else 1
    groups, n = config.sampling.groups_per_step, config.rollout.n
    each = config.trainer.mini_batch_groups or groups
    lengths_B = samples.prompts_B + samples.responses_B
    updates = cut_updates(groups, each, (config.run.seed, 1, 0))
    done = capacity = rounds = 0
    for update in updates[:_UPDATES]:
        places = (np.array(update)[:, None] * n + np.arange(n)).ravel()
        own_B = np.sort(lengths_B[places])[::-1]
        found = deal(own_B, config.trainer.microbatch_tokens, ranks, width)
        done, capacity = done + int(found.work.sum()), capacity + found.capacity
        rounds += found.work.shape[1]
    tried = min(len(updates), _UPDATES)
    scale = len(updates) / tried
    return {
        "updates": len(updates) * config.trainer.epochs,
        "lockstep": done / capacity,
        "rounds": rounds / tried,
        "level_work": capacity / ranks * scale,
        "micro_batches": rounds * scale,
    }


def learning_figures(rank: RankPlan, config: Config, machine: Machine, dealt: Figures) -> Figures:
    """Return seconds of a step's learning, its FLOP and the bytes that a rank sends."""
    strategy = config.trainer.strategy
    assert isinstance(strategy, Fsdp2)
    width = int(rank.model_config.hidden_size)
    lengths = np.array(micro_lengths(config, config.trainer.microbatch_tokens))
    full = int(work(lengths, width).sum())
    seconds: dict[str, float] = {}
    sent: Counter[str] = Counter()
    shards = strategy.ranks // strategy.replicas
    for name, phase in rank.tracker.phases.items():
        if name in ("start", "micro-batch"):
            continue
        is_update, steps = name.endswith("update"), name.endswith("optimizer")
        # Two micro-batches were run of an update, and one of a pass.
        share = 0.5 if is_update else 1.0
        epochs = config.trainer.epochs if is_update else 1
        compute = machine.seconds(phase) * share * dealt["level_work"] / full * epochs
        times = share * dealt["micro_batches"] * epochs
        if steps:
            compute, times = machine.seconds(phase) * dealt["updates"], dealt["updates"]
        beside = apart = 0.0
        for kind, size in phase.sent.items():
            sent[kind] += int(size * times)
            if kind.startswith("alltoall"):
                apart += size * times / machine.rate(strategy.sequence)
            elif kind.startswith("allreduce"):
                beside += 2 * size * times / machine.rate(strategy.ranks)
            else:
                beside += size * times / machine.rate(shards)
        seconds[name] = max(compute, beside) + apart
    return {"seconds": seconds, "sent_gib": {kind: size / GIB for kind, size in sent.items()}}


def step_flop(passes: Passes, samples: Samples, generated: int) -> float:
    """Return the FLOP of a step, rollout included, as MFU counts it."""
    packed = int((samples.prompts_B + samples.responses_B).sum())
    lengths = samples.prompts_B.tolist(), samples.responses_B.tolist()
    tokens = StepTokens(generated, packed, *lengths)
    return passes.flop(tokens)


@dataclass(frozen=True)
class EngineFit:
    """What an engine holds on one of its GPUs."""

    tensor_parallel: int
    weights_gib: float
    room_gib: float
    """Memory that it may take."""
    cache_gib: float
    """Left for keys and values, or what the recipe asks for."""
    row_gib: float
    """Keys and values of the longest prompt and answer."""

    @property
    def fits(self) -> bool:
        """Whether the weights fit with the cache, and that holds one answer."""
        return self.weights_gib + max(self.cache_gib, self.row_gib) <= self.room_gib

    @property
    def rows(self) -> int:
        """Answers of the longest kind that the cache holds."""
        return max(int(self.cache_gib / self.row_gib), 0) if self.fits else 0


def engine_fit(
    config: Config, rank: RankPlan, machine: Machine, peak_gib: float, tensor_parallel: int
) -> EngineFit:
    """Compute what an engine of the recipe holds, split over some GPUs."""
    engine, dtype = config.rollout.engine, torch_dtype(config.model.dtype)
    extra = getattr(engine, "extra", {})
    share = float(extra.get("gpu_memory_utilization", VLLM_UTILIZATION))
    room = machine.gpu.memory_gib * share - RESERVED_GIB
    if shares_gpus(config) and not getattr(engine, "sleep", False):
        room = machine.limit_gib - peak_gib
    weights = rank.parameters["policy"] * dtype.itemsize / tensor_parallel / GIB
    heads = getattr(rank.model_config, "num_key_value_heads", None) or 1
    row = cache_bytes(rank.model_config, dtype, longest_tokens(config)) / GIB
    row /= min(tensor_parallel, heads)
    asked = getattr(engine, "cache_gib", None)
    return EngineFit(tensor_parallel, weights, room, asked or max(room - weights, 0.0), row)


def shares_gpus(config: Config) -> bool:
    """Return whether an engine's GPU holds a rank as well."""
    if not workers_of(config)["rollout"]:
        return True  # in the run's process, beside the first rank
    roles = config.cluster.roles if isinstance(config.cluster, RayCluster) else None
    return roles is not None and roles.policy is not None and roles.policy == roles.rollout


def engine_figures(
    fit: EngineFit, config: Config, rank: RankPlan, machine: Machine, samples: Samples, kept: float
) -> Figures:
    """Return rows, and seconds in which a step's answers are written: weights and cache read."""
    engines = max(workers_of(config)["rollout"], 1)
    slots = int(getattr(config.rollout.engine, "slots", 0) or 256)
    mean = float((samples.prompts_B + samples.responses_B).mean())
    longest = longest_tokens(config)
    held = fit.cache_gib / (fit.row_gib * mean / longest) if fit.fits else 0.0
    rows = int(min(held, slots))
    tokens = samples.responses_B.sum() / kept
    figures: Figures = {
        "engines": engines,
        "tensor_parallel": fit.tensor_parallel,
        "weights_gib": fit.weights_gib,
        "cache_gib": fit.cache_gib,
        "room_gib": fit.room_gib,
        "row_gib": fit.row_gib,
        "rows_longest": min(fit.rows, slots),
        "rows_mean": rows,
        "tokens": int(tokens),
    }
    if rows:
        gpu = machine.gpu
        read = fit.weights_gib + rows * fit.row_gib * mean / longest / 2  # filled to a half
        flop = 2 * rank.parameters["policy"] * rows / fit.tensor_parallel
        peak = gpu.float32 if config.model.dtype == "float32" else gpu.bfloat16
        tick = max(read * GIB / (gpu.memory_gb_s * 1e9), flop / (peak * 1e12))
        ticks = max(tokens / engines / rows, float(samples.responses_B.max()))
        figures["seconds"] = tick * ticks
    return figures


def transfer_figures(config: Config, rank: RankPlan, machine: Machine) -> Figures:
    """Return bytes and seconds of a publication and of a checkpoint."""
    policy = rank.parameters["policy"] * torch_dtype(config.model.dtype).itemsize
    gathered = policy / machine.rate(machine.devices)
    state = rank.tracker.held_at_end(("weights", "optimizer state"))
    strategy = config.trainer.strategy
    assert isinstance(strategy, Fsdp2)
    shards = strategy.ranks // strategy.replicas
    written = state * min(machine.per_node, shards) / (machine.disk_gb_s * 1e9)
    folder = policy / (machine.disk_gb_s * 1e9)
    hashed = (state * shards + policy) / (HASH_GB_S * 1e9)
    return {
        "publication": {
            "gib": policy / GIB,
            "seconds": gathered + policy / (PUBLISH_GB_S * 1e9),
        },
        "checkpoint": {
            "gib": (state * shards + policy) / GIB,
            "seconds": written + folder + hashed,
        },
    }


def run_figures(
    config: Config, seconds: dict[str, float], tokens: int, devices: int, price: float | None
) -> Figures:
    """Add a step's seconds up to a run's hours and cost."""
    step = sum(seconds.values())
    hours = step * config.trainer.steps / 3600
    figures: Figures = {
        "step_seconds": step,
        "steps": config.trainer.steps,
        "tokens": tokens * config.trainer.steps,
        "hours": hours,
        "gpu_hours": hours * devices,
    }
    if price is not None:
        figures["cost"] = hours * devices * price
    return figures


def given_samples(prompts: Sequence[int], responses: Sequence[int], config: Config) -> Samples:
    """Draw a step's samples from lengths that were measured."""
    count = config.sampling.groups_per_step * config.rollout.n
    places = np.random.default_rng(0).integers(0, len(responses), count)
    limit = config.rollout.max_response_tokens
    found = np.minimum(np.array(responses, dtype=np.int64)[places], limit)
    told = f"{len(responses):,} given, mean {found.mean():,.0f}"
    return Samples(np.array(prompts, dtype=np.int64)[places], found, told)
