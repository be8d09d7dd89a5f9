"""The answers of a step as a table of groups, and one group's answers with their tokens.

Of a step's file only the columns with numbers are read, of a group only the row groups that hold
it. A column that a run did not keep is absent, and the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from winnow.dashboard.metrics_columns import round_to
from winnow.dashboard.runs import RunFiles, UnreadableError
from winnow.environments.calls import split_calls
from winnow.observe.rollouts import COLUMNS

_TABLE = {
    "uid": ("prompt_uid", "first"),
    "source": ("data_source", "first"),
    "outcome": ("outcome", "first"),
    "answers": ("group", "count"),
    "accuracy": ("accuracy", "mean"),
    "reward": ("reward", "mean"),
    "reward_std": ("reward", "stddev"),
    "length": ("response_tokens", "mean"),
    "longest": ("response_tokens", "max"),
    "staleness": ("staleness", "max"),
    "cut_off": ("cut_off", "sum"),
    "overlong": ("overlong", "sum"),
    "failed": ("failed", "sum"),
    "mismatch": ("mismatch", "max"),
    "prompt": ("prompt", "first"),
}
"""Columns of the table of groups: the column of the answers, and how it is reduced."""
_FLAGS = ("finish_reason", "scorer_error", "part/overlong", "extra/overlong")
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
    table = read_sampled(files, name, [*(column for column, _ in _TABLE.values()), *_FLAGS])
    finish_reason, error, penalty, excess = (table[column] for column in _FLAGS)
    is_penalised = pc.less(pc.cast(penalty, pa.float64()), 0)
    is_overlong = pc.greater(pc.cast(excess, pa.float64()), 0)
    flags = {
        "cut_off": pc.equal(finish_reason, "length"),
        "overlong": pc.or_(pc.fill_null(is_penalised, False), pc.fill_null(is_overlong, False)),
        "failed": pc.not_equal(error, ""),
    }
    for flag, values in flags.items():
        at = table.column_names.index(flag)
        table = table.set_column(at, flag, pc.fill_null(values, False).cast(pa.int32()))
    groups = aggregate_groups(table, _TABLE.values())
    shown = {key: groups[f"{column}_{how}"] for key, (column, how) in _TABLE.items()}
    shown["prompt"] = pc.utf8_slice_codeunits(shown["prompt"], 0, _PREVIEW)
    return {
        "group": groups["group"].to_pylist(),
        **{key: [_rounded(value) for value in each.to_pylist()] for key, each in shown.items()},
    }


def read_sampled(files: RunFiles, name: str, columns: Sequence[str]) -> pa.Table:
    """Read columns of a step's answers without its baselines; those it lacks are null.

    Raises:
        UnreadableError: the file is missing, damaged, or not one of answers.
    """
    with files.parquet(name) as file:
        available = set(file.schema_arrow.names)
        for column in ("group", "outcome", "reward", "accuracy", "response_tokens"):
            if column not in available:
                raise UnreadableError(f"{name} has no column {column}: not a rollout file")
        names = dict.fromkeys(["group", "kind", *columns])
        table = file.read(columns=[each for each in names if each in available])
    for column in names.keys() - available:
        kind = COLUMNS.get(column, pa.float64())
        table = table.append_column(column, pa.nulls(len(table), kind))
    sampled = pc.equal(table["kind"], "sampled")
    return table.filter(sampled) if pc.any(sampled).as_py() else table


def aggregate_groups(table: pa.Table, columns: Iterable[tuple[str, str]]) -> pa.Table:
    """Reduce the rows of each group to one, in the order of the groups' ids."""
    return table.group_by("group", use_threads=False).aggregate([*columns]).sort_by("group")


def _rounded(value: Any) -> Any:
    return round_to(value) if isinstance(value, float) else value


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
    files: RunFiles, name: str, group: int, pieces: TokenTexts | None, calls: str = "auto"
) -> list[dict[str, Any]]:
    """Read a group's answers with all that was kept of them; tokens as texts where they were.

    Args:
        pieces: reads token ids; None shows text alone.
        calls: the recipe's `environment.calls`, by which calls are found in turns.

    Raises:
        UnreadableError: the file is missing or damaged, or has no such group.
    """
    return [_answer_json(row, pieces, calls) for row in iter_answers(files, name, [group])]


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


def _answer_json(row: dict[str, Any], pieces: TokenTexts | None, calls: str) -> dict[str, Any]:
    ids = {each: row.pop(each, None) for each in _IDS}
    columns = {
        each: [round_to(value) for value in values]
        for each in TOKEN_COLUMNS
        if (values := row.pop(each, None)) is not None
    }
    for turn in row.get("turns") or ():
        text, is_model = turn.pop("text") or "", turn["author"] == "model"
        turn["pieces"] = split_calls(text, calls) if is_model else [(text, False)]
    shown = {key: _rounded(value) for key, value in row.items()}
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
