"""`winnow.Trainer`: the run of `winnow train`, made of Python values in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.kill import CHAT_TEMPLATE, differences
from PIL import Image
from tests.forked import Server
from tests.hubs import Hub
from tests.small_models import digits_model, save
from tests.winnow_command import draw_no_curve, python
from tests.winnow_command import winnow as in_winnow

import winnow
from winnow.commands import train as session
from winnow.data.images import open_image
from winnow.data.sort_digits import build_tokenizer
from winnow.data.sources import read_rows
from winnow.environments import Step
from winnow.errors import ConfigError, DataError, RewardError, WinnowError

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


def test_it_is_evaluated_asked_and_pushed_once_it_has_a_checkpoint(
    here: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = trainer("young"), trainer("asked")
    after.train()
    with pytest.raises(WinnowError, match="not a run's folder"):
        before.generate(["31:"])
    ((first,),) = after.generate(["31:"], temperature=0)
    assert len(first.token_ids) <= TYPED["max_response_tokens"]
    with pytest.raises(ConfigError, match=r"max_tokens must be in \[1, 8\], got 9"):
        after.generate(["31:"], max_tokens=9)
    with pytest.raises(WinnowError, match="neither a run folder"):
        before.evaluate()
    for answers in (1, 2):
        report = after.evaluate(overrides=[f"evaluation.n={answers}"])
        assert len(report.sources["eval_data"].prompts) == 3
        assert report.sources["eval_data"].answers == answers
    other = after.evaluate([{"prompt": "9:", "answer": "9"}])
    assert len(other.sources["eval_data"].prompts) == 1
    monkeypatch.setenv("HF_TOKEN", "write")
    with pytest.raises(WinnowError, match="not a run's folder"):
        before.push_to_hub("owner/young")
    after.push_to_hub("owner/sort", private=True)
    card = hub.repos["owner/sort"]["README.md"].decode()
    for part in (
        "| training data | data.jsonl |",
        "| reward | program:even |",
        "| versions | winnow ",
        "| Held-out accuracy, 95 % interval over problems | step 0 | step 3 |",
    ):
        assert part in card, part
    (line,) = [line for line in card.splitlines() if line.startswith("| eval_data, 3 problems |")]
    assert re.fullmatch(r"\| eval_data, 3 problems( \| [\d.]+ \[[\d.]+, [\d.]+\]){2} \|", line)
    assert str(here) not in card


class Repeat:
    """An environment that no other process can import: its class is made in a function."""

    def reset(self, row: Any) -> Any:
        self.digits = row["ground_truth"]
        return ()

    def step(self, turn: Any) -> Step:
        return Step("1:", reward=len(turn.text) / 8, done=len(turn.text) % 2 == 0)


def test_a_start_that_failed_is_tried_again_with_the_same_rows(here: Path) -> None:
    again = trainer("again", model="later", steps=1)
    (here / "later").mkdir()
    (here / "later/config.json").write_bytes((here / "model/config.json").read_bytes())
    with pytest.raises(WinnowError, match="later"):
        again.train()
    for file in (here / "model").iterdir():
        (here / "later" / file.name).write_bytes(file.read_bytes())
    assert again.train().metrics[-1]["step"] == 1


def test_a_save_that_fails_as_the_loop_is_left_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in trainer("left", save_every=STEPS):
        (here / "runs/left/checkpoints").touch()  # where a folder should be
        break
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("winnow: cannot save the checkpoint runs/left/checkpoints/step-1: Not")


def test_a_card_has_the_held_out_rows_of_the_last_evaluation(
    here: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "write")
    for step, name in enumerate(("first", "second"), 1):
        (here / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS[:3])))
        moved = trainer("moved", eval_data=f"{name}.jsonl", steps=step, eval_every=1)
        moved.train()
    moved.push_to_hub("owner/moved")
    assert "| second, 3 problems |  | " in hub.repos["owner/moved"]["README.md"].decode()


def test_steps_of_fine_tuning_are_handed_over_too(here: Path) -> None:
    rows = ({"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS)
    (here / "shown.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["sft.train_files=[shown.jsonl]", "observe.console=off", "run.threads=1"]
    tuner = winnow.Trainer("model", recipe="sft", steps=2, name="tuned", overrides=words)
    assert [step.number for step in tuner] == [1, 2]


def test_an_environment_of_the_program_plays_in_its_process(here: Path) -> None:
    kind = type("Local", (Repeat,), {"__module__": "cell"})  # as a notebook has no file
    (here / "chat.jinja").write_text(CHAT_TEMPLATE)
    words = [*OTHERS, "data.chat_template=chat.jinja", "environment.max_turns=3",
             "reward/manager=environment"]  # fmt: skip
    one = trainer("plays", None, environment=kind, overrides=words, steps=1, max_response_tokens=16)
    (step,) = one
    assert step.figures["environment/faults"] == 0
    assert max(len(turns or ()) for turns in one.run.rollouts(1)["turns"].to_pylist()) > 1
    apart = trainer("apart", None, environment=Repeat, overrides=words).config
    assert apart.environment.path == f"{__name__}:Repeat"  # type: ignore[union-attr]


BAD: list[tuple[dict[str, Any], type[WinnowError], str]] = [
    ({"lr": "fast"}, ConfigError, "optim.lr must be a number greater than 0, got 'fast' (set by "
     "winnow.Trainer)"),
    ({"num_generations": 4}, ConfigError, "num_generations is not a known key (set by "
     "winnow.Trainer); that is TRL's name for rollout.n"),
    ({"reward": [even, even], "reward_weights": [1]}, ConfigError, "reward_weights has 1 numbers "
     "for 2 reward functions; give one for each"),
    ({"data": [{"prompt": "1:"}, 7]}, DataError, "data[1] must be a dict with columns, got a int"),
    ({"data": []}, DataError, "data has no rows; give at least one"),
    ({"data": {"prompt": ["1:"]}}, DataError, "data must be a list of dicts, a Dataset or files, "
     "got a dict; give one of its splits, or its rows"),
    ({"data": [{"prompt": {1}}]}, DataError, "data[0]: set is not a value of a data file; leave "
     "the column out, or make it text"),
    ({"overrides": [*OTHERS, "trainer.max_restarts=1"]}, ConfigError, "trainer.max_restarts=1 "
     "restarts the process of `winnow train`, and a Trainer's is your program; set it to 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "line"), BAD, ids=[next(iter(b[0])) for b in BAD])
def test_bad_input_is_one_line_and_leaves_no_folder(
    changes: dict[str, Any], error: type[WinnowError], line: str
) -> None:
    with pytest.raises(error) as caught:
        trainer("bad", **changes)
    assert str(caught.value) == line
    assert not Path("runs/bad").exists()


def test_a_reward_without_the_columns_that_it_names_ends_the_run_in_one_line() -> None:
    def needs(completions: list[str], gold: list[str]) -> list[float]:
        return [1.0 for _ in gold]

    with pytest.raises(RewardError, match=r"missing 1 required positional argument: 'gold'"):
        trainer("columns", needs).train()


def test_rows_may_hold_images_numbers_of_numpy_and_bytes(tmp_path: Path) -> None:
    picture = Image.new("RGB", (3, 2), "red")
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": picture},
           {"type": "text", "text": "What?"}]}], "answer": np.int64(7)}  # fmt: skip
    made = trainer("images", data=[row, {**row, "answer": 8}], dir=str(tmp_path))
    (file,) = made.config.data.train_files
    first, second = read_rows([file])
    assert (first.ground_truth, second.ground_truth) == ("7", "8")
    opened = open_image(first.images[0], "image 1", made.config.data)
    assert (opened.size, opened.getpixel((0, 0))) == ((3, 2), (255, 0, 0))
    assert first.messages[0]["content"] == "<image>What?"


def test_a_list_of_functions_is_summed_and_filtered_by_the_sum() -> None:
    config = trainer("listed", [even, lambda response: 1.0, "even.py:even"]).config
    reward = config.reward
    assert (reward.function.path, reward.function.name) == ("program", "even")
    assert {name: part.path for name, part in reward.parts.items()} == {
        "function": "program",
        "even": "even.py",
    }
    assert config.sampling.filter.metric == "reward"  # type: ignore[union-attr]
    weighted = trainer("listed", [even, even], reward_weights=[0.5, 2.0]).config.reward
    assert (weighted.weights.task, weighted.parts["even"].weight) == (0.5, 2.0)


def programs(page: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    return [block.replace('"FOLDER"', '"model"') for block in blocks]


def test_the_programs_of_the_pages_run(here: Path, server: Server) -> None:
    ours = [programs("from_trl.md")[1], "import winnow\n" + programs("python.md")[1]]
    for program, run in zip(ours, ("sort", "object"), strict=True):
        python(server, program, here).check()
        assert winnow.open_run(here / "runs" / run).metrics[-1]["step"] == 2
    parts = winnow.open_run(here / "runs/sort").metrics[-1]
    assert {"score/parts/task/mean", "score/parts/short/mean"} <= parts.keys()


@pytest.mark.slow
def test_the_program_of_trl_beside_ours_runs_too(here: Path) -> None:
    pytest.importorskip("trl")
    program = programs("from_trl.md")[0]
    program = program.replace("GRPOConfig(", "GRPOConfig(use_cpu=True, bf16=False, ")
    said = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True)
    assert (said.returncode, b"train_runtime" in said.stdout) == (0, True), said.stderr


SIGNALLED = """
import os, signal, sys
from tests.e2e.test_trainer import even, trainer

