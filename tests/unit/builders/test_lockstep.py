"""Ranks that would wait for each other are named before a run begins, with a setting that helps."""

from __future__ import annotations

import re

import pytest
from transformers import Qwen2Config

from winnow.builders.lockstep import lockstep_notes
from winnow.config.load import load_recipe

SHAPE = Qwen2Config(hidden_size=5120, num_attention_heads=40)
FSDP2 = ["cluster=local", "rollout/engine=torch", "trainer.microbatch_tokens=22528"]
FSDP2 += ["trainer/strategy=single", "trainer/strategy=fsdp2"]


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ([], None),
        ([*FSDP2, "trainer.strategy.ranks=16"], None),
        ([*FSDP2, "trainer.strategy.ranks=256"], r"set trainer\.strategy\.sequence=4 \(0\.9\d\)$"),
        ([*FSDP2, "trainer.strategy.ranks=256", "trainer.strategy.sequence=4"], None),
        ([*FSDP2, "trainer.strategy.ranks=255"], r"raise trainer\.mini_batch_groups, or use fewer"),
    ],
)
def test_ranks_that_wait_for_each_other_are_named(layout: list[str], told: str | None) -> None:
    notes = [*lockstep_notes(load_recipe("dapo_qwen2.5_32b", layout), SHAPE)]
    if told is None:
        assert notes == []
    else:
        assert notes[0].startswith("Warning: trainer.strategy.ranks=25")
        assert "512 answers an update keep them busy 0.4" in notes[0]
        assert re.search(told, notes[0])
