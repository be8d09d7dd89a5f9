"""The ladder that benchmarks/ladder.py climbs, and how its report tells noise from difference."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.recipes import recipe

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import ladder
import ladder_report

RUNG_MORE = ["grpo", "+ more", "+ missing"]
RUNG_NAMES = [name for name, _ in ladder.RUNGS]


def settings(job: ladder.Job, seed: int = 1) -> dict[str, Any]:
    command = job.command(seed, 40, Path("runs"))
    return recipe(command[2], *command[3:]).model_dump(mode="json", exclude={"run"})


def rungs() -> list[dict[str, Any]]:
    made = {job.name: job for job in ladder.jobs(["grpo"], with_rungs=True)}
    return [settings(made[name]) for name in RUNG_NAMES]


def differing(a: dict[str, Any], b: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for key in a.keys() | b.keys():
        here, there = a.get(key), b.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            found |= differing(here, there, f"{path}{key}.")
        elif here != there:
            found.add(f"{path}{key}")
    return found


def run(accuracy: float, **figures: float) -> dict[str, Any]:
    return {
        "pass@1": accuracy,
        "greedy": accuracy,
        "length": 40.0,
        "truncated": 0.0,
        "clip_low": 0.01,
        "clip_high": None,
        "dual_clip": None,
        "tokens": 1e6,
        "cpu_s": 60.0,
        "accuracy_by_step": [0.3, accuracy],
        "tokens_by_step": [5e5, 5e5],
        **figures,
    }


def test_each_rung_adds_one_thing() -> None:
    steps = [differing(a, b) for a, b in zip(rungs(), rungs()[1:], strict=False)]
    assert steps[:4] == [
        {"algorithm.overlong_filtering"},
        {"algorithm.policy_loss.clip_high"},
        {"reward.overlong.enabled"},
        {"algorithm.aggregation"},
    ]
    assert steps[4] == {"sampling.filter.name", "sampling.filter.metric"}


def test_the_ladder_ends_at_dapo_but_for_what_dapo_left_out() -> None:
    dapo = settings(ladder.Job("dapo", "dapo"))
    assert differing(rungs()[-1], dapo) == {
        "algorithm.overlong_filtering",
        "algorithm.policy_loss.dual_clip",
    }


def test_every_family_is_run_once_a_seed_and_remax_last() -> None:
    names = [job.name for job in ladder.jobs(ladder.FAMILIES, with_rungs=True)]
    assert names[0] == "start"
    assert names[-1] == "remax"
    assert len(names) == len(set(names)) == 1 + len(ladder.FAMILIES) + len(ladder.RUNGS) - 1
    keys = {job.key(1) for job in ladder.jobs(ladder.FAMILIES, with_rungs=True)}
    assert len(keys) == len(names)


def test_a_difference_is_paired_by_seed() -> None:
    results = {
        "a": {1: run(0.80), 2: run(0.60), 3: run(0.71), 5: run(0.01)},
        "b": {1: run(0.70), 2: run(0.50), 3: run(0.60), 4: run(0.99)},
    }
    mean, half, seeds = ladder_report.difference(results, "a", "b", "pass@1")
    assert mean == pytest.approx(0.31 / 3)
    assert half is not None
    assert half == pytest.approx(4.30 * 0.0057735 / 3**0.5, rel=1e-4)
    assert seeds == 3


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({1: run(0.70), 2: run(0.50), 3: run(0.60)}, "over 3 seeds: clear"),
        ({1: run(0.70), 2: run(0.65), 3: run(0.60)}, "over 3 seeds: within noise"),
        ({1: run(0.70)}, "of one seed: may be noise"),
    ],
)
def test_the_report_calls_a_difference_noise_unless_its_interval_leaves_out_zero(
    others: dict[int, dict[str, Any]], said: str
) -> None:
    results = {"grpo": {1: run(0.80), 2: run(0.60), 3: run(0.71)}, "dapo": others}
    text = ladder_report.report(results, ["grpo", "dapo", "rloo"], [], 40, "command")
    assert said in text
    assert "Not run: start, rloo." in text
    assert said in ladder_report.summary(results, ["grpo", "dapo"], [], 40)


def test_rungs_are_compared_where_the_cheapest_run_ended() -> None:
    cheap = run(0.5, tokens=1e6)
    dear = run(0.9, tokens=3e6) | {
        "accuracy_by_step": [0.2, 0.2, 0.2, 0.8, 0.8, 0.8],
        "tokens_by_step": [5e5] * 6,
    }
    text = ladder_report.at_equal_tokens({"grpo": {1: cheap}, "+ more": {1: dear}}, RUNG_MORE)
    assert "when 1.00 M tokens were generated" in text
    assert text.endswith("- grpo: 40.0\n- + more: 20.0")


def test_a_page_keeps_what_stands_around_the_marks() -> None:
    first, last = ladder_report.MARKS
    page = f"before\n{first}\nold\n{last}\nafter\n"
    written = ladder_report.put_between_marks("new", page)
    assert written == f"before\n{first}\n\nnew\n\n{last}\nafter\n"
    assert ladder_report.put_between_marks("new", written) == written
    with pytest.raises(ValueError, match="lacks"):
        ladder_report.put_between_marks("new", f"{last}\n{first}")


def test_a_run_is_taken_from_before_only_with_its_settings(tmp_path: Path) -> None:
    job, other = ladder.Job("grpo", "grpo"), ladder.Job("grpo", "grpo", ("optim.lr=1e-3",))
    folder = tmp_path / job.key(1)
    folder.mkdir()
    kept = {"config": ladder.settings(job, 1, 40, tmp_path), "pass@1": 0.5}
    (folder / ladder.KEPT).write_text(json.dumps(kept))
    assert ladder.finished(job, 1, 40, tmp_path) == kept
    assert ladder.finished(job, 1, 30, tmp_path) is None
    assert ladder.finished(job, 2, 40, tmp_path) is None
    assert ladder.finished(other, 1, 40, tmp_path) is None


def test_the_picture_is_drawn_from_runs_of_several_seeds(tmp_path: Path) -> None:
    results = {name: {1: run(0.8), 2: run(0.7)} for name in RUNG_NAMES}
    results[RUNG_NAMES[1]] = {1: run(0.84), 2: run(0.73)}
    results[RUNG_NAMES[2]] = {1: run(0.9)}
    text = ladder_report.report(results, ["grpo"], RUNG_NAMES, 40, "")
    ends, gaps, equal = ladder_report.ladder_of(text)
    assert list(ends) == list(equal) == RUNG_NAMES
    assert ends["grpo"] == (75.0, 70.0, 80.0)
    assert ends[RUNG_NAMES[2]] == (90.0, 90.0, 90.0)
    # Differences of 4 and 3 points; Student's t for one degree of freedom is 12.7.
    assert gaps[RUNG_NAMES[1]] == (3.5, 6.4, "within")
    assert list(gaps) == [RUNG_NAMES[1], *RUNG_NAMES[4:]]
    ladder_report.draw(text, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
