"""The generated task `sort_digits`: sort a string of digits, character by character.

A problem is asked as `5391:`; the worked form is selection sort, `1|539;3|59;5|9;9|#1359`.
Problems whose crc32 modulo 10 is 0 are held out for evaluation and never trained on.

Demonstrations for a warm start are guesses, worked answers and ramblings. The mix is deliberately
bad: half of the answers guess without working, and a share of the worked ones starts over and
over, so that reinforcement learning has something to find.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from winnow.config.data import ArithmeticTask, CalcTask, ShapesTask, SortDigitsTask
from winnow.config.model import DemonstrationConfig
from winnow.data.sources import Row
from winnow.data.tokenizer import make_tokenizer
from winnow.errors import DataError
from winnow.types import Image, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "sort_digits"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
DIGITS = "0123456789"
MARKS = ":|;#?"
# Room for later tasks. One character each, so that any text of known characters comes back
# from its ids unchanged.
RESERVED = "abcdefghijk"
VOCABULARY = (PAD, EOS, UNKNOWN, *DIGITS, *MARKS, *RESERVED)
PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
Task = TypeVar("Task", SortDigitsTask, CalcTask, ShapesTask, ArithmeticTask)
_IDS = {token: i for i, token in enumerate(VOCABULARY)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a Hugging Face tokenizer of 29 tokens, one a character; it adds none by itself."""
    return make_tokenizer(VOCABULARY)


def encode(text: str) -> IntArray:
    """[L] the ids that `build_tokenizer()` gives to a text without special tokens."""
    return np.array([_IDS.get(character, UNKNOWN_ID) for character in text], dtype=np.int64)


def longest_prompt(task: SortDigitsTask) -> int:
    """Return the most tokens that a prompt has."""
    return task.max_digits + 1


def is_held_out(problem: str) -> bool:
    """Return whether a problem is kept for evaluation."""
    return zlib.crc32(problem.encode()) % 10 == 0


def prompt_text(digits: str) -> str:
    """Write a problem as it is asked."""
    return f"{digits}:"


def solution(digits: str) -> str:
    """Sort the digits of a problem: its ground truth."""
    return "".join(sorted(digits))


class GeneratedRows(ABC, Generic[Task]):
    """The problems of a seed, `TaskRows`. A training row depends on its index alone.

    Problems that `is_held_out` are for evaluation and never trained on.
    """

    size = None
    digest_bytes = 16

    def __init__(self, task: Task, seed: int, source: str, settings: str, limit: str = "") -> None:
        """Name the problems.

        Args:
            source: data source of the rows.
            settings: the problems that the task makes, for the user.
            limit: field of the task of which a higher value gives more problems, if any does.
        """
        self.task: Task = task
        self._seed, self._source, self._settings, self._limit = seed, source, settings, limit
        self.data_sources = frozenset({source})
        self.fingerprints = {source: f"{settings}, seed {seed}"}

    @abstractmethod
    def make_problem(self, digest: bytes) -> str:
        """Make a problem of `digest_bytes` random bytes."""

    @abstractmethod
    def is_problem(self, text: str) -> bool:
        """Return whether the task makes this problem."""

    @abstractmethod
    def describe(self, problem: str) -> tuple[str, str, dict[str, Any]]:
        """Return how a problem is asked, its ground truth, and further fields of its row."""

    def is_held_out(self, problem: str) -> bool:
        """Return whether a problem is kept for evaluation: a tenth of them are."""
        return is_held_out(problem)

    def training_problems(self, key: str) -> Iterator[str]:
        """Yield random problems that are not held out."""
        return (problem for problem in self._problems(key) if not self.is_held_out(problem))

    def candidates(self, index: int) -> Iterator[Row]:
        yield self._make_row(next(self.training_problems(f"{self._seed}/{index}")))

    def candidates_of(self, uid: str) -> Iterator[Row]:
        problem = uid.removeprefix(f"{self._source}:")
        if problem == uid or not self.is_problem(problem) or self.is_held_out(problem):
            raise KeyError(uid)
        return iter([self._make_row(problem)])

    def held_out(self) -> list[Row]:
        """Make rows of the first of the one fixed list of different held-out problems.

        Raises:
            DataError: there are not so many.
        """
        count, problems = self.task.eval_problems, dict[str, None]()
        for problem in itertools.islice(self._problems("evaluation"), 20_000 + 200 * count):
            if self.is_held_out(problem):
                problems[problem] = None
            if len(problems) == count:
                return [self._make_row(each) for each in problems]
        more = self._limit and f", or raise data.task.{self._limit}"
        raise DataError(
            f"data.task.eval_problems is {count}, but {self._settings} give only about "
            f"{len(problems)} held-out problems; lower it{more}"
        )

    def _problems(self, key: str) -> Iterator[str]:
        """Yield random problems, of a hash, so that no library's generator can change the data."""
        for attempt in itertools.count():
            digest = hashlib.blake2b(f"{key}/{attempt}".encode(), digest_size=self.digest_bytes)
            yield self.make_problem(digest.digest())

    def _make_row(self, problem: str) -> Row:
        """Make a problem a row of data; its uid is the same whenever the problem comes round."""
        question, truth, fields = self.describe(problem)
        uid, origin = f"{self._source}:{problem}", f"{self._source} {problem}"
        messages = ({"role": "user", "content": question},)
        return Row(uid, origin, self._source, messages, truth, **fields)


