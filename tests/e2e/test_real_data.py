"""The shipped recipes on rows of the real DAPO and GSM8K files, with small random Qwen folders.

No model here can do mathematics: what is shown is that real rows are read, asked, scored by the
rules and learnt from, and that a run that cannot learn says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.small_models import qwen_folder
from tests.winnow_command import Outcome, in_this_process

from winnow.checkpoints.checkpoint import checkpoints_in
from winnow.config.load import load_recipe
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (
    *("rollout.n=4", "rollout.max_response_tokens=16", "rollout.engine.slots=16"),
    *("reward.overlong.buffer_tokens=8", "sampling.groups_per_step=2"),
    *("sampling.max_groups_per_step=4", "trainer.steps=2", "trainer.mini_batch_groups=1"),
    *("optim.warmup_steps=0", "evaluation.n=2", "evaluation.max_prompts=3", "run.threads=1"),
)
ROWS, DAPO, GSM8K = 500, "dapo.parquet", "gsm8k.jsonl"


@dataclass(frozen=True)
class Place:
    """Where the commands are typed, with rows of real files and two models."""

    path: Path
    data: Path
    qwen2: Path
    qwen3: Path

    def command(self, recipe: str, model: Path, data: str, *more: str) -> list[str]:
        files = [f"data.train_files=[{data}]", f"model.path={model}"]
        return ["train", recipe, *files, *SETTINGS, *more]

    def run(self, name: str, recipe: str, model: Path, data: str, *more: str) -> RunFolder:
        command = self.command(recipe, model, data, f"run.name={name}", *more)
        in_this_process(*command, folder=self.path).check()
        return RunFolder.open(self.path / "runs" / name)

    @property
    def held_out(self) -> str:
        return f"data.eval_files=[{self.data / 'math/aime24_aime25_math500.parquet'}]"


@pytest.fixture(scope="module")
def place(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("real")
    rows = pq.read_table(shared_data / "math" / "dapo_math_17k.parquet").slice(0, ROWS)
    pq.write_table(rows, folder / DAPO)
    with (shared_data / "gsm8k" / "train.jsonl").open() as lines:
        (folder / GSM8K).write_text("".join(islice(lines, ROWS)))
    texts = [row["prompt"][0]["content"] for row in rows.to_pylist()]
    return Place(
        folder, shared_data,
        qwen_folder(folder / "qwen2", "qwen2", texts, chat=False),
        qwen_folder(folder / "qwen3", "qwen3", texts, chat=True),
    )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_rollouts(folder).to_pylist()
    return rows


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
    hopeless = place.held_out, "run.name=hopeless"
    command = place.command("dapo-math", place.qwen2, DAPO, *hopeless)
    said: Outcome = in_this_process(*command, folder=place.path)
    assert said.code == 2
    assert re.fullmatch(
        r"winnow: no group qualified: sampling reached its bound 3 times in a row; "
        r"of 12 groups, 0 qualified, 12 were all wrong, 0 all right, 0 failed; "
        r"mean accuracy 0\.000, \d+% of answers truncated; most answers are truncated: "
        r"raise rollout\.max_response_tokens; if answers loop, .*\n",
        said.err,
    )
    assert f"{ROWS} rows of training data" in said.out
    (line,) = (line for line in said.out.splitlines() if "first step" in line)
    assert line.startswith("Warning: first step: no signal: 0 of 12 prompts have better and worse")
    assert line.endswith("winnow rollouts runs/hopeless")
    assert "held out, start: MATH-500 0.0 %" in said.out
    run = RunFolder.open(place.path / "runs" / "hopeless")
    pinned = "trainer.microbatch_tokens=1024"  # the default of the device that the run had
    assert load_recipe(str(run.config)) == load_recipe("dapo-math", [*command[2:], pinned])
    assert [record["step"] for record in read_metrics(run.metrics)] == [0]
    asked = [row for row in rows_of(run.eval_file(0)) if row["outcome"] == "held_out"]
    assert len(asked) == 3 * 2
    assert run.log.read_text().count("no group qualified within the bound") == 2
    assert not list(run.path.rglob("*.partial"))


def test_rows_of_the_dapo_file_are_asked_scored_and_trained_on(place: Place) -> None:
    more = ["sampling/filter=none", place.held_out, "data.max_prompt_tokens=300"]
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


def test_gsm8k_in_its_own_form_is_asked_scored_and_trained_on(place: Place) -> None:
    held_out = f"data.eval_files=[{place.data / 'gsm8k/test.jsonl'}]"
    cut = "data.max_prompt_tokens=60", "data.overlong_prompts=left", "sampling/filter=none"
    run = place.run("gsm8k", "gsm8k", place.qwen2, GSM8K, *cut, held_out)
    rows = check_two_steps(run)
    assert max(row["prompt_tokens"] for row in rows) <= 60
    assert re.search(rf"{ROWS} rows of training data; [\d,]+ cut to", run.log.read_text())
    assert {row["data_source"] for row in rows} == {"gsm8k"}
    assert all(row["prompt"].endswith('after "####".') for row in rows if row["prompt"])
    assert read_metrics(run.metrics)[-1]["eval/gsm8k/prompts"] == 3
