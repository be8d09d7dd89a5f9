"""Each small recipe of a family, run for a few steps as a user would, on a smaller task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from benchmarks.kill import SETTINGS
from tests.winnow_command import Outcome, in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.observe.metrics import Record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FAMILIES = ("grpo", "dapo", "drgrpo", "rloo", "remax", "ppo", "reinforce_pp", "gspo", "cispo")
STEPS = 3


@dataclass(frozen=True)
class Family:
    """What a run of a recipe said and recorded."""

    said: Outcome
    steps: list[dict[str, float]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Runs a recipe, once; all with one cache."""
    home = tmp_path_factory.mktemp("families")
    done: dict[str, Family] = {}

    def train(name: str) -> Family:
        if name not in done:
            said = in_this_process(
                *("train", name, *SETTINGS, f"trainer.steps={STEPS}", f"run.name={name}"),
                *("evaluation.every=null", "trainer.save_every=null", "observe.console=plain"),
                folder=home,
                environment={"WINNOW_CACHE": str(home / "cache")},
            ).check()
            records = read_metrics(home / "runs" / name / "metrics.jsonl")
            done[name] = Family(said, [r for r in records if r["step"] > 0])
        return done[name]

    def train_after_the_start(name: str) -> Family:
        train("grpo")
        assert len(list((home / "cache" / "warm-starts").glob("[!.]*"))) == 1
        return train(name)

    return train_after_the_start


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_recipe_learns_from_the_shared_start(
    run: Callable[[str], Family], name: str
) -> None:
    family = run(name)
    assert [record["step"] for record in family.steps] == [1, 2, 3]
    last = family.steps[-1]
    assert math.isfinite(last["actor/loss"])
    assert last["actor/grad_norm"] > 0
    assert last["actor/updates"] == 2
    assert all(record.get("actor/skipped_updates", 0) == 0 for record in family.steps)
    if name != "grpo":
        assert "Warm start: taken from" in family.said.out + family.said.err


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"dapo", "cispo"}))
def test_without_a_filter_every_group_is_trained_on_and_none_is_surplus(
    run: Callable[[str], Family], name: str
) -> None:
    family = run(name)
    for record in family.steps:
        assert record["sampling/groups/trained"] == record["sampling/groups/admitted"] == 8
        assert record["sampling/staleness/max"] == 0
    assert "is replaced" not in family.said.out


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_with_dynamic_sampling_the_start_of_a_run_says_what_is_replaced(
    run: Callable[[str], Family], name: str
) -> None:
    assert "teaches nothing and is replaced" in run(name).said.out.replace("\n", " ")


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
