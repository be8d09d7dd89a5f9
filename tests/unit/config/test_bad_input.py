"""What a user reads when a recipe or an override is wrong: field, value, remedy, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from winnow.config import rules
from winnow.config.load import load_recipe
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.rules import config_warnings
from winnow.errors import ConfigError

SHELL = "(set by the command line)"
LOSSES = (
    "ppo_clip, gspo, cispo, sapo, gmpo, clip_cov, kl_cov, dppo_tv, dppo_kl, dro, gpg, reinforce, "
    "custom"
)
FIXTURES = Path(__file__).parents[2] / "fixtures/config"
TABLE = yaml.safe_load((FIXTURES / "refusals.yaml").read_text(encoding="utf-8"))
CASES = yaml.safe_load((FIXTURES / "contradictions.yaml").read_text(encoding="utf-8"))
CONTRADICTIONS = [tuple(case.values()) for case in CASES]


def message(recipe: str, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is None
    return str(caught.value)


@pytest.mark.parametrize(("overrides", "expected"), TABLE["overrides"])
def test_a_wrong_override_is_answered_in_one_line(overrides: list[str], expected: str) -> None:
    wanted = expected.replace("LOSSES", LOSSES).replace("SHELL", SHELL)
    assert message("quickstart", overrides) == wanted


@pytest.mark.parametrize(("text", "expected"), TABLE["files"])
def test_a_wrong_file_is_answered_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    said = message(str(path), [])
    assert "\n" not in said
    wanted = expected.replace("{file}", str(path))
    before, _, after = wanted.partition("{yaml}")
    assert said.startswith(before)
    assert said.endswith(after)
    assert ("{yaml}" in wanted and len(said) > len(before + after) + 10) or said == wanted


def test_each_of_several_faults_has_its_line() -> None:
    keys = message("quickstart", ["optim.lrr=1", "optim.lr=-1", "warm_start=x"])
    assert [line.split()[0] for line in keys.splitlines()] == ["optim.lrr", "warm_start"]
    values = message("quickstart", ["optim.lr=-1", "trainer.steps=0", "rollout.n=true"])
    assert sorted(line.split()[0] for line in values.splitlines()) == [
        "optim.lr",
        "rollout.n",
        "trainer.steps",
    ]


def test_a_fault_in_an_included_file_names_that_file(tmp_path: Path) -> None:
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("optim:\n  lr: -1\n", encoding="utf-8")
    mine.write_text("defaults: [base]\noptim: {eps: 1}\n", encoding="utf-8")
    assert message(str(mine), []).endswith(f"got -1 (set by {base}, line 2)")


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("[" * 1500, encoding="utf-8")
    assert message(str(path), []) == f"recipe {path} is nested too deeply; flatten it"


# Rules across sections: each contradiction names both fields, their values and a remedy.


@pytest.mark.parametrize(("overrides", "parts", "mended"), CONTRADICTIONS)
def test_a_contradiction_names_both_fields_and_the_way_out(
    overrides: list[str], parts: list[str], mended: list[str]
) -> None:
    said = message("quickstart", overrides)
    assert "\n" not in said
    assert [part for part in parts if part not in said] == []
    assert load_recipe("quickstart", mended)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.warmup_steps=20"], []),
        (["trainer.steps=2"], ["optim.warmup_steps=5 is more than trainer.steps=2: the learning"]),
        (["warm_start.steps=9"], ["warm_start.warmup_steps=50 is more than warm_start.steps=9"]),
        (["critic.warmup_steps=20", "critic.optim.warmup_steps=21"], []),
        (
            ["algorithm/advantage=gae", "critic.warmup_steps=20", "critic.optim.warmup_steps=21"],
            [
                "critic.warmup_steps=20 leaves none of trainer.steps=20 for the policy: the first "
                "19 train the critic only",
                "critic.optim.warmup_steps=21 is more than trainer.steps=20",
            ],
        ),
    ],
)
def test_a_warm_up_longer_than_the_run_is_cut_and_told(
    overrides: list[str], said: list[str]
) -> None:
    found = config_warnings(load_recipe("quickstart", overrides))
    assert len(found) == len(said)
    assert [s for line, s in zip(found, said, strict=True) if f"Warning: {s}" not in line] == []


@pytest.mark.parametrize(("staleness", "count"), [(1, 1), (2, 0)])
def test_engines_that_will_want_for_groups_are_told_of(staleness: int, count: int) -> None:
    mode = ["trainer/mode=one_step_off", f"sampling.max_staleness={staleness}"]
    found = config_warnings(load_recipe("quickstart", mode))
    assert sum("sampling.max_staleness=1" in line for line in found) == count


def test_what_ranks_and_micro_batches_cannot_share_out_is_told() -> None:
    small = "sampling.groups_per_step=4", "rollout.n=2", "trainer.mini_batch_groups=2"
    ranks = "trainer/strategy=fsdp2", "trainer.strategy.ranks=6"
    (idle,) = config_warnings(load_recipe("quickstart", [*small, *ranks]))
    assert "an update has 4 answers for 6 data-parallel ranks, so 2 idle" in idle
    shared = [*small, *ranks, "trainer.strategy.sequence=2"]  # three by three
    assert config_warnings(load_recipe("quickstart", shared)) == []
    stages = "trainer/strategy=megatron", "trainer.strategy.ranks=6", "trainer.strategy.pipeline=2"
    cut = [*small, *stages]  # as much
    assert config_warnings(load_recipe("quickstart", cut)) == []
    limits = "data.max_prompt_tokens=100", "rollout.max_response_tokens=128"
    fits = load_recipe("quickstart", [*limits, "trainer.microbatch_tokens=228"])
    assert config_warnings(fits) == []
    (long,) = config_warnings(load_recipe("quickstart", [*limits, "trainer.microbatch_tokens=227"]))
    assert "trainer.microbatch_tokens=227 is less than the longest prompt and answer" in long


def test_each_broken_rule_has_its_line() -> None:
    said = message("quickstart", ["rollout.n=1", "trainer.mini_batch_groups=15"])
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.commit=completion_order", "sampling.max_staleness=1"],
        ["sampling.commit=completion_order", "sampling.max_staleness=0"],
        ["reward.overlong.enabled=false", "reward.overlong.buffer_tokens=4096"],
        ["rollout.n=1", "sampling/filter=band"],
        ["rollout.n=1", "sampling.filter={name: band, metric: reward, low: 0.2, high: 0.8}"],
        ["evaluation.top_p=0.7", "evaluation.temperature=0"],
        [
            "evaluation.every=1",
            "evaluation.before=true",
            "warm_start=none",
            "data/task=none",
            "model.path=M",
            "data.train_files=[a.parquet]",
        ],
        ["sampling.filter.metric=whatever_the_scorer_gives"],
        ["sampling.groups_per_step=4"],  # fewer than trainer.mini_batch_groups=16 of the recipe
        [
            "warm_start.demonstrations.guess_share=0.1",
            "warm_start.demonstrations.working_share=0.9",
        ],
    ],
)
def test_what_only_looks_like_a_contradiction_passes(overrides: list[str]) -> None:
    assert load_recipe("quickstart", overrides)


def test_each_rule_is_applied_to_sections_by_their_names() -> None:
    arguments = {**get_type_hints(Config), "config": Config, "roles": Roles, "longest": int}
    hints = {f: get_type_hints(f) for f in vars(rules).values() if isfunction(f)}
    applied = {rule for rule, types in hints.items() if types.pop("return", None) == Iterator[str]}
    assert applied == {*rules.RULES, *rules.WARNINGS}
    for rule in applied:
        assert hints[rule].items() <= arguments.items(), rule.__name__
