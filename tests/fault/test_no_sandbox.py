"""A machine on which no sandbox holds: rewards that run code are refused before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sandboxes import block_all, need_bubblewrap
from tests.small_models import digits_folder


def refused(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of Winnow's where neither namespaces nor Landlock can be had."""
    return subprocess.run(
        [sys.executable, "-m", "winnow.cli.main", *words],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=block_all,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model, and rows whose answers are code."""
    digits_folder(tmp_path / "model")
    row = {
        "data_source": "mbpp",
        "prompt": [{"role": "user", "content": "123"}],
        "reward_model": {"ground_truth": json.dumps({"assert_case": ["assert f(1) == 1"]})},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_training_on_code_is_refused_before_it_begins(place: Path) -> None:
    need_bubblewrap()
    words = [
        "train", "dapo-math", "model.path=model", "data.train_files=[rows.jsonl]",
        'data.prompt_template={*:"{prompt}"}', "data.max_prompt_tokens=16",
        "rollout.max_response_tokens=8", "reward.overlong.enabled=false",
    ]  # fmt: skip
    said = refused(place, *words)
    assert said.returncode == 2, said.stderr
    (line,) = said.stderr.splitlines()
    assert line.startswith("winnow: no sandbox holds here, so no program is run. bubblewrap: bwrap")
    assert "; landlock: Landlock is off; version 3 (Linux 6.2) is needed. Install " in line
    # Nothing was written by the model, nor learned, and no run is left.
    assert not list(place.glob("runs/*"))


def test_trying_a_reward_runs_no_program_either(place: Path) -> None:
    need_bubblewrap()
    mark = place / "mark"
    mark.touch()
    mark.chmod(0o666)
    code = f"open({str(mark)!r}, 'w').write('escaped')"
    said = refused(place, "reward", "try", "rows.jsonl", "--answer", code)
    assert said.returncode == 2
    assert said.stderr.startswith("winnow: no sandbox holds here, so no program is run.")
    assert mark.read_text() == ""
