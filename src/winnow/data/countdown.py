"""The generated task `countdown`: reach a number from three or four others.

Every problem has a solution, because the target is the value of an expression of its numbers.
Problems whose crc32 modulo 10 is 0 are the test split.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import count, islice

from winnow.data.sources import Row

DATA_SOURCE = "countdown"
LARGEST_NUMBER = 99
TARGETS = range(10, 100)


def generate_rows(seed: int, count: int, test: bool) -> Iterator[Row]:
    """Yield the first problems of a split; the test split is the same for every seed."""
    key = "test" if test else str(seed)
    of_split = (p for p in _problems(key) if _is_test(*p) == test)
    return (_row(*problem) for problem in islice(of_split, count))


def _row(numbers: Sequence[int], target: int) -> Row:
    question = (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}. Use each number exactly "
        "once, with +, -, *, / and brackets as you like. Think step by step, then write the "
        "expression alone between <answer> and </answer>, for example "
        "<answer>(1 + 2) * 3</answer>."
    )
    return Row(
        uid=f"{DATA_SOURCE}:{'-'.join(map(str, numbers))}={target}",
        origin=f"{DATA_SOURCE} {target}",
        data_source=DATA_SOURCE,
        messages=({"role": "user", "content": question},),
        ground_truth=json.dumps({"target": target, "numbers": list(numbers)}),
    )


def _is_test(numbers: Sequence[int], target: int) -> bool:
    """Return whether a problem belongs to the test split, however its numbers are ordered."""
    return zlib.crc32(f"{sorted(numbers)}={target}".encode()) % 10 == 0


def _problems(key: str) -> Iterator[tuple[tuple[int, ...], int]]:
    for index in count():
        draws = _draws(f"{key}/{index}")
        numbers = tuple(1 + next(draws) % LARGEST_NUMBER for _ in range(3 + next(draws) % 2))
        target = _value(list(numbers), draws)
        if target in TARGETS:
            yield numbers, target


def _value(numbers: list[int], draws: Iterator[int]) -> int:
    """Evaluate some expression of all the numbers; all values in it are whole and positive."""
    while len(numbers) > 1:
        a = numbers.pop(next(draws) % len(numbers))
        b = numbers.pop(next(draws) % len(numbers))
        a, b = max(a, b), min(a, b)
        options = [a + b, a * b]
        options += [a - b] if a > b else []
        options += [a // b] if a % b == 0 else []
        numbers.append(options[next(draws) % len(options)])
    return numbers[0]


def _draws(key: str) -> Iterator[int]:
    """Yield numbers from a hash, so that no library's generator can change the data."""
    for number in count():
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        yield int.from_bytes(digest, "big")
