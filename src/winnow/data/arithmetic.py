"""The generated task `arithmetic`: sums and products, asked of a model that knows English.

A problem is `12+7` or `7*8`, asked as `What is 12 + 7?`; the last number of an answer counts. One
in eight problems is a sum of one-digit numbers, one a product of them, three are sums of two-digit
numbers, three products of a one-digit number and one up to 30. 0 and 1 do not occur.

Which problems are held out depends on their two numbers alone: in training no two numbers stand
together that evaluation asks for, neither in the other order nor with the other sign.
"""

from __future__ import annotations

import re
from typing import Any

from winnow.config.data import ArithmeticTask
from winnow.data.sort_digits import GeneratedRows

DATA_SOURCE = "arithmetic"
_ONE, _TWO, _UP_TO_30 = range(2, 10), range(10, 100), range(10, 31)
KINDS = {
    ("+", _ONE, _ONE): 1,
    ("*", _ONE, _ONE): 1,
    ("+", _TWO, _TWO): 3,
    ("*", _ONE, _UP_TO_30): 3,
}
"""Shares in eighths of the kinds: a sign, and ranges of two numbers that come in either order."""
_DRAWN = [kind for kind, share in KINDS.items() for _ in range(share)]


class ArithmeticRows(GeneratedRows[ArithmeticTask]):
    """The problems of a seed; within a kind all are equally likely."""

    def __init__(self, task: ArithmeticTask, seed: int) -> None:
        super().__init__(task, seed, DATA_SOURCE, "numbers of one and two digits")

    def make_problem(self, digest: bytes) -> str:
        rest, kind = divmod(int.from_bytes(digest, "big"), len(_DRAWN))
        sign, *ranges = _DRAWN[kind]
        rest, is_swapped = divmod(rest, 2)
        numbers = []
        for numbers_of_kind in ranges:
            rest, place = divmod(rest, len(numbers_of_kind))
            numbers.append(numbers_of_kind[place])
        return sign.join(map(str, numbers[::-1] if is_swapped else numbers))

    def is_problem(self, text: str) -> bool:
        return re.fullmatch(r"\d\d?[+*]\d\d?", text, re.ASCII) is not None and any(
            sign in text and a in one and b in other
            for a, b in (_numbers(text), _numbers(text)[::-1])
            for sign, one, other in KINDS
        )

    def is_held_out(self, problem: str) -> bool:
        """Return whether a problem is kept for evaluation, by its numbers in rising order."""
        return super().is_held_out("{},{}".format(*sorted(_numbers(problem))))

    def describe(self, problem: str) -> tuple[str, str, dict[str, Any]]:
        a, b = _numbers(problem)
        sign = "+" if "+" in problem else "*"
        return f"What is {a} {sign} {b}?", str(a + b if sign == "+" else a * b), {}


def _numbers(problem: str) -> tuple[int, int]:
    a, b = re.split(r"[+*]", problem)
    return int(a), int(b)
