"""The recipes that ship: each validates, holds what was published, and stands in the docs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.recipes import recipe

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.aggregation import AGGREGATIONS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.algorithm import Advantage, PolicyLoss
from winnow.config.files import RECIPES, available_recipes
from winnow.config.root import Config
from winnow.config.rules import config_warnings

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import ladder

TO_COMPLETE = ["model.path=FOLDER", "data.train_files=[train.parquet]"]


def load(name: str) -> Config:
    to_complete = TO_COMPLETE if name in ("dapo-math", "gsm8k", "sft") else ()
    return recipe(name, *to_complete, *(["sft.train_files=[x.jsonl]"] if name == "sft" else []))


@pytest.mark.parametrize("name", available_recipes())
def test_a_shipped_recipe_validates_and_says_what_it_is_for(name: str) -> None:
    assert load(name)
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"winnow {'sft' if name == 'sft' else 'train'} {name}" in text


def test_the_published_configuration_is_complete() -> None:
    config = load("dapo_qwen2.5_32b")
    assert (config.sampling.groups_per_step, config.rollout.n) == (512, 16)
    assert config.trainer.mini_batch_groups == 32
    assert config.sampling.max_groups_per_step == 10 * 3 * 512
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 20480)
    assert config.reward.overlong.buffer_tokens == 4096
    optim, loss = config.optim, config.algorithm.policy_loss
    assert (optim.lr, optim.warmup_steps, optim.weight_decay) == (1e-6, 20, 0.1)
    assert (loss.name, loss.clip_low, loss.clip_high, loss.dual_clip) == ("ppo_clip", 0.2, 0.28, 10)
    assert (config.evaluation.temperature, config.evaluation.top_p) == (1.0, 0.7)
    cut = load("dapo_megatron_qwen2.5_32b")
    assert (cut.algorithm, cut.optim, cut.data) == (config.algorithm, config.optim, config.data)


def test_recipes_that_sample_beside_learning_correct_for_older_weights() -> None:
    beside = {name: load(name) for name in available_recipes() if "async" in name or "off" in name}
    assert {name: config.trainer.mode.name for name, config in beside.items()} == {
        "dapo_async": "async",
        "dapo_async_qwen2.5_math_7b": "async",
        "dapo_one_step_off": "one_step_off",
        "dapo_one_step_off_qwen2.5_math_7b": "one_step_off",
    }
    assert not any(
        "off-policy tokens" in line for c in beside.values() for line in config_warnings(c)
    )


def test_older_weights_without_a_correction_are_told() -> None:
    (line,) = config_warnings(recipe("dapo_one_step_off", "algorithm/correction/weight=none"))
    assert line.startswith("Warning: trainer/mode=one_step_off trains on off-policy tokens")
    assert config_warnings(recipe("dapo_one_step_off", "algorithm/correction/rejection=k1")) == []
    bypass = ("algorithm/correction/weight=none", "algorithm.correction.mode=bypass")
    assert config_warnings(recipe("dapo_one_step_off", *bypass)) == []


DOCS = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"
SECTIONS = dict(
    part.partition("\n")[::2] for part in DOCS.read_text(encoding="utf-8").split("\n## ")[1:]
)


def section(title: str) -> str:
    return next(text for name, text in SECTIONS.items() if name.startswith(title))


def first_cells(title: str) -> list[str]:
    """The names in the first column of a section's first table, without their remarks."""
    table = section(title).split("\n\n| ", 1)[-1].split("\n\n")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def keys_told(title: str) -> dict[str, set[str]]:
    """The keys that a section's table gives for each name."""
    found: dict[str, set[str]] = {}
    for line in section(title).splitlines():
        cells = line.strip("| ").split(" | ")
        if line.startswith("| `") and len(cells) >= 3:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                found[name] = set(re.findall(r"`([a-z_]+)`", cells[2]))
    return found


def test_the_tables_name_every_estimator_loss_and_aggregation() -> None:
    assert first_cells("Advantage") == [*ESTIMATORS, "custom"]
    assert sorted(first_cells("Policy loss")) == sorted([*POLICY_LOSSES, "custom"])
    assert sorted(first_cells("Loss aggregation")) == sorted(AGGREGATIONS)


