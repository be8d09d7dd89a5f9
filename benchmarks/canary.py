"""The canary over many models: false alarms, room of correct engines, and which faults it catches.

    .venv-vllm/bin/python -m benchmarks.canary [--publications 1000]
                                               [--out benchmarks/results/canary.md]

Each publication is one AdamW step of the trainer on random tokens, an export, and the check of an
engine that took the weights. Models have random weights: `flat` as Hugging Face draws them,
`peaked` with matrices whose outputs are as large as their inputs, and logits of the spread that is
named. Without vLLM its rows are left out. A share is what was found over what is allowed, of the
mean or of the largest difference, whichever is more: above 1 the canary refuses the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from winnow.config.model import LoraAdapter
from winnow.errors import PublicationError
from winnow.learning.batch import MicroBatch, all_micro_batches, pack_sequences
from winnow.learning.canary import SCORED, Canary, CanaryScores
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.models.causal_lm import use_layout_attention
from winnow.models.lora import add_lora
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import PublishedEngine
from winnow.rollout.weights import WeightUpdate

FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
HEAD, TEMPERATURE, UNKNOWN = 32, 0.9, 3
"""`UNKNOWN` is the number of ids that the tokenizer lacks."""
HAS_VLLM = importlib.util.find_spec("vllm") is not None
Tensors = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Kind:
    """A model's architecture and how its weights are drawn."""

    family: str
    layers: int
    spread: float | None
    """The standard deviation of its logits; None draws all weights as Hugging Face does."""
    dtype: torch.dtype
    tied: bool = False
    width: int = 64
    vocabulary: int = 1024
    lora: bool = False
    """The trainer has an adapter beside the weights, which engines get merged and rounded."""

    def __str__(self) -> str:
        how = "flat" if self.spread is None else f"peaked {self.spread:g}"
        how += ", tied" * self.tied + ", LoRA" * self.lora
        name = f"{self.family}, {self.layers} x {self.width}, {how}"
        return f"{name} | {str(self.dtype).removeprefix('torch.')}"


BF16, FP32 = torch.bfloat16, torch.float32
PUBLISHED = [
    Kind("qwen2", 2, None, BF16, tied=True),
    Kind("qwen3", 4, 2.0, BF16),
    Kind("llama", 8, 8.0, BF16),
    Kind("qwen3", 32, 4.0, BF16),
    Kind("llama", 24, 4.0, BF16, lora=True),
    Kind("qwen3", 2, None, FP32, tied=True),
    Kind("qwen2", 4, 8.0, FP32),
    Kind("llama", 8, 2.0, FP32),
    Kind("qwen2", 24, 4.0, FP32),
]
PUBLISHED_VLLM = [
    Kind("qwen2", 2, None, BF16, tied=True),
    Kind("qwen3", 8, 4.0, BF16),
    Kind("qwen3", 8, 4.0, BF16, lora=True),
    Kind("llama", 24, 4.0, BF16),
    Kind("llama", 4, 2.0, FP32),
]
DEEP = [
    Kind(family, layers, spread, BF16)
    for (layers, spread), family in product(
        [(4, 8.0), (8, 16.0), (16, 4.0), (24, 8.0), (48, None), (48, 4.0), (64, 2.0), (64, 8.0)],
        FAMILIES,
    )
]


def model_of(kind: Kind) -> Any:
    """Make a model with random weights."""
    torch.manual_seed(0)
    config = FAMILIES[kind.family](
        vocab_size=kind.vocabulary,
        hidden_size=kind.width,
        intermediate_size=3 * kind.width,
        num_hidden_layers=kind.layers,
        num_attention_heads=kind.width // HEAD,
        num_key_value_heads=1,
        head_dim=HEAD,
        max_position_embeddings=1024,
        tie_word_embeddings=kind.tied,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if kind.spread is not None:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, parameter.shape[1] ** -0.5)
        torch.nn.init.normal_(model.get_input_embeddings().weight, 0, 1)
        torch.nn.init.normal_(model.lm_head.weight, 0, kind.spread * kind.width**-0.5)
    model = model.to(kind.dtype).eval()
    use_layout_attention(model)
    return model


def strategy_of(model: Any) -> Strategy:
    """Hold a copy of a model as the trainer does."""
    known = model.config.vocab_size - UNKNOWN
    return Strategy(copy.deepcopy(model), temperature=TEMPERATURE, vocab_size=known)


def with_adapter(model: Any) -> Any:
    """Put an adapter into a model, with an update that is not zero."""
    add_lora(model, LoraAdapter(rank=8, alpha=16.0), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.02)
    use_layout_attention(model)
    return model


