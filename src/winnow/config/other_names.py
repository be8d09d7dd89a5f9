"""Names that verl, TRL and OpenRLHF have for our keys: for messages and docs/coming_from.md.

The table is other_names.yaml. `python -m winnow.config.other_names docs/coming_from.md` writes the
page again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

_TABLE = Path(__file__).with_suffix(".yaml")
_NOTHING = "-"
_HEAD = """# Coming from verl, TRL or OpenRLHF

Keys of public GRPO, DAPO and PPO scripts, and what they are called here. A name typed as one of
these systems knows it is answered with ours: `num_generations=16` with "num_generations is no known
key (set by the command line); that is TRL's name for rollout.n".

Settings are given as `KEY=VALUE`; a slash chooses a variant (`algorithm/advantage=rloo`).
`winnow train RECIPE --help-config KEY` says what a key means. This page is written by
`python -m winnow.config.other_names docs/coming_from.md`.
"""


class OtherName(NamedTuple):
    """A key of another system."""

    system: str
    name: str
    ours: str
    """Our key; empty where nothing is to be set."""
    meaning: str
    """A few words on a difference between the two."""


@cache
def other_names() -> tuple[OtherName, ...]:
    """Read the table."""
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    rows = []
    for system, names in table.items():
        for name, text in names.items():
            ours, _, meaning = text.partition(" | ")
            rows.append(OtherName(system, name, "" if ours == _NOTHING else ours, meaning))
    return tuple(rows)


def known_elsewhere(typed: str) -> str:
    """Say what a key of another system is called here; empty for a name that none has.

    Args:
        typed: a key, or one below it: what verl has under `override_config` is of no use either.
    """
    found: dict[tuple[str, str], list[str]] = {}
    parts = typed.replace("/", ".").split(".")
    for stop in range(len(parts), 0, -1):
        for row in other_names():
            if row.name == ".".join(parts[:stop]) and (stop == len(parts) or not row.ours):
                found.setdefault((row.ours, row.meaning), []).append(row.system)
        if found:
            break
    return "; ".join(
        f"{' and '.join(systems)}'s name for {ours}{f' ({meaning})' if meaning else ''}"
        if ours
        else f"{' and '.join(systems)}'s name, and nothing is to be set here: {meaning}"
        for (ours, meaning), systems in found.items()
    )


def as_markdown() -> str:
    """Write the table as a page of the docs."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    for system in dict.fromkeys(row.system for row in other_names()):
        yield f"## {system}\n\n| {system} | Winnow | |\n|---|---|---|"
        for row in other_names():
            if row.system == system:
                ours = f"`{row.ours}`" if row.ours else ""
                yield f"| `{row.name}` | {ours} | {row.meaning} |"
        yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_markdown(), encoding="utf-8")
