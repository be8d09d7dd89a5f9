"""Rows of data from parquet and JSONL files, in the schema that verl's users have.

A row is checked when its file is read, so that a fault is met before training and is named
by file, row and field. Rows count from 1. A raw GSM8K file (`question`, `answer`) is known by
its columns. What becomes of a row's messages is the affair of `winnow.data.prompts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from winnow.data.files import read_records
from winnow.errors import DataError

Record = Mapping[str, Any]
Message = Mapping[str, Any]
_GSM8K_MARK = "####"


@dataclass(frozen=True, eq=False)
class Row:
    """A checked row: a prompt that is not yet rendered."""

    uid: str
    """File name and row number: `extra_info.index` is not reliably unique."""
    origin: str
    """The same for a person to read, such as `train.parquet row 7`."""
    data_source: str
    messages: tuple[Message, ...]
    """With `role` and `content` at least."""
    ground_truth: Any
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other column."""


def read_rows(paths: Sequence[str], prompt_key: str = "prompt") -> list[Row]:
    """The rows of all files, in order.

    Raises:
        DataError: a file or a row is not usable.
    """
    names = Counter(_file_name(path) for path in paths)
    repeated = next((path for path, count in Counter(paths).items() if count > 1), None)
    if repeated is not None:
        raise DataError(f"{repeated}: given twice; name each data file once")
    rows: list[Row] = []
    for path in paths:
        # Files of one name in different folders need the whole path to tell their rows apart.
        name = _file_name(path) if names[_file_name(path)] == 1 else path
        before = len(rows)
        rows += (
            to_row(record, path, number, name, prompt_key) for number, record in read_objects(path)
        )
        if len(rows) == before:
            raise DataError(f"{path}: the file has no rows; leave it out or write it again")
    return rows


def read_objects(path: str) -> Iterator[tuple[int, Record]]:
    """Each record of a file with its number, seen to have columns.

    Raises:
        DataError: the file is not readable, or a record is no object.
    """
    for number, record in read_records(path):
        if not isinstance(record, dict):
            raise _fault(
                path, number, f"must be an object with columns, got {_kind(record)}",
                "write one JSON object a line",
            )  # fmt: skip
        yield number, record


def to_row(
    record: Record, path: str, number: int, name: str = "", prompt_key: str = "prompt"
) -> Row:
    """A record, checked; its uid begins with `name`.

    Raises:
        DataError: a column is missing or holds something else.
    """
    if _is_raw_gsm8k(record, prompt_key):
        record = _from_gsm8k(record, path, number, prompt_key)
    source = record.get("data_source")
    if not isinstance(source, str) or not source.strip():
        raise wrong_field(
            path, number, "data_source", source, "a name that routes the answer to a scorer"
        )
    truth, reward_rest = _ground_truth(record, path, number)
    if record.get("images"):
        raise _fault(
            path, number, "images is set, but only text can be trained on", "remove such rows"
        )
    used = {"data_source", "reward_model", prompt_key}
    extra = {key: value for key, value in record.items() if key not in used}
    if reward_rest:
        extra["reward_model"] = reward_rest
    return Row(
        uid=f"{name}:{number}",
        origin=f"{path} row {number}",
        data_source=source.strip(),
        messages=_messages(record, path, number, prompt_key),
        ground_truth=truth,
        extra=extra,
    )


def _ground_truth(record: Record, path: str, number: int) -> tuple[Any, dict[str, Any]]:
    """`reward_model.ground_truth`, and what else stands beside it."""
    reward_model = record.get("reward_model")
    if not isinstance(reward_model, dict):
        raise wrong_field(
            path, number, "reward_model", reward_model, "an object with the key ground_truth"
        )
    rest = dict(reward_model)
    truth = rest.pop("ground_truth", None)
    if truth is None:
        raise wrong_field(
            path, number, "reward_model.ground_truth", None, "what the scorer compares with"
        )
    return truth, rest


def _messages(record: Record, path: str, number: int, prompt_key: str) -> tuple[Message, ...]:
    prompt = record.get(prompt_key)
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        remedy = "" if prompt_key in record else "; data.prompt_key names the column"
        raise wrong_field(path, number, prompt_key, prompt, f"a text or a list of messages{remedy}")
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise wrong_field(
                path, number, f"{prompt_key}[{i}]", message, "an object with role and content"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise wrong_field(
                    path, number, f"{prompt_key}[{i}].{key}", message.get(key), "a text"
                )
        # Parquet gives every message each key that any of them has.
        messages.append({key: value for key, value in message.items() if value is not None})
    return tuple(messages)


def _is_raw_gsm8k(record: Record, prompt_key: str) -> bool:
    return (
        not {prompt_key, "data_source", "reward_model"} & record.keys()
        and {"question", "answer"} <= record.keys()
    )


def _from_gsm8k(record: Record, path: str, number: int, prompt_key: str) -> Record:
    """A row as openai/grade-school-math publishes it, in verl's schema."""
    question, answer = record["question"], record["answer"]
    if not isinstance(question, str) or not question:
        raise wrong_field(path, number, "question", question, "a text")
    if not isinstance(answer, str) or _GSM8K_MARK not in answer:
        raise wrong_field(
            path, number, "answer", answer, f"a text with the final answer after {_GSM8K_MARK}"
        )
    final = answer.rpartition(_GSM8K_MARK)[2].strip().replace(",", "").replace("$", "")
    rest = {key: value for key, value in record.items() if key not in ("question", "answer")}
    return {
        **rest,
        "data_source": "gsm8k",
        prompt_key: question,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final},
        "extra_info": {"question": question, "answer": answer},
    }


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _fault(path: str, number: int, fault: str, remedy: str) -> DataError:
    return DataError(f"{path} row {number}: {fault}; {remedy}")


def wrong_field(path: str, number: int, name: str, value: Any, wanted: str) -> DataError:
    """The error for a column that is missing or holds something else than is wanted."""
    fault = "is missing" if value is None else f"is {_kind(value)}"
    return DataError(f"{path} row {number}: {name} {fault}; it must be {wanted}")


def _kind(value: Any) -> str:
    """What a value is, shown short."""
    if isinstance(value, str | list | dict) and not value:
        return f"an empty {_NAMES[type(value)]}"
    shown = repr(value)
    name = _NAMES.get(type(value), type(value).__name__)
    return f"the {name} {shown if len(shown) <= 40 else shown[:37] + '...'}"


_NAMES = {str: "text", list: "list", dict: "object", int: "number", float: "number"}
