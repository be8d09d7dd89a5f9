"""Every figure of a run: name, unit, meaning, healthy values, and the name that verl's users know
it by.

metric_names.md is the list: `winnow metrics` prints it, and docs/metrics.md is a copy. In a name
`{a,b}` stands for either, and a word in capitals for what it says: SOURCE a data source (which may
hold slashes), NAME a name, N and K numbers, SPREAD one of mean, max and min.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_LIST = Path(__file__).with_suffix(".md")
_SLOTS = {"SOURCE": r".+", "NAME": r"[^/]+", "SPREAD": "(?:mean|max|min)", "N": r"\d+", "K": r"\d+"}


class Metric(NamedTuple):
    """A row of the list; one name may stand for several figures."""

    name: str
    unit: str
    """Empty for numbers without one."""
    meaning: str
    healthy: str
    """Its course in a run that learns; empty where none can be named."""
    verl: str
    """Its nearest relative in verl; empty where there is none."""


def find_metric(name: str) -> Metric | None:
    """Return the row that a figure belongs to; None where the list has none."""
    return next((row for row, pattern in _patterns() if pattern.fullmatch(name)), None)


@cache
def list_metrics() -> tuple[Metric, ...]:
    """Return all rows."""
    lines = [line for line in metrics_markdown().splitlines() if line.startswith("| `")]
    return tuple(Metric(*(cell.strip(" `") for cell in line[1:-1].split("|"))) for line in lines)


def metrics_markdown() -> str:
    """Return the page docs/metrics.md."""
    return _LIST.read_text(encoding="utf-8")


@cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    return tuple((row, re.compile(_pattern(row.name))) for row in list_metrics())


def _pattern(name: str) -> str:
    parts = re.split(r"(\{[^}]*\}|[A-Z]+)", name)
    return "".join(
        f"(?:{'|'.join(map(_pattern, part[1:-1].split(',')))})"
        if part.startswith("{")
        else _SLOTS.get(part, re.escape(part))
        for part in parts
    )