def torch_engine(model: Any) -> TorchEngine:
    """Hold a copy of a model as an engine does."""
    known = model.config.vocab_size - UNKNOWN
    return TorchEngine(copy.deepcopy(model), slots=4, prefill_tokens=1024, vocab_size=known)


@cache
def started(kind: Kind) -> Any:
    """Start a vLLM with a model's shapes; it stays."""
    from winnow.rollout.vllm.engine import meta_model, start_vllm
    from winnow.rollout.vllm.worker import VllmOptions

    folder = tempfile.mkdtemp(prefix="winnow-canary-")
    model_of(kind).save_pretrained(folder)
    name = str(kind.dtype).removeprefix("torch.")
    options: Any = {"slots": 4, "prefill_tokens": 1024, "cache_gib": 1 / 16, "longest": 600}
    return start_vllm(folder, VllmOptions(dtype=name, **options)), meta_model(folder, kind.dtype)


def vllm_engine(kind: Kind) -> Any:
    """Make an engine over a vLLM that is up."""
    from winnow.rollout.vllm.engine import VllmEngine

    llm, shapes = started(replace(kind, lora=False))
    return VllmEngine(llm, shapes, 4, kind.vocabulary - UNKNOWN)


FIXED = {FP32: (5e-4, 5e-5), BF16: (0.5, 0.02)}
"""Limits that were fixed by dtype before, of the largest and of the mean difference."""


def canary_of(kind: Kind) -> Canary:
    """The canary of a run with such a model."""
    return Canary.random(kind.vocabulary - UNKNOWN, 1024, kind.dtype, TEMPERATURE)


@dataclass(frozen=True)
class Found:
    """One check."""

    largest: float
    mean: float
    share: float
    fixed_share: float
    """Of the limits that were fixed by dtype before."""
    refused: bool


async def check(canary: Canary, expected: CanaryScores, engine: PublishedEngine) -> Found:
    """Have the canary check an engine."""
    answers: list[Any] = []

    class Recorded:
        async def logprobs_of(self, *args: Any) -> list[Any]:
            answers.extend(await engine.logprobs_of(*args))
            return answers

    recorded: Any = Recorded()
    try:
        await canary.check(expected, 1, {"engine": recorded})
        refused = False
    except PublicationError:
        refused = True
    pairs = zip(answers, expected.logprobs, strict=True)
    gaps = np.concatenate([np.abs(own - theirs) for own, theirs in pairs])
    most, mean = float(gaps.max()), float(gaps.mean())
    limits = expected.limits
    share, fixed = (
        float(np.maximum(most / largest, mean / average))
        for largest, average in ((limits.largest, limits.mean), FIXED[canary.dtype])
    )
    return Found(most, mean, share, fixed, refused)


