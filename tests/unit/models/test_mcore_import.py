"""The import of megatron-core, and what tests answer it on a CPU, in processes started afresh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.megatron_ranks import megatron_environment

from winnow.errors import ConfigError
from winnow.models.mcore_import import check_installed

SAYS_NO_GPU = """
import sys, torch
from winnow.errors import ConfigError
from winnow.models.mcore_import import import_megatron
try:
    import_megatron(torch.device("cpu"))
except ConfigError as error:
    print(error)
assert "megatron.core.tensor_parallel" in sys.modules
"""
ANSWERS = """
import sys
assert sys.chained == 1 and "torch" not in sys.modules
import torch
try:
    torch.cuda.current_device()
except (AssertionError, RuntimeError):
    print("no GPU")
from winnow.models.mcore_import import import_megatron
import_megatron(torch.device("cpu"))
print(torch.cuda.current_device(), torch.cuda.is_available(), torch.zeros(2, device="cuda").device)
from tests.megatron_on_cpu import cuda_answers
zeros = torch.zeros
cuda_answers.install()
assert torch.cuda.current_device is cuda_answers._current_device and torch.zeros is zeros
"""


def run(code: str, **variables: str) -> str:
    """What a fresh process prints, errors and warnings included."""
    root = Path(__file__).parents[3]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=env, text=True, check=True, timeout=120, **streams).stdout


def test_without_a_gpu_one_line_refuses_and_no_warning_of_megatrons_is_seen() -> None:
    said = run(SAYS_NO_GPU)
    assert said.startswith("trainer/strategy=megatron computes on GPUs alone")
    assert said.endswith(
        "choose trainer/strategy=fsdp2, or a machine with GPUs and run.device=auto\n"
    )
    assert said.count("\n") == 1


def test_a_process_with_the_tests_folder_computes_on_the_cpu_from_megatrons_import_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.chained = 1\n")
    path = megatron_environment()["PYTHONPATH"] + os.pathsep + str(tmp_path)
    assert run(ANSWERS, PYTHONPATH=path) == "no GPU\ncpu False cpu\n"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (None, "needs megatron-core, which is not installed"),
        ("__version__ = '0.15.4'\n", "needs megatron-core 0.16.1 or newer, got 0.15.4"),
        ("__version__ = '0.16.1'\n", None),
        ("__version__ = '0.17.0rc0'\n", None),
    ],
)
def test_what_is_absent_or_too_old_is_refused_with_how_to_install_it(
    file: str | None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").write_text("")  # before the installed one
    if file is not None:
        (core / "package_info.py").write_text(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    if said is None:
        check_installed()
        return
    with pytest.raises(ConfigError, match=said) as error:
        check_installed()
    assert str(error.value).endswith("; pip install 'winnow-rl[megatron]'")
