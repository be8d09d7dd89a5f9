"""Each small recipe of a family, run for a few steps as a user would, on a smaller task."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from benchmarks.kill import SETTINGS
from tests.winnow_command import Outcome, winnow

from winnow.observe.jsonl import read_metrics
from winnow.observe.metrics import Record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FAMILIES = ("grpo", "dapo", "drgrpo", "rloo", "remax", "ppo", "reinforce_pp", "gspo", "cispo")
STEPS = {"ppo": 3}
"""Of which the critic has two to itself; others have two."""


@dataclass(frozen=True)
class Family:
    """What a run of a recipe said and recorded."""

    said: Outcome
    steps: list[dict[str, float]]


@pytest.fixture(scope="module")
def run(home: Path) -> Callable[[str], Family]:
    """Runs a recipe, once; all with one cache."""

    @cache
    def train(name: str) -> Family:
        said = winnow(
            home,
            *("train", name, *SETTINGS, f"trainer.steps={STEPS.get(name, 2)}", f"run.name={name}"),
            *("evaluation.every=null", "trainer.save_every=null", "observe.console=plain"),
        ).check()
        records = read_metrics(home / "runs" / name / "metrics.jsonl")
        return Family(said, [r for r in records if r["step"] > 0])

    return train


def test_families_share_one_warm_start(run: Callable[[str], Family]) -> None:
    def starts(name: str) -> list[str]:
        return re.findall(r"Warmstart:cachedin(\S+?)\(--fresh", "".join(run(name).said.out.split()))

    taken = [starts(name) for name in FAMILIES]
    assert [len(each) for each in taken].count(0) <= 1  # the one that made it
    assert len({start for each in taken for start in each}) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_recipe_learns(run: Callable[[str], Family], name: str) -> None:
    family = run(name)
    assert [record["step"] for record in family.steps] == [*range(1, STEPS.get(name, 2) + 1)]
    last = family.steps[-1]
    assert math.isfinite(last["actor/loss"])
    assert last["actor/grad_norm"] > 0
    assert last["actor/updates"] == 2
    assert all(record.get("actor/skipped_updates", 0) == 0 for record in family.steps)
    is_filtered = name in ("dapo", "cispo")
    said = family.said.out.replace("\n", " ")
    assert ("give no signal and are replaced" in said) == is_filtered
    for record in [] if is_filtered else family.steps:
        assert record["sampling/groups/trained"] == record["sampling/groups/admitted"] == 8
        assert record["sampling/staleness/max"] == 0


def test_ppo_leaves_the_first_steps_to_its_critic(run: Callable[[str], Family]) -> None:
    first, second, third = run("ppo").steps
    assert "actor/loss" not in first
    assert "actor/loss" not in second
    assert third["actor/updates"] == 2
    assert all(math.isfinite(r["critic/value_loss"]) for r in (first, second, third))
    # The head starts at zero, and moves.
    assert _spread(first) == 0
    assert _spread(third) > 0


def _spread(record: Record) -> float:
    return record["critic/value/max"] - record["critic/value/min"]


def test_remax_writes_a_greedy_answer_to_each_prompt(run: Callable[[str], Family]) -> None:
    assert all(record["sampling/tokens/baseline"] >= 8 for record in run("remax").steps)
    assert all(
        "sampling/tokens/baseline" not in r or r["sampling/tokens/baseline"] == 0
        for r in run("rloo").steps
    )


def test_the_first_update_of_gspo_clips_nothing_and_later_ones_much(
    run: Callable[[str], Family],
) -> None:
    shares = [r["actor/clip_low"] + r["actor/clip_high"] for r in run("gspo").steps]
    # Of two updates a step the first has ratios of 1: at most half of the tokens can be clipped.
    assert 0 < max(shares) <= 0.5
    assert max(shares) > max(r["actor/clip_low"] + r["actor/clip_high"] for r in run("grpo").steps)
