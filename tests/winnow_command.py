"""Running `winnow` as a user does: in a process of its own, or, much faster, in this one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.kill import SETTINGS

from winnow.checkpoints.checkpoint import checkpoints_in
from winnow.commands import train as session
from winnow.observe.files import write_atomic

if TYPE_CHECKING:
    from tests.forked import Server

WINNOW = Path(sys.executable).with_name("winnow")
"""The installed command."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
_LONGEST_S = 900.0


@dataclass(frozen=True)
class Outcome:
    """What a command left behind in the terminal."""

    code: int
    out: str
    err: str

    def check(self) -> Outcome:
        """Itself, after it is seen that the command succeeded."""
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self


def _write_empty_curve(folder: Path) -> None:
    write_atomic(folder / "curve.png", b"")


def draw_no_curve() -> None:
    """Have this process write a run's picture and not draw it: that is half of a small run."""
    session.draw_curve = _write_empty_curve


def in_own_process(
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    largest_file: int | None = None,
) -> Outcome:
    """The installed command, started in `folder`.

    Args:
        largest_file: bytes after which the system refuses to write on, as a full disk does.
    """
    limit = [] if largest_file is None else ["prlimit", f"--fsize={largest_file}"]
    done = subprocess.run(
        [*limit, WINNOW, *arguments],
        cwd=folder,
        env={**os.environ, **_ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST_S,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def in_forked_process(
    server: Server,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    spares: int = 0,
    module: str = "winnow.cli.main",
) -> Outcome:
    """The command in a process of its own, and those that it starts, which need not import.

    Args:
        spares: at least as many as start in it (`tests.spares`).
        module: whose `main` is called.
    """
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        process = server.start(
            module,
            arguments,
            folder=folder,
            environment={**_ENVIRONMENT, **(environment or {})},
            out=out,
            err=err,
            spares=spares,
        )
        return Outcome(process.wait(_LONGEST_S), out.read_text(), err.read_text())


def python(server: Server, program: str, home: Path) -> Outcome:
    """A program that uses `winnow` where an event loop runs already, as in a notebook."""
    cache = {"WINNOW_CACHE": str(home / "cache")}
    return in_forked_process(
        server, program, folder=home, environment=cache, spares=4, module=__name__
    )


def main() -> None:
    """Be the process of a program."""

    async def run() -> None:
        exec(sys.argv[1], {})

    asyncio.run(run())


def in_this_process(
    *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
) -> Outcome:
    """The command's entry point, called in `folder`: saves the seconds that imports take."""
    from winnow.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, {**_ENVIRONMENT, **(environment or {})}),
        patch.object(sys, "argv", ["winnow", *arguments]),
        patch.object(session, "draw_curve", _write_empty_curve),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())


def winnow(home: Path, *arguments: str) -> Outcome:
    """A command in a folder that has a cache of its own."""
    return in_this_process(
        *arguments, folder=home, environment={"WINNOW_CACHE": str(home / "cache")}
    )


def train(home: Path, name: str, *settings: str) -> Outcome:
    """A small run of the quickstart's task, whose checkpoints all stay."""
    return winnow(
        home,
        *("train", "quickstart", *SETTINGS, f"run.name={name}", "trainer.save_every=1"),
        *("trainer.keep_last=null", "observe.console=plain", *settings),
    )


def cut_off(home: Path, name: str, copy: str, step: int) -> Path:
    """A copy of a run that died after `step` was saved."""
    run = home / "runs" / copy
    shutil.copytree(home / "runs" / name, run)
    for checkpoint in checkpoints_in(run / "checkpoints"):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    return run
