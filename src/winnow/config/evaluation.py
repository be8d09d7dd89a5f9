"""Evaluation on held-out prompts before, during and after training."""

from __future__ import annotations

from pydantic import Field

from winnow.config.base import Section


class EvaluationConfig(Section):
    """When to evaluate and how to sample for it."""

    before: bool = True
    """Evaluate the start."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations; the end is always evaluated. null: only there."""
    n: int = Field(1, ge=1)
    """Answers a prompt: avg@n, pass@k for k up to n, maj@k."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens kept; 0 keeps all."""
    greedy: bool = False
    """Report one greedy answer a prompt as well."""
    max_prompts: int | None = Field(None, ge=1)
    """Take only the first so many prompts."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Response limit; null takes the rollout's."""
    data_set: str | None = None
    """What `winnow data prepare` calls the held-out data; said where its file is missing."""
