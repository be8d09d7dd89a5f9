"""A held-out question before and after training, from the run's evaluation files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from winnow.observe.rollouts import read_rollouts
from winnow.observe.summary import Sample

_COLUMNS = ("group", "answer", "outcome", "accuracy", "prompt", "response")


def samples(before: Path, after: Path) -> list[Sample]:
    """A question that training changed from wrong to right, else the first whose text was kept.

    Greedy answers where there are any, else the first one sampled. Empty where an evaluation was
    not made, or kept no text (`observe.rollout_text_groups`).

    Raises:
        WinnowError: a file is damaged.
    """
    if not before.is_file() or not after.is_file():
        return []
    old, new = _answers(before), _answers(after)
    pairs = [(old[group], new[group]) for group in sorted(old.keys() & new.keys())]
    if not pairs:
        return []
    rights = [(b["accuracy"] >= 1, a["accuracy"] >= 1) for b, a in pairs]
    place = rights.index((False, True)) if (False, True) in rights else 0
    (was, now), (was_right, is_right) = pairs[place], rights[place]
    return [Sample(now["prompt"], was["response"], was_right, now["response"], is_right)]


def _answers(file: Path) -> dict[int, dict[str, Any]]:
    """By group, the answer to be shown of each whose text was kept."""
    rows = read_rollouts(file).select(_COLUMNS).to_pylist()
    kept = [row for row in rows if row["response"] is not None and row["answer"] == 0]
    greedy = [row for row in kept if row["outcome"] == "held_out_greedy"]
    return {row["group"]: row for row in greedy or kept}
