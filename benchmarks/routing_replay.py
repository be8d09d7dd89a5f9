"""How far trainer and engine disagree on a mixture of experts, with and without routing replay.

    python -m benchmarks.routing_replay [--prompts 4] [--out benchmarks/results/routing_replay.md]

A Qwen3-MoE with random weights writes answers in the torch engine; a strategy then computes the
log-probs of the tokens, once with its own routers' choices and once with the engine's. Near ties
are made on purpose: the rows of each router are scaled down, so that the best experts of a token
have almost the same logit and rounding decides between them. Random experts differ from each other
more than trained ones, too. What is measured is a mechanism, not the size that it has in a trained
model.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from winnow.learning.batch import Batch, MicroBatch, pack
from winnow.learning.routes import load_figures, token_routes
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import (
    AnswerRequest,
    GroupRequest,
    SamplingParams,
    answer_seed,
    trajectory_of,
)
from winnow.types import ROUTES, Answer, Group, Prompt, Score

ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 16, 48
BUDGET = 2048
"""Tokens of a micro-batch."""
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CASES = [
    ("bf16", "bf16", 1.0),
    ("bf16", "bf16", 0.1),
    ("fp32", "bf16", 1.0),
    ("fp32", "bf16", 0.1),
    ("fp32", "fp32", 0.1),
]
"""Types of the engine and of the trainer, and the scale of the routers' weights."""


def mixture(dtype: torch.dtype, scale: float) -> Qwen3MoeForCausalLM:
    """The same weights in each type but for rounding: those of bf16."""
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    use_layout_attention(model)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.mul_(scale)
    return model.to(torch.bfloat16).to(dtype).eval()


async def sampled(model: Qwen3MoeForCausalLM, prompts: int) -> list[Group]:
    """Groups of answers that the engine writes, with their routes."""
    rng = np.random.default_rng(1)
    engine = TorchEngine(model, slots=64, prefill_tokens=2048, routes=True)
    sampling = SamplingParams(ANSWER_TOKENS)
    requests = [
        GroupRequest(
            group,
            rng.integers(0, SHAPE["vocab_size"], PROMPT_TOKENS),
            tuple(AnswerRequest(i, answer_seed(0, group, i)) for i in range(ANSWERS)),
            sampling,
            group,
        )
        for group in range(prompts)
    ]
    await engine.submit(requests)
    found = dict[tuple[int, int], Answer]()
    while events := await engine.events():
        found |= {event.key: Answer(trajectory_of(event), Score(0.0, 0.0)) for event in events}
    return [
        Group(
            request.group_id,
            Prompt(str(request.group_id), request.prompt_ids, "", "", None),
            tuple(found[request.group_id, i] for i in range(ANSWERS)),
        )
        for request in requests
    ]


def no_loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """A pass with a gradient, whose tokens are counted."""
    return LossResult(outputs["logprob"].sum() * 0.0, {})


def compared(engine: str, trainer: str, scale: float, prompts: int) -> list[str]:
    """Return the rows of a case: without replay and with it."""
    groups = asyncio.run(sampled(mixture(TYPES[engine], scale), prompts))
    strategy = Strategy(mixture(TYPES[trainer], scale), replays_routes=True)
    assert strategy.replayed is not None
    batch = pack(groups)
    own = _distances(strategy, batch)
    batch.columns[ROUTES] = token_routes(groups, batch, strategy.replayed)
    replayed = _distances(strategy, batch)
    micro = strategy.sharder.all_micro_batches(batch, BUDGET)
    strategy.forward_backward(micro, frozenset({"logprob"}), no_loss)
    rerouted = load_figures(strategy.expert_load()).record()["experts/rerouted"]
    start = f"| {engine} | {trainer} | {scale:g} | {rerouted:.3%} |"
    return [
        f"{start} {name} | {mean:.2e} | {p99:.2e} | {most:.2e} |"
        for name, (mean, p99, most) in (("no", own), ("yes", replayed))
    ]


def _distances(strategy: Strategy, batch: Batch) -> tuple[float, float, float]:
    """Return mean, 99th percentile and maximum of |log-prob - the engine's| in nats."""
    found = run_pass(strategy, batch, frozenset({"logprob"}), BUDGET)["logprob"]
    away = (found - batch.behav)[batch.gen_mask].abs().double()
    return float(away.mean()), float(away.quantile(0.99)), float(away.max())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for case in CASES for row in compared(*case, given.prompts)]
    tokens = given.prompts * ANSWERS * ANSWER_TOKENS
    command = f"python -m benchmarks.routing_replay --prompts {given.prompts}"
    shown = f" --out {given.out}" if given.out else ""
    text = "\n".join(
        [
            "# Routing replay: trainer against engine on a mixture",
            "",
            f"`{command}{shown}`",
            "",
            f"Qwen3-MoE of random weights: {SHAPE['num_hidden_layers']} layers of "
            f"{SHAPE['num_experts']} experts, {SHAPE['num_experts_per_tok']} a token; "
            f"{tokens:,} tokens written at temperature 1; one thread, {platform.machine()}. "
            "Near ties are made: the routers' weights are scaled. Distances are of log-probs, in "
            "nats; rerouted are the engine's choices that the trainer's router would not have "
            "made.",
            "",
            "| engine | trainer | router scale | rerouted | replay | mean | 99 % | largest |",
            "|---|---|---:|---:|---|---:|---:|---:|",
            *rows,
            "",
        ]
    )
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
