"""What a reward model costs: each answer alone, as deterministic runs do, and packed.

    OMP_NUM_THREADS=1 python benchmarks/reward_model.py [--answers 64] [--repeats 3]

Sequence classifiers of random weights, 64 random answers of 10 to 300 tokens, fp32 on the CPU:
tokens a second of the fastest of some repeats, and how many scores differ in their last bits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from winnow.learning.strategy import Strategy, score_sequences
from winnow.models.folders import quiet_transformers
from winnow.models.value import load_reward_model
from winnow.types import IntArray

PACKED_TOKENS = 8192
SHAPES = {"1 x 16": (1, 16), "2 x 64": (2, 64), "4 x 256": (4, 256)}
"""Layers and width."""


def role_of(layers: int, width: int) -> Strategy:
    """A reward model of random weights."""
    config = Qwen3Config(
        vocab_size=2000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(8, width // 4),
        max_position_embeddings=512,
        num_labels=1,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        Qwen3ForSequenceClassification(config).save_pretrained(folder)
        model = load_reward_model(folder, torch.float32, torch.device("cpu"))
    return Strategy(model)


def fastest(run: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    """What it gives, and the seconds of the fastest of some calls."""
    found = run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        found = run()
        times.append(time.perf_counter() - began)
    return found, min(times)


def one_by_one(model: Strategy, answers: Sequence[IntArray]) -> Tensor:
    """Score each answer in a pass of its own."""
    return torch.cat([score_sequences(model, [ids], PACKED_TOKENS) for ids in answers])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 301, options.answers)
    answers: list[IntArray] = [rng.integers(0, 2000, int(length)) for length in lengths]
    print(
        "| layers x width | alone, tokens/s | packed, tokens/s | packed over alone | bits differ |"
    )
    print("|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        role = role_of(*shape)
        alone, alone_s = fastest(
            partial(one_by_one, role, answers),
            options.repeats,
        )
        packed, packed_s = fastest(
            partial(score_sequences, role, answers, PACKED_TOKENS),
            options.repeats,
        )
        rates = [f"{lengths.sum() / seconds:,.0f}" for seconds in (alone_s, packed_s)]
        differ = int((alone != packed).sum())
        print(
            f"| {name} | {rates[0]} | {rates[1]} | {alone_s / packed_s:.2f} | "
            f"{differ} of {options.answers}, at most {float((alone - packed).abs().max()):.1g} |"
        )


if __name__ == "__main__":
    main()
