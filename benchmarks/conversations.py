"""What turns of a conversation cost the torch engine, against one answer as long as all of them.

    OMP_NUM_THREADS=1 python -m benchmarks.conversations [--sessions 256] [--turns 4] [--out FILE]

A model with random weights writes turns that end with a stop token (1 token in 40), and an
environment replies to each but the last. Each session is written three ways: with its cache row
retained between turns, without, and as a single turn of the same prompt and the same total length,
all of it sampled. All sessions have a slot, and replies take effect after 16 ticks. Tokens are
those that went through the model. Rounds alternate on one thread; CPU-seconds are those of the
process, and those of the engine's ticks alone, without conversation, environment and chat
template; the best of the rounds counts, of each way.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.unit.environments.test_conversation import EOS, tokenizer
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.data.tokenizer import make_decoder
from winnow.environments import Step, Turn
from winnow.environments.conversation import (
    ConversationEngine,
    ConversationLimits,
    ReplySchedule,
    TurnFormat,
)
from winnow.models.causal_lm import use_layout_attention
from winnow.models.fused_layers import fuse_layers
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    Engine,
    GroupRequest,
    SamplingParams,
    group_request,
)
from winnow.types import Prompt

LONGEST = 1024
REPLY = "abcdefgh01234567"
WAYS = ("rows retained", "rows not retained", "one turn")
MODELS = {"quickstart's": (64, 2), "larger": (128, 4)}
"""Width and layers."""


def random_model(width: int, layers: int) -> PreTrainedModel:
    """A Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        head_dim=16,
        intermediate_size=3 * width,
        max_position_embeddings=2 * LONGEST,
    )
    model = Qwen3ForCausalLM(config).eval()
    use_layout_attention(model)
    fuse_layers(model)
    return model


class CountingEngine(TorchEngine):
    """An engine that counts the tokens that go through its model."""

    tokens = 0
    seconds = 0.0
    retains = True

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups, with leave to retain rows or without."""
        if not self.retains:
            groups = [
                replace(g, answers=tuple(replace(a, retain_cache=False) for a in g.answers))
                for g in groups
            ]
        await super().submit(groups)

    def _advance(self) -> list[CompletionEvent]:
        began = time.process_time()
        events = super()._advance()
        self.seconds += time.process_time() - began
        return events

    def _run(self, tokens: Tensor, *inputs: Any) -> Any:
        self.tokens += len(tokens)
        return super()._run(tokens, *inputs)


class Replies:
    """Environments that say the same after each turn."""

    steps, seconds = 0, 0.0

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def step(
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: str = ""
    ) -> list[Step]:
        """Return the reply, or the end."""
        return [Step(REPLY, 0.0, done=len(turns) == self._turns)]

    def close_conversation(self, conversation: int) -> None:
        """Do nothing."""


async def finished(engine: Engine, asked: Sequence[GroupRequest]) -> dict[int, CompletionEvent]:
    """The ends of answers, by group."""
    await engine.submit(asked)
    done: dict[int, CompletionEvent] = {}
    while events := await engine.events():
        done |= {event.group_id: event for event in events}
    return done


def measure(
    model: PreTrainedModel,
    way: str,
    prompts: Sequence[Prompt],
    turns: int,
    lengths: Mapping[int, int],
) -> tuple[dict[int, int], tuple[int, float, float]]:
    """Tokens of each session behind its prompt; tokens through the model, CPU-seconds."""
    engine = CountingEngine(model, slots=len(prompts), prefill_tokens=8192)
    engine.retains = way == WAYS[0]
    runner: Engine = engine
    if way == WAYS[2]:
        asked = [
            GroupRequest(
                *(i, prompt.token_ids, (AnswerRequest(0, i),)), SamplingParams(lengths[i]), i
            )
            for i, prompt in enumerate(prompts)
        ]
    else:
        sampling = SamplingParams(LONGEST, stop_token_ids=(EOS,))
        asked = [group_request(i, p, {0: None}, sampling, 7) for i, p in enumerate(prompts)]
        own = tokenizer()
        chat = TurnTokenizer(ChatTemplate(own, DataConfig()), own, [EOS])
        runner = ConversationEngine(
            engine,
            TurnFormat(chat, make_decoder(own), Turn),
            Replies(turns),
            ConversationLimits(turns),
            ReplySchedule(True, lag_ticks=16),
        )
    began = time.process_time()
    done = asyncio.run(finished(runner, asked))
    seconds = time.process_time() - began
    written = {i: sum(map(len, (*e.earlier, e.segment))) for i, e in done.items()}
    return written, (engine.tokens, seconds, engine.seconds)


def table(model: PreTrainedModel, sessions: int, turns: int, rounds: int) -> str:
    """Tokens and CPU-seconds of the three ways."""
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(str(i), rng.integers(6, 40, rng.integers(24, 40)), "", "", None)
        for i in range(sessions)
    ]
    found: dict[str, list[tuple[int, float, float]]] = {way: [] for way in WAYS}
    lengths: dict[int, int] = {}
    measure(model, WAYS[0], prompts[:16], turns, {})  # the process warms up
    for _ in range(rounds):
        for way in WAYS:
            written, figures = measure(model, way, prompts, turns, lengths)
            assert not lengths or written == lengths, "the ways wrote other tokens"
            lengths = written
            found[way].append(figures)
    lines = [
        "| | tokens through the model | ratio | CPU-seconds | ratio | of ticks | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        cells = [way]
        for place, digits in enumerate((0, 2, 2)):
            best, single = (min(each[place] for each in found[w]) for w in (way, WAYS[2]))
            cells += [f"{best:,.{digits}f}", f"{best / single:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return f"{np.mean([*lengths.values()]):.0f} tokens a session\n\n" + "\n".join(lines)


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = []
    for name in args.model or MODELS:
        width, layers = MODELS[name]
        made = table(random_model(width, layers), args.sessions, args.turns, args.rounds)
        parts.append(f"The {name} model, {layers} layers of width {width}; {made}")
        print(parts[-1], flush=True)
    if args.out is not None:
        command = " ".join(["python -m benchmarks.conversations", *sys.argv[1:]])
        args.out.write_text(
            f"# Conversations\n\nMade by `OMP_NUM_THREADS=1 {command}`, on a machine that others "
            f"used too: {args.sessions} sessions of {args.turns} turns.\n\n"
            + "\n\n".join(parts)
            + "\n"
        )


if __name__ == "__main__":
    main()
