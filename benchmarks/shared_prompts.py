"""An update and a pass of old log-probs with each group's prompt run once, and with copies of it.

    python -m benchmarks.shared_prompts --out benchmarks/results/shared_prompts.md

Models have random weights in fp32, in the shapes of SmolLM2-135M and of the quickstart's; tokens
are random. An update is forward and backward passes and a step of AdamW. Both ways take turns in
one process, which begins changing from round to round; seconds are the processor's, of one thread,
the median over rounds, without a first one. `tokens` are those that the model runs. The difference
is the largest of a log-prob and of a weight's gradient (its norm over that of the gradient).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from winnow.learning.batch import Batch, MicroBatch, pack
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.models.causal_lm import use_layout_attention
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory


@dataclass(frozen=True)
class Case:
    """A model's shape, and what it learns from in an update."""

    model: type[PreTrainedModel]
    config: LlamaConfig | Qwen3Config
    groups: int
    prompt_tokens: int
    answer_tokens: tuple[int, int]
    """The least and the most of an answer."""
    budget: int = 4096
    """trainer.microbatch_tokens."""


ANSWERS = 8
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
QUICKSTART = Qwen3Config(
    vocab_size=24,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    tie_word_embeddings=True,
)
CASES = {
    "SmolLM2-135M, prompts of 40": Case(LlamaForCausalLM, SMOLLM2, 8, 40, (12, 12)),
    "quickstart, prompts of 8": Case(Qwen3ForCausalLM, QUICKSTART, 16, 8, (20, 60)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| shape | tokens, copies | shared | update, CPU s, copies | shared | ratio "
        "| pass, CPU s, copies | shared | ratio | difference of a log-prob | of a gradient |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in arguments.cases:
        lines.append(f"| {name} | {measure(CASES[name], arguments.rounds)} |")
        print(lines[-1], flush=True)
    if arguments.out:
        heading = ["# Prompts that are run once", "", *(__doc__ or "").splitlines()]
        arguments.out.write_text("\n".join([*heading, "", *lines, ""]))


def measure(case: Case, rounds: int) -> str:
    """A line of the table."""
    torch.manual_seed(0)
    model = case.model(case.config).eval()
    use_layout_attention(model)
    strategy, batch = Strategy(model), batch_of(case)
    updates, passes = ({way: list[float]() for way in (False, True)} for _ in range(2))
    found: dict[bool, tuple[Tensor, dict[str, Tensor]]] = {}
    tokens = {}
    for turn in range(rounds + 1):
        for shares in (False, True) if turn % 2 else (True, False):
            strategy.sharder = strategy.sharder.sharing_prompts(0.0 if shares else math.inf)
            began = time.process_time()
            outputs = run_pass(strategy, batch, frozenset({"logprob", "entropy"}), case.budget)
            middle = time.process_time()
            micro = strategy.sharder.cut_update(batch, range(batch.n_groups), case.budget)
            strategy.forward_backward(micro, frozenset({"logprob"}), loss)
            ended = time.process_time()
            if not turn:
                named = model.named_parameters()
                gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
                found[shares] = outputs["logprob"], gradients
                tokens[shares] = sum(sum((each.shared or each).lengths) for each in micro)
            stepping = time.process_time()
            strategy.optimizer_step(0.0)
            stepped = time.process_time()
            if turn:
                passes[shares].append(middle - began)
                updates[shares].append(ended - middle + stepped - stepping)
    cells = [f"{tokens[False]:,}", f"{tokens[True]:,}"]
    for seconds in (updates, passes):
        copies, shared = (statistics.median(seconds[way]) for way in (False, True))
        cells += [f"{copies:.3g}", f"{shared:.3g}", f"{shared / copies:.2f}"]
    (first, wanted), (second, mine) = found[False], found[True]
    away = max(float((mine[n] - g).norm() / g.norm()) for n, g in wanted.items())
    return " | ".join([*cells, f"{float((first - second).abs().max()):.1e}", f"{away:.1e}"])


def batch_of(case: Case) -> Batch:
    """Groups of random tokens."""
    rng, groups = np.random.default_rng(0), []
    for number in range(case.groups):
        prompt = rng.integers(case.config.vocab_size, size=case.prompt_tokens)
        answers = []
        for _ in range(ANSWERS):
            tokens = int(rng.integers(case.answer_tokens[0], case.answer_tokens[1] + 1))
            ids = rng.integers(case.config.vocab_size, size=tokens)
            segment = Segment(ids, np.zeros(tokens, np.float32), ())
            answers.append(Answer(Trajectory((segment,), "stop"), Score(0.0, 0.0)))
        groups.append(Group(number, Prompt(str(number), prompt, "", "", None), tuple(answers)))
    return pack(groups)


def loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """The mean of log-probs, each with a weight of its own."""
    weights = torch.cos(micro.token_ids.float() + micro.positions)
    return LossResult((outputs["logprob"] * weights).sum() / micro.counts.tokens, {})


if __name__ == "__main__":
    main()
