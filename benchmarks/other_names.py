"""Writes docs/coming_from.md from the table of other systems' names.

python -m benchmarks.other_names docs/coming_from.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from winnow.config.other_names import NO_KEY_REASONS, OURS, SUBKEYS, load_other_names

_HEAD = """# Coming from verl, TRL or OpenRLHF

Keys of public GRPO, DAPO and PPO scripts, and what they are called here. A name typed as one of
these systems knows it is answered with ours: `num_generations=16` with "num_generations is not a
known key (set by the command line); that is TRL's name for rollout.n". All names of a command line
are answered at once, before anything starts, with exit code 2.

Settings are given as `KEY=VALUE`; a slash chooses a variant (`algorithm/advantage=rloo`).
`winnow train RECIPE --help-config KEY` says what a key means. Where the value decides, a row has
`NAME=VALUE`. This page is written by `python -m benchmarks.other_names docs/coming_from.md`.
"""


def render_markdown() -> str:
    """Return the table as a page of the docs."""
    return "\n".join(_markdown_lines())


def _markdown_lines() -> Iterator[str]:
    yield _HEAD
    every = [row for rows in load_other_names().values() for row in rows]
    for system in dict.fromkeys(row.system for row in every):
        title = "Values of other systems for keys of Winnow" if system == OURS else system
        yield f"## {title}\n\n| {system} | {'Write' if system == OURS else OURS} | |\n|---|---|---|"
        for row in every:
            if row.system == system:
                name = f"{row.name}={row.value}" if row.value else row.name
                ours = NO_KEY_REASONS.get(row.ours) or f"`{row.ours.removesuffix(SUBKEYS)}`"
                yield f"| `{name}` | {ours} | {row.meaning} |"
        yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_markdown(), encoding="utf-8")
