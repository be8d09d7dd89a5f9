"""The steps that passes over the data fill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from winnow.builders.environments import agent_notes
from winnow.builders.run import _epoch_notes, _scorer_notes, count_steps, make_prompt_budget
from winnow.config.load import load_recipe
from winnow.data.loader import training_prompts
from winnow.data.prompts import PromptSet
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import ConfigError
from winnow.run.loop import PromptBudget
from winnow.types import Prompt


def prompts(count: int) -> PromptSet:
    return PromptSet(tuple(Prompt(f"f:{i}", np.array([i]), "", "s", "") for i in range(count)))


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(1, 100, 12), (3, 100, 37), (0.29, 100, 3), (0.58, 400, 29)]
)
def test_steps_are_those_that_the_passes_fill(epochs: float, rows: int, steps: int) -> None:
    assert count_steps(epochs, 8, prompts(rows), "none") == steps


def test_data_that_never_ends_or_fills_no_step_is_refused() -> None:
    config = load_recipe("quickstart")
    with pytest.raises(ConfigError) as endless:
        count_steps(2, 64, training_prompts(config.data, build_tokenizer(), 0), "sort_digits")
    assert str(endless.value) == (
        "trainer.data_epochs=2 counts passes over the data, and data/task=sort_digits never ends; "
        "set data.max_train_prompts, or trainer.data_epochs=null and trainer.steps"
    )
    with pytest.raises(ConfigError) as short:
        count_steps(2, 64, prompts(31), "none")
    assert str(short.value) == (
        "trainer.data_epochs=2 of 31 prompts fills no step of sampling.groups_per_step=64; raise "
        "the one or lower the other"
    )


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("none", "2 passes over 100 prompts: at most 25 steps of 8 (trainer.data_epochs)"),
        ("variance", "2 passes over 100 prompts: at most 25 steps of 8; at their end fewer than 8"),
    ],
)
def test_prompts_that_fill_no_step_are_told_before_they_are_left(kind: str, told: str) -> None:
    cut = "sampling.groups_per_step=8", "trainer.mini_batch_groups=null", f"sampling/filter={kind}"
    config = load_recipe("quickstart", ["trainer.data_epochs=2", "trainer.steps=25", *cut])
    budget = make_prompt_budget(2, 8, prompts(100))
    notes = _epoch_notes(config.trainer, config.sampling, prompts(100), budget)
    assert next(notes).startswith(told)


def test_prompts_that_were_left_are_told_at_the_end() -> None:
    (note,) = PromptBudget(100, 8, used=96).notes
    assert note == "4 prompts of the passes over the data are unused: they fill no step"
    assert PromptBudget(100, 10, used=100).notes == ()
    assert PromptBudget(100, 8, used=64).notes == ()  # stopped, not over
    assert PromptBudget().notes == ()


def test_a_source_that_verl_scores_otherwise_is_told() -> None:
    source = PromptSet((Prompt("f:0", np.array([1]), "", "math", ""),))
    config = load_recipe("quickstart")
    (note,) = _scorer_notes(config.reward, config.sampling.filter, source)
    assert note.startswith("Data source math is scored by math_verify")
    assert "dapo_math" in note
    routed = load_recipe("quickstart", ["reward.scorers={math: dapo_math}"])
    assert list(_scorer_notes(routed.reward, routed.sampling.filter, source)) == []


@pytest.mark.parametrize(
    ("extra", "environment", "agent"),
    [
        ({"agent_name": "tool_agent"}, "none", "tool_agent"),
        ({"extra_info": {"tools_kwargs": {"calc": {}}}}, "none", "tool_agent"),
        ({"agent_name": "single_turn_agent"}, "none", None),
        ({"agent_name": "tool_agent"}, "custom", None),
        ({"extra_info": {"index": 3}}, "none", None),
    ],
)
def test_rows_for_agents_do_not_become_single_turns_without_a_word(
    extra: dict[str, Any], environment: str, agent: str | None
) -> None:
    words = [f"environment={environment}", *["environment.path=e.py:E"] * (environment != "none")]
    config = load_recipe("quickstart", words)
    rows = [Prompt("f:7", np.array([1]), "", "s", "", extra)]
    found = list(agent_notes(config.environment, rows))
    assert len(found) == (agent is not None)
    for line in found:
        assert line.startswith(f"Warning: row f:7 is for {agent}, and environment=none answers it")
