"""A stranger's run folder: nothing in it runs unless the user says so, and files in it are told."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.bombs import Bomb
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.config.load import dump_config, load_recipe
from winnow.errors import CheckpointError, ConfigError, WinnowError
from winnow.models.causal_lm import load_causal_lm
from winnow.runs import checkpoint as module
from winnow.runs.checkpoint import (
    MANIFEST,
    Checkpoint,
    Manifest,
    Snapshot,
    checkpoints_in,
    load_state,
    save_checkpoint,
)
from winnow.runs.evaluate import EvalRequest, subject_of
from winnow.runs.export import run_export
from winnow.runs.resume import code_hashes, code_notes, opened_run

TRUSTING = "model.trust_remote_code=true"


def made(runs: Path, *overrides: str) -> Checkpoint:
    """A run's folder with a recipe and a checkpoint of step 3."""
    run = runs / "theirs"
    settings = [f"run.dir={runs}", "run.name=theirs", *overrides]
    config = load_recipe("quickstart", settings)
    with opened_run(config, "quickstart") as opened:
        text = dump_config(opened.config)
    (run / "metrics.jsonl").write_text('{"step":3}\n')
    manifest = Manifest(3, code=code_hashes(config))
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
@pytest.mark.parametrize("dump", [pickle.dumps, "torch"])
def test_a_pickle_in_any_file_of_a_checkpoint_does_not_run(
    name: str, dump: Callable[[object], bytes] | str, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    if callable(dump):
        content = dump(Bomb(mark))
    else:
        torch.save(Bomb(mark), tmp_path / "bomb.pt")
        content = (tmp_path / "bomb.pt").read_bytes()
    checkpoint = spoilt(made(tmp_path / "runs"), name, content)
    with pytest.raises(WinnowError, match=r"cannot be read|cannot load"):
        read_all(checkpoint)
    assert not mark.exists()


def test_pickled_weights_beside_a_model_without_others_do_not_run(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "runs")
    (checkpoint.model / "model.safetensors").unlink()
    mark = tmp_path / "ran"
    torch.save({"lm_head.weight": Bomb(mark)}, checkpoint.model / "pytorch_model.bin")
    with pytest.raises(Exception, match=r".+"):
        load_causal_lm(str(checkpoint.model), torch.float32, torch.device("cpu"))
    assert not mark.exists()


def test_a_checkpoint_with_a_pickle_gets_one_line(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "runs")
    told = json.loads((checkpoint.path / MANIFEST).read_text())
    (checkpoint.path / MANIFEST).write_text(json.dumps(told | {"format": 3}))
    with pytest.raises(CheckpointError, match="has format 3, this version reads 4; use") as caught:
        load_state(checkpoint)
    assert "\n" not in str(caught.value)


def asked(checkpoint: Checkpoint, *more: str) -> None:
    subject_of(EvalRequest(str(checkpoint.path.parent.parent), overrides=more))


def test_a_recipe_that_trusts_remote_code_is_trusted_only_when_the_user_says_so(
    tmp_path: Path,
) -> None:
    checkpoint = made(tmp_path / "runs", TRUSTING)
    run = checkpoint.path.parent.parent
    refused = in_this_process("resume", str(run), folder=tmp_path)
    assert refused.code == 2
    assert f"{run} has model.trust_remote_code=true in its recipe" in refused.err
    assert "say so with model.trust_remote_code=true" in refused.err
    with pytest.raises(ConfigError, match="trust_remote_code=true in its recipe"):
        asked(checkpoint)
    asked(checkpoint, TRUSTING)
    base = digits_folder(tmp_path / "base")
    adapter = json.dumps({"base_model_name_or_path": str(base)}).encode()
    spoilt(checkpoint, "model/adapter_config.json", adapter)
    with pytest.raises(ConfigError, match=r"say so with --trust-remote-code"):
        run_export(str(run), str(tmp_path / "out"), None)
    assert not (tmp_path / "out").exists()


SCORER = "def compute_score(**_):\n    return 1.0\n"


def test_a_users_file_that_changed_or_lies_in_the_runs_folder_is_told_on_resuming(
    tmp_path: Path,
) -> None:
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
        f"Warning: reward.function.path={mine} is not what it was when the checkpoint was made: "
        "the run goes on with what it says now"
    ]
    fork = load_recipe(
        str(checkpoint.path / "config.yaml"), ["run.name=b", f"run.fork={runs}/theirs"]
    )
    with opened_run(fork, "quickstart") as opened:
        assert [each for each in opened.notes if each in notes()] == notes()
    mine.unlink()  # told where it is loaded
    assert notes() == []
    shutil.rmtree(runs)
    theirs = runs / "theirs" / "evil.py"
    checkpoint = made(runs, f"sampling.filter={{name: custom, path: '{theirs}:keep'}}")
    config = load_recipe(str(checkpoint.path / "config.yaml"))
    assert notes() == [
        f"Warning: sampling.filter.path={theirs} lies in the run's folder: its code runs now, with "
        "your permissions; stop here if you do not know whose it is"
    ]
    assert code_notes(config, tmp_path / "elsewhere", {}) == []
