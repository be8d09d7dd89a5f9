"""What docs/algorithms.md says can be chosen is what there is, and each of its lines is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from tests.objectives import legal_aggregation
from tests.recipes import recipe

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.aggregation import AGGREGATIONS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.algorithm import Advantage, PolicyLoss
from winnow.config.files import available_recipes

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
    assert sorted(first_cells("What")) == sorted(AGGREGATIONS)


def test_the_tables_name_every_recipe_of_a_family() -> None:
    small, real = first_cells("Small recipes"), first_cells("Real recipes")
    assert sorted([*small, *real]) == sorted(
        set(available_recipes()) - {"quickstart", "dapo-math", "gsm8k", "sft"}
    )


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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_is_chosen_as_the_docs_say(name: str) -> None:
    config = recipe("quickstart", f"algorithm/advantage={name}")
    assert config.algorithm.advantage.name == name


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_each_loss_is_chosen_as_the_docs_say(name: str) -> None:
    aggregation = f"algorithm.aggregation={legal_aggregation(name)}"
    chosen = [f"algorithm/policy_loss={name}", aggregation]
    assert recipe("quickstart", *chosen).algorithm.policy_loss.name == name


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
