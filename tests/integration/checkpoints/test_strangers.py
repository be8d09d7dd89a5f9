"""A stranger's run folder: what docs/resume.md says of it, a test a row of its table."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.bombs import Bomb
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.builders.preflight import startup_notes
from winnow.checkpoints import checkpoint as module
from winnow.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    Manifest,
    Snapshot,
    checkpoints_in,
    load_state,
    save_checkpoint,
)
from winnow.checkpoints.opening import code_hashes, opened_run, user_code_files
from winnow.checkpoints.strangers import MARK, is_local_run, mark_as_local
from winnow.commands.evaluate import EvalRequest, resolve_setup
from winnow.commands.export import run_export
from winnow.config.load import dump_config, load_recipe, parse_recipe
from winnow.config.roles import Roles
from winnow.errors import ConfigError, ModelError, WinnowError
from winnow.models.causal_lm import load_causal_lm
from winnow.observe.files import AppendFile, write_atomic

TRUSTING = "model.trust_remote_code=true"


def made(runs: Path, *overrides: str) -> Checkpoint:
    """A run's folder with a recipe and a checkpoint of step 3."""
    run = runs / "theirs"
    settings = [f"run.dir={runs}", "run.name=theirs", *overrides]
    config = load_recipe("quickstart", settings)
    with opened_run(config, "quickstart") as opened:
        text = dump_config(opened.config)
    (run / "metrics.jsonl").write_text('{"step":3}\n')
    manifest = Manifest(3, code=code_hashes(user_code_files(config)))
    snapshot = Snapshot({"x": torch.ones(3)}, lambda path: [digits_folder(path), None][1])
    return save_checkpoint(run / "checkpoints", manifest, snapshot, text)


def spoilt(checkpoint: Checkpoint, name: str, content: bytes) -> Checkpoint:
    """A file of a checkpoint replaced, with a manifest that says so: sums prove no origin."""
    path = checkpoint.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    told = json.loads((checkpoint.path / MANIFEST).read_text())
    told["files"][name] = {"bytes": len(content), "sha256": module._sha256(path)}
    entries = {key: value for key, value in told.items() if key not in ("format", "sha256")}
    told["sha256"] = module._digest(entries)
    (checkpoint.path / MANIFEST).write_text(json.dumps(told))
    return checkpoint


def read_all(checkpoint: Checkpoint) -> None:
    """Everything that resuming, evaluating and exporting read of a checkpoint."""
    load_causal_lm(str(checkpoint.model), torch.float32, torch.device("cpu"))
    load_state(checkpoint)


