"""Decoding speed of the embedded engine against Hugging Face `generate`, in one run.

    python benchmarks/decode.py [--model FOLDER] [--lengths eos|equal|lognormal] [--rows 512]
        [--limit 128] [--threads 1] [--rounds 5] [--sides generate engine modules]

Both sample at temperature 1 in fp32 from the model of a folder, or the quickstart's with random
weights, on the same prompts of 5 to 9 random tokens. Answers end with EOS (of the random model 1
token in 29, so 29 tokens on average) or at the limit; or all at the limit; or at lengths drawn once
for both sides, log-normal with median 48 and sigma 0.8, at most the limit. `generate` gets all
requests as one left-padded batch with its dynamic cache, and runs it to its longest answer; tokens
behind an answer's end do not count. The engine gets groups of 8 that share a prompt, but single
requests where each has its own length. Sides take turns; CPU-seconds count, prefill included. The
side `modules` is the engine without merged weights. The ratio is the second side's to the first's.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams
from winnow.rollout.weights import WeightUpdate

VOCABULARY, PAD, EOS, GROUP = 29, 0, 1, 8


def tiny_model() -> PreTrainedModel:
    """The quickstart's architecture, random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=192,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config).eval()


def with_generate(
    model: PreTrainedModel, prompts: list[np.ndarray], limits: list[int], eos: int | None
) -> int:
    """Tokens written by one call of `generate`."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
    settings: Any = model.generation_config
    settings.eos_token_id, settings.pad_token_id = eos, PAD
    options: Any = {"do_sample": True, "top_k": 0, "max_new_tokens": max(limits)}
    generate: Any = model.generate
    out = generate(ids, attention_mask=(ids != PAD).long(), **options)[:, width:]
    if eos is None:
        return sum(limits)
    ended = (out == eos).cumsum(1)
    return int(((ended == 0) | ((out == eos) & (ended == 1))).sum())


def with_engine(
    engine: TorchEngine, prompts: list[np.ndarray], limits: list[int], eos: int | None
) -> int:
    """Tokens written by the engine."""
    size = GROUP if len(set(limits)) == 1 else 1
    stops = () if eos is None else (eos,)
    groups = [
        GroupRequest(
            first,
            prompts[first],
            tuple(AnswerRequest(i, first + i) for i in range(size)),
            SamplingParams(max_tokens=limits[first], stop_token_ids=stops),
            first,
        )
        for first in range(0, len(prompts), size)
    ]

    async def run() -> list[CompletionEvent]:
        # As after a step of a learner, which changes all weights.
        await engine.load_weights(WeightUpdate(engine.status().weight_version + 1))
        await engine.submit(groups)
        done: list[CompletionEvent] = []
        while events := await engine.events():
            done += events
        return done

    return sum(len(event.segment) for event in asyncio.run(run()))


def main() -> None:
    """Print tokens a CPU-second of both and the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--lengths", choices=("eos", "equal", "lognormal"), default="eos")
    parser.add_argument("--rows", type=int, default=512, help="a multiple of 8")
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    names = ("generate", "engine", "modules")
    parser.add_argument("--sides", nargs=2, choices=names, default=names[:2])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    theirs: Any = tiny_model()
    if args.model:
        loaded = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        theirs = loaded.eval()
    eos = theirs.config.eos_token_id if args.lengths == "eos" else None
    rng = np.random.default_rng(0)
    vocabulary = theirs.config.vocab_size
    distinct = [rng.integers(3, vocabulary, rng.integers(5, 10)) for _ in range(args.rows)]
    prompts = [distinct[i // GROUP] for i in range(args.rows)]
    limits = [args.limit] * args.rows
    if args.lengths == "lognormal":
        drawn = np.ceil(rng.lognormal(math.log(48), 0.8, args.rows)).astype(int)
        limits = drawn.clip(1, args.limit).tolist()
    ours = copy.deepcopy(theirs)
    use_layout_attention(ours)
    engine, modules = (TorchEngine(ours, args.rows, prefill_tokens=8192) for _ in range(2))
    modules._merged = None
    sides: dict[str, Callable[[], int]] = {
        "generate": lambda: with_generate(theirs, prompts, limits, eos),
        "engine": lambda: with_engine(engine, prompts, limits, eos),
        "modules": lambda: with_engine(modules, prompts, limits, eos),
    }
    rates: dict[str, list[float]] = {name: [] for name in args.sides}
    for _ in range(args.rounds):
        for name in args.sides:
            start = time.process_time()
            tokens = sides[name]()
            rates[name].append(tokens / (time.process_time() - start))
            print(f"{name}: {tokens} tokens, {rates[name][-1]:,.1f} a CPU-second", flush=True)
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    print(f"{args.rows} requests, mean limit {np.mean(limits):.0f}, {args.threads} thread(s)")
    for name, each in (*rates.items(), ("ratio", ratios)):
        middle, least, most = (float(f(each)) for f in (np.median, min, max))
        print(f"{name:10}{middle:10,.2f} ({least:,.2f} to {most:,.2f})", flush=True)


if __name__ == "__main__":
    main()
