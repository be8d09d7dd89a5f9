"""Types of the sandbox: programs, limits, results, slots, and the protocol of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, NamedTuple, Protocol

from winnow.config.reward import FusionConfig, SandboxConfig

Ending = Literal["finished", "time_limit", "output_limit", "compile_error"]
OUTPUT_LIMIT: Ending = "output_limit"
"""The message of our own server beside a program that wrote too much."""
MAIN = "main.py"
_LONGEST_NAME = 200


class SandboxError(Exception):
    """The sandbox itself failed; never the fault of the program."""


@dataclass(frozen=True)
class Limits:
    """Resources that a program may use."""

    time_s: float
    """Wall clock, from the start of the sandbox."""
    memory_bytes: int
    """Address space of each process."""
    processes: int
    open_files: int
    scratch_bytes: int
    output_bytes: int

    @classmethod
    def of(cls, config: SandboxConfig) -> Limits:
        """Read the limits from a recipe."""
        return cls(
            config.time_s,
            config.memory_mb << 20,
            config.processes,
            config.open_files,
            config.scratch_mb << 20,
            config.output_kb << 10,
        )

    @property
    def files(self) -> int:
        """Most files and folders in the scratch folder: each takes memory that no limit counts."""
        return max(1000, self.scratch_bytes >> 12)

    @property
    def of_a_process(self) -> dict[str, int]:
        """Limits of `setrlimit` for each process, by their names in small letters."""
        return {
            "as": self.memory_bytes,
            "cpu": int(self.time_s) + 2,  # a second line behind the wall clock
            "nproc": self.processes,
            "nofile": self.open_files,
            "fsize": self.scratch_bytes,
            "core": 0,
            "msgqueue": 0,
            "memlock": 0,
        }


@dataclass(frozen=True)
class Program:
    """Python code and what it is given."""

    code: str
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By name, in the folder that it starts in or below it (`data/rows.txt`)."""
    is_ours: bool = False
    """The code is Winnow's own, the same in many programs, so that it pays to compile it once."""

    def __post_init__(self) -> None:
        folders = {str(parent) for name in self.files for parent in PurePosixPath(name).parents}
        for name in self.files:
            is_plain = name.isprintable() and not {"", ".", ".."} & set(name.split("/"))
            is_taken = name in folders or name.partition("/")[0] == MAIN
            if not is_plain or is_taken or len(name.encode()) > _LONGEST_NAME:
                raise ValueError(f"{name[:99]!r} is no plain name of a file beside {MAIN}")

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


class Slot(NamedTuple):
    """A place for one program at a time."""

    number: int
    uid: int | None
    """The unprivileged user that it runs as; None keeps ours, which is unprivileged already."""


class Sandbox(Protocol):
    """Runs programs; safe to use from any thread."""

    @property
    def config(self) -> SandboxConfig | FusionConfig:
        """The section that describes it."""
        ...

    @property
    def slots(self) -> Sequence[object]:
        """One for each program that may run at once."""
        ...

    @property
    def description(self) -> str:
        """One line for people."""
        ...

    def run_for(self, program: Program, time_s: float) -> Result:
        """Run a program within a time; waits for a slot.

        Raises:
            SandboxError: the sandbox failed.
        """
        ...

    def close(self) -> None:
        """End what runs."""
        ...