def likelihood(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """The loss of a step: the mean negative log-prob."""
    return LossResult(-outputs["logprob"].sum() / len(micro.token_ids), {})


def learn(strategy: Strategy, vocabulary: int, seed: int) -> None:
    """Take one AdamW step on random tokens."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, vocabulary, 16) for _ in range(4)]
    micro = all_micro_batches(pack_sequences(ids), 64)
    strategy.forward_backward(micro, frozenset({"logprob"}), likelihood)
    strategy.optimizer_step(1e-4)


async def publications(kind: Kind, engine: Any, count: int) -> list[Found]:
    """Publish after each of so many steps."""
    model, canary = model_of(kind), canary_of(kind)
    policy = strategy_of(with_adapter(model) if kind.lora else model)
    found = []
    for step in range(1, count + 1):
        learn(policy, kind.vocabulary - UNKNOWN, step)
        expected = canary.score(policy)
        await engine.load_weights(WeightUpdate(step, policy.export_weights(kind.dtype)))
        found.append(await check(canary, expected, engine))
    return found


def published_table(count: int) -> Iterator[str]:
    """Rows of publications in which nothing is wrong."""
    yield "| model | dtype | engine | publications | refused | greatest share | median share |"
    yield "|---|---|---|---|---|---|---|"
    vllm = PUBLISHED_VLLM if HAS_VLLM else []
    each = -(-max(1, count - 20 * len(vllm)) // len(PUBLISHED))
    runs: list[tuple[Kind, str, int]] = [(kind, "torch", each) for kind in PUBLISHED]
    runs += [(kind, "vLLM", 20) for kind in vllm]
    total = refused = 0
    for kind, name, times in runs:
        engine = torch_engine(model_of(kind)) if name == "torch" else vllm_engine(kind)
        found = asyncio.run(publications(kind, engine, times))
        shares = [each.share for each in found]
        total, refused = total + times, refused + sum(each.refused for each in found)
        yield (
            f"| {kind} | {name} | {times} | {sum(each.refused for each in found)} "
            f"| {max(shares):.2f} | {np.median(shares):.2f} |"
        )
    yield f"\n{refused} of {total} correct publications were refused."


def deep_table() -> Iterator[str]:
    """Rows of correct deep or peaked models, what the former limits say of them, and a fault."""
    yield "`fp32` is an engine that computes in fp32 with the same bf16 weights: other roundings."
    yield "The last column is no correct engine: its output layer is stale, of weights 5 % apart.\n"
    yield "| model | dtype | largest | mean | share | fp32: share | of fixed limits | stale head |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in DEEP:
        model, canary = model_of(kind), canary_of(kind)
        expected = canary.score(strategy_of(model))
        own = asyncio.run(check(canary, expected, torch_engine(model)))
        exact = copy.deepcopy(model).float()
        use_layout_attention(exact)
        other = asyncio.run(check(canary, expected, torch_engine(exact)))
        yield (
            f"| {kind} | {own.largest:.3f} | {own.mean:.4f} | {own.share:.2f} | {other.share:.2f} "
            f"| {max(own.fixed_share, other.fixed_share):.2f} "
            f"| {asyncio.run(with_fault(kind, 0.05, stale_head)).share:.2f} |"
        )


# Faults. Each gets the tensors of a publication and the engine, which has the weights before.


def stale_head(tensors: Tensors, engine: TorchEngine) -> Tensors:
    """an output layer as it was"""
    head = copy.deepcopy(engine._head)
    engine._head = head
    return tensors


def swapped_layers(tensors: Tensors, engine: TorchEngine) -> Tensors:
    """two layers under each other's names"""
    swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}

    def other(name: str) -> str:
        return next((name.replace(a, b) for a, b in swap.items() if a in name), name)

    return [(other(name), tensor) for name, tensor in tensors]


def stale_tensor(tensors: Tensors, engine: TorchEngine) -> Tensors:
    """one tensor as it was"""
    return [(n, t) for n, t in tensors if n != "model.layers.1.mlp.down_proj.weight"]


def transposed(tensors: Tensors, engine: TorchEngine) -> Tensors:
    """a matrix transposed"""
    return [(n, t.T if n.endswith("0.self_attn.q_proj.weight") else t) for n, t in tensors]


def not_a_number(tensors: Tensors, engine: TorchEngine) -> Tensors:
    """a NaN"""
    broken = [(n, t.detach().clone()) for n, t in tensors]
    broken[3][1].view(-1)[0] = float("nan")
    return broken


def nothing_arrived(tensors: Tensors, engine: TorchEngine) -> Tensors:
    """all weights as they were"""
    return []


FAULTS: list[Callable[[Tensors, TorchEngine], Tensors]] = [
    stale_head,
    nothing_arrived,
    stale_tensor,
    swapped_layers,
    transposed,
    not_a_number,
]


