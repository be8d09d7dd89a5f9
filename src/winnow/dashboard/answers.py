"""The answers of a step as a table of groups, and one group's answers with their tokens.

Of a step's file only the columns with numbers are read, of a group only the row groups that hold
it. A column that a run did not keep is absent, and the page says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from winnow.dashboard.columns import short
from winnow.dashboard.runs import RunFiles, UnreadableError

NUMBERS = (
    *("group", "answer", "kind", "prompt_uid", "data_source", "outcome", "prompt_tokens"),
    *("response_tokens", "reward", "accuracy", "advantage", "staleness", "finish_reason"),
    *("scorer_error", "part/overlong", "extra/overlong", "mismatch", "prompt"),
)
TOKEN_COLUMNS = {
    "logprobs": "log-prob of the sampler, nats",
    "entropies": "entropy, nats",
    "trainer_logprobs": "log-prob of the trainer, nats",
    "token_advantages": "advantage",
    "versions": "weight version",
}
"""Columns with a number for each token of an answer, of which a run has some."""
_TEXTS = ("prompt", "response")
_IDS = ("prompt_ids", "token_ids")
_PREVIEW = 160
_REPLACEMENT = "\ufffd"


def group_table(files: RunFiles, name: str) -> dict[str, Any]:
    """Sum up the answers of a step by group, as columns of equal length.

    Returns:
        `{"group": […], "uid": […], …, "answers": 64}`; baselines are not counted.

    Raises:
        UnreadableError: the file is missing or damaged.
    """
    with files.parquet(name) as file:
        there = set(file.schema_arrow.names)
        table = file.read(columns=[each for each in NUMBERS if each in there])
    require(table, name, "group", "outcome", "reward", "accuracy", "response_tokens")
    ids = table["group"].to_numpy()
    order = np.argsort(ids, kind="stable")
    groups, first = np.unique(ids[order], return_index=True)
    picked = pa.array(order[first])
    sampled = _holds(table, "kind", "sampled")[order]
    if not sampled.any():
        sampled = ~sampled
    counts = np.maximum(np.add.reduceat(sampled.astype(float), first), 1) if len(ids) else first

    def numbers(column: str) -> np.ndarray:
        return _numbers(table, column)[order]

    def mean(values: np.ndarray) -> list[float | None]:
        sums = np.add.reduceat(np.where(sampled, values, 0.0), first) if len(ids) else values
        return [short(each) for each in sums / counts]

    def most(values: np.ndarray) -> list[float | None]:
        known = np.where(sampled & ~np.isnan(values), values, -np.inf)
        return [short(each) for each in (np.maximum.reduceat(known, first) if len(ids) else known)]

    def firsts(column: str) -> list[Any]:
        there = column in table.column_names
        return table[column].take(picked).to_pylist() if there else [None] * len(groups)

    def count(marks: np.ndarray) -> list[int]:
        return [round((m or 0.0) * n) for m, n in zip(mean(marks[order]), counts, strict=True)]

    reward, lengths = numbers("reward"), numbers("response_tokens")
    square = mean(reward * reward)
    rewards = mean(reward)
    ok = _holds(table, "scorer_error", "") | _holds(table, "scorer_error", None)
    overlong = (_numbers(table, "part/overlong") < 0) | (_numbers(table, "extra/overlong") > 0)
    return {
        "group": groups.tolist(),
        "uid": firsts("prompt_uid"),
        "source": firsts("data_source"),
        "outcome": firsts("outcome"),
        "answers": counts.astype(int).tolist(),
        "accuracy": mean(numbers("accuracy")),
        "reward": rewards,
        "reward_std": [
            short(math.sqrt(max((s or 0.0) - (m or 0.0) ** 2, 0.0)))
            for s, m in zip(square, rewards, strict=True)
        ],
        "length": mean(lengths),
        "longest": most(lengths),
        "staleness": most(numbers("staleness")),
        "cut_off": count(_holds(table, "finish_reason", "length")),
        "overlong": count(overlong),
        "failed": count(~ok),
        "mismatch": most(numbers("mismatch")),
        "prompt": [None if p is None else p[:_PREVIEW] for p in firsts("prompt")],
    }  # fmt: skip


def search(files: RunFiles, name: str, text: str) -> dict[str, Any]:
    """Find the answers of a step whose prompt or response holds a text, whatever its case.

    Returns:
        `{"groups": {group: ["s0", …]}, "kept": 64}`: kinds and numbers of the answers, and how many
        of the step kept their text.

    Raises:
        UnreadableError: the file is missing or damaged.
    """
    found: dict[str, list[str]] = {}
    kept = 0
    with files.parquet(name) as file:
        for part in range(file.num_row_groups):
            table = file.read_row_group(part, ["group", "answer", "kind", *_TEXTS])
            kept += len(table) - table["response"].null_count
            hits = [
                pc.fill_null(pc.match_substring(table[each], text, ignore_case=True), False)
                for each in _TEXTS
            ]
            for row in table.drop_columns(_TEXTS).filter(pc.or_(*hits)).to_pylist():
                found.setdefault(str(row["group"]), []).append(f"{row['kind'][0]}{row['answer']}")
    return {"groups": found, "kept": kept}


def group_answers(
    files: RunFiles, name: str, group: int, pieces: Pieces | None
) -> list[dict[str, Any]]:
    """Read a group's answers with all that was kept of them; tokens as texts where they were.

    Args:
        pieces: reads token ids; None shows text alone.

    Raises:
        UnreadableError: the file is missing or damaged, or has no such group.
    """
    with files.parquet(name) as file:
        parts = [n for n in range(file.num_row_groups) if _may_hold(file, n, group)]
        table = file.read_row_groups(parts)
        table = table.filter(pc.equal(table["group"], group))
    if not len(table):
        raise UnreadableError(f"{name} of {files.name} has no group {group}; choose another one")
    return [_answer(row, pieces) for row in table.to_pylist()]


def every_answer(files: RunFiles, name: str, groups: Collection[int]) -> Iterator[dict[str, Any]]:
    """Yield all that was kept of each answer of some groups, without loading the file whole.

    Raises:
        UnreadableError: the file is missing or damaged, or has none of them.
    """
    wanted, count = pa.array(sorted(groups), pa.int64()), 0
    with files.parquet(name) as file:
        for part in range(file.num_row_groups):
            table = file.read_row_group(part)
            rows = table.filter(pc.is_in(table["group"], wanted)).to_pylist()
            count += len(rows)
            yield from rows
    if groups and not count:
        raise UnreadableError(f"{name} of {files.name} has no group {min(groups)}")


def _may_hold(file: pq.ParquetFile, part: int, group: int) -> bool:
    at = file.schema_arrow.names.index("group")  # of the flat columns before the lists
    statistics = file.metadata.row_group(part).column(at).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min <= group <= statistics.max)


def _answer(row: dict[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    ids = {each: row.pop(each, None) for each in _IDS}
    columns = {
        each: [short(value) for value in values]
        for each in TOKEN_COLUMNS
        if (values := row.pop(each, None)) is not None
    }
    shown = {key: short(v) if isinstance(v, float) else v for key, v in row.items()}
    shown["columns"] = columns
    if pieces is not None and ids["token_ids"] is not None:
        shown["tokens"] = pieces.of(ids["token_ids"])
        shown["prompt_pieces"] = pieces.of(ids["prompt_ids"] or [])
    return shown


class Pieces:
    """Texts of single tokens, special ones included, by the run's own tokenizer.

    Args:
        content: a tokenizer.json.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer

        text = content.decode("utf-8")
        try:
            self._tokenizer: Any = Tokenizer.from_str(text)
        except Exception as error:  # the library has no class of its own
            raise ValueError(str(error)) from error
        added = json.loads(text).get("added_tokens") or ()
        self._special = {each["id"] for each in added if each.get("special")}
        # Some decoders drop a blank at the start of a text: there is a token before each.
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._before = self._decode(self._anchor)
        self._text = lru_cache(maxsize=1 << 18)(self._text_of)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _is_known(self, token: int) -> bool:
        return 0 <= token < 1 << 32 and self._tokenizer.id_to_token(token) is not None

    def _text_of(self, token: int) -> str:
        if not self._is_known(token):
            return f"[{token}]"
        text = self._decode([*self._anchor, token])
        return text.removeprefix(self._before) if text.startswith(self._before) else text

    def of(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the text of each token, and the places of the special and the unknown ones.

        A character whose bytes are several tokens stands at the last of them, the others are empty.
        """
        texts = [self._text(each) for each in ids]
        start: int | None = None
        for place, text in enumerate([*texts, ""]):
            if place < len(ids) and _REPLACEMENT in text:
                start = place if start is None else start
                whole = self._decode([*self._anchor, *ids[start : place + 1]])
                if not whole.endswith(_REPLACEMENT):
                    texts[start:place] = [""] * (place - start)
                    texts[place] = whole.removeprefix(self._before)
                    start = None
            else:
                start = None
        is_special = [each in self._special or not self._is_known(each) for each in ids]
        return {"texts": texts, "special": np.flatnonzero(is_special).tolist()}


def require(table: pa.Table, name: str, *columns: str) -> None:
    """Check that a table has columns.

    Raises:
        UnreadableError: it lacks one.
    """
    for column in columns:
        if column not in table.column_names:
            raise UnreadableError(f"{name} has no column {column}: not a file of answers")


def _numbers(table: pa.Table, column: str) -> np.ndarray:
    """Return a column as float64, NaN where it has nothing."""
    if column not in table.column_names:
        return np.full(len(table), np.nan)
    return np.asarray(pc.cast(table[column], pa.float64()))


def _holds(table: pa.Table, column: str, text: str | None) -> np.ndarray:
    """Tell for each row if a column holds a text; None: nothing."""
    if column not in table.column_names:
        return np.full(len(table), text is None)
    found = table[column].is_null() if text is None else pc.equal(table[column], text)
    return np.asarray(pc.fill_null(found, False))
