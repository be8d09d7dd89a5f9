"""The import of megatron-core, in a process that has not imported it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.forked import Server

from winnow.errors import ConfigError
from winnow.models.megatron.mcore_import import check_installed, import_megatron


def main() -> None:
    """Import it on a CPU, and print the refusal."""
    assert "megatron.core" not in sys.modules
    try:
        import_megatron(torch.device("cpu"))
    except ConfigError as error:
        print(error)
    assert "megatron.core.tensor_parallel" in sys.modules


def test_without_a_gpu_one_line_refuses_and_no_warning_of_megatrons_is_seen(
    server: Server, tmp_path: Path
) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    assert server.start(__name__, [], environment=environment, out=out, err=err).wait() == 0
    said = out.read_text() + err.read_text()
    assert said.startswith("trainer/strategy=megatron needs GPUs")
    assert said.endswith(
        "choose trainer/strategy=fsdp2, or a machine with GPUs and run.device=auto\n"
    )
    assert said.count("\n") == 1


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
