"""The generated task `calc`: products of two numbers, which a calculator works out.

A problem is asked as `37*48`; the worked form is a call of a tool and an answer, in two turns:

    <|user|>37*48<|assistant|><call>37*48</call><eos><|tool|>1776<|assistant|>=1776<eos>

Problems whose crc32 modulo 10 is 0 are held out for evaluation and never trained on.
Demonstrations for a warm start are guesses, which are wrong nearly always, and calls; in calls
and the answers behind them some digits are miscopied.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.data import CalcTask
from winnow.config.model import DemonstrationConfig
from winnow.data.sort_digits import (
    DIGITS,
    EOS,
    PAD,
    UNKNOWN,
    UNKNOWN_ID,
    Demonstration,
    GeneratedRows,
    draw_other_digit,
    is_held_out,
)
from winnow.data.tokenizer import make_tokenizer
from winnow.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "calc"
USER, ASSISTANT, TOOL = ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
CALL, END = "<call>", "</call>"
VOCABULARY = (PAD, EOS, UNKNOWN, *ROLES, CALL, END, *(DIGITS + "+-*="))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_IDS = {token: i for i, token in enumerate(VOCABULARY)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a Hugging Face tokenizer with a token a character, a role and a tag of a call."""
    return make_tokenizer(VOCABULARY, ROLES, CHAT_TEMPLATE, rf"{CALL}|{END}|[\s\S]")


def encode(text: str) -> IntArray:
    """[L] the ids that `build_tokenizer()` gives to a text."""
    tokens = re.findall(r"<[^<>]+>|[\s\S]", text)
    return np.array([_IDS.get(token, UNKNOWN_ID) for token in tokens], dtype=np.int64)


def longest_prompt(task: CalcTask) -> int:
    """Return the most tokens that a prompt has."""
    return 2 * len(str(task.max_factor)) + 3


class CalcRows(GeneratedRows[CalcTask]):
    """The problems of a seed, all factors equally likely."""

    def __init__(self, task: CalcTask, seed: int) -> None:
        settings = f"factors {task.min_factor}-{task.max_factor}"
        super().__init__(task, seed, DATA_SOURCE, settings, "max_factor")

    def make_problem(self, digest: bytes) -> str:
        low, factors = self.task.min_factor, self.task.max_factor - self.task.min_factor + 1
        one, other = divmod(int.from_bytes(digest, "big") % factors**2, factors)
        return f"{low + one}*{low + other}"

    def is_problem(self, text: str) -> bool:
        factors = range(self.task.min_factor, self.task.max_factor + 1)
        parts = text.split("*")
        return len(parts) == 2 and all(p.isdecimal() and int(p) in factors for p in parts)

    def describe(self, problem: str) -> tuple[str, str, dict[str, Any]]:
        return problem, _work_out(problem), {}


def demonstrations(
    count: int,
    config: DemonstrationConfig,
    task: CalcTask,
    max_response_tokens: int,
    rng: np.random.Generator,
) -> list[Demonstration]:
    """Make `count` demonstrations on training problems: guesses, and calls with their answers."""
    examples: list[Demonstration] = []
    while len(examples) < count:
        one, other = rng.integers(task.min_factor, task.max_factor + 1, size=2).tolist()
        problem = f"{one}*{other}"
        if is_held_out(problem):
            continue
        if rng.random() < config.guess_share:
            guess = abs(round(one * other + config.guess_noise * rng.standard_normal()))
            texts = [f"={guess}{EOS}"]
        else:
            expression = _miscopy(problem, config.step_error, rng)
            result = _work_out(expression)
            answer = _miscopy(result, config.step_error, rng)
            call = f"{CALL}{expression}{END}{EOS}"
            texts = [call, f"{TOOL}{result}{ASSISTANT}", f"={answer}{EOS}"]
        turns = tuple(encode(text)[:max_response_tokens] for text in texts)
        examples.append(Demonstration(encode(f"{USER}{problem}{ASSISTANT}"), turns))
    return examples


def _miscopy(text: str, chance: float, rng: np.random.Generator) -> str:
    """Write another digit in the place of each digit, with a chance."""
    return "".join(
        draw_other_digit(each, rng) if each in DIGITS and rng.random() < chance else each
        for each in text
    )


def _work_out(problem: str) -> str:
    one, _, other = problem.partition("*")
    return str(int(one) * int(other))
