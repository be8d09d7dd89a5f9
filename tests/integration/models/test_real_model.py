"""A real tokenizer, chat template and model: SmolLM2-135M-Instruct in engine and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.test_engine_models import gap, imitation, sampled, scored
from tests.real_model import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.data.tokenizer import load_tokenizer, make_decoder, stop_token_ids
from winnow.learning.batch import all_micro_batches
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.rollout.embedded.torch_engine import TorchEngine

pytestmark = pytest.mark.real
QUESTION = {"role": "user", "content": "What is 7 * 8?"}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2()


def test_a_prompt_is_what_the_chat_template_makes_of_it_with_its_system_message(
    folder: Path,
) -> None:
    tokenizer, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    chat = ChatTemplate(tokenizer, DataConfig())
    turns = TurnTokenizer(chat, tokenizer, (2,))
    for messages in ([QUESTION], [{"role": "system", "content": "Be brief."}, QUESTION]):
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert turns.prompt_ids(messages).tolist() == ids
        text = make_decoder(tokenizer, special_tokens=True)(ids)
        assert text.startswith("<|im_start|>system\n")
        assert (SYSTEM in text) == (messages[0]["role"] == "user")
        assert text.endswith("What is 7 * 8?<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer) == 49_152
    assert stop_token_ids(tokenizer, str(folder), 2) == (2,), "<|im_end|>"


def test_a_conversation_grows_by_the_ids_of_its_whole_rendering(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    turns = TurnTokenizer(ChatTemplate(tokenizer, DataConfig()), tokenizer, (2,))
    reply = [{"role": "user", "content": "sure?\n\n And 12 + 30<|im_end|>?"}]
    assert turns.history(reply) == "exact"
    answer: Sequence[int] = tokenizer("7 * 8 is 56.")["input_ids"]
    spoken = {"role": "assistant", "content": "7 * 8 is 56."}
    grown = [turns.prompt_ids([QUESTION]), [*answer, 2], turns.reply_ids(reply)]
    whole = turns.prompt_ids([QUESTION, spoken, *reply])
    assert np.array_equal(np.concatenate(grown), whole)
    assert (turns.reply_ids(reply) == 2).sum() == 1, "a spelled special token ends no turn"


def test_engine_trainer_and_transformers_agree_before_and_after_an_update(folder: Path) -> None:
    model = load_causal_lm(str(folder), torch.float32, torch.device("cpu"))
    strategy = Strategy(model, temperature=0.7)
    engine = TorchEngine(model, 6, 64)
    first = sampled(engine)
    before = scored(strategy, first)
    assert gap(before, first.behav, first) < 1e-4
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start, end = (int(first.offsets[i]) for i in (0, 1))
    with torch.no_grad():
        logits = reference(first.token_ids[None, start:end]).logits[0, :-1] / 0.7
    tokens = first.token_ids[start + 1 : end]
    theirs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    written = first.gen_mask[start + 1 : end]
    assert float((theirs - before[start + 1 : end]).abs()[written].max()) < 1e-4
    strategy.forward_backward(all_micro_batches(first, 500), frozenset({"logprob"}), imitation)
    strategy.optimizer_step(1e-4)
    assert gap(scored(strategy, first), before, first) > 0.01
    second = sampled(engine, version=1)
    assert gap(scored(strategy, second), second.behav, second) < 1e-4
