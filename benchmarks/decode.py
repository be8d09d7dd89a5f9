"""Decoding speed of the embedded engine against Hugging Face `generate`, in one run.

    python benchmarks/decode.py [--threads 1] [--requests 512] [--repeat 5]

Both sample at temperature 1 from the quickstart's model with random weights, on the same
prompts of 5 to 9 tokens. Answers end with EOS (1 token in 29, so lengths are ragged, 29 on
average) or at 128 tokens. `generate` gets all requests as one left-padded batch with its
dynamic cache; the engine gets them as groups of 8 that share a prompt. Tokens behind an EOS
count for nobody. Rounds alternate, and the best of each side counts.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams

VOCABULARY, PAD, EOS, LIMIT, GROUP = 29, 0, 1, 128, 8


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


def with_generate(model: PreTrainedModel, prompts: list[np.ndarray]) -> int:
    """Tokens written by one call of `generate`."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
    out = model.generate(
        ids, attention_mask=(ids != PAD).long(), do_sample=True, top_k=0, max_new_tokens=LIMIT
    )[:, width:]
    ended = (out == EOS).cumsum(1)
    return int(((ended == 0) | ((out == EOS) & (ended == 1))).sum())


def with_engine(model: PreTrainedModel, prompts: list[np.ndarray], slots: int) -> int:
    """Tokens written by the engine."""
    engine = TorchEngine(model, slots=slots, prefill_tokens=8192)
    sampling = SamplingParams(max_tokens=LIMIT, stop_token_ids=(EOS,))
    groups = [
        GroupRequest(
            g, prompts[g * GROUP], tuple(AnswerRequest(i, g * GROUP + i) for i in range(GROUP)),
            sampling, g,
        )
        for g in range(len(prompts) // GROUP)
    ]  # fmt: skip

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        done: list[CompletionEvent] = []
        while events := await engine.events():
            done += events
        return done

    return sum(len(event.segment) for event in asyncio.run(run()))


def main() -> None:
    """Print tokens/s of both and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    distinct = [rng.integers(3, VOCABULARY, rng.integers(5, 10)) for _ in range(args.requests)]
    prompts = [distinct[i // GROUP] for i in range(args.requests)]
    theirs = tiny_model()
    ours = copy.deepcopy(theirs)
    use_layout_attention(ours)
    best = {"generate": 0.0, "engine": 0.0}
    for _ in range(args.repeat):
        for name in best:
            start = time.perf_counter()
            if name == "generate":
                tokens = with_generate(theirs, prompts)
            else:
                tokens = with_engine(ours, prompts, args.slots)
            best[name] = max(best[name], tokens / (time.perf_counter() - start))
    print(f"{args.requests} requests, {args.threads} thread(s), best of {args.repeat}")
    print(f"Hugging Face generate  {best['generate']:>8,.0f} tokens/s")
    print(f"embedded engine        {best['engine']:>8,.0f} tokens/s")
    print(f"ratio                  {best['engine'] / best['generate']:>8.2f}")


if __name__ == "__main__":
    main()