def test_the_tables_name_every_recipe_of_a_family() -> None:
    small, real = first_cells("Toy recipes"), first_cells("Published recipes")
    assert sorted([*small, *real]) == sorted(set(available_recipes()) - OTHERS)


@pytest.mark.parametrize(
    ("title", "union"), [("Advantage", Advantage), ("Policy loss", PolicyLoss)]
)
def test_the_keys_of_each_variant_are_those_it_has(title: str, union: object) -> None:
    told = keys_told(title)
    for variant in get_args(get_args(union)[0]):
        name = variant.model_fields["name"].default
        if name == "custom":
            continue
        assert told.get(name, set()) == set(variant.model_fields) - {"name"}, name


def test_each_line_on_kl_length_and_correction_is_taken() -> None:
    lines = [
        line.split(" | ")[0]
        for line in section("KL, entropy").splitlines()
        if line.startswith("| `")
    ]
    assert len(lines) >= 10
    one_update = "trainer.mini_batch_groups=null"
    for line in lines:
        first, *others = re.findall(r"`([^`]+)`", line)
        group, separator, _ = first.rpartition("=")
        together = [other for other in others if "=" in other]
        for choice in [first, *(group + separator + o for o in others if "=" not in o)]:
            assert recipe("quickstart", choice, *together, one_update)


UNFILTERED = {
    "algorithm.aggregation": "seq-mean-token-mean",
    "algorithm.policy_loss.clip_high": 0.2,
    "algorithm.policy_loss.dual_clip": None,
    "reward.overlong.enabled": False,
    "sampling.filter.name": "none",
}
"""GRPO against DAPO."""
TASK = {
    "data.task.max_digits": 8,
    "data.task.eval_problems": 400,
    "rollout.max_response_tokens": 128,
    "reward.overlong.buffer_tokens": 48,
    "warm_start.demonstrations.guess_share": 0.5,
    "warm_start.demonstrations.working_share": 0.25,
    "warm_start.steps": 1000,
    "optim.lr": 4e-4,
    "trainer.steps": 40,
}
"""All small recipes against the quickstart."""
SMALL: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": UNFILTERED,
    "drgrpo": UNFILTERED
    | {
        "algorithm.advantage.std_normalization": "none",
        "algorithm.aggregation": "seq-mean-token-sum-norm",
    },
    "rloo": UNFILTERED
    | {"algorithm.advantage.name": "rloo", "algorithm.aggregation": "seq-mean-token-sum"},
    "remax": UNFILTERED
    | {"algorithm.advantage.name": "remax", "algorithm.aggregation": "seq-mean-token-sum"},
    "reinforce_pp": UNFILTERED
    | {"algorithm.advantage.name": "reinforce_plus_plus", "algorithm.aggregation": "token-mean"},
    "ppo": UNFILTERED
    | {
        "algorithm.advantage.name": "gae",
        "algorithm.aggregation": "token-mean",
        "critic.optim.lr": 1e-3,
        "critic.optim.schedule": "linear",
        "critic.optim.weight_decay": 0.0,
        "critic.warmup_steps": 2,
    },
    "gspo": UNFILTERED
    | {
        "algorithm.policy_loss.name": "gspo",
        "algorithm.policy_loss.clip_low": 3e-4,
        "algorithm.policy_loss.clip_high": 4e-4,
    },
    "cispo": {"algorithm.policy_loss.name": "cispo"},
}
"""What else differs from the quickstart, key by key; keys of one variant alone are left out."""
OTHERS = {
    *("quickstart", "quickstart-tools", "quickstart-images"),
    *("smollm2", "dapo-math", "gsm8k", "sft"),
}
"""Recipes that are neither variants of the quickstart nor published."""
REAL = sorted(
    name
    for name in available_recipes()
    if name not in SMALL
    and name not in OTHERS
    and not re.search("_async|_one_step_off|_megatron", name)
)
BESIDE = [
    *("dapo_async_qwen2.5_math_7b", "dapo_one_step_off_qwen2.5_math_7b"),
    *("dapo_megatron_qwen2.5_32b", "dapo_megatron_qwen3_30b_a3b"),
]
"""Real recipes that sample beside learning, or hold the model by Megatron's layers."""
SOURCE = re.compile(r"# .*\b([Pp]aper|script|code|base|oat|verl|TIS|Winnow)\b")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield path.removeprefix("."), tree
        return
    for key, value in tree.items():
        yield from leaves(value, f"{path}.{key}")