asked = 0

def reward(solution_str, ground_truth):
    global asked
    asked += 1
    if asked == 20:
        os.kill(os.getpid(), NUMBER)
    return even(solution_str, ground_truth)

try:
    trainer("signalled", reward).train()
except KeyboardInterrupt:
    sys.exit("interrupted")
"""
INTERRUPTING = """
import os, signal, time

def estimate(inputs):
    for _ in range(2 * ("ARMED" in os.environ)):  # not in the check before the run
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
    os.environ.pop("ARMED", None)
    return inputs.rewards - inputs.rewards.mean()
"""
TWICE = """
import os, time
from tests.e2e.test_trainer import OTHERS, even, trainer
from winnow.errors import WinnowError

words = [*OTHERS, "algorithm/advantage=custom", "algorithm.advantage.path=interrupting.py:estimate"]

def reward(solution_str, ground_truth):
    os.environ |= {} if os.environ.get("WAS_ARMED") else {"ARMED": "1", "WAS_ARMED": "1"}
    return even(solution_str, ground_truth)

try:
    trainer("twice", reward, overrides=words).train()
except KeyboardInterrupt:
    print("interrupted")
for _ in range(600):
    try:
        assert trainer("twice", reward, overrides=words).train().metrics[-1]["step"] == 3
        break
    except WinnowError as error:  # until the first has ended
        assert "in use" in str(error), error
        time.sleep(0.1)
else:
    raise SystemExit("the run is still in use")
"""


def test_a_second_ctrl_c_lets_go_of_the_run(here: Path, server: Server) -> None:
    (here / "interrupting.py").write_text(INTERRUPTING)
    assert "interrupted" in python(server, TWICE, here).check().out


def test_ctrl_c_and_sigterm_save_the_run_before_they_end_the_program(
    whole: winnow.RunRecord, here: Path, server: Server
) -> None:
    for number, code in ((signal.SIGINT, 1), (signal.SIGTERM, 75)):
        said = python(server, SIGNALLED.replace("NUMBER", str(int(number))), here)
        assert said.code == code, said.err
        assert "then saving" in said.err
        assert ("interrupted" in said.err) == (number == signal.SIGINT)

    def reward(solution_str: str, ground_truth: str) -> float:
        return float(even(solution_str, ground_truth))

    run = trainer("signalled", reward).train()
    assert differences(whole.path, run.path, STEPS) == []
