"""`winnow` as the first process of a terminal, which is its standard output."""

from __future__ import annotations

import fcntl
import os
import sys
import termios

from winnow.cli.main import main as winnow


def main() -> None:
    """Take the terminal of standard output for this process's session, and be `winnow`."""
    os.setsid()
    fcntl.ioctl(1, termios.TIOCSCTTY)
    os.dup2(1, 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    winnow()
