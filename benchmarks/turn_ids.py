"""Ids of conversations: those that the engine wrote, those that are trained, those rendered again.

    python -m benchmarks.turn_ids [--sessions 32] [--turns 4]

Concurrent conversations of a random model over a real engine: it spells its turns in pieces that a
tokenizer would merge. Compared are the contexts of the engine's turns with the packed batch of the
learner, and with the ids that the same conversations have once their turns are decoded and the
whole is rendered by the chat template and tokenized again.
"""

from __future__ import annotations

import argparse
import asyncio
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.environments import Step, Turn
from winnow.environments.conversation import (
    ConversationEngine,
    ConversationLimits,
    ReplySchedule,
    TurnFormat,
)
from winnow.learning.batch import pack
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import CompletionEvent, GroupRequest, SamplingParams, generate
from winnow.rollout.engine import group_request as request_of
from winnow.types import Answer, Group, Prompt, Score

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
STOP = 0


class RecordingEngine(TorchEngine):
    """A `TorchEngine` that records the context at the end of each turn."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.prompts: dict[int, np.ndarray] = {}
        self.contexts: dict[int, list[np.ndarray]] = {}

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Submit groups of one answer."""
        self.prompts |= {group.group_id: group.prompt_ids for group in groups}
        await super().submit(groups)

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Return events, and record the contexts of the finished ones."""
        events = await super().events(until)
        for event in events:
            ids = [self.prompts[event.group_id], event.segment.token_ids]
            self.contexts.setdefault(event.group_id, []).append(np.concatenate(ids))
        return events


class Listening:
    """Environments that ask for one more turn."""

    steps, seconds = 0, 0.0

    async def step(
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: str = ""
    ) -> list[Step]:
        """Reply to the last turn."""
        return [Step(f"go on after {len(turns)}")]

    def close_conversation(self, conversation: int) -> None:
        """Free nothing."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of letters and pairs of them; only the first special token is drawn."""
    model = Tokenizer(models.BPE(unk_token=None))
    model.decoder = decoders.Fuse()
    words = [a + b for a in "abcdefgh" for b in "aeo"] * 3
    letters = [*string.ascii_lowercase, *string.digits, " ", "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=64, initial_alphabet=letters, special_tokens=["<|end|>"], show_progress=False
    )
    model.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        chat_template=TEMPLATE,
    )


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Make a random model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=vocabulary, max_position_embeddings=2048, **sizes, **heads)
    model = Qwen3ForCausalLM(config).eval()
    use_layout_attention(model)
    return model


def main() -> None:
    """Print how many conversations agree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    drawn = len(tokenizer) - 1  # the last id is the token that opens a message
    options = {"slots": args.sessions, "prefill_tokens": 2048, "vocab_size": drawn}
    engine = RecordingEngine(make_model(len(tokenizer)), **options)
    chat = TurnTokenizer(ChatTemplate(tokenizer, DataConfig()), tokenizer, [STOP])
    texts = [f"question {number}" for number in range(args.sessions)]
    firsts = [({"role": "user", "content": text},) for text in texts]
    prompts = [
        Prompt(text, chat.prompt_ids(first), text, "", None, messages=first)
        for text, first in zip(texts, firsts, strict=True)
    ]
    limits = ConversationLimits(args.turns)
    turn_format = TurnFormat(chat, tokenizer.decode, Turn)
    parts = engine, turn_format, Listening(), limits, ReplySchedule(True)
    conversations: Any = ConversationEngine(*parts)
    sampling = SamplingParams(1600, 1.0, stop_token_ids=(STOP,))
    requests = [request_of(i, p, {0: None}, sampling, 0) for i, p in enumerate(prompts)]
    done = asyncio.run(generate(conversations, requests))
    scores = [Answer(done[i, 0], Score(0.0, 0.0)) for i in range(args.sessions)]
    batch = pack([Group(i, prompts[i], (each,)) for i, each in enumerate(scores)])
    offsets, ids = batch.offsets.tolist(), batch.token_ids.numpy()
    turns = different = rendered = alike = 0
    for number, first in enumerate(firsts):
        trained = ids[offsets[number] : offsets[number + 1]]
        for context in engine.contexts[number]:
            turns += 1
            different += not np.array_equal(trained[: len(context)], context)
        messages = [*first]
        for place, turn in enumerate(done[number, 0].turns, 1):
            text = tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            if place < len(done[number, 0].turns):
                messages.append({"role": "user", "content": f"go on after {place}"})
        again = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
        new_ids = tokenizer(again, add_special_tokens=False)["input_ids"]
        rendered += new_ids == trained.tolist()
        alike += tokenizer.decode(new_ids) == tokenizer.decode(trained)
    sampled = int(batch.gen_mask.sum())
    print(f"{args.sessions} conversations, {turns} turns, {sampled:,} sampled tokens")
    print(f"turns whose ids differ between engine and learner: {different}")
    print(f"conversations with the same text if rendered again: {alike} of {args.sessions}")
    print(f"conversations with the same ids if rendered again: {rendered} of {args.sessions}")


if __name__ == "__main__":
    main()
