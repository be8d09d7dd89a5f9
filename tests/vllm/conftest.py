"""Small runs of the quickstart's task with heads that vLLM's CPU kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kill import LONGEST_S
from benchmarks.vllm_bits import VLLM, WIDE
from tests.fault.quick_lab import QuickLab
from tests.forked import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts processes that have imported everything, vLLM too."""
    server = Server(preloaded=["winnow.rollout.vllm.engine"])
    yield server
    server.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, server: Server) -> QuickLab:
    """A folder with the run `torch` of the torch engine, in the run's process."""
    lab = QuickLab(tmp_path_factory.mktemp("lab"), settings=WIDE, server=server)
    assert lab.start("torch").wait(LONGEST_S) == 0
    return lab


@pytest.fixture(scope="session")
def calm(lab: QuickLab) -> Path:
    """An undisturbed run of one vLLM engine; it imports everything itself."""
    assert lab.start("calm", VLLM, afresh=True).wait(LONGEST_S) == 0
    return lab.run("calm")
