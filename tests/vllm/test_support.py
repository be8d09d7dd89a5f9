"""The pairs of the support matrix with vLLM, in as many runs as the page lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.support import Matrix, covering_runs, runs_of
from tests.forked import Server
from tests.megatron_ranks import megatron_environment
from tests.pages import ROOT
from tests.support_runs import support_home, train_three_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUNS = runs_of((ROOT / "docs/support.md").read_text("utf-8"), "vllm")


@pytest.fixture(scope="module")
def trains() -> Iterator[Server]:
    """Starts processes that have imported vLLM, and answer for CUDA what megatron-core asks."""
    server = Server(environment=megatron_environment(), preloaded=["winnow.rollout.vllm.engine"])
    yield server
    server.close()


@pytest.fixture(scope="module")
def interprets() -> Iterator[Server]:
    """Starts processes in which the kernels of vLLM's runner that has routes run on a CPU."""
    preloaded = "tests.triton_on_cpu", "winnow.rollout.vllm.engine"
    server = Server(environment={"TRITON_INTERPRET": "1"}, preloaded=preloaded)
    yield server
    server.close()


def test_the_runs_are_those_of_the_page() -> None:
    assert covering_runs(Matrix(), "vllm") == RUNS


@pytest.mark.real
@pytest.mark.parametrize("run", RUNS, ids=range(1, len(RUNS) + 1))
def test_choices_train_together(
    run: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = "interprets" if "routing replay" in run else "trains"
    # Heads that vLLM's CPU kernels take.
    home = support_home(tmp_path, head_dim=32, hidden_size=32)
    train_three_steps(home, request.getfixturevalue(name), run)