def changed(model: Any, size: float) -> Any:
    """The model after each weight changed by about `size` of its value."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = 1 + size * torch.randn(parameter.shape)
            parameter.copy_((parameter.float() * noise).to(parameter.dtype))
    return other


def verdict(found: Found) -> str:
    """One cell."""
    share = "NaN" if np.isnan(found.share) else f"{found.share:.3g} ({found.fixed_share:.3g})"
    return f"{share} {'caught' if found.refused else '**missed**'}"


FAULTY = [
    *(Kind("qwen2", 2, None, dtype, tied=True) for dtype in (FP32, BF16)),
    *(Kind("qwen3", 4, 2.0, dtype) for dtype in (FP32, BF16)),
    *(Kind("llama", 24, 4.0, dtype) for dtype in (FP32, BF16)),
]


async def with_fault(kind: Kind, size: float, fault: Callable[..., Tensors]) -> Found:
    """Publish weights that are `size` apart with a fault, and have the canary check it."""
    before = model_of(kind)
    policy, engine = strategy_of(changed(before, size)), torch_engine(before)
    canary = canary_of(kind)
    expected = canary.score(policy)
    tensors = fault(list(policy.export_weights(kind.dtype)), engine)
    await engine.load_weights(WeightUpdate(1, tensors))
    return await check(canary, expected, engine)


def fault_table() -> Iterator[str]:
    """Rows of faults, a column a model."""
    yield "Shares of what is allowed; in brackets, of the limits that were fixed by dtype before.\n"
    yield f"| fault | weights apart | {' | '.join(str(k).replace(' | ', ', ') for k in FAULTY)} |"
    yield "|---" * (len(FAULTY) + 2) + "|"
    smaller = [(stale_head, 0.05), (nothing_arrived, 0.05), (nothing_arrived, 0.01)]
    for fault, size in [*product(FAULTS, (0.3,)), *smaller]:
        cells = [verdict(asyncio.run(with_fault(kind, size, fault))) for kind in FAULTY]
        yield f"| {fault.__doc__} | {100 * size:g} % | {' | '.join(cells)} |"
    if HAS_VLLM:
        tied = [kind if kind.tied else None for kind in FAULTY]
        cells = ["" if k is None else verdict(asyncio.run(vllm_stale_head(k))) for k in tied]
        yield f"| vLLM's tied output layer not packed again | 5 % | {' | '.join(cells)} |"


async def vllm_stale_head(kind: Kind) -> Found:
    """Publish to vLLM twice, the second time without the remedy for its tied output layer."""
    from winnow.rollout.vllm import plugin as vllm_plugin

    engine, before = vllm_engine(kind), model_of(kind)
    policy, canary = strategy_of(changed(before, 0.05)), canary_of(kind)
    await engine.load_weights(WeightUpdate(1, strategy_of(before).export_weights(kind.dtype)))
    remedy, vllm_plugin.repack_head = vllm_plugin.repack_head, lambda model: None
    try:
        await engine.load_weights(WeightUpdate(2, policy.export_weights(kind.dtype)))
    finally:
        vllm_plugin.repack_head = remedy
    return await check(canary, canary.score(policy), engine)


def cpu_s(work: Callable[[], Any], times: int = 3) -> float:
    """CPU-seconds of one call."""
    work()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(times):
        work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent / times


def cost_table() -> Iterator[str]:
    """Rows of CPU-seconds, for all tokens as before and for the last ones."""
    yield "| model | dtype | side | all 583 tokens | the last ones |"
    yield "|---|---|---|---|---|"
    for dtype in (FP32, BF16):
        kind = Kind("qwen3", 6, None, dtype, tied=True, width=256, vocabulary=32_768)
        model, canary = model_of(kind), canary_of(kind)
        policy = strategy_of(model)
        sides = [
            ("trainer", *of_trainer(policy, canary)),
            ("torch engine", *of_engine(torch_engine(model), canary)),
        ]
        if HAS_VLLM and kind.dtype == FP32:
            engine = vllm_engine(kind)
            update = WeightUpdate(1, policy.export_weights(kind.dtype))
            asyncio.run(engine.load_weights(update))
            sides.append(("vLLM", *of_engine(engine, canary)))
        for side, before, now in sides:
            yield f"| {kind} | {side} | {cpu_s(before):.3f} | {cpu_s(now):.3f} |"


Work = tuple[Callable[[], Any], Callable[[], Any]]


def of_trainer(policy: Strategy, canary: Canary) -> Work:
    """The trainer's side: all tokens once, as before, and as now."""
    batch = pack_sequences(canary.sequences)

    def before() -> Any:
        return run_pass(policy, batch, frozenset({"logprob"}), 2048)

    return before, lambda: canary.score(policy)


def of_engine(engine: Any, canary: Canary) -> Work:
    """An engine's side: all tokens, as before, and the last ones."""

    def of(last: int) -> Callable[[], Any]:
        return lambda: asyncio.run(engine.logprobs_of(canary.sequences, TEMPERATURE, last))

    return of(512), of(SCORED)


def main() -> None:
    """Run all parts, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--publications", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = Path("/proc/loadavg").read_text().split()[0]
    parts = [
        ("Faults", fault_table()),
        ("Correct deep or peaked models", deep_table()),
        ("CPU-seconds of a check", cost_table()),
        ("Publications in which nothing is wrong", published_table(args.publications)),
    ]
    text = "# What the canary of a publication lets pass\n\n"
    text += f"Made by `{' '.join(['python -m benchmarks.canary', *sys.argv[1:]])}`, one thread; "
    text += f"other work on the machine (load average) when it began: {load}.\n"
    print(text)
    for title, lines in parts:
        print(f"\n## {title}\n", flush=True)
        text += f"\n## {title}\n\n"
        for line in lines:
            print(line, flush=True)
            text += line + "\n"
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
