"""Runs in which a judge scores beside the rule: behind a real server, or on the run's engines."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest
from benchmarks.kill import SETTINGS, Lab, code_of, differences
from tests.fault.quick_lab import QuickLab
from tests.faulty_http import Served, Step, reply, serving
from tests.forked import Server
from tests.judges import DIGITS, coin, judge_folder, judging
from tests.pauses import go_on
from tests.processes import gone, workers_of
from tests.winnow_command import Outcome, in_this_process

from winnow.checkpoints.checkpoint import checkpoints_in
from winnow.observe.jsonl import read_metrics
from winnow.observe.metrics import Record
from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "sk-very-secret-1"
SHORT = (
    *("trainer.steps=2", "evaluation.before=false", "data.task.eval_problems=4"),
    *("sampling.groups_per_step=4", "trainer.mini_batch_groups=2"),
)
JUDGED = (
    *("reward/judge=openai", "reward.judge.model=m", "reward.judge.weight=0.25"),
    *("reward.weights.task=0.5", "reward.judge.part=llm", "reward.judge.api_key_env=JUDGE_KEY"),
)


@pytest.fixture(scope="module")
def lab(home: Path, server: Server) -> QuickLab:
    return QuickLab(home, server=server)


def train(lab: Lab, name: str, step: Step, *settings: str) -> tuple[Outcome, Served]:
    with serving([step]) as served:
        said = in_this_process(
            *(
                "train",
                "quickstart",
                *SETTINGS,
                *SHORT,
                *JUDGED,
                f"run.name={name}",
                "observe.console=plain",
            ),
            *(f"reward.judge.base_url={served.url}/v1", *settings),
            folder=lab.folder,
            environment={"WINNOW_CACHE": str(lab.folder / "cache"), "JUDGE_KEY": KEY},
        )
        return said, served


@pytest.fixture(scope="module")
def judged(lab: Lab) -> tuple[Path, Outcome, Served]:
    said, served = train(lab, "judged", judging(longest_s=0.01), "reward.judge.in_evaluation=true",
                         "sampling.filter.metric=reward")  # fmt: skip
    return lab.run("judged"), said.check(), served


def steps_of(run: Path, count: int) -> list[Record]:
    """The steps' figures, in which the reward has three parts."""
    records = [r for r in read_metrics(run / "metrics.jsonl") if "score/reward/mean" in r]
    assert [record["step"] for record in records] == [*range(1, count + 1)]
    for record in records:
        task, llm, overlong = (
            record[f"score/parts/{name}/mean"] for name in ("task", "llm", "overlong")
        )
        assert record["score/reward/mean"] == pytest.approx(0.5 * task + 0.25 * llm + overlong)
        assert record["judge/requests"] > 0
    return records


def test_parts_reward_and_costs_are_in_the_metrics(judged: tuple[Path, Outcome, Served]) -> None:
    run, _, served = judged
    records = steps_of(run, 2)
    assert all(r["judge/retries"] == r["judge/unparsed"] == 0 for r in records)
    assert records[1]["eval/sort_digits/part_llm"] >= 0
    assert sum(record["judge/requests"] for record in records) == len(served.requests)
    assert sum(record["judge/tokens"] for record in records) == 100 * len(served.requests)
    with sqlite3.connect(run.parent.parent / "cache" / "judge.sqlite") as file:
        assert file.execute("SELECT count(*) FROM replies").fetchone() == (len(served.requests),)


def test_the_key_is_sent_and_written_nowhere(judged: tuple[Path, Outcome, Served]) -> None:
    run, said, served = judged
    assert {r.headers["authorization"] for r in served.requests} == {f"Bearer {KEY}"}
    assert KEY not in said.out + said.err
    files = [path for path in run.parent.parent.rglob("*") if path.is_file()]
    assert run / "config.yaml" in files
    assert b"JUDGE_KEY" in (run / "config.yaml").read_bytes()
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert b"chat/completions" not in (run / "log.txt").read_bytes()  # not a line a request


