"""Forward and backward passes of a policy whose blocks are compiled, beside eager ones.

    python -m benchmarks.compiled --out benchmarks/results/compiled.md

A Qwen3 of random weights (4 layers of width 256, 8 heads and 4 for keys, 1,024 in between) learns
from packed answers of 100 to 500 tokens, micro-batches of at most `--tokens`; each round has
other lengths. `fused` is what a CPU runs by default (`winnow.models.fused_layers`), `transformers`
its layers as they are, `compiled` `trainer.strategy.compile=true`. The variants take turns in one
process; seconds are the processor's, of one thread, the median over rounds, without the first,
which compiles. The error is the largest distance of a weight's gradient from that of
`transformers`, over its norm.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.learning.batch import MicroBatch, all_micro_batches, pack_sequences
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.causal_lm import load_causal_lm

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 1024,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
TOKENS = 4096
CPU = torch.device("cpu")
VARIANTS = ("transformers", "fused", "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
        made = {name: strategy_of(folder, name, arguments.checkpointing) for name in VARIANTS}
    first, seconds, errors = (
        {},
        {name: list[float]() for name in VARIANTS},
        dict.fromkeys(VARIANTS, 0.0),
    )
    for turn in range(arguments.rounds + 1):
        micro = micro_batches(arguments.tokens, turn)
        gradients = {}
        for name, strategy in made.items():
            took_s, gradients[name] = timed(strategy, micro)
            if turn:
                seconds[name].append(took_s)
            else:
                first[name] = took_s
        errors = {n: max(errors[n], error(gradients[n], gradients[VARIANTS[0]])) for n in VARIANTS}
    base = statistics.median(seconds["fused"])
    lines = [
        "| variant | CPU s of 4,096 tokens | to fused | first round, CPU s | error of gradients |",
        "|---|---|---|---|---|",
    ]
    for name in VARIANTS:
        own_s = statistics.median(seconds[name])
        figures = f"{own_s:.2f} | {own_s / base:.2f} | {first[name]:.1f} | {errors[name]:.1e}"
        lines.append(f"| {name} | {figures} |")
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join([*(__doc__ or "").splitlines(), "", *lines, ""]))


def strategy_of(folder: str, name: str, checkpointing: bool) -> Strategy:
    """A policy; without fused layers where that is asked for."""
    model: nn.Module = load_causal_lm(folder, torch.float32, CPU)
    kinds = {module: type(module) for module in model.modules()}
    made = Strategy(model, compiles=name == "compiled", gradient_checkpointing=checkpointing)
    if name == "transformers":
        for module, kind in kinds.items():
            module.__class__ = kind
    return made


def micro_batches(tokens: int, turn: int) -> list[MicroBatch]:
    """About 4,096 tokens in answers of other lengths each turn."""
    rng, sequences, left = np.random.default_rng(turn), [], TOKENS
    while left > 0:
        sequences.append(rng.integers(2048, size=rng.integers(100, 500)))
        left -= len(sequences[-1])
    return all_micro_batches(pack_sequences(sequences), tokens)


def timed(strategy: Strategy, micro: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """CPU seconds of all passes, and the gradients, which are cleared."""
    began = time.process_time()
    strategy.forward_backward(micro, frozenset({"logprob"}), loss)
    took_s = time.process_time() - began
    named = strategy.model.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    strategy.model.zero_grad()
    return took_s, gradients


def loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    return LossResult(-outputs["logprob"].sum() / micro.counts.tokens, {})


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted)


if __name__ == "__main__":
    main()
