"""Where prompts come from and how a row becomes token ids."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from winnow.config.base import Options, Section, UserObject


class NoTask(Section):
    """No generated task: prompts come from files."""

    name: Literal["none"] = "none"


class SortDigitsTask(Section):
    """Sort a string of digits, character by character; made on the spot, endless.

    Problems whose crc32 modulo 10 is 0 are held out for evaluation.
    """

    name: Literal["sort_digits"] = "sort_digits"
    min_digits: int = Field(4, ge=2, le=12)
    """Fewest digits of a problem."""
    max_digits: int = Field(8, ge=2, le=12)
    """Most digits of a problem."""
    eval_problems: int = Field(400, ge=1)
    """Held-out problems for evaluation, always the same ones first."""


class ReasoningGymTask(Section):
    """A task of reasoning-gym (`pip install 'winnow[reasoning-gym]'`); endless, judged by itself.

    Problems whose question's crc32 modulo 10 is 0 are held out for evaluation.
    """

    name: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = "chain_sum"
    """Its name there, such as chain_sum or sudoku."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, such as {max_digits: 3}."""
    eval_problems: int = Field(200, ge=1)
    """Held-out problems for evaluation, always the same ones first."""


class CustomTask(Section):
    """A source of prompts of your own, given by its place; docs/data.md shows its signature."""

    name: Literal["custom"] = "custom"
    path: UserObject
    """Place of the function or class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the function or class."""


Task = Annotated[
    NoTask | SortDigitsTask | ReasoningGymTask | CustomTask, Field(discriminator="name")
]


class DataConfig(Section):
    """Training and evaluation data, prompt form and length limits."""

    task: Task = NoTask()
    """A generated task instead of files."""
    train_files: tuple[str, ...] = ()
    """Parquet or JSONL files (paths or fsspec URLs) with rows in verl's schema."""
    eval_files: tuple[str, ...] = ()
    """Files for evaluation."""
    prompt_key: str = "prompt"
    """Column with the list of messages (or a bare string)."""
    chat_template: Literal["auto", "none"] = "auto"
    """auto applies the tokenizer's chat template if it has one; none joins the contents."""
    prompt_template: dict[str, str] = Field(default_factory=dict)
    """Text put around the last user message, by data source (case-insensitive, `*` for
    every source); `{prompt}` stands for the message."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt in tokens."""
    overlong_prompts: Literal["filter", "error", "left", "right", "middle"] = "filter"
    """What to do with a longer one: leave the row out, stop, or cut it on that side."""
    shuffle: bool = True
    """Reshuffle the rows in each epoch (seeded)."""

    @field_validator("prompt_template")
    @classmethod
    def _holds_the_message(cls, value: dict[str, str]) -> dict[str, str]:
        without = [source for source, text in value.items() if "{prompt}" not in text]
        if without:
            raise ValueError(f"must say {{prompt}} where the message goes, for {without[0]!r} too")
        return value
