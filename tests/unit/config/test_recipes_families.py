"""Recipes of the families: what a small one changes, what a real one says of its values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.recipes import recipe

from winnow.config.files import RECIPES, available_recipes
from winnow.config.model import SftWarmStart
from winnow.config.rollout import TorchEngineConfig
from winnow.runs.warm_start import cache_folder

UNFILTERED = {
    "algorithm.aggregation": "seq-mean-token-mean",
    "algorithm.policy_loss.clip_high": 0.2,
    "algorithm.policy_loss.dual_clip": None,
    "reward.overlong.enabled": False,
    "sampling.filter.name": "none",
    "trainer.steps": 40,
}
"""GRPO against the quickstart."""
SMALL: dict[str, dict[str, Any]] = {
    "dapo": {"trainer.steps": 40},
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
    | {
        "algorithm.advantage.name": "reinforce_plus_plus",
        "algorithm.aggregation": "token-mean",
    },
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
    "cispo": {"algorithm.policy_loss.name": "cispo", "trainer.steps": 40},
}
"""What differs from the quickstart, key by key; keys that only one variant has are left out."""
REAL = sorted(
    name
    for name in available_recipes()
    if name not in SMALL
    and name not in ("quickstart", "dapo-math", "gsm8k", "sft")
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


def settings(name: str) -> dict[str, Any]:
    return dict(leaves(recipe(name).model_dump(mode="json")))


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
    expected = {key: value for key, value in SMALL[name].items() if key in family}
    assert changed == {k: v for k, v in expected.items() if k in start and start[k] != v}
    assert {key: family[key] for key in expected} == expected


def test_the_small_recipes_share_the_quickstarts_warm_start() -> None:
    configs = [recipe(name) for name in ("quickstart", *SMALL)]
    assert all(isinstance(config.warm_start, SftWarmStart) for config in configs)
    assert len({cache_folder(config) for config in configs}) == 1


@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_says_its_name_and_paper(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert re.search(r"arXiv \d{4}\.\d{5}", text.splitlines()[0])
    assert f"winnow train {name}\n" in text
    told = recipe(name).run.description
    assert told != recipe("quickstart").run.description


def test_there_is_a_real_recipe_for_each_family() -> None:
    assert [name.split("_")[0] for name in REAL] == sorted(
        {name.split("_")[0] for name in SMALL},
    )


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


@pytest.mark.parametrize("name", REAL)
def test_a_real_recipe_sets_what_decides_a_run(name: str) -> None:
    config = recipe(name)
    assert config.model.path is not None
    assert config.warm_start.name == "none"
    assert config.data.train_files
    # fp32 weights of 32B take 131 GB, 256 answers of 22,528 tokens a cache of 2.75 TiB.
    assert config.model.dtype == "bfloat16"
    assert isinstance(config.rollout.engine, TorchEngineConfig)
    assert config.rollout.engine.cache_gib == 32
    written = typed(RECIPES / f"{name}.yaml")
    for key in (
        "algorithm.policy_loss.name",
        "algorithm.aggregation",
        "algorithm.advantage.name",
        "optim.lr",
        "rollout.n",
        "rollout.max_response_tokens",
        "sampling.groups_per_step",
        "trainer.mini_batch_groups",
    ):
        assert key in written, f"{name} leaves {key} to the default and does not say so"


@pytest.mark.parametrize("name", [*REAL, *BESIDE])
def test_a_real_recipe_claims_no_result(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert not re.search(r"\d ?%|\bpass@|\breaches\b|\bscores? \d|state of the art", text)
    if name != "dapo_qwen2.5_32b":
        assert "othing of this was" in text


def typed(path: Path) -> dict[str, Any]:
    """The keys that a recipe and those that it includes write out."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name in tree.pop("defaults", []):
        found |= typed(RECIPES / f"{name}.yaml")
    return found | dict(leaves(tree))
