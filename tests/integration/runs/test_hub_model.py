"""A model named as on the hub, read from a cache laid out as the hub's client does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.small_models import digits_model, save

from winnow.data.sort_digits import build_tokenizer

COMMIT = "0" * 40
LOAD = """
from winnow.config.load import load_recipe
from winnow.runs.build import use_machine
from winnow.runs.loading import load_policy

settings = ["warm_start=none", "model.path=owner/digits"]
config = load_recipe("quickstart", settings)
print(load_policy(config, "owner/digits", use_machine(config)).stop_ids)
"""


def test_answers_end_with_the_tokens_that_a_hub_model_names(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--digits"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    model = digits_model()
    model.generation_config.eos_token_id = [1, 7]
    save(model, build_tokenizer(), repository / "snapshots" / COMMIT)
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=tmp_path,
        env=os.environ
        | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "(1, 7)\n"), done.stderr
