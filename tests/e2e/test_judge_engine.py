"""Runs in which a judge on engines of the run's own scores beside the rule."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from benchmarks.kill import STEPS, code_of, differences
from tests.fault.quick_lab import QuickLab
from tests.forked import Server
from tests.judges import DIGITS, judge_folder
from tests.pauses import go_on
from tests.processes import gone, workers_of
from tests.winnow_command import in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEPT = "trainer.save_every=1", "trainer.keep_last=null"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, server: Server, warm_starts: Path) -> QuickLab:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "cache").symlink_to(warm_starts)
    return QuickLab(folder, server=server)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of a judge without a cache: only what follows from the recipe can be the same."""
    folder = judge_folder(tmp_path_factory.mktemp("judge") / "judge")
    return (
        *(*KEPT, *DIGITS, "reward/judge=engine", f"reward.judge.path={folder}"),
        *("reward.judge.part=llm", "reward.judge.weight=0.25", "reward.weights.task=0.5"),
    )


@pytest.fixture(scope="module")
def calm(lab: QuickLab, judged: tuple[str, ...]) -> Path:
    """An undisturbed run of one engine."""
    assert lab.start("judged-calm", *judged).wait(240) == 0
    return lab.run("judged-calm")


def test_the_judges_number_is_a_part_of_the_reward(calm: Path) -> None:
    records = [r for r in read_metrics(calm / "metrics.jsonl") if "score/reward/mean" in r]
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    for record in records:
        task, llm, overlong = (
            record[f"score/parts/{name}/mean"] for name in ("task", "llm", "overlong")
        )
        assert record["score/reward/mean"] == pytest.approx(0.5 * task + 0.25 * llm + overlong)
        assert record["judge/requests"] > 0
        assert record["judge/tokens"] > record["judge/requests"]
    parts = [row["part/llm"] for row in read_rollouts(calm / "rollouts").to_pylist()]
    assert {round(9 * part) for part in parts} > {1, 4, 7}
    assert gone(set(workers_of(calm).values()))


def test_an_engine_of_two_that_is_killed_changes_no_bit(
    calm: Path, lab: QuickLab, judged: tuple[str, ...]
) -> None:
    run = lab.run("judge-killed")
    more = "reward.judge.engine.processes=2", "trainer.max_restarts=2"
    process = lab.start(run.name, *judged, *more, pauses={2: 0.05})
    driver = lab.stands_still(process, run.name, 2)
    workers = workers_of(run)
    assert sorted(workers) == ["judge 0[0]", "judge 1[0]"]
    os.kill(workers["judge 1[0]"], signal.SIGKILL)
    go_on(driver)
    assert code_of(process, 300) == 0
    assert differences(calm, run) == []
    assert "judge 1[0] was killed by SIGKILL" in (run / "log.txt").read_text()
    assert gone({*workers.values(), *workers_of(run).values()})


def test_held_out_answers_are_judged_where_the_recipe_asks(calm: Path, tmp_path: Path) -> None:
    judge = "reward.judge.in_evaluation=true", "reward.judge.as_accuracy=true"
    for name, more in (("plain", ()), ("judged", judge)):
        words = "eval", str(calm), "--out", str(tmp_path / name), *more
        in_this_process(*words, folder=tmp_path).check()
    plain, judged = (read_rollouts(tmp_path / n / "answers.parquet") for n in ("plain", "judged"))
    assert "part/llm" not in plain.column_names
    for row in judged.to_pylist():
        assert row["accuracy"] == float(row["part/llm"] >= 0.5)


def test_an_absent_model_is_told_in_one_line_and_one_answer_can_be_tried(
    judged: tuple[str, ...], tmp_path: Path
) -> None:
    words = *judged, f"reward.judge.path={tmp_path}/none", "warm_start.steps=1"
    said = in_this_process("train", "quickstart", *words, "observe.console=off", folder=tmp_path)
    assert said.code == 2
    assert said.err == (
        f"winnow: reward.judge.path {tmp_path}/none: no such folder; give a Hugging Face model "
        "folder or a hub name\n"
    )
    tried = "reward", "try", "--truth", "12", "--source", "sort_digits", "--answer", "#12"
    said = in_this_process(*tried, "reward.scorers={sort_digits: none}", *judged[2:],
                           folder=tmp_path).check()  # fmt: skip
    assert "part llm" in said.out
