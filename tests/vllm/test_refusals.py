"""What vLLM refuses is told in one line with the key and the remedy; nothing of a run is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from benchmarks.kill import code_of, wait_for
from benchmarks.vllm_bits import VLLM
from tests.fault.quick_lab import QuickLab
from tests.forked import Server
from tests.processes import descendants, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WANTED = {
    "option": "rollout.engine.extra.enforce_eagr is no option of vLLM ",
    "value": "block_size",
    "architecture": "Model architectures ['MineForCausalLM'] are not supported",
    "windows": "Sliding window for some but all layers is not supported",
    "heads": "rollout.engine.tensor_parallel=2 does not divide the 3 attention heads of ",
    "too little memory": "rollout.engine.cache_gib=0.001 holds not one answer of 4096 tokens",
    "too much memory": "rollout.engine.cache_gib=10000 is more than the ",
    "routes": "is refused by vLLM 0.32.0: Model Runner V2 requires Triton; set it to false, ",
    "head size": "vLLM's CPU kernels do not take heads of size 16, but 32, 64, ",
}


def told_by_winnow(said: Path) -> list[str]:
    """Lines of a run's standard error; Triton tells there that a forked process keeps objects."""
    lines = said.read_text().splitlines()
    return [line for line in lines if not line.startswith((" - ", "nanobind: ", "See https:"))]


@pytest.fixture(scope="module")
def told(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("refusals")
    out = home / "out"
    assert server.start("tests.vllm.refusals", [str(home)], out=out).wait(240) == 0
    return dict(json.loads(out.read_text().splitlines()[-1]))


@pytest.mark.parametrize("name", WANTED)
def test_what_vllm_refuses_is_told_in_one_line(name: str, told: dict[str, str]) -> None:
    assert WANTED[name] in told[name]
    assert "\n" not in told[name]
    assert "Traceback" not in told[name]


def test_an_engine_that_dies_while_it_starts_ends_the_run_with_one_line(
    server: Server, lab: QuickLab, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    cache = {"WINNOW_CACHE": str(lab.folder / "cache")}
    words = lab.words("stillborn", VLLM)
    run = server.start("winnow.cli.main", words, environment=cache, err=said, spares=2)

    def engines() -> list[int]:
        # A spare that became a worker is called like its module (`tests.spares`).
        return [pid for pid, line in descendants(run.pid).items() if line[:6] == "child\n"]

    assert wait_for(run, lambda: bool(engines()))  # type: ignore[arg-type]
    (engine,) = engines()
    time.sleep(0.2)
    os.kill(engine, signal.SIGKILL)
    assert code_of(run, 120) == 1  # type: ignore[arg-type]
    (line,) = told_by_winnow(said)
    assert line.startswith("winnow: engine 0[0] was killed by SIGKILL")
    assert line.endswith("see its last lines in the log")
    assert gone({engine})
