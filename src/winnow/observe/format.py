"""Figures and tables as people read them: short, aligned, in what a terminal can show."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
import unicodedata

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

DASH = "-"
WIDTH = 100
"""Widest table."""


def figure_table(*columns: str, title: str | None = None) -> Table:
    """Make a table of names and right-aligned figures under `columns`; without them no head."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if columns else None,
        show_header=bool(columns),
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    if columns:
        table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, overflow="crop")
    return table


def spaced(table: Table) -> Padding:
    """Put a line of space behind a table."""
    return Padding(table, (0, 0, 1, 0), expand=False)


def print_table(table: Table, console: Console) -> None:
    """Print a table at most 100 columns wide, with a line of space behind it."""
    console.print(spaced(table), width=min(WIDTH, console.width))


def percent(value: float | None, digits: int = 0) -> str:
    """Write a share in percent: `0.423` as `42 %`."""
    if value is None:
        return DASH
    return f"{100 * value:.{digits}f} %" if math.isfinite(value) else str(value)


def number(value: float | None, digits: int = 2) -> str:
    """Write a figure with fixed digits."""
    return DASH if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """Write a count: `12345` as `12,345`; from ten million on in millions."""
    if value is None or not math.isfinite(value):
        return DASH if value is None else str(value)
    return f"{value / 1e6:,.1f} M" if abs(value) >= 1e7 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Write seconds: `75` as `1:15`; from an hour on `1:02:03`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str, encoding: str = "utf-8") -> str:
    """Make a model's text safe to print: no control codes, nothing beyond the encoding."""
    # Cc and Cf: escape sequences and marks that turn the direction of writing; Cs: surrogates.
    codes = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    shown = "".join(c.encode("unicode_escape").decode() if c in codes else c for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def safe_line(text: str, encoding: str = "utf-8") -> str:
    """Make a line for the user safe to print, without the passwords of addresses in it."""
    return printable(re.sub(r"://[^/\s:@]*:[^/\s@]+@", "://***@", text), encoding)


def safe_excerpt(text: str, limit: int, encoding: str = "utf-8") -> str:
    """Make a model's text a line that is safe to print, with the number of characters that are left
    out of its middle where it is longer than `limit`."""
    line = " ".join(printable(text, encoding).split())
    if len(line) <= limit:
        return line or "(nothing)"
    head = limit * 2 // 3
    return f"{line[:head]} ... ({len(line) - limit:,} characters) ... {line[head - limit :]}"


def command_line(*words: str) -> str:
    """Write a command of this program that works as it is pasted: with the program's path where
    PATH leads to no `winnow` or to another one."""
    program, on_path = sys.argv[0], shutil.which("winnow")
    if os.path.basename(program) != "winnow" or not os.path.isfile(program):
        # This is `python -m`, as restarted runs are, or a user's program.
        program = os.path.join(os.path.dirname(sys.executable), "winnow")
    if not os.path.isfile(program) or (on_path and os.path.samefile(on_path, program)):
        return shlex.join(["winnow", *words])
    shortest = min(program, os.path.relpath(program), key=len)
    return shlex.join([shortest if os.sep in shortest else f"./{shortest}", *words])
