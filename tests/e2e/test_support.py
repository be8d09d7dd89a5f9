"""The support matrix: it is the rules', what it refuses is refused, what it supports trains."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from benchmarks.support import (
    CHOICES,
    FAST_RUNS,
    Matrix,
    completed,
    covering_runs,
    page,
    runs_of,
    settings_of,
)
from tests.forked import Server
from tests.megatron_ranks import megatron_environment
from tests.pages import ROOT
from tests.ray_nodes import RayWorkers
from tests.support_runs import support_home, train_three_steps
from tests.winnow_command import in_this_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = (ROOT / "docs/support.md").read_text("utf-8")
RUNS = runs_of(PAGE, "cpu")
FAST = [run for run in RUNS if not any(CHOICES[name].slow for name in run)][:FAST_RUNS]
REAL = [run for run in RUNS if run not in FAST and "ray" not in run]
ON_RAY = [run for run in RUNS if "ray" in run]


def label(run: tuple[str, ...]) -> str:
    return str(RUNS.index(run) + 1)


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix()


@pytest.fixture(scope="module")
def trains() -> Iterator[Server]:
    """Starts processes that compute on the CPU what megatron-core asks of CUDA."""
    server = Server(environment=megatron_environment(), preloaded=("megatron.core",))
    yield server
    server.close()


@pytest.fixture(scope="module")
def cluster(trains: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("w")
    with RayWorkers(trains, folder).nodes({"num_cpus": 5}) as address:
        yield address


def test_the_page_is_what_the_rules_say(matrix: Matrix) -> None:
    assert page(matrix) == PAGE, "python -m benchmarks.support > docs/support.md"


def test_the_runs_hold_every_supported_pair_of_a_cpu(matrix: Matrix) -> None:
    assert covering_runs(matrix, "cpu") == RUNS
    covered = {pair for run in RUNS for pair in combinations(run, 2)}
    for pair, lines in matrix.refusals.items():
        if {CHOICES[name].runner for name in pair} == {"cpu"}:
            assert (pair in covered) == (not lines), pair


def test_a_refused_pair_is_refused_in_its_one_line(matrix: Matrix, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("trainer: {steps: 3}\n")
    refused = {pair: lines for pair, lines in matrix.refusals.items() if lines}
    assert refused
    for pair, (line, *more) in refused.items():
        assert not more, pair
        words = "train", "small.yaml", *settings_of(completed(pair))
        outcome = in_this_process(*words, folder=tmp_path)
        assert (outcome.code, outcome.err) == (2, f"winnow: {line}\n"), pair
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize("run", FAST, ids=label)
def test_choices_train_together(run: tuple[str, ...], trains: Server, tmp_path: Path) -> None:
    train_three_steps(support_home(tmp_path), trains, run)


@pytest.mark.real
@pytest.mark.parametrize("run", REAL, ids=label)
def test_all_choices_train_together(run: tuple[str, ...], trains: Server, tmp_path: Path) -> None:
    train_three_steps(support_home(tmp_path), trains, run)


@pytest.mark.real
@pytest.mark.parametrize("run", ON_RAY, ids=label)
def test_all_choices_train_together_on_ray(
    run: tuple[str, ...], trains: Server, cluster: str, tmp_path: Path
) -> None:
    train_three_steps(support_home(tmp_path), trains, run, f"cluster.address={cluster}")