@pytest.mark.parametrize(
    "name", ["state.json", "state.safetensors", "model/model.safetensors", "ranks/.metadata"]
)
def test_a_pickle_in_any_file_of_a_checkpoint_does_not_run(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    checkpoint = spoilt(made(tmp_path / "runs"), name, pickle.dumps(Bomb(mark)))
    with pytest.raises(WinnowError, match=r"cannot be read|cannot load"):
        read_all(checkpoint)
    assert not mark.exists()


def test_pickled_weights_beside_a_model_without_others_do_not_run(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "runs")
    (checkpoint.model / "model.safetensors").unlink()
    mark = tmp_path / "ran"
    torch.save({"lm_head.weight": Bomb(mark)}, checkpoint.model / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\A[^\n]*cannot load its weights: [^\n]*\Z"):
        load_causal_lm(str(checkpoint.model), torch.float32, torch.device("cpu"))
    assert not mark.exists()


def bare(folder: Path, *overrides: str) -> Path:
    """A stranger's run as far as a command reads it before it asks: the recipe, and a log."""
    folder.mkdir(parents=True)
    (folder / "log.txt").touch()
    text = dump_config(parse_recipe("quickstart", ["run.name=theirs", *overrides]))
    (folder / "config.yaml").write_text(text)
    return folder


REMOTE = ("reward/manager=remote", "reward.manager.url=http://127.0.0.1:9/")
JUDGE = ("reward/judge=openai", "reward.judge.model=m", "reward.judge.base_url=http://127.0.0.1:9")
RAY = ("cluster=ray", "reward.processes=1")
TASK = ("data.task={name: custom, path: 'evil:f'}", "warm_start=none", "model.path=m")
HTTP = ("rollout/engine=http", "rollout.engine.url=[http://127.0.0.1:9]", "run.deterministic=false")
CHAT = "data.chat_template='{{ messages }}'"
REACHING = {
    "code": [
        ("reward.function.path", "reward.function.path=evil.pyc"),
        ("reward.function.path", "reward.function.path='evil\\n.py'", "observe.console=off"),
        ("sampling.filter.path", "sampling.filter={name: custom, path: 'evil:keep'}"),
        ("algorithm.policy_loss.path", "algorithm.policy_loss={name: custom, path: 'evil:f'}"),
        ("algorithm.advantage.path", "algorithm.advantage={name: custom, path: 'evil:f'}"),
        ("data.task.path", *TASK),
        ("data.sampler", "data.sampler=evil:Sampler"),
        ("rollout.engine.path", "rollout.engine={name: custom, path: 'evil:f'}"),
        ("rollout.engine.extra", "rollout/engine=vllm", "rollout.engine.extra={load_format: x}"),
        ("reward.manager.path", "reward.manager={name: custom, path: 'evil:f'}"),
        ("observe.sinks.0.path", "observe.sinks=[{path: 'evil:f'}]"),
        ("environment.path", "environment={name: custom, path: 'evil:f'}", CHAT),
        ("environment.tools", "environment={name: tools, tools: [python, 'evil:f']}", CHAT),
        ("environment.tools", "environment={name: tools, tools: ['winnow.boxed:f']}", CHAT),
        ("model.trust_remote_code", TRUSTING),
    ],
    "program": [
        ("reward.sandbox.python", "reward.sandbox.python=/tmp/evil"),
        ("cluster.runtime_env.py_executable", *RAY, "cluster.runtime_env.py_executable=evil"),
        ("cluster.runtime_env.worker_process_setup_hook", *RAY,
         "cluster.runtime_env.worker_process_setup_hook=evil.f"),
        ("cluster.runtime_env.working_dir", *RAY, "cluster.runtime_env.working_dir=http://evil/a.zip"),
        ("cluster.runtime_env.pip", *RAY, "cluster.runtime_env.pip=[evil]"),
        ("cluster.runtime_env.env_vars", *RAY, "cluster.runtime_env.env_vars={LD_PRELOAD: e.so}"),
        ("cluster.environment", *RAY, "cluster.environment={PYTHONPATH: /tmp}"),
    ],
    "address": [
        ("reward.manager.url", *REMOTE),
        ("reward.judge.base_url", *JUDGE),
        ("reward.sandbox.url", "reward/sandbox=fusion", "reward.sandbox.url=http://127.0.0.1:9"),
        ("rollout.engine.url", *HTTP),
        ("trainer.checkpoint_url", "trainer.checkpoint_url=file:///tmp/evil"),
        ("cluster.address", *RAY, "cluster.address=127.0.0.1:9"),
        ("observe.mlflow.uri", "observe.mlflow.uri=http://127.0.0.1:9"),
        ("observe.wandb.entity", "observe.wandb.entity=evil"),
        ("observe.trackio.space_id", "observe.trackio.space_id=evil/space"),
        ("observe.swanlab.workspace", "observe.swanlab.workspace=evil"),
    ],
    "place": [
        ("trainer.profile.save_path", "trainer.profile.save_path=/tmp/evil"),
        ("model.cache_dir", "model.cache_dir=/tmp/evil"),
        ("warm_start.cache_dir", "warm_start.cache_dir=/tmp/evil"),
        ("observe.tensorboard.dir", "observe.tensorboard.dir=/tmp/evil"),
        ("cluster.timeline_file", *RAY, "cluster.timeline_file=/tmp/evil"),
        ("cluster.init.temp_dir", *RAY, "cluster.init.temp_dir=/tmp/evil"),
    ],
    "secret": [("reward.function.kwargs.key", "reward.function.kwargs.key='${oc.env:PATH}'")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "overrides"),
    [pytest.param(k, o, id=f"{row}-{k}") for row, all_ in REACHING.items() for k, *o in all_],
)
def test_a_strangers_setting_is_refused_by_its_field(
    key: str, overrides: list[str], tmp_path: Path
) -> None:
    run = bare(tmp_path / "theirs", *overrides)
    said = in_this_process("resume", "theirs", folder=tmp_path)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"winnow: theirs/config.yaml: {key}=")
    assert said.err.endswith("this machine; if you trust its author, add --trust\n")
    assert said.err.count("\n") == 1
    assert sorted(os.listdir(run)) == ["config.yaml", "log.txt"]


@pytest.mark.parametrize(
    "command",
    [
        "train theirs/config.yaml run.name=new",
        "train theirs/config.yaml run.name=new trainer.max_restarts=3",
        "resume theirs trainer.max_restarts=3",
        "sft theirs/config.yaml",
        "plan theirs/config.yaml",
        "check-engine theirs/config.yaml model.path=m",
        "reward try --recipe theirs/config.yaml --truth 1 --answer 1 --tokens 1",
        # With a recipe of the user's own, a model's code is what the folder can bring.
        "train mine.yaml run.name=theirs run.dir=.",
        "train mine.yaml run.resume=theirs",
        "train mine.yaml run.name=new run.fork=theirs@3",
    ],
)
def test_every_command_that_runs_a_strangers_recipe_asks(command: str, tmp_path: Path) -> None:
    run = bare(tmp_path / "theirs", TRUSTING)
    shutil.copy(run / "config.yaml", tmp_path / "mine.yaml")
    said = in_this_process(*command.split(), folder=tmp_path)
    assert said.code == 2
    assert said.err.startswith("winnow: theirs/config.yaml: model.trust_remote_code=true runs ")
    assert not (tmp_path / "runs").exists()


def test_eval_and_export_of_a_strangers_run_ask(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "runs", TRUSTING)
    run = checkpoint.path.parent.parent
    request = EvalRequest(str(run))
    resolve_setup(request)  # begun here: needs no leave
    (run / MARK).unlink()
    refused = "config.yaml: model.trust_remote_code=true runs Python code"
    for model in (run, checkpoint.path):
        with pytest.raises(ConfigError, match=refused):
            resolve_setup(EvalRequest(str(model)))
    resolve_setup(EvalRequest(str(run), trusts=True))
    resolve_setup(EvalRequest(str(run), overrides=(TRUSTING,)))
    base = digits_folder(tmp_path / "base")
    adapter = json.dumps({"base_model_name_or_path": str(base)}).encode()
    spoilt(checkpoint, "model/adapter_config.json", adapter)
    with pytest.raises(ConfigError, match=refused):
        run_export(str(run), str(tmp_path / "out"), None)
    assert not (tmp_path / "out").exists()


def test_a_run_is_this_users_where_it_was_begun_or_once_it_was_trusted(tmp_path: Path) -> None:
    run = made(tmp_path / "runs", "reward.function.path=gone.py").path.parent.parent
    gone = "reward.function.path gone.py: no such file"  # what comes after the question of trust
    assert gone in in_this_process("resume", str(run), folder=tmp_path).err
    copy, moved = run.with_name("copy"), run.with_name("moved")
    shutil.copytree(run, copy)
    asks = f"{copy}/config.yaml: reward.function.path='gone.py' runs Python code"
    assert asks in in_this_process("resume", str(copy), folder=tmp_path).err
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "another-machine")}
    there = in_this_process("resume", str(run), folder=tmp_path, environment=elsewhere)
    assert f"{run}/config.yaml: reward.function.path" in there.err
    assert gone in in_this_process("resume", str(copy), "--trust", folder=tmp_path).err
    assert gone in in_this_process("resume", str(copy), folder=tmp_path).err
    run.rename(moved)
    assert is_local_run(moved)
    key = Path(os.environ["XDG_STATE_HOME"]) / "winnow" / "runs.key"
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_copy_that_is_fetched_from_where_the_user_says_is_his(tmp_path: Path) -> None:
    run = made(tmp_path / "runs").path.parent.parent
    shutil.copytree(run, tmp_path / "away" / "theirs", ignore=shutil.ignore_patterns(".*"))
    shutil.rmtree(run)
    url = f"trainer.checkpoint_url=file://{tmp_path}/away"
    config = load_recipe("quickstart", [f"run.dir={tmp_path}/runs", "run.name=theirs", url])
    with opened_run(config, "quickstart") as opened:
        assert opened.checkpoint is not None
    assert is_local_run(run)
    assert f"Each checkpoint is copied to file://{tmp_path}/away (trainer.checkpoint_url)" in (
        startup_notes(Roles(config), config.trainer.checkpoint_url)
    )


