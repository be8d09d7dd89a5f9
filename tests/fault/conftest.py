"""A small run of the quickstart's task, undisturbed, that tests of this folder compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from benchmarks.kill import SETTINGS, Lab
from tests.forked import Forked, Server


@dataclass(frozen=True)
class QuickLab(Lab):
    """A lab whose runs are forked from a server; the undisturbed one was started afresh."""

    server: Server | None = None

    def start(self, name: str, *settings: str) -> Forked:  # type: ignore[override]
        """The command, in a process of its own."""
        assert self.server is not None
        where = f"run.dir={self.folder / 'runs'}", f"run.name={name}"
        return self.server.start(
            "winnow.cli",
            ["train", "quickstart", *SETTINGS, *where, *self.settings, *settings],
            environment={"WINNOW_CACHE": str(self.folder / "cache")},
        )


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts processes that have imported everything."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Lab:
    """A folder with a warm start and an undisturbed run."""
    fresh = Lab(tmp_path_factory.mktemp("lab")).undisturbed()
    quick = QuickLab(fresh.folder, server=server)
    # How long a run takes tells when to kill it; a forked one does not import.
    return replace(quick, seconds=fresh.seconds)
