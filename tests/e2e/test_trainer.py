"""`winnow.Trainer`: the run of `winnow train`, made of Python values in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kill import differences
from tests.forked import Server
from tests.small_models import digits_model, save
from tests.winnow_command import draw_no_curve, python
from tests.winnow_command import winnow as in_winnow

import winnow
from winnow.commands import train as session
from winnow.data.sort_digits import build_tokenizer

STEPS = 3
ROWS = [{"prompt": f"{i}{j}:", "answer": f"{min(i, j)}{max(i, j)}"} for i in "246" for j in "135"]
TYPED: dict[str, Any] = {
    **{"lr": 1e-3, "steps": STEPS, "n": 4, "groups_per_step": 4, "mini_batch_groups": 2},
    **{"max_response_tokens": 8, "save_every": 1, "eval_every": 2, "threads": 1},
    "console": "off",
}
OTHERS = [
    *("rollout.engine.slots=16", "reward.overlong.enabled=false", "trainer.keep_last=null"),
    *("evaluation.n=1", "evaluation.greedy=false", "optim.warmup_steps=1"),
]
REWARD = """
def even(solution_str, ground_truth):
    return sum(c in ground_truth + "02468" for c in solution_str) / 8
"""
even: Any = {}
exec(REWARD, even)  # a function that no other process can import
even = even["even"]


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which all programs of this file run."""
    home, before = tmp_path_factory.mktemp("home"), Path.cwd()
    save(digits_model(), build_tokenizer(), home / "model")
    (home / "cache").mkdir()
    (home / "even.py").write_text(REWARD)
    os.chdir(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "draw_curve", session.draw_curve)
        draw_no_curve()
        yield home
    os.chdir(before)


def trainer(name: str, reward: Any = even, **changes: Any) -> winnow.Trainer:
    values = {"model": "model", "data": ROWS, "eval_data": ROWS[:3], "overrides": OTHERS}
    return winnow.Trainer(**{**values, **TYPED, "reward": reward, "name": name, **changes})


@pytest.fixture(scope="module")
def whole(here: Path) -> winnow.RunRecord:
    """A run to its end."""
    return trainer("whole").train()


def test_it_has_the_bits_of_the_command_with_the_same_settings(
    whole: winnow.RunRecord, here: Path
) -> None:
    config = whole.config
    (file,), (held_out,) = config.data.train_files, config.data.eval_files
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == ROWS
    words = [
        *("data/task=none", f"data.train_files=[{file}]", f"data.eval_files=[{held_out}]"),
        *("model.path=model", "warm_start=none", "run.description=[]", "run.name=typed"),
        *("reward.function.path=even.py", "reward.function.name=even", "reward.workers=0"),
        *("optim.lr=1e-3", f"trainer.steps={STEPS}", "rollout.n=4", "trainer.save_every=1"),
        *("sampling.groups_per_step=4", "trainer.mini_batch_groups=2", "evaluation.every=2"),
        *("rollout.max_response_tokens=8", "run.threads=1", "observe.console=off", *OTHERS),
    ]
    in_winnow(here, "train", "dapo", *words).check()
    assert differences(whole.path, here / "runs/typed", STEPS) == []


def test_each_step_has_its_figures_and_groups_and_leaving_the_loop_saves_the_run(
    whole: winnow.RunRecord,
) -> None:
    seen: list[int] = []
    cut = trainer("cut", callbacks=[lambda step: seen.append(step.number)])
    for step in cut:
        assert {"step": step.number, **step.figures} == cut.run.metrics[-1]
        trained = [group for group in step.groups if group.outcome == "trained"]
        assert len(trained) == 4
        first = trained[0]
        truth = "".join(sorted(str(first.prompt).rstrip(":")))
        assert first.rewards == [even(answer, truth) for answer in first.answers]
        assert sum(advantage or 0.0 for advantage in first.advantages) == pytest.approx(0, abs=1e-5)
        break
    assert seen == [1]
    assert [record["step"] for record in cut.run.metrics] == [0, 1]
    again = trainer("cut", callbacks=[lambda step: step.number == 2 and step.stop()])
    assert again.train().metrics[-1]["step"] == 2
    assert [step.number for step in trainer("cut")] == [3]
    assert [*trainer("cut")] == []
    assert differences(whole.path, cut.path, STEPS) == []


KILLED = """
import os, signal, sys
from tests.e2e.test_trainer import even, trainer

def die(step):
    if step.number == int(sys.argv[-1]):
        os.kill(os.getpid(), signal.SIGKILL)

trainer("killed", callbacks=[die]).train()
"""


def test_a_killed_program_goes_on_with_the_same_bits_where_a_loop_runs_already(
    whole: winnow.RunRecord, here: Path, server: Server
) -> None:
    for number, code in ((2, -9), (0, 0)):
        program = KILLED.replace("sys.argv[-1]", str(number))
        assert python(server, program, here).code == code
    assert differences(whole.path, here / "runs/killed", STEPS) == []


def test_a_run_of_program_objects_is_continued_by_its_program_alone(
    whole: winnow.RunRecord, here: Path
) -> None:
    (warning,) = [line for line in (whole.path / "log.txt").read_text().splitlines()
                  if "objects of this program" in line]  # fmt: skip
    assert "reward.function.path: objects of this program, which no other" in warning
    winnow.user_code.program_objects.clear()  # as in another process
    said = in_winnow(here, "resume", str(whole.path), "trainer.steps=4", "observe.console=plain")
    assert (said.code, "even is an object of the program that began the run" in said.err) == (2, 1)
    assert len(said.err.strip().splitlines()) == 1
