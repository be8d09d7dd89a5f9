"""The generated task `countdown`: reach a number from three or four others.

Every problem has a solution, because the target is the value of an expression of its numbers.
Problems whose crc32 modulo 10 is 0 are the test split.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

DATA_SOURCE = "countdown"
LARGEST_NUMBER = 99
TARGETS = range(10, 100)


@dataclass(frozen=True)
class Problem:
    """Numbers, each to be used once, and what they are to make."""

    numbers: tuple[int, ...]
    target: int

    @property
    def ground_truth(self) -> str:
        """As the scorer `countdown` reads it."""
        return json.dumps({"target": self.target, "numbers": list(self.numbers)})

    @property
    def question(self) -> str:
        """How it is asked."""
        numbers = ", ".join(map(str, self.numbers))
        return (
            f"Make {self.target} from the numbers {numbers}. Use each number exactly once, with "
            "+, -, *, / and brackets as you like. Think step by step, then write the expression "
            "alone between <answer> and </answer>, for example <answer>(1 + 2) * 3</answer>."
        )

    @property
    def is_test(self) -> bool:
        """Whether it belongs to the test split, however its numbers are ordered."""
        same = f"{sorted(self.numbers)}={self.target}"
        return zlib.crc32(same.encode()) % 10 == 0


def problems(seed: int, count: int, test: bool) -> list[Problem]:
    """The first `count` of a split; the test split is one and the same for every seed."""
    key = "test" if test else str(seed)
    return list(islice((p for p in _stream(key) if p.is_test == test), count))


def _stream(key: str) -> Iterator[Problem]:
    for index in count():
        draws = _draws(f"{key}/{index}")
        numbers = tuple(1 + next(draws) % LARGEST_NUMBER for _ in range(3 + next(draws) % 2))
        target = _value(list(numbers), draws)
        if target in TARGETS:
            yield Problem(numbers, target)


def _value(left: list[int], draws: Iterator[int]) -> int:
    """The value of some expression of all the numbers; all values in it are whole and positive."""
    while len(left) > 1:
        a = left.pop(next(draws) % len(left))
        b = left.pop(next(draws) % len(left))
        a, b = max(a, b), min(a, b)
        options = [a + b, a * b]
        options += [a - b] if a > b else []
        options += [a // b] if a % b == 0 else []
        left.append(options[next(draws) % len(options)])
    return left[0]


def _draws(key: str) -> Iterator[int]:
    """Numbers from a hash, so that no library's generator can change the data."""
    for number in count():
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        yield int.from_bytes(digest, "big")
