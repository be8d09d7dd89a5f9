"""The learning side: gradients beside those of a CPU, updates at full size, memory after one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.harness import GIB, Bench, synchronize
from benchmarks.shared_prompts import Case
from benchmarks.shared_prompts import batch_of as batch_of_groups
from benchmarks.shared_prompts import loss as weighted
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from winnow.algorithms.losses import POLICY_LOSSES
from winnow.learning.batch import Batch, MicroBatch, all_micro_batches, pack_sequences
from winnow.learning.policy import PolicyObjective
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.run.step_metrics import AttentionFlop, StepFlop, StepTokens, gpu_peak_tflops

OUTPUTS = PolicyObjective.outputs
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
GAUGES: dict[str, Callable[[], int]] = {
    "allocated_gib": torch.cuda.memory_allocated,
    "reserved_gib": torch.cuda.memory_reserved,
    "free_gib": lambda: torch.cuda.mem_get_info()[0],
}
SLOWEST = 14
"""Kernels that are listed."""


def batch_of(bench: Bench, lengths: Sequence[int]) -> Batch:
    """Pack sequences of random tokens."""
    rng = np.random.default_rng(0)
    return pack_sequences([rng.integers(0, bench.ids, length) for length in lengths])


def likelihood(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """Compute the negative mean log-prob."""
    total = (outputs["logprob"] * micro.loss_mask).sum()
    return LossResult(-total / micro.counts.tokens, {})


def gradients(bench: Bench) -> None:
    """Compare gradients with those of fp32 on a CPU, and an update with the same one again."""
    lengths = bench.pick([700, 300, 1200, 50], [70, 30, 5])
    micro = all_micro_batches(batch_of(bench, lengths), 4096)

    def learn(
        device: torch.device, dtype: torch.dtype, reduced: bool = False
    ) -> tuple[Strategy, dict[str, Tensor]]:
        model = bench.model(torch.float32, layers=4).to(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
        for parameter in model.parameters():  # frequencies of positions stay in fp32, as loaded
            parameter.data = parameter.data.to(dtype)
        strategy = Strategy(model, vocab_size=bench.ids, gradient_checkpointing=True)
        strategy.forward_backward(micro, OUTPUTS, likelihood)
        named = strategy.trained()
        return strategy, {n: p.grad.float().cpu() for n, p in named if p.grad is not None}

    exact = learn(torch.device("cpu"), torch.float32)[1]
    for dtype, reduced in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        made = [learn(bench.device, dtype, reduced) for _ in range(2)]
        (strategy, first), (other, second) = made
        errors = {n: float((first[n] - g).norm() / g.norm()) for n, g in exact.items()}
        worst = sorted(errors, key=lambda name: -errors[name])[:3]
        name = str(dtype).removeprefix("torch.")
        report = partial(bench.report, dtype=name, bf16_sums=reduced)
        report("error against fp32 on a CPU", worst={name: errors[name] for name in worst})
        differ = sum(not torch.equal(first[n], second[n]) for n in first)
        report("the same update twice", gradients=len(first), differ=differ)
        strategy.optimizer_step(1e-4)
        state = copy.deepcopy(strategy.state_dict())
        other.load_state_dict(state)
        weights = other.state_dict()["weights"].items()
        same = all(torch.equal(weight, state["weights"][name]) for name, weight in weights)
        report("state loaded again", equal=same)


def update(bench: Bench, tokens: int, variant: str = "") -> None:
    """Time updates and passes of old log-probs, of one sample and of eight, and their kernels.

    Args:
        variant: `compiled` blocks, or activations `stored` instead of computed again, or those of
            `attention` alone.
    """
    tokens, model = bench.pick(tokens, 128), bench.model()
    compiles, recomputes = variant == "compiled", variant != "stored"
    options: Any = {"compiles": compiles, "gradient_checkpointing": recomputes}
    if variant == "attention":
        options["recompute_attention"] = False
    strategy = Strategy(model, vocab_size=bench.ids, **options)
    objective = PolicyObjective(POLICY_LOSSES["ppo_clip"], CLIP, "token-mean")
    passes = StepFlop(
        strategy.n_parameters,
        epochs=1,
        forwards=0,
        attention=AttentionFlop.of(model.config),
    )
    peak = gpu_peak_tflops(torch.cuda.get_device_name(), "bfloat16") if bench.on_gpu else None
    for samples in (1, 8):
        labels = {"samples": samples, "tokens": tokens, **options}
        lengths = [tokens // samples] * samples
        batch = batch_of(bench, lengths)
        batch.columns.update(dict.fromkeys(("old", "advantages"), torch.full((tokens,), -1.0)))
        micro = all_micro_batches(batch, tokens)
        learn = partial(strategy.forward_backward, micro, OUTPUTS, objective)
        with bench.guard("update", **labels):
            bench.peak_gib()
            learn_s = bench.timed(learn)
            step_s = bench.timed(partial(strategy.optimizer_step, 1e-6), repeats=1, warmup=0)
            flop = passes.flop(StepTokens(0, tokens, [0] * samples, lengths))
            figures = {"s": learn_s, "tokens_per_s": tokens / learn_s, "optimizer_s": step_s}
            limits = {"mfu": peak and flop / learn_s / peak / 1e12, "peak_gib": bench.peak_gib()}
            bench.report("update", **labels, **figures, **limits)
            pass_s = bench.timed(partial(strategy.forward, micro, OUTPUTS))
            bench.report("old log-probs", **labels, s=pass_s, tokens_per_s=tokens / pass_s)
            if not compiles:
                report_kernels(bench, learn, learn_s, labels)


def shared_prompts(bench: Bench) -> None:
    """Time an update in which a group's prompt is run once, and one with a copy for each answer."""
    model = bench.model()
    strategy = Strategy(model, gradient_checkpointing=True)
    sizes = bench.pick((4, 2048, (256, 512)), (2, 24, (4, 8)))
    case = Case(type(model), model.config, *sizes)
    batch, gradients = batch_of_groups(case), list[dict[str, Tensor]]()
    for shares in (False, True):
        strategy.sharder = strategy.sharder.sharing_prompts(0.0 if shares else math.inf)
        micro = strategy.sharder.cut_update(batch, range(batch.n_groups), 16_384)
        learn = partial(strategy.forward_backward, micro, OUTPUTS, weighted)
        learn()
        named = strategy.trained()
        gradients.append({n: p.grad.float().cpu() for n, p in named if p.grad is not None})
        bench.peak_gib()
        seconds, peak = bench.timed(learn), bench.peak_gib()
        strategy.optimizer_step(0.0)
        tokens = sum(sum((each.shared or each).lengths) for each in micro)
        bench.report("update", shared=shares, tokens=tokens, s=seconds, peak_gib=peak)
    copies, shared = gradients
    away = {n: float((shared[n] - g).norm() / g.norm()) for n, g in copies.items()}
    bench.report("difference of gradients", worst=max(away.values()))


