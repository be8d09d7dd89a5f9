"""Published programming problems (HumanEval, MBPP) as rows with their tests.

The ground truth is JSON, as `winnow.rewards.scorers.code` reads it: `test` with a function
`check` and its `entry_point`, or `test_list` with asserts; `prompt` is code that the tests, and
an answer that only goes on, may rely on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from winnow.data.sources import Record, wrong_field

_FENCED = "\n\n```python\n{}\n```"
_COMPLETE = (
    "Complete this Python function. Answer with the whole function, and what it imports, in one "
    "block of code." + _FENCED
)
_WRITE = (
    "{}\n\nThe code must pass these tests:"
    + _FENCED
    + "\n\nAnswer with all of the code in one block."
)


def question_and_truth(record: Record, path: str, number: int) -> tuple[str, str]:
    """What is asked, and the tests as JSON.

    Raises:
        DataError: a column is missing or holds something else.
    """
    prompt = _text(record, "prompt", path, number)
    if "test_list" in record:
        tests = _texts(record, "test_list", path, number)
        imports = _texts(record, "test_imports", path, number) if "test_imports" in record else []
        if not tests:
            raise wrong_field(path, number, "test_list", None, "a list of Python asserts")
        asked = _WRITE.format(prompt.strip(), "\n".join([*imports, *tests]))
        return asked, _as_json({"test_list": tests, "prompt": "\n".join(imports)})
    truth = {
        "test": _text(record, "test", path, number),
        "entry_point": _text(record, "entry_point", path, number),
        "prompt": prompt,
    }
    return _COMPLETE.format(prompt.rstrip()), _as_json(truth)


def _text(record: Record, column: str, path: str, number: int) -> str:
    value = record.get(column)
    if not isinstance(value, str) or not value.strip():
        raise wrong_field(path, number, column, value, "a text")
    return value


def _texts(record: Record, column: str, path: str, number: int) -> list[str]:
    value = record[column]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise wrong_field(path, number, column, value, "a list of texts")
    return value


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