def test_a_run_that_was_killed_ends_with_the_same_bits_because_replies_are_kept(
    lab: QuickLab,
) -> None:
    # This judge throws a coin, so only what was kept can be the same.
    with serving([judging(coin, longest_s=0.05)]) as served:
        settings = [
            *(*SHORT, *JUDGED, "trainer.steps=3", "trainer.save_every=1", "evaluation.every=3"),
            *(f"reward.judge.base_url={served.url}/v1", "reward.judge.api_key_env=null"),
            f"reward.judge.cache={lab.folder / 'replies'}",
        ]
        run = lab.run("killed")
        process = lab.start("killed", *settings, pauses={2: 0.05})
        lab.stands_still(process, "killed", 2)
        process.kill()
        process.wait()
        assert checkpoints_in(run / "checkpoints")
        assert lab.start("killed", *settings).wait(240) == 0
        asked = len(served.requests)
        assert lab.start("calm", *settings).wait(240) == 0
        assert len(served.requests) == asked
        assert differences(lab.run("calm"), run, steps=3) == []


@pytest.mark.parametrize(
    ("name", "step", "settings", "says"),
    [
        ("refused", reply(401, {"error": KEY}), [], "the judge refuses every request: http://127."),
        ("nothing", judging(lambda _: "well"), [], "reward.judge.parse matched no number in two"),
        ("alone", judging(), ["reward.scorers={sort_digits: none}", "sampling.filter.metric=llm"],
         "or set reward.judge.in_evaluation and reward.judge.as_accuracy"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_in_one_line(
    name: str, step: Step, settings: list[str], says: str, lab: Lab
) -> None:
    said, _ = train(lab, f"bad-{name}", step, "reward.judge.cache=none", *settings)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert says in said.err
    assert KEY not in said.out + said.err
    files = [path for path in lab.run(f"bad-{name}").rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


@pytest.fixture(scope="module")
def by_engine(home: Path) -> tuple[str, ...]:
    """Settings of a judge without a cache: only what follows from the recipe can be the same."""
    folder = judge_folder(home / "judge")
    return (
        *("trainer.steps=3", "trainer.save_every=1", "trainer.keep_last=null", *SHORT[1:], *DIGITS),
        *("reward/judge=engine", f"reward.judge.path={folder}"),
        *("reward.judge.part=llm", "reward.judge.weight=0.25", "reward.weights.task=0.5"),
    )


@pytest.fixture(scope="module")
def calm(lab: QuickLab, by_engine: tuple[str, ...]) -> Path:
    """An undisturbed run of one engine."""
    assert lab.start("judged-calm", *by_engine).wait(240) == 0
    return lab.run("judged-calm")


def test_the_judges_number_is_a_part_of_the_reward(calm: Path) -> None:
    assert all(r["judge/tokens"] > r["judge/requests"] for r in steps_of(calm, 3))
    parts = [row["part/llm"] for row in read_rollouts(calm / "rollouts").to_pylist()]
    assert {round(9 * part) for part in parts} > {1, 4, 7}
    assert gone(set(workers_of(calm).values()))


def test_an_engine_of_two_that_is_killed_changes_no_bit(
    calm: Path, lab: QuickLab, by_engine: tuple[str, ...]
) -> None:
    run = lab.run("judge-killed")
    more = "reward.judge.engine.processes=2", "trainer.max_restarts=2"
    process = lab.start(run.name, *by_engine, *more, pauses={1: 0.05})
    driver = lab.stands_still(process, run.name, 1)
    workers = workers_of(run)
    assert sorted(workers) == ["judge 0[0]", "judge 1[0]"]
    os.kill(workers["judge 1[0]"], signal.SIGKILL)
    go_on(driver)
    assert code_of(process, 300) == 0
    assert differences(calm, run, steps=3) == []
    assert "judge 1[0] was killed by SIGKILL" in (run / "log.txt").read_text()
    assert gone({*workers.values(), *workers_of(run).values()})
