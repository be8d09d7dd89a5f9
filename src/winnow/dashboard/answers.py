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

from winnow.dashboard.metrics_columns import round_to
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
        available = set(file.schema_arrow.names)
        table = file.read(columns=[each for each in NUMBERS if each in available])
        require_columns(table, name, "group", "outcome", "reward", "accuracy", "response_tokens")
        sampled = _equals_text(table, "kind", "sampled")
        table = table.filter(sampled) if sampled.any() else table
        by = GroupedRows(table)

    def means(values: np.ndarray) -> list[float | None]:
        return [round_to(each) for each in by.sums(values) / by.counts]

    def most(column: str) -> list[float | None]:
        return [round_to(each) for each in by.largest(float_column(table, column))]

    def count(marks: np.ndarray) -> list[int]:
        return by.sums(marks.astype(int)).tolist()  # type: ignore[no-any-return]

    reward = float_column(table, "reward")
    rewards, squares = means(reward), means(reward * reward)
    is_scored = _equals_text(table, "scorer_error", "") | _equals_text(table, "scorer_error", None)
    overlong = (float_column(table, "part/overlong") < 0) | (
        float_column(table, "extra/overlong") > 0
    )
    return {
        "group": by.groups.tolist(),
        "uid": by.firsts("prompt_uid"),
        "source": by.firsts("data_source"),
        "outcome": by.firsts("outcome"),
        "answers": by.counts.tolist(),
        "accuracy": means(float_column(table, "accuracy")),
        "reward": rewards,
        "reward_std": [
            round_to(math.sqrt(max((s or 0.0) - (m or 0.0) ** 2, 0.0)))
            for s, m in zip(squares, rewards, strict=True)
        ],
        "length": means(float_column(table, "response_tokens")),
        "longest": most("response_tokens"),
        "staleness": most("staleness"),
        "cut_off": count(_equals_text(table, "finish_reason", "length")),
        "overlong": count(overlong),
        "failed": count(~is_scored),
        "mismatch": most("mismatch"),
        "prompt": [None if p is None else p[:_PREVIEW] for p in by.firsts("prompt")],
    }


class GroupedRows:
    """The rows of a table by their group, and figures of each group in the order of their ids."""

    def __init__(self, table: pa.Table) -> None:
        ids = table["group"].to_numpy()
        self._table, self._order = table, np.argsort(ids, kind="stable")
        self.groups, self._first, self.counts = np.unique(
            ids[self._order], return_index=True, return_counts=True
        )

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum the values, one a row."""
        return np.add.reduceat(values[self._order], self._first)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Return the largest values; NaN where a group has no other."""
        return np.fmax.reduceat(values[self._order], self._first)

    def firsts(self, column: str) -> list[Any]:
        """Return the values of each group's first row in a column; None if it is absent."""
        if column not in self._table.column_names:
            return [None] * len(self.groups)
        return list(self._table[column].take(pa.array(self._order[self._first])).to_pylist())


def search_texts(files: RunFiles, name: str, text: str) -> dict[str, Any]:
    """Find the answers of a step whose prompt or response holds a text, whatever its case.

    Returns:
        `{"groups": {group: ["s0", …]}, "kept": 64}`: kinds and numbers of the answers, and how many
        of the step kept their text.

    Raises:
        UnreadableError: the file is missing or damaged.
    """
    groups: dict[str, list[str]] = {}
    with_text = 0
    with files.parquet(name) as file:
        for part in range(file.num_row_groups):
            table = file.read_row_group(part, ["group", "answer", "kind", *_TEXTS])
            with_text += len(table) - table["response"].null_count
            hits = [
                pc.fill_null(pc.match_substring(table[each], text, ignore_case=True), False)
                for each in _TEXTS
            ]
            for row in table.drop_columns(_TEXTS).filter(pc.or_(*hits)).to_pylist():
                groups.setdefault(str(row["group"]), []).append(f"{row['kind'][0]}{row['answer']}")
    return {"groups": groups, "kept": with_text}


