"""How programs that a model wrote are run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from winnow.config.base import Section, environment_name, web_address


class _Programs(Section):
    """What holds wherever programs are run."""

    time_s: float = Field(5.0, gt=0, le=3600)
    """Seconds for one program: one test case with standard input, one call of a function."""
    sample_s: float = Field(30.0, gt=0, le=3600)
    """Seconds for all test cases of an answer; those not run by then count as not passed."""
    output_kb: int = Field(1024, ge=1)
    """Standard output and error together, in KiB; a program that writes more is ended."""
    credit: Literal["all", "share"] = "all"
    """Reward 1 for passing all test cases and else 0, or the share of them that pass."""


class SandboxConfig(_Programs):
    """The local sandbox, and what a program in it may use."""

    name: Literal["local"] = "local"
    backend: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """auto takes bubblewrap, Landlock where namespaces are blocked, and refuses without either."""
    python: str = "/usr/bin/python3"
    """The interpreter; one outside /usr is bound read-only, with its library."""
    max_concurrent: int | None = Field(None, ge=1, le=256)
    """Programs that run at once over the whole run; null: as many as there are cores."""
    memory_mb: int = Field(512, ge=64)
    """Address space of one process, in MiB; times `processes` bounds a program's memory."""
    processes: int = Field(8, ge=4, le=1024)
    """Processes and threads of a program, three of our own included."""
    open_files: int = Field(64, ge=32)
    """Files that a process may hold open."""
    scratch_mb: int = Field(16, ge=1)
    """What a program may write to its folder in memory, in MiB (bubblewrap only)."""


class FusionConfig(_Programs):
    """A service that speaks SandboxFusion's HTTP API, such as `winnow sandbox serve`."""

    name: Literal["fusion"] = "fusion"
    url: str
    """Its address, such as http://127.0.0.1:8080; /run_code is put behind it."""
    token_env: str | None = None
    """Name of the environment variable that holds its token; null sends none."""
    max_concurrent: int = Field(64, ge=1, le=4096)
    """Requests under way at once over the whole run."""
    compile_s: float = Field(10.0, gt=0, le=3600)
    """Seconds to compile a program; a request may take this, the program's time and 10 s."""
    memory_mb: int = Field(1024, ge=64)
    """Memory of a program, in MB, as the service counts it."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        wanted = "must be an address such as http://127.0.0.1:8080"
        parts = web_address(value, "reward.sandbox.token_env is for tokens", wanted)
        if parts.query or parts.fragment:
            raise ValueError(wanted)
        return value.rstrip("/").removesuffix("/run_code")

    @field_validator("token_env")
    @classmethod
    def _is_variable(cls, value: str | None) -> str | None:
        return environment_name(value, "token")


SandboxChoice = Annotated[SandboxConfig | FusionConfig, Field(discriminator="name")]
