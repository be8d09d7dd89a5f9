"""Every check of `benchmarks.gpu` runs on a CPU, at tiny sizes; its figures say nothing."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.__main__ import CHECKS, main
from benchmarks.gpu.fake_cuda import main as learn_on_fakes
from benchmarks.gpu.harness import ON_CPU

pytestmark = pytest.mark.real
UPDATE, RUN = {"update", "old log-probs"}, {"run"}
FIGURES = {
    "machine": {"machine", "required", "optional", "attention in bf16"},
    "tests": {"tests"},
    "gradients": {"error against fp32 on a CPU", "the same update twice", "state loaded again"},
    "mismatch": {"engine against trainer, nats"},
    "update": {*UPDATE, "kernels"},
    "update-compiled": UPDATE,
    "update-long": {*UPDATE, "kernels"},
    "update-long-compiled": UPDATE,
    "update-stored": {*UPDATE, "kernels"},
    "update-attention": {*UPDATE, "kernels"},
    "shared-prompts": {"update", "difference of gradients"},
    "head": {"log-probs", "products"},
    "kernel": {"compiled" if find_spec("triton") else "failed"},
    "fp32": RUN,
    "bf16": RUN,
    "one-step-off": RUN,
    "deterministic": RUN | {"two runs"},
    "ranks": RUN,
    "offload": RUN,
    "publish": {
        *("buckets through the host", "checksums", "copies on the device", "CRC-32 on a core"),
        *("weighted sum on the device", "device to host", "device to pinned"),
        "to another process",
    },
    "memory": {"after an update", "after empty_cache"},
    "decode": {"draw", "torch engine"},
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.usefixtures("forked_workers")
def test_a_check_reports_its_figures(
    check: str, tmp_path: Path, warm_starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINNOW_CACHE", str(warm_starts))
    # Traced all the same; code in C++ takes a minute of CPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    is_failed = main([check, "--cpu", "--out", str(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert {line["figure"] for line in lines} == FIGURES[check]
    assert {(line["check"], line["device"]) for line in lines} == {(check, ON_CPU)}
    # No Triton comes with PyTorch for CPUs.
    errors = [line["error"] for line in lines if "error" in line]
    assert is_failed == len(errors) == FIGURES[check].issuperset({"failed"})
    assert all("No module named 'triton'" in error for error in errors)


def test_several_checks_run_in_a_process_each_and_those_that_fail_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "figures.jsonl").mkdir()
    assert main(["machine", "head", "--cpu", "--out", str(tmp_path)]) == 1
    out, err = capfd.readouterr()
    assert {json.loads(line)["check"] for line in out.splitlines()} == {"machine", "head"}
    assert "failed: machine, head of 2 checks" in err


def test_fake_tensors_tell_where_the_host_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert learn_on_fakes(["--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["dtype"] for line in lines} == {"bfloat16", "float32"}
    for line in lines:
        reads = line["host_reads"]
        assert reads["forward"] == reads["export_weights"] == reads["load_state_dict"] == []
        assert len(reads["forward_backward"]) == len(reads["optimizer_step"]) == 1
