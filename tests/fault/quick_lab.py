"""Runs whose processes are forked from a server that has imported everything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kill import SETTINGS, Lab
from tests.forked import Forked, Server
from tests.pauses import ask, wait_for_pause

STARTERS = (
    *("trainer/strategy=", "trainer/mode=", "trainer.max_restarts=", "rollout/engine=vllm"),
    *("rollout.engine.processes=", "reward.processes=", "critic/strategy=", "--multirun"),
    "reward/judge=engine",
)
"""Settings of a run that starts processes with models."""
SPARES = 6
"""More than any of these processes starts: three workers, or a child four times."""


@dataclass(frozen=True)
class QuickLab(Lab):
    """A lab whose runs are forked from a server; the undisturbed one was started afresh."""

    server: Server | None = None

    def start(  # type: ignore[override]
        self,
        name: str,
        *settings: str,
        afresh: bool = False,
        pauses: Mapping[int | str, float] | None = None,
        terminal: Path | None = None,
        out: Path | None = None,
        err: Path | None = None,
    ) -> Forked:
        """The command, in a process of its own; so are its child and its workers, if it has any.

        Args:
            afresh: these are started as usual, and import what they need.
            pauses: moments at which the run stands still (`tests.pauses`).
            terminal: where it is the first process.
            out, err: files for standard output and error.
        """
        assert self.server is not None
        paused = ask(self._pauses(name), pauses) if pauses else {}
        starts_more = any(setting.startswith(STARTERS) for setting in settings) and not afresh
        return self.server.start(
            "winnow.cli.main" if terminal is None else "tests.fault.terminal",
            self.words(name, *settings),
            environment={"WINNOW_CACHE": str(self.folder / "cache"), **paused},
            out=terminal or out,
            err=terminal or err,
            spares=SPARES if starts_more else 0,
        )

    def stands_still(self, process: Forked, name: str, moment: int | str) -> int:
        """Wait until a run stands still; the process of it that does."""
        return wait_for_pause(self._pauses(name), moment, process.poll)

    def _pauses(self, name: str) -> Path:
        return self.folder / "pauses" / name

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
