"""Runs scored by each manager: the same bits wherever scores come from, and each part's figures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kill import SETTINGS, contents, figures
from tests.processes import gone
from tests.winnow_command import WINNOW, Outcome, in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REWARD = """
def one(text, truth):
    right = text.rpartition("#")[2] == truth
    return {"score": 1.0 if right else -0.5, "acc": float(right), "hashes": text.count("#")}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return one(solution_str, ground_truth)

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [one(*each) for each in zip(solution_strs, ground_truths)]

class Own:
    def __init__(self, config): ...

    async def score(self, prompt, text):
        return one(text, prompt.ground_truth)
"""
SHORT = (
    *SETTINGS,
    *("trainer.steps=2", "evaluation.every=2", "trainer.save_every=2"),
    # Whoever scores: when a score is seen is the same.
    "sampling.score_lag_ticks=4",
)
FUNCTION = "reward.function.path=reward.py"
BATCH = ("reward/manager=batch", FUNCTION, "reward.function.name=compute_scores")


def train(home: Path, name: str, *settings: str) -> Outcome:
    return in_this_process(
        *("train", "quickstart", *SHORT, f"run.name={name}", *settings),
        folder=home,
        environment={"WINNOW_CACHE": str(home / "cache")},
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, warm_starts: Path) -> Path:
    """With a reward file, and a run that it scored in the run's own process."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "cache").symlink_to(warm_starts)
    (folder / "reward.py").write_text(REWARD)
    train(folder, "naive", "reward/manager=naive", FUNCTION).check()
    return folder


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[str]:
    """The address of `winnow reward serve`, which ends at SIGTERM and leaves nothing."""
    process = subprocess.Popen(
        [WINNOW, "reward", "serve", "--function", "reward.py", "--port", "0", "--workers", "1"],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    found = re.search(r"http://\S+", said)
    assert found, said
    yield found[0]
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    workers = {int(word) for task in tasks for word in (task / "children").read_text().split()}
    assert workers
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert errors == "winnow: stopped by SIGTERM\n"
    assert gone(workers)


def is_the_same(home: Path, name: str) -> bool:
    runs = [home / "runs" / each for each in ("naive", name)]
    return all(
        look(runs[0]) == look(runs[1])
        for look in (
            figures,
            lambda run: contents(run / "rollouts"),
            lambda run: contents(run / "checkpoints/step-2/model"),
        )
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("batch", (*BATCH, "reward.workers=2", "reward.manager.max_answers=3")),
        ("custom", ("reward/manager=custom", "reward.manager.path=reward.py:Own")),
    ],
)
def test_who_calls_the_scorer_changes_no_bit(
    name: str, settings: tuple[str, ...], home: Path
) -> None:
    train(home, name, *settings).check()
    assert is_the_same(home, name)


def test_a_service_changes_no_bit_either(home: Path, service: str) -> None:
    train(home, "remote", "reward/manager=remote", f"reward.manager.url={service}").check()
    assert is_the_same(home, "remote")


def test_another_reward_changes_them(home: Path) -> None:
    # That the runs above are equal is no accident of figures that never move.
    train(home, "other", *BATCH, "reward.cosine.enabled=true").check()
    assert not is_the_same(home, "other")


def test_parts_and_length_shaping_are_in_the_metrics_the_rollouts_and_the_reward(
    home: Path,
) -> None:
    train(
        home,
        "parts",
        *("reward/manager=dapo", "reward.weights.task=0.5", "sampling.filter.metric=digits"),
        "reward.parts={digits: {scorer: sort_digits, weight: 0.25, in_evaluation: true}}",
        *("reward.parts.form.scorer=think_answer", "reward.parts.form.weight=0.1"),
        *("reward.cosine={enabled: true, weight: 0.1}", "reward.overlong.enabled=true"),
    ).check()
    records = [*read_metrics(home / "runs/parts/metrics.jsonl")]
    trained = [record for record in records if "score/reward/mean" in record]
    assert [record["step"] for record in trained] == [1, 2]
    for record in trained:
        task, digits, form, cosine, overlong = (
            record[f"score/parts/{part}/mean"]
            for part in ("task", "digits", "form", "cosine", "overlong")
        )
        expected = 0.5 * task + 0.25 * digits + 0.1 * form + 0.1 * cosine + overlong
        assert record["score/reward/mean"] == pytest.approx(expected)
        assert record["score/overlong_reward/mean"] == overlong
        assert 0 <= record["score/overlong"] <= 1
        assert -10 <= record["score/parts/cosine/min"] < record["score/parts/cosine/max"] <= 2
        assert digits == task  # the same scorer twice
    evaluated = [record for record in records if "eval/sort_digits/part_digits" in record]
    assert evaluated
    assert "eval/sort_digits/part_form" not in evaluated[0]
    rows = read_rollouts(home / "runs/parts/rollouts/step-1.parquet").to_pylist()
    assert {"part/digits", "part/cosine", "part/form", "extra/overlong_reward"} <= {*rows[0]}


def test_a_batch_function_that_fails_stops_the_run_in_one_line(home: Path) -> None:
    (home / "broken.py").write_text("def compute_scores(**lists):\n    raise KeyError('x')\n")
    said = train(home, "broken", "reward/manager=batch", "reward.function.path=broken.py",
                 "reward.function.name=compute_scores")  # fmt: skip
    assert said.code == 2
    assert "scoring failed for " in said.err
    assert f"the first failure: KeyError: 'x' at {home}/broken.py:2" in said.err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("reward/manager=remote", "reward.manager.url=http://127.0.0.1:9"), "cannot be reached"),
        (
            ("reward/manager=custom", "reward.manager.path=reward.py:Nobody"),
            "has no callable Nobody",
        ),
        (("reward.parts.form.scorer=sonnet",), "reward.parts.form.scorer is sonnet, which is no"),
        (("reward/manager=batch", FUNCTION), "cannot be called with data_sources"),
    ],
)
def test_what_cannot_score_is_refused_before_training(
    settings: tuple[str, ...], says: str, home: Path
) -> None:
    said = train(home, "refused", *settings)
    assert said.code == 2
    assert says in said.err
    assert said.err.count("\n") == 1
