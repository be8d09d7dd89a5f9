"""The generated task `calc`: products of two numbers, which a calculator works out.

A problem is asked as `37*48`; the worked form is a call of a tool and an answer, in two turns:

    <|user|>37*48<|assistant|><call>37*48</call><eos><|tool|>1776<|assistant|>=1776<eos>

Problems whose crc32 modulo 10 is 0 are held out for evaluation and never trained on.
Demonstrations for a warm start are guesses, which are wrong nearly always, and calls; in calls
and the answers behind them some digits are miscopied.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
    is_held_out,
)
from winnow.data.sources import Row
from winnow.data.tokenizer import make_tokenizer
from winnow.errors import DataError
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
_EVALUATION_SEED = "evaluation"


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


class CalcRows:
    """The problems of a seed, `TaskRows`. A training row depends on its index alone."""

    size = None
    data_sources = frozenset({DATA_SOURCE})

    def __init__(self, task: CalcTask, seed: int) -> None:
        self._task, self._seed = task, seed
        factors = f"factors {task.min_factor}-{task.max_factor}, seed {seed}"
        self.fingerprints = {DATA_SOURCE: factors}

    def candidates(self, index: int) -> Iterator[Row]:
        problems = _candidates(self._task, f"{self._seed}/{index}")
        yield _make_row(next(problem for problem in problems if not is_held_out(problem)))

    def candidates_of(self, uid: str) -> Iterator[Row]:
        problem = uid.removeprefix(f"{DATA_SOURCE}:")
        factors = range(self._task.min_factor, self._task.max_factor + 1)
        parts = problem.split("*")
        is_problem = len(parts) == 2 and all(p.isdecimal() and int(p) in factors for p in parts)
        if problem == uid or not is_problem or is_held_out(problem):
            raise KeyError(uid)
        return iter([_make_row(problem)])

    def held_out(self) -> list[Row]:
        """Make rows of the first of the one fixed list of different held-out problems.

        Raises:
            DataError: there are not so many.
        """
        count, problems = self._task.eval_problems, dict[str, None]()
        candidates = _candidates(self._task, _EVALUATION_SEED)
        for problem in itertools.islice(candidates, 20_000 + 200 * count):
            if is_held_out(problem):
                problems[problem] = None
            if len(problems) == count:
                return [_make_row(each) for each in problems]
        raise DataError(
            f"data.task.eval_problems is {count}, but factors from {self._task.min_factor} to "
            f"{self._task.max_factor} give only about {len(problems)} held-out problems; lower it, "
            "or raise data.task.max_factor"
        )


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
        DIGITS[(int(each) + int(rng.integers(1, 10))) % 10]
        if each in DIGITS and rng.random() < chance
        else each
        for each in text
    )


def _work_out(problem: str) -> str:
    one, _, other = problem.partition("*")
    return str(int(one) * int(other))


def _make_row(problem: str) -> Row:
    """Make a problem a row of data; its uid is the same whenever the problem comes round."""
    return Row(
        uid=f"{DATA_SOURCE}:{problem}",
        origin=f"{DATA_SOURCE} {problem}",
        data_source=DATA_SOURCE,
        messages=({"role": "user", "content": problem},),
        ground_truth=_work_out(problem),
    )


def _candidates(task: CalcTask, key: str) -> Iterator[str]:
    """Yield random problems, of a hash, so that no library's generator can change the data."""
    factors = task.max_factor - task.min_factor + 1
    for attempt in itertools.count():
        digest = hashlib.blake2b(f"{key}/{attempt}".encode(), digest_size=16).digest()
        one, other = divmod(int.from_bytes(digest, "big") % factors**2, factors)
        yield f"{task.min_factor + one}*{task.min_factor + other}"
