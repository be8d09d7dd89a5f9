"""How programs that a model wrote are run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from winnow.config.base import Section


class SandboxConfig(Section):
    """The local sandbox, and what a program in it may use."""

    backend: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """auto takes bubblewrap, Landlock where namespaces are blocked, and refuses without either."""
    python: str = "/usr/bin/python3"
    """The interpreter; one outside /usr is bound read-only, with its library."""
    max_concurrent: int | None = Field(None, ge=1, le=256)
    """Programs that run at once over the whole run; null: as many as there are cores."""
    time_s: float = Field(5.0, gt=0, le=3600)
    """Seconds for one program: one test case with standard input, one call of a function."""
    sample_s: float = Field(30.0, gt=0, le=3600)
    """Seconds for all test cases of an answer; those not run by then count as not passed."""
    memory_mb: int = Field(512, ge=64)
    """Address space of one process, in MiB; times `processes` bounds a program's memory."""
    processes: int = Field(8, ge=4, le=1024)
    """Processes and threads of a program, three of our own included."""
    open_files: int = Field(64, ge=32)
    """Files that a process may hold open."""
    scratch_mb: int = Field(16, ge=1)
    """What a program may write to its folder in memory, in MiB (bubblewrap only)."""
    output_kb: int = Field(1024, ge=1)
    """Standard output and error together, in KiB; a program that writes more is ended."""
    credit: Literal["all", "share"] = "all"
    """Reward 1 for passing all test cases and else 0, or the share of them that pass."""
