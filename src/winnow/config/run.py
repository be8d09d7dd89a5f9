"""Where a run lives and what makes it repeatable."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from winnow.config.base import Section


class RunConfig(Section):
    """Name, folder, seed and machine of a run."""

    name: str | None = None
    """Name of the run's folder; null makes RECIPE-DATE-TIME."""
    description: tuple[str, ...] = ()
    """What a new run says of itself at its start, a line each."""
    dir: str = "runs"
    """Folder that holds all runs."""
    resume: str = "auto"
    """auto continues the run of that name if it is unfinished and its recipe the same; never
    starts a new one; a run's or checkpoint's folder is continued."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seeds data order, sampling and shuffles."""
    deterministic: bool = True
    """The same seed gives the same bits, however long anything takes. false: scores count as soon
    as they are there, and answers under way go on across new weights without a new prefill; a
    resumed run then has the same prompts, groups and counters, but not the same bits."""
    threads: int | None = Field(None, ge=1)
    """CPU threads for tensor work; null takes all cores. Bits depend on it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto takes a GPU if there is one."""

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str | None) -> str | None:
        if value is not None and (not value or value[0] == "." or set(value) & set("/\\\0")):
            raise ValueError("must name one folder (not empty, no slash, no dot in front)")
        return value
