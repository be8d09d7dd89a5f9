"""Problems of reasoning-gym are the same in every process, or the task is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from winnow.config.data import DataConfig, ReasoningGymTask
from winnow.data.loader import training_prompts
from winnow.data.procedural import UNSTABLE
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import DataError

IN_ANOTHER = """
import sys
from winnow.config.data import ReasoningGymTask
from winnow.data.procedural import ProceduralRows
for name in sys.argv[1:]:
    rows = ProceduralRows(ReasoningGymTask(task=name), 3)
    print(name, [next(rows.candidates(index)).uid for index in range(12)])
"""
STABLE = ["chain_sum", "group_anagrams", "family_relationships", "course_schedule", "sudoku",
          "word_sorting", "syllogism", "simple_equations", "prime_factorization"]  # fmt: skip


def in_another_process(hash_seed: int, *names: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER, *names],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_rows_are_the_same_in_every_process_or_the_task_is_refused() -> None:
    shaky = ["ransom_note", "isomorphic_strings"]
    one, two = (in_another_process(seed, *STABLE, *shaky) for seed in (1, 2))
    assert len(one) == len(STABLE) + 2
    assert one[: len(STABLE)] == two[: len(STABLE)]
    assert all(a != b for a, b in zip(one[len(STABLE) :], two[len(STABLE) :], strict=True))
    assert set(shaky) <= UNSTABLE
    with pytest.raises(DataError, match="`winnow data prepare reasoning_gym/ransom_note`"):
        training_prompts(
            DataConfig(task=ReasoningGymTask(task="ransom_note")), build_tokenizer(), 0
        )
