"""A user's first day: init, sweeps, printed commands, refused starts, a folder that goes away."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.kill import SETTINGS
from tests.forked import Server
from tests.small_models import byte_level_bpe, digits_model, save
from tests.winnow_command import WINNOW, in_forked_process, in_this_process, winnow

from winnow import __version__
from winnow.cli import init as init_module
from winnow.config.files import available_recipes
from winnow.config.load import load_recipe
from winnow.errors import WinnowError
from winnow.observe.jsonl import read_metrics

pytestmark = pytest.mark.slow
SMALL = (*SETTINGS, "trainer.steps=2", "observe.console=plain")


def test_version_short_help_and_a_line_for_each_recipe(home: Path) -> None:
    assert winnow(home, "--version").check().out == f"winnow {__version__}\n"
    for words in ((), ("train",), ("data", "prepare")):
        short, long = (winnow(home, *words, end).check() for end in ("-h", "--help"))
        assert short.out == long.out != ""
    lines = winnow(home, "recipes").check().out.splitlines()
    for name, line in zip(available_recipes(), lines, strict=False):
        assert re.fullmatch(rf"{re.escape(name)} +\S.{{10,}}", line), line


INTERRUPTED = """
import sys


class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "winnow.cli.main":
            raise KeyboardInterrupt


sys.meta_path.insert(0, Interrupt())
from winnow.cli import main

main()
"""


def test_ctrl_c_while_importing_and_a_folder_that_is_gone_are_one_line(home: Path) -> None:
    said = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(said, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "winnow: interrupted\n")
    code = "import os; os.mkdir('g'); os.chdir('g'); os.rmdir('../g')\n"
    code += "from winnow.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=home, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2, "winnow: the working directory no longer exists; cd to another one\n",
    )  # fmt: skip


NOWHERE = ["warm_start=none", "model.path=./none", "data/task=none", "data.train_files=[none.csv]"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (NOWHERE, "none.csv: no such file; check the path"),
        (NOWHERE[:2], "model.path ./none: no such folder; give a Hugging Face model folder"),
        (["reward.function.path=nobody.py"], "reward.function.path nobody.py: no such file"),
        (["reward.function.path=torn.py"], "torn.py, line 1: importing it fails with SyntaxError"),
        (["reward.function.path=other.py"], "has no callable compute_score; give one of reward"),
        (
            ["algorithm/policy_loss=custom", "algorithm.policy_loss.path=other.py:loss"],
            "algorithm.policy_loss.path other.py:loss has no callable loss",
        ),
    ],
)
def test_a_wrong_file_is_told_before_the_warm_up_and_leaves_nothing(
    settings: list[str], words: str, home: Path
) -> None:
    (home / "torn.py").write_text("def compute_score(:")
    (home / "other.py").write_text("def reward(*given): return 0.0\nraise SystemExit('was run')\n")
    nowhere = {"WINNOW_CACHE": str(home / "nowhere")}
    said = in_this_process("train", "quickstart", *settings, folder=home, environment=nowhere)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert words in said.err
    assert [*home.glob("runs/*")] == []
    assert not (home / "nowhere").exists()


def test_a_package_that_is_absent_is_told_before_the_warm_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.builders.preflight.find_spec", lambda name: None)
    on_ray = "cluster=ray", "trainer/strategy=fsdp2", "rollout.engine.processes=1"
    for settings, package in ((("model/adapter=lora",), "peft"), (on_ray, "ray")):
        said = winnow(home, "train", "quickstart", *settings)
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert (
            f"needs {package}, which is not installed; pip install 'winnow-rl[{package}]'"
            in said.err
        )
    assert [*home.glob("runs/*")] == []


def test_the_commands_that_a_run_prints_work_as_they_stand(home: Path) -> None:
    place = "run.dir='my runs'", "run.name=the$one"
    elsewhere = {"WINNOW_CACHE": str(home / "cache"), "PATH": "/usr/bin:/bin"}
    command = "train", "quickstart", *SMALL, *place
    out = in_this_process(*command, folder=home, environment=elsewhere).check()
    lines = out.out[out.out.index("Next") :].splitlines()[1:]
    found = [line.partition("  # ")[0].strip() for line in lines if line.strip()]
    assert [shlex.split(command)[1] for command in found] == [
        *("eval", "rollouts", "doctor", "dashboard", "train", "train", "export")
    ]
    for command in found:
        program, *words = subprocess.run(
            ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert (home / program).samefile(WINNOW), "what is pasted is the program, without PATH"
        assert words == shlex.split(command)[1:]
        if words[0] == "doctor":
            winnow(home, *words)  # which has something to say of two steps
        elif words[0] != "dashboard" and "--help-config" not in words:
            more = ["trainer.steps=1", "warm_start.seed=0"] if words[0] == "train" else []
            winnow(home, *words, *more).check()
    assert (home / "the$one-model/model.safetensors").is_file()
    assert (home / "my runs/the$one-1/metrics.jsonl").stat().st_size > 0


GOING = """
import os
calls = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    calls.append(solution_str)
    if len(calls) == 40:
        os.rename("runs/gone", "elsewhere")
    return float(len(solution_str) % 2)
