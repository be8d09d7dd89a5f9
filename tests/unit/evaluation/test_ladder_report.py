"""The arithmetic of benchmarks/ladder_report.py: intervals, equal steps and tokens, the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import ladder
from ladder_report import (
    DIGITS,
    at_equal_steps,
    at_equal_tokens_of,
    interval,
    parts_report,
)


def test_a_paired_interval_is_that_of_students_t() -> None:
    # Mean 2, standard deviation sqrt(2), its error 1: half the interval is t itself.
    mean, half = interval([1.0, 3.0])
    assert (mean, half) == (2, pytest.approx(12.7062, abs=1e-4))
    # Deviations .1, -.1, 0, 0: standard error sqrt(.02 / 3 / 4), and t = 3.1824 for 3 degrees.
    mean, half = interval([0.3, 0.1, 0.2, 0.2])
    assert (mean, half) == (pytest.approx(0.2), pytest.approx(0.1299, abs=1e-4))
    # Of one degree of freedom t is the cotangent of pi p / 2: here p = .05 / 8.
    assert interval([1.0, 3.0], comparisons=8)[1] == pytest.approx(101.8558, abs=1e-3)
    assert interval([0.5]) == (0.5, None)


def test_a_finished_run_counts_for_the_command_that_made_it_alone(tmp_path: Path) -> None:
    job, other = list(ladder.part_jobs(DIGITS))[:2]
    folder = tmp_path / job.key(1)
    folder.mkdir()
    made = {"command": job.command(1, 60, Path())[2:], "tokens": 5}
    (folder / ladder.KEPT).write_text(json.dumps(made))
    assert ladder.finished(job, 1, 60, tmp_path) == ladder.measure(job, 1, 60, tmp_path) == made
    assert ladder.finished(job, 1, 61, tmp_path) is None
    assert ladder.finished(job, 2, 60, tmp_path) is None
    assert ladder.finished(other, 1, 60, tmp_path) is None


def run(curve: list[tuple[int, float]], tokens_by_step: list[float]) -> dict[str, Any]:
    figures = dict.fromkeys(("pass@1", "length", "truncated", "clip_low", "clip_high"), 0.25)
    tokens = sum(tokens_by_step)
    return {**figures, "curve": curve, "tokens_by_step": tokens_by_step, "tokens": tokens}


# 0.1 a step; 10 tokens in each of six steps, then 30 in each.
DEAR = run([(0, 0.0), (4, 0.4), (8, 0.8), (12, 1.2)], [10.0] * 6 + [30.0] * 6)
CHEAP = run([(0, 0.0), (4, 0.1), (8, 0.1), (12, 0.4)], [5.0] * 12)


def test_equal_tokens_end_the_dearer_run_where_the_cheaper_ended() -> None:
    assert at_equal_steps(DEAR) == pytest.approx(0.8)
    # At 20, 40 and 60 of its 240 tokens; it had spent 40 at step 4 and 120 at step 8.
    assert at_equal_tokens_of(DEAR, CHEAP) == pytest.approx((0.2 + 0.4 + 0.5) / 3)
    assert at_equal_tokens_of(CHEAP, DEAR) == pytest.approx(at_equal_steps(CHEAP))


def test_figures_of_several_sources_are_means_over_their_problems() -> None:
    sums = {"eval/sums/prompts": 30, "eval/sums/pass@1": 0.5}
    record = sums | {"eval/products/prompts": 10, "eval/products/pass@1": 0.1}
    assert ladder.held_out(record, "pass@1") == pytest.approx(0.4)
    assert ladder.held_out(record, "greedy") is None


def test_intervals_are_over_the_seeds_that_all_arms_have() -> None:
    arms = list(DIGITS.arms)
    results = {arm: {1: DEAR, 2: DEAR} for arm in arms}
    results[arms[2]] = {1: CHEAP, 2: run([(0, 0.0), (4, 0.2), (8, 0.2), (12, 0.5)], [5.0] * 12)}
    results[arms[0]] = results[arms[0]] | {3: CHEAP}
    page = parts_report({"digits": results})
    assert "11 of 40 runs are finished. Complete in all arms: 2 of 8 seeds (1, 2)." in page
    # Gaps of .6 and .5: mean .55, standard error .05, t 12.706 and 101.86.
    row = "| dynamic sampling | +55.0 ± 63.5 (± 509.3) | does not separate | +11.7 ± 63.5 "
    assert row in page
    assert "| clip-higher | +0.0 ± 0.0 (± 0.0) | does not separate |" in page
    assert "| 1 | 0.0 | 80.0 | 80.0 | 20.0 | 80.0 | 80.0 |" in page
    empty = parts_report({"digits": {}})
    assert "0 of 40 runs are finished. Complete in all arms: 0 of 8 seeds (-)." in empty
    assert "±" not in empty