def settings(name: str, *overrides: str) -> dict[str, Any]:
    return dict(leaves(recipe(name, *overrides).model_dump(mode="json")))


def lines_with_values(name: str) -> list[tuple[str, str]]:
    """Each line that sets a value, and the line before it."""
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return [
        (line, before)
        for before, line in zip(["", *lines], lines, strict=False)
        if re.match(r"\s+(\w+: [^#\s]|- )", line)
    ]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_changes_what_its_family_changes_and_nothing_else(name: str) -> None:
    start, family = settings("quickstart"), settings(name)
    shared = {key for key in start if key in family} - {"run.description"}
    changed = {key: family[key] for key in shared if family[key] != start[key]}
    expected = {key: value for key, value in (TASK | SMALL[name]).items() if key in family}
    assert changed == {k: v for k, v in expected.items() if k in start and start[k] != v}
    assert {key: family[key] for key in expected} == expected


@pytest.mark.parametrize("name", [*REAL, *BESIDE])
def test_every_published_value_names_its_source(name: str) -> None:
    values = lines_with_values(name)
    assert values
    unsourced = [
        line
        for line, before in values
        if not SOURCE.search(line)
        # An entry of a list stands under the key that says where it is from.
        and not (line.lstrip().startswith("- ") and SOURCE.search(before))
    ]
    assert unsourced == []


@pytest.mark.parametrize("name", [*REAL, *BESIDE])
def test_the_sources_that_a_real_recipe_names_are_those_of_its_head(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    head, _, body = text.partition("\n\n")
    assert re.search(r"arXiv \d{4}\.\d{5}", head)
    named = set(re.findall(r"# (paper|script|code|base|oat|verl|TIS|Winnow)\b", body))
    explained = set(re.findall(r"^#   (paper|script|code|base|oat|verl|TIS|Winnow) ", head, re.M))
    assert named <= explained


# The ladder that benchmarks/ladder.py climbs.


def rungs() -> list[dict[str, Any]]:
    made = {job.name: job for job in ladder.jobs(["grpo"], with_rungs=True)}
    commands = [made[name].command(1, 40, Path("runs")) for name, _ in ladder.RUNGS]
    return [settings(*command[2:]) for command in commands]


def differing(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    found = {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
    return {key for key in found if not key.startswith("run.")}


def test_each_rung_adds_one_thing() -> None:
    steps = [differing(a, b) for a, b in zip(rungs(), rungs()[1:], strict=False)]
    assert steps == [
        {"algorithm.overlong_filtering"},
        {"algorithm.policy_loss.clip_high"},
        {"reward.overlong.enabled"},
        {"algorithm.aggregation"},
        {"sampling.filter.name", "sampling.filter.metric"},
    ]


def test_the_ladder_ends_at_dapo_but_for_what_dapo_left_out() -> None:
    dapo = settings(*ladder.Job("dapo", "dapo").command(1, 40, Path("runs"))[2:])
    left_out = {"algorithm.overlong_filtering", "algorithm.policy_loss.dual_clip"}
    assert differing(rungs()[-1], dapo) == left_out


def test_each_arm_of_the_plan_lacks_one_part_of_dapo() -> None:
    plan = ladder.PLANS["digits"]
    commands = [job.command(1, plan.steps, Path("runs")) for job in ladder.part_jobs(plan)]
    dapo, *others = (settings(*command[2:]) for command in commands)
    assert [differing(dapo, other) for other in others] == [
        {"algorithm.policy_loss.clip_high"},
        {"sampling.filter.name", "sampling.filter.metric"},
        {"algorithm.aggregation"},
        {"reward.overlong.enabled"},
    ]