def report_kernels(
    bench: Bench, learn: Callable[[], object], learn_s: float, labels: dict[str, Any]
) -> None:
    """Report the kernels that take most time, and the share of an update that all of them take."""
    kinds = [ProfilerActivity.CPU, *bench.pick([ProfilerActivity.CUDA], [])]
    with profile(activities=kinds) as profiler:
        learn()
        synchronize()
    clock = bench.pick("self_device_time_total", "self_cpu_time_total")
    events = [e for e in profiler.key_averages() if e.device_type.name.lower() == bench.device.type]
    times_ms = sorted(((getattr(e, clock) / 1e3, e.key[:100]) for e in events), reverse=True)
    rows = [[key, round(ms, 2)] for ms, key in times_ms[:SLOWEST]]
    bench.report("kernels", **labels, ms=rows, busy=sum(ms for ms, _ in times_ms) / 1e3 / learn_s)


def memory(bench: Bench) -> None:
    """Report what a process that learns holds of the GPU, and what `empty_cache` gives back."""
    strategy = Strategy(bench.model(), vocab_size=bench.ids)
    length = bench.pick(4096, 64)
    micro = all_micro_batches(batch_of(bench, [length] * 4), 4 * length)

    def learn() -> None:
        strategy.forward_backward(micro, OUTPUTS, likelihood)
        strategy.optimizer_step(1e-6)

    for moment, work in (("an update", learn), ("empty_cache", torch.cuda.empty_cache)):
        seconds = bench.timed(work, repeats=1, warmup=0)
        gib = {name: gauge() / GIB if bench.on_gpu else None for name, gauge in GAUGES.items()}
        bench.report(f"after {moment}", s=seconds, **gib)
