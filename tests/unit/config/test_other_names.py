"""Names of other systems: each leads to a key that exists, and messages and docs say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.winnow_command import in_this_process

from winnow.config.load import SHORTHANDS, resolve_recipe
from winnow.config.other_names import as_markdown, other_names
from winnow.config.schema import all_keys
from winnow.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs/coming_from.md"


def test_every_name_leads_to_a_key_that_exists_or_says_why_there_is_none() -> None:
    known = {key.spelling for key in all_keys()}
    assert [row for row in other_names() if row.ours and row.ours not in known] == []
    assert [row for row in other_names() if not row.ours and not row.meaning] == []
    assert {row.system for row in other_names()} == {"verl", "TRL", "OpenRLHF"}


def test_every_name_that_is_not_ours_is_answered_with_ours() -> None:
    known = {key.spelling for key in all_keys()} | SHORTHANDS.keys()
    rows = [row for row in other_names() if row.name not in known]
    assert len(rows) > 250
    with pytest.raises(ConfigError) as caught:
        resolve_recipe("quickstart", [f"{row.name}=1" for row in rows])
    lines = str(caught.value).splitlines()
    assert len(lines) == len(rows)
    for row, said in zip(rows, lines, strict=True):
        assert said.startswith(f"{row.name} is no known key (set by the command line); that is ")
        nothing = f"name, and nothing is to be set here: {row.meaning}"
        assert (f"name for {row.ours}" if row.ours else nothing) in said
        assert row.system in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.total_epochs=3", "verl's name for trainer.data_epochs (passes over the data;"),
        ("custom_reward_function.path=x.py", "verl's name for reward.function.path"),
        (
            "+actor_rollout_ref.model.override_config.embd_pdrop=0.",
            "nothing is to be set here: the",
        ),
        ("temperature=1", "TRL and OpenRLHF's name for rollout.temperature"),
        ("algorithm=grpo", "choose algorithm/advantage=grpo"),
        ("trainer.total_epoch=3", "did you mean"),
    ],
)
def test_what_users_of_other_systems_type_first(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_recipe("quickstart", [override])
    assert words in str(caught.value)


def test_a_flag_of_another_system_is_answered_with_our_key(tmp_path: Path) -> None:
    said = in_this_process("train", "grpo", "--num_generations", "8", folder=tmp_path)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "TRL's name for rollout.n" in said.err
    said = in_this_process("train", "grpo", "--eps-clip=0.2", folder=tmp_path)
    assert "OpenRLHF's name for algorithm.policy_loss.clip_low" in said.err


def test_the_page_of_the_docs_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown()
