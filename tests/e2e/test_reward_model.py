"""Runs in which a reward model scores beside the rule: figures, filters, the same bits again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from benchmarks.kill import SETTINGS, STEPS, differences
from tests.reward_models import classifier_folder
from tests.winnow_command import Outcome, in_this_process
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts
from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JUDGED = (
    *("reward/model=sequence_classifier", "reward.model.path=judge", "reward.model.part=taste"),
    *("reward.model.weight=0.25", "reward.weights.task=0.5", "sampling.filter.metric=taste"),
)


def winnow(home: Path, *arguments: str) -> Outcome:
    return in_this_process(
        *arguments, folder=home, environment={"WINNOW_CACHE": str(home / "cache")}
    )


def train(home: Path, name: str, *settings: str) -> Outcome:
    return winnow(
        home,
        *("train", "quickstart", *SETTINGS, f"run.name={name}", "trainer.save_every=1"),
        *("trainer.keep_last=null", "observe.console=plain", *settings),
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, warm_starts: Path) -> Path:
    """With a reward model, `judge`, and a finished run, `whole`."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "cache").symlink_to(warm_starts)
    classifier_folder(folder / "judge")
    train(folder, "whole", *JUDGED).check()
    return folder


def test_each_part_is_in_the_metrics_and_the_reward_is_their_weighted_sum(home: Path) -> None:
    records = [
        r for r in read_metrics(home / "runs/whole/metrics.jsonl") if "score/reward/mean" in r
    ]
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    for record in records:
        task, taste, overlong = (
            record[f"score/parts/{name}/mean"] for name in ("task", "taste", "overlong")
        )
        assert record["score/reward/mean"] == pytest.approx(0.5 * task + 0.25 * taste + overlong)
        assert record["score/parts/taste/min"] < record["score/parts/taste/max"]
        assert record["score/task_reward/mean"] == task
    evaluated = [name for record in read_metrics(home / "runs/whole/metrics.jsonl")
                 for name in record if name.startswith("eval/")]  # fmt: skip
    assert evaluated
    assert not [name for name in evaluated if "part_" in name]


def test_each_part_is_in_the_rollouts_as_transformers_itself_would_score_it(home: Path) -> None:
    rows = read_rollouts(home / "runs/whole/rollouts").to_pylist()
    shown = [row for row in rows if row["response"] is not None]
    assert len(shown) > 20
    for row in rows:
        parts = 0.5 * row["part/task"] + 0.25 * row["part/taste"] + row["part/overlong"]
        assert row["reward"] == pytest.approx(parts)
    tokenizer = AutoTokenizer.from_pretrained(home / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(home / "judge").eval()
    for row in shown[:40]:
        turns = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            said = float(model(ids["input_ids"]).logits)
        assert row["part/taste"] == pytest.approx(said, abs=1e-5)


def test_the_filter_sees_the_models_part(home: Path) -> None:
    rows = read_rollouts(home / "runs/whole/rollouts").to_pylist()
    groups: dict[tuple[int, int], list[dict[str, object]]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group"]), []).append(row)
    trained = [g for g in groups.values() if g[0]["outcome"] == "trained"]
    # To the accuracy, the default, these would have carried no signal.
    assert [g for g in trained if len({row["accuracy"] for row in g}) == 1]
    assert all(len({row["part/taste"] for row in group}) > 1 for group in trained)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_run_that_was_cut_off_ends_with_the_same_bits(step: int, home: Path) -> None:
    run = home / "runs" / f"cut-{step}"
    shutil.copytree(home / "runs" / "whole", run)
    for checkpoint in checkpoints_in(run / "checkpoints"):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    assert (
        f"after step {step}"
        in winnow(home, "resume", str(run), "observe.console=plain").check().out
    )
    assert differences(home / "runs" / "whole", run) == []


def test_held_out_answers_are_judged_where_the_recipe_asks(home: Path) -> None:
    winnow(home, "eval", "runs/whole").check()
    answers = home / "runs/whole/eval" / f"checkpoint-{STEPS}.parquet"
    assert "part/taste" not in read_rollouts(answers).column_names
    judged = ["reward.model.in_evaluation=true", "reward/model/strategy=fsdp2", "--out", "judged"]
    winnow(home, "eval", "runs/whole", *judged).check()
    rows = read_rollouts(home / "judged/answers.parquet").to_pylist()
    assert all(row["part/taste"] is not None for row in rows)


def test_without_determinism_answers_are_packed_and_score_alike(home: Path) -> None:
    train(home, "free", *JUDGED, "run.deterministic=false", "trainer.steps=2",
          "optim.warmup_steps=1").check()  # fmt: skip
    rows = read_rollouts(home / "runs/free/rollouts").to_pylist()
    assert all(
        row["reward"]
        == pytest.approx(0.5 * row["part/task"] + 0.25 * row["part/taste"] + row["part/overlong"])
        for row in rows
    )


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("path", ["reward.model.path=nowhere"], "reward.model.path nowhere: no such folder"),
        (
            "tokens",
            ["reward.model.max_tokens=3"],
            "reward.model.path judge: no answer to prompt sort_digits:",
        ),
        (
            "template",
            ["reward.model.chat_template='{{ raise_exception(1) }}'"],
            "its chat template fails: 1; mend it, or set reward.model.chat_template",
        ),
        (
            "metric",
            ["reward.scorers={sort_digits: none}", "sampling.filter.metric=accuracy"],
            "sampling.filter.metric is accuracy, which no scorer of these data sources gives; "
            "there are overlong, reward, taste",
        ),
        (
            "held-out",
            ["reward.scorers={sort_digits: none}"],
            "reward.scorers leaves sort_digits to the reward model or the judge, which gives "
            "held-out answers no accuracy; name a scorer for it, leave it out of data.eval_files, "
            "or set reward.judge.in_evaluation and reward.judge.as_accuracy",
        ),
        (
            "long",
            ["reward.model.max_tokens=40", "reward.max_failure_share=0"],
            "the first failure: the reward model: ",
        ),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    name: str, settings: list[str], says: str, home: Path
) -> None:
    said = train(home, f"bad-{name}", *JUDGED, *settings)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert says in said.err
