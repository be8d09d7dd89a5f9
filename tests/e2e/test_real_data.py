"""The shipped recipes on the real DAPO and GSM8K files, with small random Qwen folders.

No model here can do mathematics: what is shown is that real rows are read, asked, scored by the
rules and learnt from, and that a run that cannot learn says so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from tests.small_models import qwen_folder
from tests.winnow_command import Outcome, in_own_process, in_this_process

from winnow.config.load import load_recipe
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts
from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = [
    "rollout.n=4",
    "rollout.max_response_tokens=16",
    "rollout.engine.slots=16",
    "reward.overlong.buffer_tokens=8",
    "sampling.groups_per_step=2",
    "sampling.max_groups_per_step=4",
    "trainer.steps=2",
    "trainer.mini_batch_groups=1",
    "optim.warmup_steps=0",
    "evaluation.n=2",
    "evaluation.max_prompts=3",
    "run.threads=1",
]
LETTERS = """
import math

def letters(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    assert isinstance(ground_truth, str) and float(ground_truth) == float(ground_truth)
    share = sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
    return {"score": scale * share, "acc": share, "letters": share, "row": extra_info["index"]}

compute_score = letters
"""
LETTERS_ASYNC = """
import asyncio

async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.001 * (len(solution_str) % 3))
    assert data_source == "gsm8k" and "question" in extra_info
    share = sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
    return {"score": share, "acc": share, "pred": solution_str[:5]}
