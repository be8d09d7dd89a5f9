"""When scores are seen where the recipe leaves it open: later if scorers run beside the engine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.scoring import rewards_of

from winnow.config.load import load_recipe
from winnow.runs.build import LAG_OF_SCORERS_APART, score_lag_ticks

SORT = {"sort_digits"}


def lag(*overrides: str, sources: set[str] = SORT) -> int:
    config = load_recipe("quickstart", list(overrides))
    with contextlib.closing(rewards_of(config.reward, 16)) as rewards:
        return score_lag_ticks(config, rewards, sources)


def function(folder: Path, kind: str) -> str:
    file = folder / "reward.py"
    file.write_text(f"{kind} compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                    "    return 1.0\n")  # fmt: skip
    return f"reward.function.path={file}"


def test_rules_in_process_are_seen_at_once() -> None:
    assert lag() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_rules_in_workers_are_seen_later(workers: int) -> None:
    assert lag(f"reward.workers={workers}") == LAG_OF_SCORERS_APART > 0


@pytest.mark.parametrize(
    ("kind", "more", "wanted"),
    [
        ("def", ["reward.workers=0"], 0),
        ("async def", ["reward.workers=0"], LAG_OF_SCORERS_APART),
        ("def", ["reward.workers=1"], LAG_OF_SCORERS_APART),
        ("def", [], LAG_OF_SCORERS_APART),
    ],
)
def test_a_function_is_seen_later_if_it_runs_beside_the_engine(
    kind: str, more: list[str], wanted: int, tmp_path: Path
) -> None:
    assert lag(function(tmp_path, kind), *more) == wanted


def test_what_a_recipe_says_counts() -> None:
    assert lag("sampling.score_lag_ticks=3") == 3
    assert lag("sampling.score_lag_ticks=0", "reward.workers=1") == 0


def test_free_mode_has_no_lag() -> None:
    assert lag("run.deterministic=false", "reward.workers=1") == 0
