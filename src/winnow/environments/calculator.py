"""A calculator as a tool: `environment.tools=[winnow.environments.calculator:calc]`."""

from __future__ import annotations

import math
import re

_LONGEST = 200
_SUM = re.compile(r"-?[0-9]+([-+*][0-9]+)*")


def calc(expression: str) -> str:
    """Work out sums, differences and products of whole numbers.

    Args:
        expression: such as 37*48 or 12+3*4-5.
    """
    expression = "".join(expression.split())
    if len(expression) > _LONGEST or not _SUM.fullmatch(expression):
        raise ValueError(f"no sum or product of whole numbers: {expression[:_LONGEST]}")
    terms = re.findall(r"[-+]?[^-+]+", expression)
    return str(sum(math.prod(map(int, term.split("*"))) for term in terms))
