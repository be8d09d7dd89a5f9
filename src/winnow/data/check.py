r"""Report on a data file: what it holds, and what is wrong with it as training data.

Two prompts are *the same* if they are equal once white space at the ends and a known instruction
are off. This decides what counts as a duplicate and whether labels conflict, so nothing that might
matter is thrown away.

They are *alike* if they are equal in their letters, digits, decimal points and signs
(+ - * / = < >), whatever the case, spacing, punctuation, brackets and `\left`, `\right` around
them. This finds an evaluation problem that was typed again for a training file, and keeps
z^4 + z^2 apart from z^4 - z^2.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.data import DataConfig
from winnow.data.files import excerpt
from winnow.data.prompts import PromptRenderer
from winnow.data.published import bare
from winnow.data.sources import Message, Row, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANY_LENGTH = 10**9
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])")
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-"})
_NO_MATTER = re.compile(r"(?!(?<=\d)\.\d)(?:[^\w+\-*/=<>]|_)")
"""A point within a number does matter."""


@dataclass(frozen=True)
class SourceCount:
    """The rows of a data source."""

    source: str
    rows: int
    scorer: str | None
    """None: no scorer is known for it."""


@dataclass(frozen=True)
class Lengths:
    """Quantiles of the prompts' lengths."""

    unit: str
    """`tokens` (with the chat template, as training sends them) or `characters`."""
    shortest: int
    median: int
    p95: int
    longest: int
    limit: int | None = None
    beyond: int | None = None
    """Prompts longer than the limit."""


@dataclass(frozen=True)
class Conflict:
    """One prompt with more than one label."""

    prompt: str
    """Its beginning."""
    labels: tuple[str, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class SharedPrompt:
    """An evaluation prompt that is in the file too."""

    source: str
    """The evaluation row's data source."""
    prompt: str
    """Its beginning."""
    evaluation_row: int
    rows: tuple[int, ...]
    same_label: bool
    """True if some row of the file gives it the evaluation's label."""


@dataclass(frozen=True)
class Overlap:
    """Prompts that a file shares with an evaluation file."""

    file: str
    rows: int
    """Rows of the evaluation file."""
    shared_by_source: Mapping[str, int]
    """Evaluation prompts found in the file, for every source of the evaluation file."""
    rows_affected: int
    """Rows of the checked file that are such prompts."""
    shared: tuple[SharedPrompt, ...]


@dataclass(frozen=True)
class DataReport:
    """The findings of `winnow data check` about a file."""

    file: str
    rows: int
    sources: tuple[SourceCount, ...]
    """The largest first."""
    lengths: Lengths
    unique_prompts: int
    copies: int
    """Rows beyond the first with the same source, prompt and label."""
    alike_prompts: int
    """Unique prompts that are alike another one."""
    conflicts: tuple[Conflict, ...]
    overlap: Overlap | None

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def check(
    path: str,
    scorer_of: Callable[[str], str | None],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    limit: int | None = None,
    evaluation: str | None = None,
    prompt_key: str = "prompt",
) -> DataReport:
    """Report on a file as training would see it.

    Raises:
        DataError: a file cannot be read, or a row of it is not usable.
        ModelError: the chat template fails.
    """
    rows = read_rows([path], prompt_key)
    others = read_rows([evaluation], prompt_key) if evaluation else []
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_prompt[same(row.messages)].append(row)
    by_look: dict[str, list[Row]] = defaultdict(list)
    for group in by_prompt.values():
        by_look[alike(group[0].messages)] += group
    sources = Counter(row.data_source for row in rows).most_common()
    distinct = {
        (row.data_source, prompt, label(row))
        for prompt, group in by_prompt.items()
        for row in group
    }
    return DataReport(
        file=path,
        rows=len(rows),
        sources=tuple(SourceCount(name, count, scorer_of(name)) for name, count in sources),
        lengths=_lengths(rows, tokenizer, limit),
        unique_prompts=len(by_prompt),
        copies=len(rows) - len(distinct),
        alike_prompts=len(by_prompt) - len(by_look),
        conflicts=tuple(_conflicts(by_prompt)),
        overlap=_overlap(by_look, evaluation, others) if evaluation else None,
    )


def prompt_text(messages: Sequence[Message]) -> str:
    """Join the messages of a prompt to one text."""
    return "\n".join(message["content"] for message in messages)


def same(messages: Sequence[Message]) -> str:
    """Return a key that is equal for prompts that are the same."""
    return "\n".join(bare(message["content"]) for message in messages)


def alike(messages: Sequence[Message]) -> str:
    """Return a key that is equal for prompts that are alike."""
    text = _SIZES.sub("", same(messages)).translate(_MINUS)
    # A prompt of nothing but punctuation is like itself alone.
    return _NO_MATTER.sub("", text).casefold() or text


def label(row: Row) -> str:
    """Return the ground truth as a text to compare."""
    return str(row.ground_truth).strip()


def _conflicts(by_prompt: Mapping[str, Sequence[Row]]) -> list[Conflict]:
    found = []
    for prompt, group in by_prompt.items():
        labels = tuple(dict.fromkeys(label(row) for row in group))
        if len(labels) > 1:
            found.append(Conflict(excerpt(prompt), labels, tuple(_number(r) for r in group)))
    return found


def _overlap(by_look: Mapping[str, Sequence[Row]], file: str, others: Sequence[Row]) -> Overlap:
    """Find the evaluation prompts that occur; one that their file repeats counts once."""
    shared: list[SharedPrompt] = []
    counts = {name: 0 for name, _ in Counter(row.data_source for row in others).most_common()}
    hit: dict[tuple[str, str], None] = {}
    for other in others:
        look = alike(other.messages)
        if look not in by_look or (other.data_source, look) in hit:
            continue
        hit[other.data_source, look] = None
        counts[other.data_source] += 1
        group = by_look[look]
        shared.append(
            SharedPrompt(
                source=other.data_source,
                prompt=excerpt(same(other.messages)),
                evaluation_row=_number(other),
                rows=tuple(_number(row) for row in group),
                same_label=label(other) in {label(row) for row in group},
            )
        )
    affected = sum(len(by_look[look]) for look in {look for _, look in hit})
    return Overlap(file, len(others), counts, affected, tuple(shared))


def _lengths(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase | None, limit: int | None
) -> Lengths:
    if tokenizer is None:
        lengths = sorted(len(prompt_text(row.messages)) for row in rows)
        unit, limit = "characters", None
    else:
        config = DataConfig(max_prompt_tokens=_ANY_LENGTH)
        rendered = PromptRenderer(tokenizer, config).render(rows)
        lengths = sorted(len(prompt.token_ids) for prompt in rendered.prompts)
        unit = "tokens"
    return Lengths(
        unit=unit,
        shortest=lengths[0],
        median=int(np.quantile(lengths, 0.5, method="inverted_cdf")),
        p95=int(np.quantile(lengths, 0.95, method="inverted_cdf")),
        longest=lengths[-1],
        limit=limit,
        beyond=None if limit is None else sum(length > limit for length in lengths),
    )


def _number(row: Row) -> int:
    return int(row.uid.rpartition(":")[2])
