"""A small run of the quickstart's task, undisturbed, that tests of this folder compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from benchmarks.kill import LONGEST_S, Lab
from tests.fault.quick_lab import QuickLab
from tests.fault.small_disk import namespace, why_not
from tests.forked import Server


@pytest.fixture(scope="session")
def mounting() -> Iterator[Server]:
    """Starts processes that have imported everything, and see mounts of their own."""
    server = Server(*namespace())
    yield server
    server.close()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Starts processes that have imported everything."""
    if os.geteuid() == 0 and why_not() is None:  # whoever may mount is the same user there
        yield request.getfixturevalue("mounting")
        return
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Lab:
    """A folder with a warm start and an undisturbed run."""
    fresh = Lab(tmp_path_factory.mktemp("lab"))
    quick = QuickLab(fresh.folder, server=server)
    assert quick.start("warm-up", "trainer.steps=1").wait(LONGEST_S) == 0
    # How long a run takes tells when to kill it; a forked one does not import.
    return replace(quick, seconds=fresh.timed().seconds)
