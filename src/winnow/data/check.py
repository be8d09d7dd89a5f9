r"""Report on a data file: what it holds, and what is wrong with it as training data.

Two prompts are *the same* if they are equal once white space at the ends and a known instruction
are off, and their images are the same files. This decides what counts as a duplicate and whether
labels conflict, so nothing that might matter is thrown away.

They are *alike* if they are equal in their letters, digits, decimal points and signs
(+ - * / = < >), whatever the case, spacing, punctuation, brackets and `\left`, `\right` around
them. This finds an evaluation problem that was typed again for a training file, and keeps
z^4 + z^2 apart from z^4 - z^2.

A report is plain values, as `winnow data check --json` prints them:

| key | value |
|---|---|
| file, schema, rows | the file, the columns that were taken, and its number of rows |
| sources | of each data source, the largest first: source, rows, scorer (null: none is known) |
| warnings | lines on rows that the recipe's environment does not fit |
| lengths | unit (tokens, with the chat template, or characters), shortest, median, p95, longest, |
| | limit, beyond (prompts longer than the limit; null without a tokenizer) |
| images | images of all rows; each was opened |
| unique_prompts, alike_prompts | different prompts, and those of them that are alike another |
| copies | rows beyond the first with the same source, prompt and label |
| conflicts | prompts with more than one label: prompt (its beginning), labels, rows |
| overlap | with an evaluation file, else null: file, rows; shared_by_source (its prompts that |
| | the checked file holds, by source); rows_affected (rows of the checked file with them) |
| overlap.shared | source, prompt, evaluation_row, rows, same_label (some row has its label) |
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.data import DataConfig
from winnow.data.columns import excerpt
from winnow.data.images import VisionInput, open_images, read_image
from winnow.data.prompts import PromptRenderer
from winnow.data.published import strip_instruction
from winnow.data.sources import Row, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_ANY_LENGTH = 10**9
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])")
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-"})
_NO_MATTER = re.compile(r"(?!(?<=\d)\.\d)(?:[^\w+\-*/=<>]|_)")
"""A point within a number does matter."""


def check(
    path: str,
    scorer_of: Callable[[str], str | None],
    *,
    notes_of: Callable[[Sequence[Row]], Iterable[str]] = lambda _: (),
    tokenizer: Tokenizer | None = None,
    limit: int | None = None,
    evaluation: str | None = None,
    config: DataConfig | None = None,
    vision: VisionInput | None = None,
) -> dict[str, Any]:
    """Report on a file as training with the section `data` would see it.

    Args:
        vision: of a vision-language model, whose tokenizer is given.

    Raises:
        DataError: a file cannot be read, or a row of it is not usable.
        ModelError: the chat template fails.
    """
    config = config or DataConfig()
    rows = read_rows([path], config)
    eval_rows = read_rows([evaluation], config) if evaluation else []
    for row in [*rows, *eval_rows]:
        for _ in open_images(row.images, row.origin, config):
            pass
    unbounded = config.model_copy(update={"max_prompt_tokens": _ANY_LENGTH})
    renderer = PromptRenderer(tokenizer, unbounded, vision=vision) if tokenizer else None
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_prompt[exact_key(row)].append(row)
    by_look: dict[str, list[Row]] = defaultdict(list)
    for group in by_prompt.values():
        by_look[loose_key(group[0])] += group
    sources = Counter(row.data_source for row in rows).most_common()
    distinct = {(row.data_source, exact_key(row), _label(row)) for row in rows}
    return {
        "file": path,
        "schema": rows[0].layout,
        "rows": len(rows),
        "sources": [{"source": s, "rows": n, "scorer": scorer_of(s)} for s, n in sources],
        "warnings": list(notes_of(rows)),
        "lengths": _lengths(rows, renderer, limit),
        "images": sum(len(row.images) for row in rows),
        "unique_prompts": len(by_prompt),
        "copies": len(rows) - len(distinct),
        "alike_prompts": len(by_prompt) - len(by_look),
        "conflicts": _conflicts(by_prompt),
        "overlap": _overlap(by_look, evaluation, eval_rows) if evaluation else None,
    }


def exact_key(row: Row) -> str:
    """Return a key that is equal for prompts that are the same."""
    texts = [strip_instruction(message["content"]) for message in row.messages]
    images = [hashlib.sha256(read_image(image)).hexdigest() for image in row.images]
    return "\n".join([*texts, *images])


def loose_key(row: Row) -> str:
    """Return a key that is equal for prompts that are alike."""
    text = _SIZES.sub("", exact_key(row)).translate(_MINUS)
    # A prompt of nothing but punctuation is like itself alone.
    return _NO_MATTER.sub("", text).casefold() or text


def _label(row: Row) -> str:
    return str(row.ground_truth).strip()


def _row_numbers(rows: Sequence[Row]) -> list[int]:
    return [int(row.uid.rpartition(":")[2]) for row in rows]


def _conflicts(by_prompt: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    labels = {prompt: list(dict.fromkeys(map(_label, rows))) for prompt, rows in by_prompt.items()}
    return [
        {"prompt": excerpt(prompt), "labels": labels[prompt], "rows": _row_numbers(rows)}
        for prompt, rows in by_prompt.items()
        if len(labels[prompt]) > 1
    ]


def _overlap(
    by_look: Mapping[str, Sequence[Row]], file: str, eval_rows: Sequence[Row]
) -> dict[str, Any]:
    """Find the evaluation prompts that occur; one that their file repeats counts once."""
    shared: dict[tuple[str, str], Row] = {}
    for other in eval_rows:
        look = loose_key(other)
        if look in by_look:
            shared.setdefault((other.data_source, look), other)
    counts = Counter(source for source, _ in shared)
    largest_first = Counter(row.data_source for row in eval_rows).most_common()
    return {
        "file": file,
        "rows": len(eval_rows),
        "shared_by_source": {source: counts[source] for source, _ in largest_first},
        "rows_affected": sum(len(by_look[look]) for look in {look for _, look in shared}),
        "shared": [
            {
                "source": source,
                "prompt": excerpt(exact_key(other)),
                "evaluation_row": _row_numbers([other])[0],
                "rows": _row_numbers(by_look[look]),
                "same_label": _label(other) in map(_label, by_look[look]),
            }
            for (source, look), other in shared.items()
        ],
    }


def _lengths(
    rows: Sequence[Row], renderer: PromptRenderer | None, limit: int | None
) -> dict[str, Any]:
    if renderer is None:
        unit, limit = "characters", None
        lengths = sorted(len(row.text) for row in rows)
    else:
        unit = "tokens"
        lengths = sorted(len(prompt.token_ids) for prompt in renderer.render(rows).prompts)
    median, p95 = np.quantile(lengths, [0.5, 0.95], method="inverted_cdf").tolist()
    return {
        "unit": unit,
        "shortest": lengths[0],
        "median": int(median),
        "p95": int(p95),
        "longest": lengths[-1],
        "limit": limit,
        "beyond": None if limit is None else sum(length > limit for length in lengths),
    }
