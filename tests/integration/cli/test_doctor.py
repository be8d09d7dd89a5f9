"""`winnow doctor`: what it says is what is there."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.__main__ import CHECKS
from packaging.requirements import Requirement
from tests.sandboxes import (
    block_all,
    block_namespaces,
    block_nothing,
    need_bubblewrap,
    sandboxes_where,
)
from tests.unprivileged import permissions_apply
from typer.testing import CliRunner

from winnow.builders.preflight import has_bfloat16
from winnow.cli import doctor
from winnow.cli.doctor import Finding
from winnow.cli.main import app
from winnow.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def ask(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_machine_that_can_train_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_bubblewrap()
    cache = tmp_path / "cache"
    (cache / "a").mkdir(parents=True)
    (cache / "a" / "b").write_bytes(bytes(3 << 20))
    monkeypatch.setenv("WINNOW_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    code, said = ask("--runs", str(tmp_path / "new" / "runs"))
    assert code == 0
    lines = {line[7:26].strip(): line[28:] for line in said.splitlines() if line[:2] == "ok"}
    assert lines["python"].startswith(f"{platform.python_version()} at {sys.executable}, on Linux")
    assert lines["torch"].startswith(f"{torch.__version__}, built for ")
    assert lines["sandbox bubblewrap"].startswith("in use: ")
    assert ("bfloat16 " in said) == (not has_bfloat16() and not torch.cuda.is_available())
    assert re.search(r"^[\d,.]+ GiB in all, [\d,.]+ GiB free", lines["memory"])
    assert lines["runs"].startswith(f"{tmp_path}/new/runs (not created yet), ")
    assert lines["cache"] == f"{cache}, 3 MiB; safe to delete"
    assert lines["model cache"] == f"{tmp_path}/none, empty"
    assert said.splitlines()[-1].startswith("Ready to train")
    assert list(tmp_path.iterdir()) == [cache]  # nothing is left behind


def test_each_extra_is_there_or_told_how_to_get() -> None:
    found = {finding.name: finding for finding in doctor._check_packages()}
    told = metadata.metadata("winnow-rl").get_all("Provides-Extra") or []
    assert set(found) == {"packages"} | {f"extra {name}" for name in told} - {
        f"extra {name}" for name in ("all", "dev", "browser", "trackers", "serve", "dashboard")
    }
    for name in ("peft", "ray"):
        finding = found[f"extra {name}"]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            assert finding.state == "note"
            assert finding.text.startswith(f"{name} is missing")
            assert finding.remedy == f"pip install 'winnow-rl[{name}]'"
        else:
            assert finding.state == "ok"
            assert f"{name} {version}" in finding.text


BEHIND = {
    "megatron_core": "megatron",
    "mlflow_skinny": "mlflow",
    "sqlalchemy": "mlflow",  # loads both where a data base has its runs
    "alembic": "mlflow",
    "tensorboard": "torch.utils.tensorboard",
    "pillow": "PIL",
}
"""Modules that winnow imports, by the packages that they are of or cannot do without."""


def test_each_extra_installs_something_that_winnow_imports() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in extras.keys() - {"all", "dev", "browser", "trackers"}:
        for requirement in extras[name]:
            package = re.split(r"[\[>]", requirement)[0].replace("-", "_")
            package = BEHIND.get(package, package)
            assert re.search(rf"^ *(import|from) {package}\b", source, re.MULTILINE), requirement


def test_no_advice_names_the_other_project_of_the_package_index() -> None:
    theirs = re.compile(r"pip install [^\n`\"]*\bwinnow(?!-rl)\b")
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert [page.name for page in pages if theirs.search(page.read_text())] == []


def test_which_sandbox_holds_is_tried_and_the_reason_told() -> None:
    need_bubblewrap()
    both = sandboxes_where(block_nothing)
    assert [finding.state for finding in both] == ["ok", "ok"]
    assert both[1].text.startswith("works, unused because bubblewrap does, too")
    one = sandboxes_where(block_namespaces)
    assert [finding.state for finding in one] == ["note", "ok"]
    assert one[0].text.startswith("bwrap could not set the sandbox up")
    assert "sysctl user.max_user_namespaces" in one[0].remedy
    assert one[1].text.startswith("in use: ")
    none = sandboxes_where(block_all)
    assert [finding.name for finding in none] == [
        "sandbox bubblewrap", "sandbox landlock", "sandbox",
    ]  # fmt: skip
    assert none[1].text == "Landlock is off; version 3 (Linux 6.2) is needed"
    assert none[2].text == "none: recipes whose rewards run code are refused"
    assert {finding.state for finding in none} == {"note"}


def test_a_requirement_is_held_against_what_is_installed() -> None:
    said = f"numpy is {metadata.version('numpy')}, requires <1"
    wanted = {"numpy>=2": "", "numpy<1": said, "no-such-one>=1": "no-such-one is missing"}
    assert {words: doctor._unmet_reason(Requirement(words)) for words in wanted} == wanted


def test_where_no_run_could_be_written_it_is_a_fault(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    with permissions_apply():
        finding = doctor._check_runs_folder(closed / "runs")
    text = f"{closed} cannot be written: Permission denied"
    assert finding == Finding("runs", text, "set run.dir to a writable folder", is_fault=True)
    (tmp_path / "file").touch()
    code, said = ask("--runs", str(tmp_path / "file" / "runs"))
    assert code == 1
    assert (
        f"FAULT  runs                 {tmp_path}/file cannot be written: Not a directory\n" in said
    )
    assert said.splitlines()[-1] == "Fix what is marked FAULT (1), then run winnow doctor again."


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_gpu_checks_need_a_gpu_and_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["--gpu"], ["--gpu", "runs/first"], ["--gpu", "--json"]):
        assert isinstance(CliRunner().invoke(app, ["doctor", *words]).exception, ConfigError)
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "a" / "b" / "c" / "doctor.py"))
    with pytest.raises(ConfigError, match="an installed wheel does not contain"):
        doctor.check_gpu(tmp_path / "report.txt")


def test_a_report_of_gpu_checks_holds_their_figures_and_failures(tmp_path: Path) -> None:
    assert set(doctor._GPU_CHECKS) < CHECKS.keys()
    report = tmp_path / "report.txt"
    assert doctor.check_gpu(report, "machine", "head", "--cpu") == 0
    *lines, last = report.read_text().splitlines()
    figures = [json.loads(line) for line in lines if line.startswith("{")]
    assert {each["check"] for each in figures} == {"machine", "head"}
    assert last == "failed: none of 2 checks"


def test_a_torch_that_does_not_load_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so:\\ncannot open')")
    command = [sys.executable, "-m", "winnow.cli.main", "doctor", "--runs", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (1, "")
    assert "FAULT  torch                does not work: libtorch.so: cannot open\n" in run.stdout
    assert "-> reinstall it: pip install --force-reinstall" in run.stdout
    assert "sandbox" in run.stdout  # all else is looked at nevertheless


def test_a_containers_share_of_cores_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    for text, cores in (("max 100000\n", None), ("150000 100000\n", 1.5), ("", None)):
        file.write_text(text)
        assert doctor._cgroup_cores(str(file)) == cores
    assert doctor._cgroup_cores(str(tmp_path / "none")) is None
