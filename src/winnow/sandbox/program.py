"""Programs that a sandbox runs, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

Ending = Literal["finished", "time_limit", "output_limit", "compile_error"]
OUTPUT_LIMIT: Ending = "output_limit"
"""The message of Winnow's server with a program that wrote too much."""
MAIN = "main.py"
_LONGEST_NAME = 200


class SandboxError(Exception):
    """The sandbox itself failed; never the fault of the program."""


@dataclass(frozen=True)
class Program:
    """Python code and its input."""

    code: str
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By name, in the folder that it starts in or below it (`data/rows.txt`)."""
    compile_once: bool = False
    """The code is Winnow's own, the same in many programs, so that it pays to compile it once."""

    def __post_init__(self) -> None:
        folders = {str(parent) for name in self.files for parent in PurePosixPath(name).parents}
        for name in self.files:
            is_plain = name.isprintable() and not {"", ".", ".."} & set(name.split("/"))
            is_taken = name in folders or name.partition("/")[0] == MAIN
            if not is_plain or is_taken or len(name.encode()) > _LONGEST_NAME:
                raise ValueError(f"{name[:99]!r} is not a plain file name beside {MAIN}")

    @property
    def all_files(self) -> dict[str, bytes]:
        """Its files, and its code as `main.py`."""
        return {MAIN: self.code.encode("utf-8", "surrogatepass"), **self.files}


@dataclass(frozen=True)
class Result:
    """Outcome of a program that was run."""

    ending: Ending
    exit_code: int
    """-N after signal N, as in subprocess; that of the kill where a limit ended it."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """Wall clock, the start of the sandbox included."""

    @property
    def is_clean(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.ending == "finished" and self.exit_code == 0
