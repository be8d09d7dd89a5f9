"""An adapter's files, written by other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.small_models import digits_folder

WRITE = """
import sys
from pathlib import Path
import torch
from winnow.config.model import LoraAdapter
from winnow.data.sort_digits import build_tokenizer
from winnow.models.causal_lm import load_causal_lm
from winnow.models.lora import adapter_weights, adapter_writer, add_lora

model = load_causal_lm(sys.argv[1], torch.float32, torch.device("cpu"))
add_lora(model, LoraAdapter(rank=2), seed=0)
weights = {name: torch.ones_like(tensor) for name, tensor in adapter_weights(model)}
adapter_writer(model, build_tokenizer())(weights, Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_the_same_adapter_is_written_in_the_same_bytes_by_every_process(tmp_path: Path) -> None:
    base = digits_folder(tmp_path / "base")
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", WRITE, str(base), str(folder)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0]
    assert written[0] == written[1]