@pytest.mark.parametrize("name", ["log.txt", "rollouts", "checkpoints/step-3/model/a", "pipe"])
def test_a_strangers_links_and_pipes_are_refused(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-9.parquet").write_text("mine")
    run = made(tmp_path / "runs").path.parent.parent
    (run / MARK).unlink()
    (run / name).unlink(missing_ok=True)
    if name == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(outside if name == "rollouts" else outside / "step-9.parquet")
    config = run / "config.yaml"
    for words in (
        ("resume", str(run)),
        ("train", "quickstart", f"run.resume={run}"),
        ("train", "quickstart", f"run.fork={run}@3"),
    ):
        said = in_this_process(*words, folder=tmp_path)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert said.err.startswith(
            f"winnow: {config}: {run / name} is not a regular file or folder,"
        )
    if name != "checkpoints/step-3/model/a":  # which is no file of the checkpoint's either
        with pytest.raises(ConfigError, match="is not a regular file or folder"):
            run_export(str(run), str(tmp_path / "out"), None)
    assert (outside / "step-9.parquet").read_text() == "mine"


def test_a_link_in_the_place_of_a_runs_file_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("mine")
    for name in ("log.txt", "config.yaml.partial", MARK):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(WinnowError, match=r"cannot write .*log.txt"):
        AppendFile(tmp_path / "log.txt")
    with pytest.raises(WinnowError, match=r"cannot write .*config.yaml"):
        write_atomic(tmp_path / "config.yaml", b"theirs")
    with pytest.raises(WinnowError, match=rf"cannot write .*{MARK}"):
        mark_as_local(tmp_path)
    assert not is_local_run(tmp_path)
    assert target.read_text() == "mine"


def test_a_strangers_words_reach_the_terminal_without_escape_codes(tmp_path: Path) -> None:
    run = bare(tmp_path / "th\x1b[2Jeirs", "run.description=['\x1b]0;title\x07']")
    row = {"prompt": "1 + 1?", "answer": "2", "data_source": "\x1b[2J"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for words in (
        ("train", f"{run}/config.yaml", "--help-config", "run.description"),
        ("train", "\x1b[31mred.yaml"),
        ("ledger", "check", str(run)),
        ("resume", str(run), "a.b=\x1b[1m"),
        ("export", str(run), "out"),
        ("data", "check", "rows.jsonl"),
    ):
        said = in_this_process(*words, folder=tmp_path)
        assert re.search(r"\\(x|u00)1b", said.out + said.err)
        assert "\x1b" not in said.out + said.err
    said = in_this_process("train", "https://me:secret@host/a.yaml", folder=tmp_path)
    assert "secret" not in said.err


SCORER = "def compute_score(**_):\n    return 1.0\n"


def test_a_users_file_that_changed_is_told_on_resuming(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(SCORER)
    runs = tmp_path / "runs"
    checkpoint = made(runs, f"reward.function.path={mine}")
    config = load_recipe(str(checkpoint.path / "config.yaml"))

    def notes() -> list[str]:
        with opened_run(config, "quickstart") as opened:
            assert checkpoints_in(opened.folder.checkpoints) == [checkpoint]
            return [note for note in opened.notes if "Continuing" not in note]

    assert notes() == []
    mine.write_text(SCORER.replace("1.0", "2.0"))
    assert notes() == [
        f"Warning: reward.function.path={mine} has changed since the checkpoint was saved: the run "
        "uses the current file"
    ]
    fork = load_recipe(
        str(checkpoint.path / "config.yaml"), ["run.name=b", f"run.fork={runs}/theirs"]
    )
    with opened_run(fork, "quickstart") as opened:
        assert [each for each in opened.notes if each in notes()] == notes()
    mine.unlink()  # told where it is loaded
    assert notes() == []