def read_group_answers(
    files: RunFiles, name: str, group: int, pieces: TokenTexts | None
) -> list[dict[str, Any]]:
    """Read a group's answers with all that was kept of them; tokens as texts where they were.

    Args:
        pieces: reads token ids; None shows text alone.

    Raises:
        UnreadableError: the file is missing or damaged, or has no such group.
    """
    return [_answer_json(row, pieces) for row in iter_answers(files, name, [group])]


def iter_answers(files: RunFiles, name: str, groups: Collection[int]) -> Iterator[dict[str, Any]]:
    """Yield all that was kept of each answer of some groups, without loading the file whole.

    Raises:
        UnreadableError: the file is missing or damaged, or has none of them.
    """
    ids, count = pa.array(sorted(groups), pa.int64()), 0
    with files.parquet(name) as file:
        for part in range(file.num_row_groups):
            if not any(_may_contain(file, part, group) for group in groups):
                continue
            table = file.read_row_group(part)
            rows = table.filter(pc.is_in(table["group"], ids)).to_pylist()
            count += len(rows)
            yield from rows
    if groups and not count:
        raise UnreadableError(f"{name} of {files.name} has no group {min(groups)}; choose another")


def _may_contain(file: pq.ParquetFile, part: int, group: int) -> bool:
    at = file.schema_arrow.names.index("group")  # of the flat columns before the lists
    statistics = file.metadata.row_group(part).column(at).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min <= group <= statistics.max)


def _answer_json(row: dict[str, Any], pieces: TokenTexts | None) -> dict[str, Any]:
    ids = {each: row.pop(each, None) for each in _IDS}
    columns = {
        each: [round_to(value) for value in values]
        for each in TOKEN_COLUMNS
        if (values := row.pop(each, None)) is not None
    }
    shown = {key: round_to(v) if isinstance(v, float) else v for key, v in row.items()}
    shown["columns"] = columns
    if pieces is not None and ids["token_ids"] is not None:
        shown["tokens"] = pieces.split(ids["token_ids"])
        shown["prompt_pieces"] = pieces.split(ids["prompt_ids"] or [])
    return shown


class TokenTexts:
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
        except Exception as error:  # the library has no error class
            raise ValueError(str(error)) from error
        added = json.loads(text).get("added_tokens") or ()
        self._special = {each["id"] for each in added if each.get("special")}
        # Some decoders drop a blank at the start of a text: there is a token before each.
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._before = self._decode(self._anchor)
        self._text = lru_cache(maxsize=1 << 18)(self._text_of)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _has_token(self, token: int) -> bool:
        return 0 <= token < 1 << 32 and self._tokenizer.id_to_token(token) is not None

    def _text_of(self, token: int) -> str:
        if not self._has_token(token):
            return f"[{token}]"
        text = self._decode([*self._anchor, token])
        return text.removeprefix(self._before) if text.startswith(self._before) else text

    def split(self, ids: Sequence[int]) -> dict[str, Any]:
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
        is_special = [each in self._special or not self._has_token(each) for each in ids]
        return {"texts": texts, "special": np.flatnonzero(is_special).tolist()}


def require_columns(table: pa.Table, name: str, *columns: str) -> None:
    """Check that a table has columns.

    Raises:
        UnreadableError: it lacks one.
    """
    for column in columns:
        if column not in table.column_names:
            raise UnreadableError(f"{name} has no column {column}: not a rollout file")


def float_column(table: pa.Table, column: str) -> np.ndarray:
    """Return a column as float64, NaN where it has nothing."""
    if column not in table.column_names:
        return np.full(len(table), np.nan)
    return np.asarray(pc.cast(table[column], pa.float64()))


def _equals_text(table: pa.Table, column: str, text: str | None) -> np.ndarray:
    """Tell for each row if a column holds a text; None: nothing."""
    if column not in table.column_names:
        return np.full(len(table), text is None)
    mask = table[column].is_null() if text is None else pc.equal(table[column], text)
    return np.asarray(pc.fill_null(mask, False))
