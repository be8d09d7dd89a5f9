"""Runs in which a judge behind a real server scores beside the rule."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from benchmarks.kill import Lab, differences
from tests.fault.quick_lab import QuickLab
from tests.faulty_http import Served, Step, reply, serving, together
from tests.forked import Server
from tests.judges import coin, completion, judging
from tests.winnow_command import Outcome, in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts
from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KEY = "sk-very-secret-1"
SHORT = (
    *("trainer.steps=2", "optim.warmup_steps=1", "evaluation.every=2", "evaluation.n=1"),
    *("evaluation.greedy=false", "evaluation.before=false", "warm_start.steps=100"),
    *("data.task.min_digits=2", "data.task.max_digits=3", "data.task.eval_problems=4"),
    *("rollout.n=4", "rollout.max_response_tokens=32", "reward.overlong.buffer_tokens=8"),
    *("sampling.groups_per_step=4", "trainer.mini_batch_groups=2", "run.threads=1"),
)
JUDGED = (
    *("reward/judge=openai", "reward.judge.model=m", "reward.judge.weight=0.25"),
    *("reward.weights.task=0.5", "reward.judge.part=llm", "reward.judge.api_key_env=JUDGE_KEY"),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Lab:
    return QuickLab(tmp_path_factory.mktemp("lab"), server=server)


def train(lab: Lab, name: str, step: Step, *settings: str) -> tuple[Outcome, Served]:
    with serving([step]) as served:
        said = in_this_process(
            *("train", "quickstart", *SHORT, *JUDGED, f"run.name={name}", "observe.console=plain"),
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


def test_parts_reward_and_costs_are_in_the_metrics(judged: tuple[Path, Outcome, Served]) -> None:
    run, _, served = judged
    records = [r for r in read_metrics(run / "metrics.jsonl") if "score/reward/mean" in r]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        task, llm, overlong = (
            record[f"score/parts/{name}/mean"] for name in ("task", "llm", "overlong")
        )
        assert record["score/reward/mean"] == pytest.approx(0.5 * task + 0.25 * llm + overlong)
        assert record["judge/requests"] > 0
        assert record["judge/retries"] == record["judge/unparsed"] == 0
    assert records[1]["eval/sort_digits/part_llm"] >= 0
    assert sum(record["judge/requests"] for record in records) == len(served.requests)
    assert sum(record["judge/tokens"] for record in records) == 100 * len(served.requests)
    with sqlite3.connect(run.parent.parent / "cache" / "judge.sqlite") as file:
        assert file.execute("SELECT count(*) FROM replies").fetchone() == (len(served.requests),)


def test_the_judges_verdict_stands_beside_each_answer(
    judged: tuple[Path, Outcome, Served],
) -> None:
    rows = read_rollouts(judged[0] / "rollouts").to_pylist()
    for row in rows:
        parts = 0.5 * row["part/task"] + 0.25 * row["part/llm"] + row["part/overlong"]
        assert row["reward"] == pytest.approx(parts)
    shown = [row for row in rows if row["response"] is not None]
    assert {row["part/llm"] for row in shown} == {0.0, 1.0}
    for row in shown:
        right = row["response"].rpartition("#")[2] == "".join(sorted(row["prompt"].strip(":")))
        assert row["part/llm"] == right


def test_the_key_is_sent_and_written_nowhere(judged: tuple[Path, Outcome, Served]) -> None:
    run, said, served = judged
    assert {r.headers["authorization"] for r in served.requests} == {f"Bearer {KEY}"}
    assert KEY not in said.out + said.err
    files = [path for path in run.parent.parent.rglob("*") if path.is_file()]
    assert run / "config.yaml" in files
    assert b"JUDGE_KEY" in (run / "config.yaml").read_bytes()
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert b"chat/completions" not in (run / "log.txt").read_bytes()  # not a line a request


def test_held_out_answers_of_all_prompts_are_judged_side_by_side(
    judged: tuple[Path, Outcome, Served], lab: Lab
) -> None:
    with serving([together(4, completion("Judgement: CORRECT"))]) as served:
        said = in_this_process(
            *("eval", "runs/judged", "reward.judge.cache=none", "reward.judge.as_accuracy=true"),
            *(f"reward.judge.base_url={served.url}/v1", "reward.judge.api_key_env=null"),
            folder=lab.folder,
            environment={"WINNOW_CACHE": str(lab.folder / "cache")},
        ).check()
    assert served.most_at_once == 4
    rows = read_rollouts(lab.run("judged") / "eval" / "checkpoint-2.parquet").to_pylist()
    assert [row["accuracy"] for row in rows] == [1.0] * 4
    assert [row["part/llm"] for row in rows] == [1.0] * 4
    assert "100" in said.out


def test_a_run_that_was_killed_ends_with_the_same_bits_because_replies_are_kept(
    lab: QuickLab,
) -> None:
    # This judge throws a coin, so only what was kept can be the same.
    with serving([judging(coin, longest_s=0.05)]) as served:
        settings = [
            *(*SHORT, *JUDGED, "trainer.steps=6", "trainer.save_every=1", "evaluation.every=6"),
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
        assert differences(lab.run("calm"), run) == []


@pytest.mark.parametrize(
    ("name", "step", "settings", "says"),
    [
        ("refused", reply(401, {"error": KEY}), [], "the judge answers nothing: http://127.0.0.1:"),
        ("down", reply(400), [], "the first failure: the judge: http://127.0.0.1:"),
        ("nothing", judging(lambda _: "well"), [], "no number was read from its reply by reward.j"),
        ("key", judging(), ["reward.judge.api_key_env=NO_KEY"], "variable; export NO_KEY"),
        ("cache", judging(), ["reward.judge.cache=runs"], "reward.judge.cache runs cannot be used"),
        ("row", judging(), ["reward/judge/parse=number", "reward.judge.template='{{answer + 1}}'"],
         "reward.judge.template fails (can only concatenate str"),
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
