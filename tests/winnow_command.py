"""Running `winnow` as a user does: in a process of its own, or, much faster, in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

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
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())
