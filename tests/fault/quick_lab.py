"""Runs whose processes are forked from a server that has imported everything."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kill import SETTINGS, Lab
from tests.forked import Forked, Server

STARTERS = (
    *("trainer/strategy=", "trainer/mode=", "trainer.max_restarts=", "rollout/engine=vllm"),
    *("rollout.engine.processes=", "reward.processes=", "--multirun"),
)
"""Settings of a run that starts processes with models."""
SPARES = 6
"""More than any of these processes starts: three workers, or a child four times."""


@dataclass(frozen=True)
class QuickLab(Lab):
    """A lab whose runs are forked from a server; the undisturbed one was started afresh."""

    server: Server | None = None

    def start(  # type: ignore[override]
        self, name: str, *settings: str, afresh: bool = False
    ) -> Forked:
        """The command, in a process of its own; so are its child and its workers, if it has any.

        Args:
            afresh: these are started as usual, and import what they need.
        """
        assert self.server is not None
        starts_more = any(setting.startswith(STARTERS) for setting in settings) and not afresh
        return self.server.start(
            "winnow.cli.main",
            self.words(name, *settings),
            environment={"WINNOW_CACHE": str(self.folder / "cache")},
            spares=SPARES if starts_more else 0,
        )

    def words(self, name: str, *settings: str, runs: Path | None = None) -> list[str]:
        """What is typed after `winnow`; `runs` is to hold the run's folder."""
        where = f"run.dir={runs or self.folder / 'runs'}", f"run.name={name}"
        return ["train", "quickstart", *SETTINGS, *where, *self.settings, *settings]

    def start_in_python(self, name: str, *settings: str) -> Forked:
        """A process that calls `winnow.train`."""
        assert self.server is not None
        return self.server.start(
            __name__,
            self.words(name, *settings)[1:],
            environment={"WINNOW_CACHE": str(self.folder / "cache")},
            spares=SPARES,
        )


def main() -> None:
    """Train a recipe and settings, which are the words of the command line, from Python."""
    import winnow

    winnow.train(sys.argv[1], sys.argv[2:])
