"""Two files of held-out answers: what is paired, what is refused, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.errors import WinnowError
from winnow.evaluation.compare import compare, comparison_notes, paired_test, read_answers, verdict
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan


def group(
    number: int, marks: Sequence[float], source: str = "sums", truth: str = "4", error: str = ""
) -> Group:
    ids = np.array([1, 2])
    segment = Segment(ids, np.zeros(2, np.float32), (VersionSpan(0, 2),))
    answers = [
        Answer(Trajectory((segment,), "stop"), Score(mark, mark, error=error)) for mark in marks
    ]
    prompt = Prompt(f"file:{number}", ids, f"What is {number}?", source, truth)
    return Group(number, prompt, tuple(answers))


def write(file: Path, groups: Sequence[Group], *greedy: Group, **settings: Any) -> str:
    entries = [RolloutGroup(each, "held_out") for each in groups]
    entries += [RolloutGroup(each, "held_out_greedy") for each in greedy]
    write_rollouts(file, 0, entries, version=0, text_groups=(), decode=str)
    if settings:
        report = file.with_name("report.json")
        report.write_text(json.dumps({"settings": settings}))
    return str(file)


def test_answers_are_read_by_problem_and_greedy_ones_left_aside(tmp_path: Path) -> None:
    copy = group(1, [0.0])
    file = write(tmp_path / "answers.parquet", [group(1, [1.0, 0.0]), copy], group(1, [1.0]))
    found = read_answers(file)
    assert [*found.means.values()] == pytest.approx([1 / 3])
    assert read_answers(str(tmp_path)).means == found.means


def test_problems_are_paired_whatever_their_place_and_others_are_counted(tmp_path: Path) -> None:
    left = [group(1, [1.0, 0.0]), group(2, [0.0], "words"), group(3, [1.0])]
    right = [group(2, [1.0], "words"), group(1, [1.0]), group(4, [0.0]), group(5, [0.0])]
    a = read_answers(write(tmp_path / "a/answers.parquet", left, n=2, top_p=1.0, seed=0))
    b = read_answers(write(tmp_path / "b/answers.parquet", right, n=1, top_p=1.0, seed=7))
    found = compare(a, b)
    assert {source: pair.difference for source, pair in found.sources.items()} == {
        "sums": 0.5,
        "words": 1.0,
    }
    assert found.pooled.problems == 2
    assert found.pooled.difference == 0.75
    assert comparison_notes(found) == [
        "1 problems are only in A and are left out.",
        "2 problems are only in B and are left out.",
        "The evaluations were sampled differently: n is 2 in A, 1 in B.",
    ]


def test_what_scored_them_is_compared_and_failed_scorings_are_counted(tmp_path: Path) -> None:
    ways = {"reward: scorer of sums": "gsm8k", "reward: manager": "auto", "n": 2}
    a = read_answers(write(tmp_path / "a/answers.parquet", [group(1, [1.0, 0.0])], **ways))
    ways["reward: scorer of sums"] = "own.py:compute_score"
    lost = [group(1, [0.0, 0.0], error="no judge")]
    b = read_answers(write(tmp_path / "b/answers.parquet", lost, *lost, **ways))
    assert (a.failed, b.failed) == (0, 2)
    assert comparison_notes(compare(a, b)) == [
        "Scoring failed for 2 answers of B, which count as wrong.",
        "The evaluations were scored differently: scorer of sums is gsm8k in A, "
        "own.py:compute_score in B.",
    ]


def test_the_same_question_with_another_truth_is_another_problem(tmp_path: Path) -> None:
    a = read_answers(write(tmp_path / "a.parquet", [group(1, [1.0])]))
    b = read_answers(write(tmp_path / "b.parquet", [group(1, [1.0], truth="5")]))
    with pytest.raises(WinnowError, match=r"a\.parquet and .*b\.parquet have no problem in common"):
        compare(a, b)


def test_of_a_run_the_latest_evaluation_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    (run / "config.yaml").touch()
    with pytest.raises(WinnowError, match="has no evaluation yet; run winnow eval"):
        read_answers(str(run))
    for name in ("step-0", "checkpoint-8", "step-8", "checkpoint-x"):
        write(run / "eval" / f"{name}.parquet", [group(1, [1.0])])
    assert read_answers(str(run)).file.name == "checkpoint-8.parquet"
    write(run / "eval/step-16.parquet", [group(1, [1.0])])
    assert read_answers(str(run)).file.name == "step-16.parquet"


def test_what_is_no_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WinnowError, match="and is not a run folder"):
        read_answers(str(tmp_path))
    write_rollouts(
        tmp_path / "trained.parquet", 1, [RolloutGroup(group(1, [1.0]), "surplus")],
        version=0, text_groups=(), decode=str,
    )  # fmt: skip
    with pytest.raises(WinnowError, match=r"trained\.parquet has no held-out answers"):
        read_answers(str(tmp_path / "trained.parquet"))
    file = write(tmp_path / "answers.parquet", [group(1, [1.0])])
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(WinnowError, match=r"report\.json: not a report of winnow eval"):
        read_answers(file)


def test_the_sentence_claims_no_more_than_both_tests_show() -> None:
    generator = np.random.default_rng(0)
    hard = generator.uniform(0, 0.6, size=60)
    noise = generator.normal(0, 0.05, size=60)
    assert verdict(paired_test(hard, hard + 0.2 + noise)).startswith("B is better by 2")
    assert verdict(paired_test(hard + 0.2 + noise, hard)).startswith("B is worse by 2")
    assert verdict(paired_test(hard, hard + noise)).startswith("Not significant: B is ")
    assert verdict(paired_test(hard, hard)).startswith("No difference")
    assert verdict(paired_test([0.0] * 5, [1.0] * 5)).startswith("Inconclusive: 5 problems")
    # One problem decides the mean: Student's t and the signs both call that luck.
    lucky = paired_test([0.0] * 7, [1.0, *[0.0] * 6])
    assert verdict(lucky).startswith("Not significant")


def test_a_comparison_is_clear_for_both_tests_or_not_at_all() -> None:
    # All six point one way, but unlike in size: 2 of 64 signs, and an interval around 0.
    skewed = paired_test([0.0] * 6, [0.01, 0.01, 0.01, 0.01, 0.02, 0.9])
    assert skewed.p_sign_flips == 2 / 64
    assert skewed.low < 0
    assert not skewed.is_significant
    # All five the same: no spread for Student's t, but 2 of 32 signs are not rare enough.
    alike = paired_test([0.0] * 5, [0.5] * 5)
    assert (alike.p_t, alike.low, alike.high, alike.p_sign_flips) == (0, 0.5, 0.5, 2 / 32)
    assert not alike.is_significant
