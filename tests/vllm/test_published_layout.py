"""The published DAPO layout in small: ranks and engines over several GPUs on the same slots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kill import LONGEST_S, differences, wait_for
from benchmarks.published_layout import (
    ALONE,
    SIZES,
    STEPS,
    TOLERANCE,
    largest_difference,
    layout,
    ray_nodes,
    trained_answers,
    write_home,
)
from tests.forked import Forked, Server

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_home(folder)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Ray on two nodes, for two ranks and an engine each; its workers import what they need."""
    with ray_nodes(2, 2) as address:
        yield address


def start(server: Server, home: Path, name: str, *settings: str) -> Forked:
    words = "train", "dapo_qwen2.5_32b", *SIZES, *settings, f"run.name={name}"
    return server.start("winnow.cli.main", words, folder=home, spares=6)


def test_ranks_and_wide_engines_on_the_same_slots_learn_what_one_of_each_does(
    server: Server, home: Path, cluster: str
) -> None:
    assert start(server, home, "alone", *ALONE).wait(LONGEST_S) == 0
    there = *layout(2, 2), f"cluster.address={cluster}"
    assert start(server, home, "together", *there).wait(LONGEST_S) == 0
    alone, together = home / "runs/alone", home / "runs/together"
    assert trained_answers(alone) == trained_answers(together)
    differs, name = largest_difference(alone, together)
    assert differs <= TOLERANCE, name
    killed = start(server, home, "killed", *there)
    assert wait_for(killed, (home / "runs/killed/checkpoints/step-1").exists)  # type: ignore[arg-type]
    time.sleep(0.1)
    killed.kill()
    assert killed.wait(60) == -9
    assert start(server, home, "killed", *there).wait(LONGEST_S) == 0
    assert differences(together, home / "runs/killed", STEPS) == []