"""


@dataclass(frozen=True)
class Place:
    """Where the commands are typed, with the real files and two models."""

    path: Path
    data: Path
    qwen2: Path
    qwen3: Path

    def command(self, recipe: str, model: Path, data: str, *more: str) -> list[str]:
        files = [f"data.train_files=[{self.data / data}]", f"model.path={model}"]
        return ["train", recipe, *files, *SETTINGS, *more]

    def run(self, name: str, recipe: str, model: Path, data: str, *more: str) -> RunFolder:
        command = self.command(recipe, model, data, f"run.name={name}", *more)
        in_this_process(*command, folder=self.path).check()
        return RunFolder.open(self.path / "runs" / name)


@pytest.fixture(scope="module")
def place(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("real")
    prompts = pq.read_table(shared_data / "math" / "dapo_math_17k.parquet", columns=["prompt"])
    texts = [row["prompt"][0]["content"] for row in prompts.slice(0, 500).to_pylist()]
    return Place(
        folder,
        shared_data,
        qwen_folder(folder / "qwen2", "qwen2", texts, chat=False),
        qwen_folder(folder / "qwen3", "qwen3", texts, chat=True),
    )


DAPO, GSM8K = "math/dapo_math_17k.parquet", "gsm8k/train.jsonl"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_rollouts(folder).to_pylist()
    return rows


def weights_of(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    yield from sorted(load_file(folder / "model.safetensors").items())


def has_learnt(run: RunFolder, start: Path) -> bool:
    """Whether the weights that a run saved differ from those it started with."""
    now, then = weights_of(checkpoints_in(run.checkpoints)[-1].model), weights_of(start)
    pairs = itertools.zip_longest(now, then)
    return any(not np.array_equal(a[1], b[1]) for a, b in pairs if a[0] == b[0])


def check_two_steps(run: RunFolder) -> list[dict[str, Any]]:
    """Two whole steps with finite figures, a checkpoint, and every token accounted for."""
    records = [dict(record) for record in read_metrics(run.metrics)]
    steps = [record for record in records if record["step"]]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/approx_kl"):
            assert np.isfinite(record[name]), name
        assert record["actor/updates"] == 2
        assert record["actor/skipped_updates"] == 0
    rows = rows_of(run.rollouts)
    written = sum(record["sampling/tokens/generated"] for record in steps)
    waiting = steps[-1]["sampling/tokens/in_progress"]
    assert written == sum(row["response_tokens"] for row in rows) + waiting
    assert [checkpoint.step for checkpoint in checkpoints_in(run.checkpoints)][-1] == 2
    return rows


def test_a_run_in_which_every_answer_is_wrong_says_so_and_stops(place: Place) -> None:
    held_out = f"data.eval_files=[{place.data / 'math/aime24_aime25_math500.parquet'}]"
    command = place.command("dapo-math", place.qwen2, DAPO, held_out, "run.name=hopeless")
    said: Outcome = in_own_process(*command, folder=place.path)
    assert said.code == 2
    assert re.fullmatch(
        r"winnow: no group to learn from: sampling met its bound 3 times in a row; "
        r"of 12 groups looked at, 0 qualified, 12 were all wrong, 0 all right, 0 failed; "
        r"mean accuracy 0\.000, \d+% of the answers truncated; most answers are cut off: "
        r"raise rollout\.max_response_tokens; if answers go round .*\n",
        said.err,
    )
    assert "17,917 rows of training data" in said.out
    assert "held out, start: MATH-500 0.0 %" in said.out
    run = RunFolder.open(place.path / "runs" / "hopeless")
    assert load_recipe(str(run.config)) == load_recipe("dapo-math", [*command[2:]])
    assert [record["step"] for record in read_metrics(run.metrics)] == [0]
    asked = [row for row in rows_of(run.evaluation(0)) if row["outcome"] == "held_out"]
    assert len(asked) == 3 * 2
    assert run.log.read_text().count("nothing qualified within the bound") == 2
    assert not list(run.path.rglob("*.partial"))


def test_without_a_filter_the_dapo_file_is_asked_scored_and_trained_on(place: Place) -> None:
    held_out = f"data.eval_files=[{place.data / 'math/aime24_aime25_math500.parquet'}]"
    more = ["sampling/filter=none", held_out, "data.max_prompt_tokens=300"]
    run = place.run("dapo", "dapo-math", place.qwen3, DAPO, *more)
    rows = check_two_steps(run)
    assert {row["data_source"] for row in rows} == {"DAPO-17k"}
    assert {row["part/task"] for row in rows} == {-1.0}
    assert max(row["prompt_tokens"] for row in rows) <= 300
    for row in rows:
        if row["prompt"] is not None:
            asked = row["prompt"]
            assert asked.startswith("<|user|>Solve the following math problem step by step.")
            assert asked.endswith('its own line after "Answer:".\n<|assistant|>')
    records = read_metrics(run.metrics)
    for record in (records[0], records[-1]):
        assert record["eval/MATH-500/prompts"] == 3
        assert record["eval/MATH-500/avg@2"] == 0
    said = in_this_process("eval", "runs/dapo", folder=place.path).check()
    assert "3 held-out" in said.out


def test_long_prompts_are_filtered_or_cut_and_counted(place: Place) -> None:
    for choice, said in (("filter", "left out: longer than"), ("left", "cut to")):
        command = place.command(
            "gsm8k", place.qwen2, GSM8K, "data.max_prompt_tokens=60", "sampling/filter=none",
            f"data.overlong_prompts={choice}", f"run.name=long-{choice}", "trainer.steps=1",
        )  # fmt: skip
        out = in_this_process(*command, folder=place.path).check().out
        assert re.search(rf"7,473 rows of training data; [\d,]+ {said} data.max_prompt_tokens", out)
        rows = rows_of(RunFolder.open(place.path / "runs" / f"long-{choice}").rollouts)
        assert max(row["prompt_tokens"] for row in rows) <= 60


def test_gsm8k_in_its_own_form_is_asked_scored_and_trained_on(place: Place) -> None:
    held_out = f"data.eval_files=[{place.data / 'gsm8k/test.jsonl'}]"
    run = place.run("gsm8k", "gsm8k", place.qwen2, GSM8K, "sampling/filter=none", held_out)
    rows = check_two_steps(run)
    assert {row["data_source"] for row in rows} == {"gsm8k"}
    assert all(row["prompt"].endswith('after "####".') for row in rows if row["prompt"])
    assert read_metrics(run.metrics)[-1]["eval/gsm8k/prompts"] == 3


def test_a_reward_file_of_the_user_trains_on_the_dapo_file(place: Place) -> None:
    (place.path / "letters.py").write_text(LETTERS)
    more = ["reward.function.path=letters.py", "reward.function.kwargs={scale: 2.0}"]
    run = place.run("letters", "dapo-math", place.qwen2, DAPO, *more, "optim.lr=1e-3")
    rows = check_two_steps(run)
    for row in rows:
        assert row["part/task"] == 2 * row["accuracy"] == 2 * row["extra/letters"]
        assert row["extra/row"] == int(row["prompt_uid"].rpartition(":")[2]) - 1
        assert -1 <= row["part/overlong"] <= 0
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert len(trained) == 2 * 2 * 4
    assert any(row["advantage"] for row in trained)
    assert has_learnt(run, place.qwen2)


def test_an_async_reward_file_of_the_user_trains_on_gsm8k(place: Place) -> None:
    (place.path / "later.py").write_text(LETTERS_ASYNC)
    more = ["reward.function.path=later.py", "reward.function.name=later"]
    run = place.run("later", "gsm8k", place.qwen3, GSM8K, *more, "optim.lr=1e-3")
    rows = check_two_steps(run)
    assert all(row["response"].startswith(row["pred"]) for row in rows if row["response"])
    assert has_learnt(run, place.qwen3)
