"""Demonstrations of `sort_digits` for a warm start: guesses, worked answers, ramblings.

The mix is deliberately bad. Half of the answers guess without working, and a share of the
worked ones starts over and over, so that reinforcement learning has something to find.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from winnow.config.data import SortDigitsTask
from winnow.config.model import DemonstrationConfig
from winnow.data.tasks.sort_digits import DIGITS, EOS_ID, encode, is_held_out, prompt_text
from winnow.types import IntArray


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One problem and an answer to imitate."""

    prompt_ids: IntArray
    """[L]"""
    response_ids: IntArray
    """[L] ends with EOS unless the limit cut it."""


def demonstrations(
    count: int,
    config: DemonstrationConfig,
    task: SortDigitsTask,
    max_response_tokens: int,
    rng: np.random.Generator,
) -> list[Demonstration]:
    """`count` demonstrations on training problems, in random order of their kinds."""
    kinds = rng.random(count)
    made = []
    for digits, kind in zip(_training_problems(count, task, rng), kinds, strict=True):
        if kind < config.guess_share:
            text = _guess(digits, config.guess_noise, rng)
        elif kind < config.guess_share + config.working_share:
            text = _worked(digits, config.step_error, 0.0, max_response_tokens, rng)
        else:
            text = _worked(digits, config.step_error, config.repeat, max_response_tokens, rng)
        response = np.append(encode(text), EOS_ID)[:max_response_tokens]
        made.append(Demonstration(encode(prompt_text(digits)), response))
    return made


def _training_problems(count: int, task: SortDigitsTask, rng: np.random.Generator) -> list[str]:
    problems: list[str] = []
    while len(problems) < count:
        lengths = rng.integers(task.min_digits, task.max_digits + 1, size=count).tolist()
        letters = rng.integers(ord("0"), ord("9") + 1, (count, task.max_digits), dtype=np.uint8)
        for length, line in zip(lengths, letters, strict=True):
            digits = line[:length].tobytes().decode()
            if not is_held_out(digits):
                problems.append(digits)
    return problems[:count]


def _guess(digits: str, noise: float, rng: np.random.Generator) -> str:
    """An answer without working: the digits sorted by their value plus noise."""
    shifts = noise * rng.standard_normal(len(digits))
    keys = [int(digit) + shift for digit, shift in zip(digits, shifts, strict=True)]
    order = sorted(range(len(digits)), key=keys.__getitem__)
    return "#" + "".join(digits[i] for i in order)


def _worked(
    digits: str, step_error: float, repeat: float, limit: int, rng: np.random.Generator
) -> str:
    """A chain of steps and its answer; each time with chance `repeat` it starts over first.

    An answer that starts over until it is longer than `limit` never comes to its end.
    """
    text, answer = _chain(digits, step_error, rng)
    while len(text) <= limit and rng.random() < repeat:
        again, answer = _chain(digits, step_error, rng)
        text = f"{text}?{again}"
    return f"{text}#{answer}"


def _chain(digits: str, step_error: float, rng: np.random.Generator) -> tuple[str, str]:
    """The steps of a selection sort, and the digits they picked.

    A step that errs is followed by steps that are right for what it wrote: the slip shows in
    the answer, as it would for a person.
    """
    steps, picked = [], []
    remaining = digits
    while remaining:
        least = min(remaining)
        rest = remaining.replace(least, "", 1)
        if rng.random() < step_error:
            least, rest = _slip(remaining, least, rest, rng)
        steps.append(f"{least}|{rest}")
        picked.append(least)
        remaining = rest
    return ";".join(steps), "".join(picked)


def _slip(remaining: str, least: str, rest: str, rng: np.random.Generator) -> tuple[str, str]:
    """A step gone wrong: a digit picked that is not the least, or one that is left miscopied.

    The last step has nothing else to pick or to copy: there the pick itself is miscopied.
    """
    others = sorted(set(remaining) - {least})
    if others and rng.random() < 0.5:
        wrong = others[rng.integers(len(others))]
        return wrong, remaining.replace(wrong, "", 1)
    if not rest:
        return _other_digit(least, rng), rest
    at = int(rng.integers(len(rest)))
    return least, rest[:at] + _other_digit(rest[at], rng) + rest[at + 1 :]


def _other_digit(digit: str, rng: np.random.Generator) -> str:
    return DIGITS[(int(digit) + int(rng.integers(1, 10))) % 10]