"""


def test_a_run_whose_folder_is_taken_away_stops_and_makes_no_other(home: Path) -> None:
    (home / "going.py").write_text(GOING)
    said = winnow(
        home,
        *("train", "quickstart", *SMALL, "run.name=gone", "evaluation.before=false"),
        *("reward.function.path=going.py", "reward.workers=0"),
    )
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "run folder runs/gone was deleted, moved or renamed" in said.err
    assert not (home / "runs/gone").exists()


TEMPLATES = "format", "maths", "code", "judge", "environment"


def init(home: Path, *words: str) -> tuple[Path, list[str]]:
    """A new folder, and the commands that are printed, to be run in it."""
    said = winnow(home, "init", *words).check().out
    entering, *commands = re.findall(r"^  (\S.*?)(?:  |$)", said, re.MULTILINE)
    assert entering.startswith("cd ")
    return home / shlex.split(entering)[1], commands


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_folder_has_a_reward_that_passes_its_test_and_recipes_that_load(
    template: str, home: Path
) -> None:
    folder, commands = init(home, f"my {template}", "--template", template)
    programs = [["-m", "pytest", "-q", "-p", "no:cacheprovider"]] * (template == "format")
    for program in ([], *programs):
        test = [sys.executable, *program, commands[0].split()[1]]
        done = subprocess.run(test, cwd=folder, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    real, toy = (load_recipe(str(folder / f"{name}.yaml")) for name in ("recipe", "toy"))
    assert (real.sampling.filter.name, real.optim.lr, real.reward) == ("variance", 5e-6, toy.reward)
    steps = load_recipe(str(folder / "warm_up.yaml")).trainer.steps
    assert toy.model.path == f"runs/warm-up/checkpoints/step-{steps}/model"
    again = winnow(home, "init", folder.name)
    assert (again.code, again.err) == (
        2,
        f"winnow: {folder.name} is not empty; choose a new folder\n",
    )


def test_a_folder_whose_data_cannot_be_made_says_what_to_do(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = home / "templates"
    shutil.copytree(init_module._TEMPLATES, templates)
    (templates / "maths/make_data.py.txt").write_text("raise SystemExit(3)")
    monkeypatch.setattr(init_module, "_TEMPLATES", templates)
    with pytest.raises(WinnowError, match=r"make_data.py failed, for the reason above; remove"):
        init_module.init_command(home / "mine", None, "maths")


@pytest.mark.parametrize("template", ["reward", "environment"])
def test_a_new_folder_for_a_model_trains_and_scores_as_its_commands_say(
    template: str, home: Path
) -> None:
    tokenizer = byte_level_bpe(["What is 11 + 10? End with the number."], chat=True)
    shape = {"vocab_size": len(tokenizer), "eos_token_id": 0, "max_position_embeddings": 1024}
    save(digits_model(**shape), tokenizer, home / "tiny")
    name = f"for tiny {template}"
    folder, (_, *commands) = init(home, name, "--model", "tiny", "--template", template)
    assert [*folder.glob("toy*"), *folder.glob("warm_up*")] == []
    for command in commands:
        more = ["trainer.steps=2", "sampling/filter=none"] if "train" in command else []
        more += ["reward.workers=0"] if template == "reward" else ["environment.workers=1"]
        winnow(folder, *shlex.split(command)[1:], *more).check()
    assert (folder / "runs/first/checkpoints/step-2/model/model.safetensors").is_file()


@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_commands_of_a_new_folder_teach_the_toy_model(template: str, home: Path) -> None:
    folder, (_, *commands, _) = init(home, template, "--template", template)
    # Half of the steps, where these suffice; the test and the evaluation are typed above.
    more = "" if template == "environment" else " trainer.steps=10"
    commands = [each + more * each.startswith("winnow train") for each in commands]
    place = {**os.environ, "PATH": f"{WINNOW.parent}:{os.environ['PATH']}", "PWD": str(folder)}
    place |= {"WINNOW_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    script = "set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "\n".join(commands)
    log = folder / "said.txt"
    with log.open("w") as file:
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=place, stdout=file, stderr=file
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    records = read_metrics(folder / "runs/first/metrics.jsonl")
    right = [v for r in records for key, v in r.items() if re.fullmatch("eval/.*/pass@1", key)]
    assert len(right) >= 3
    assert right[-1] - right[0] > 0.12


SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)
"""


def test_a_sweep_trains_each_combination_tells_failures_and_skips_what_is_done(
    home: Path, server: Server
) -> None:
    (home / "score.py").write_text(SCORE)
    words = ("train", "quickstart", *SMALL, "run.name=swept", "--multirun", "--jobs", "2")
    swept = ("optim.lr=1e-4,3e-4", "reward.function.path=score.py", "reward.workers=0")
    bad = winnow(home, *words, "optim.lr=1e-4,0")
    assert (bad.code, bad.err.count("\n")) == (2, 1)
    assert not (home / "runs/swept").exists()
    # A folder that holds something else: one run fails, the other is trained.
    (home / "runs/swept/lr=0.0003").mkdir(parents=True)
    (home / "runs/swept/lr=0.0003/mine.txt").touch()
    two = {"environment": {"WINNOW_CACHE": str(home / "cache")}, "spares": 2}
    said = in_forked_process(server, *words, *swept, folder=home, **two)
    assert said.code == 2
    assert "lr=0.0003 ended with exit code 2: winnow: run.name=lr=0.0003:" in said.out
    (home / "runs/swept/lr=0.0003/mine.txt").unlink()
    trained = (home / "runs/swept/lr=0.0001/metrics.jsonl").read_bytes()
    again = in_forked_process(server, *words, *swept, folder=home, **two).check()
    assert "2 runs in runs/swept, 1 already done" in again.out
    assert (home / "runs/swept/lr=0.0001/metrics.jsonl").read_bytes() == trained
    rows = json.loads(winnow(home, "compare", "runs/swept", "--json").check().out)
    assert [(row["run"], row["exit_code"], row["step"]) for row in rows] == [
        ("lr=0.0001", 0, 2), ("lr=0.0003", 0, 2),
    ]  # fmt: skip
    table = winnow(home, "compare", "runs/swept").check().out
    assert re.search(r"lr=0\.0003 +2 +\S+ % -> \S+ %", table)
