"""From a published row, in any of its layouts, to a question with its ground truth.

A row is either in verl's schema already, or has a question and an answer or a worked solution in
columns of their own. Rows of other sources than the set's are told apart, not converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from winnow.data.prepare_code import question_and_truth
from winnow.data.prepare_instruction import bare
from winnow.data.prepare_sets import NamedSet
from winnow.data.sources import Record, to_row, wrong_field
from winnow.data.wording import excerpt
from winnow.errors import DataError

_QUESTIONS = ("question", "problem", "Problem", "Question")
_ANSWERS = ("answer", "Answer")
_SOLUTIONS = ("solution", "Solution")
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")
_GSM8K_MARK = "####"
_DEGREES = re.compile(r"\^\\circ|\^\{\\circ\}|°")


@dataclass(frozen=True)
class Item:
    """A question, ready to be written."""

    data_source: str
    messages: tuple[tuple[str, str], ...]
    """Role and content."""
    ground_truth: str
    notes: Mapping[str, str]
    """More for `extra_info`."""
    instruction_removed: bool = False
    ability: str = "math"

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes two rows copies of each other: all but the notes."""
        return self.data_source, self.messages, self.ground_truth


def foreign_source(record: Record, named: NamedSet) -> str | None:
    """The row's data source if that is not one of the set's."""
    source = record.get("data_source")
    if not isinstance(source, str):
        return None
    name = source.strip().lower()
    if any(fnmatchcase(name, pattern) for pattern in named.own_sources):
        return None
    return source.strip()


def to_item(record: Record, path: str, number: int, named: NamedSet) -> Item:
    """A row as an item.

    Raises:
        DataError: a column is missing, or the ground truth is not in it.
    """
    if "data_source" in record or "reward_model" in record:
        item = _from_verl(record, path, number, named)
    elif named.truth == "tests":
        asked, truth = question_and_truth(record, path, number)
        return Item(
            named.data_source, (("user", asked),), truth, _notes(record, named), ability="code"
        )
    else:
        item = _from_columns(record, path, number, named)
    if named.truth == "integer":
        item = replace(item, ground_truth=_integer(item.ground_truth, path, number))
    return item


def _from_verl(record: Record, path: str, number: int, named: NamedSet) -> Item:
    row = to_row({"data_source": named.data_source, **record}, path, number)
    source = named.data_source if row.data_source.lower() in named.renamed else row.data_source
    messages, removed = [], False
    for message in row.messages:
        content = message["content"]
        if message["role"] == "user":
            content = bare(content)
            removed |= content != message["content"].strip()
        messages.append((message["role"], content))
    info = row.extra.get("extra_info")
    index = info.get("index") if isinstance(info, dict) else None
    notes = {} if index is None else {"original_index": str(index)}
    truth = _text(row.ground_truth, path, number, "reward_model.ground_truth")
    return Item(source, tuple(messages), truth, notes, removed)


def _from_columns(record: Record, path: str, number: int, named: NamedSet) -> Item:
    column = _first(record, _QUESTIONS)
    if column is None:
        raise wrong_field(path, number, "question or problem", None, "a text in one of them")
    question = record[column]
    if not isinstance(question, str) or not question.strip():
        raise wrong_field(path, number, column, question, "a text")
    plain = bare(question)
    removed = plain != question.strip()
    truth = _truth(record, path, number, named)
    asked = (("user", plain),)
    return Item(named.data_source, asked, truth, _notes(record, named), removed)


def _notes(record: Record, named: NamedSet) -> dict[str, str]:
    return {key: str(record[key]) for key in named.kept if isinstance(record.get(key), str | int)}


def _truth(record: Record, path: str, number: int, named: NamedSet) -> str:
    answers = _ANSWERS if named.truth == "gsm8k" else (*_ANSWERS, *_SOLUTIONS)
    column = _first(record, answers)
    if column is None:
        raise wrong_field(
            path, number, "answer" if named.truth == "gsm8k" else "answer or solution", None,
            "the final answer, or a text with it",
        )  # fmt: skip
    text = _text(record[column], path, number, column)
    if named.truth == "gsm8k":
        _, mark, final = text.rpartition(_GSM8K_MARK)
        final = final.strip().replace(",", "").replace("$", "")
        if not mark or not final:
            raise wrong_field(
                path, number, column, text, f"a text with the final answer after {_GSM8K_MARK}"
            )
        return final
    if column not in _SOLUTIONS:
        return text
    boxed = last_boxed(text)
    if not boxed:
        raise wrong_field(path, number, column, text, "a text with the final answer in \\boxed{}")
    return boxed


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` (or `\fbox{…}`, or `\boxed 5`); None without one."""
    found = list(_BOX.finditer(text))
    if not found:
        return None
    rest = text[found[-1].end() :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0]
    depth = 0
    for mark in re.finditer(r"(?<!\\)(?:\\\\)*([{}])", rest):
        depth += 1 if mark.group(1) == "{" else -1
        if depth == 0:
            return rest[1 : mark.end() - 1].strip()
    return None


def _integer(text: str, path: str, number: int) -> str:
    """As AIME answers go: some files write `033`, and one writes degrees."""
    digits = _DEGREES.sub("", text).strip("$ ")
    if not re.fullmatch(r"[0-9]{1,3}", digits):
        raise wrong_field(path, number, "the answer", text, "an integer from 0 to 999")
    return str(int(digits))


def _text(value: Any, path: str, number: int, column: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value)) if whole else str(value)
    if not isinstance(value, str) or not value.strip():
        raise wrong_field(path, number, column, value, "a text or a number")
    return value.strip()


def _first(record: Record, columns: tuple[str, ...]) -> str | None:
    return next((column for column in columns if record.get(column) not in (None, "")), None)


def nothing_belongs(named: NamedSet, origin: str, others: Mapping[str, int]) -> DataError:
    """The error where a file has rows, but of other sources only."""
    some = list(others.items())[:5]
    seen = ", ".join(f"{excerpt(source, 60)} ({count:,})" for source, count in some)
    seen += ", …" if len(others) > len(some) else ""
    return DataError(
        f"{origin}: no row belongs to {named.name}; their data_source is {seen}; choose another "
        "set or another file"
    )