class SortDigitsRows(GeneratedRows[SortDigitsTask]):
    """The problems of a seed, all lengths equally likely."""

    def __init__(self, task: SortDigitsTask, seed: int) -> None:
        settings = f"{task.min_digits}-{task.max_digits} digits"
        super().__init__(task, seed, DATA_SOURCE, settings, "max_digits")

    def make_problem(self, digest: bytes) -> str:
        lengths = self.task.max_digits - self.task.min_digits + 1
        number, place = divmod(int.from_bytes(digest, "big"), lengths)
        length = self.task.min_digits + place
        return f"{number % 10**length:0{length}d}"

    def is_problem(self, text: str) -> bool:
        fits = self.task.min_digits <= len(text) <= self.task.max_digits
        return fits and set(text) <= set(DIGITS)

    def describe(self, problem: str) -> tuple[str, str, dict[str, Any]]:
        extra = {"extra_info": {"digits": problem}}
        return prompt_text(problem), solution(problem), {"extra": extra}


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One problem and an answer to imitate."""

    prompt_ids: IntArray
    """[L]"""
    turns: tuple[IntArray, ...]
    """Turns, each [L] and ended by EOS unless the limit cut it, and what an environment replies to
    them, alternately."""
    images: tuple[Image, ...] = ()
    """Images of the prompt."""


def demonstrations(
    count: int,
    config: DemonstrationConfig,
    task: SortDigitsTask,
    max_response_tokens: int,
    rng: np.random.Generator,
) -> list[Demonstration]:
    """Make `count` demonstrations on training problems, in random order of their kinds."""
    kinds = rng.random(count)
    examples = []
    for digits, kind in zip(_draw_problems(count, task, rng), kinds, strict=True):
        if kind < config.guess_share:
            text = _write_guess(digits, config.guess_noise, rng)
        else:
            is_straight = kind < config.guess_share + config.working_share
            repeat = 0.0 if is_straight else config.repeat
            text = _write_working(digits, config.step_error, repeat, max_response_tokens, rng)
        response = np.append(encode(text), EOS_ID)[:max_response_tokens]
        examples.append(Demonstration(encode(prompt_text(digits)), (response,)))
    return examples


def _draw_problems(count: int, task: SortDigitsTask, rng: np.random.Generator) -> list[str]:
    problems: list[str] = []
    while len(problems) < count:
        lengths = rng.integers(task.min_digits, task.max_digits + 1, size=count).tolist()
        letters = rng.integers(ord("0"), ord("9") + 1, (count, task.max_digits), dtype=np.uint8)
        for length, line in zip(lengths, letters, strict=True):
            digits = line[:length].tobytes().decode()
            if not is_held_out(digits):
                problems.append(digits)
    return problems[:count]


def _write_guess(digits: str, noise: float, rng: np.random.Generator) -> str:
    """Write an answer without working: the digits sorted by their value plus noise."""
    shifts = noise * rng.standard_normal(len(digits))
    keys = [int(digit) + shift for digit, shift in zip(digits, shifts, strict=True)]
    order = sorted(range(len(digits)), key=keys.__getitem__)
    return "#" + "".join(digits[i] for i in order)


def _write_working(
    digits: str, step_error: float, repeat: float, limit: int, rng: np.random.Generator
) -> str:
    """Write a chain of steps and its answer; each time with chance `repeat` it starts over first.

    An answer that starts over until it is longer than `limit` never comes to its end.
    """
    text, answer = _write_steps(digits, step_error, rng)
    while len(text) <= limit and rng.random() < repeat:
        again, answer = _write_steps(digits, step_error, rng)
        text = f"{text}?{again}"
    return f"{text}#{answer}"


def _write_steps(digits: str, step_error: float, rng: np.random.Generator) -> tuple[str, str]:
    """Write the steps of a selection sort, and return the digits they picked, too.

    A step that errs is followed by steps that are right for what it wrote: the slip shows in
    the answer, as it would for a person.
    """
    steps, picked = [], []
    remaining = digits
    while remaining:
        least = min(remaining)
        rest = remaining.replace(least, "", 1)
        if rng.random() < step_error:
            least, rest = _make_error(remaining, least, rest, rng)
        steps.append(f"{least}|{rest}")
        picked.append(least)
        remaining = rest
    return ";".join(steps), "".join(picked)


def _make_error(remaining: str, least: str, rest: str, rng: np.random.Generator) -> tuple[str, str]:
    """Make a step err: it picks a digit that is not the least, or miscopies one that is left.

    The last step has nothing else to pick or to copy: there the pick itself is miscopied.
    """
    choices = sorted(set(remaining) - {least})
    if choices and rng.random() < 0.5:
        wrong = choices[rng.integers(len(choices))]
        return wrong, remaining.replace(wrong, "", 1)
    if not rest:
        return draw_other_digit(least, rng), rest
    at = int(rng.integers(len(rest)))
    return least, rest[:at] + draw_other_digit(rest[at], rng) + rest[at + 1 :]


def draw_other_digit(digit: str, rng: np.random.Generator) -> str:
    """Draw a digit that is another one, all equally likely."""
    return DIGITS[(int(digit) + int(rng.integers(1, 10))) % 10]
