"""Published data sets: where each lies, and how its rows become questions with ground truths.

`SETS` is the table of `winnow data prepare`. A row is in verl's schema already, or has a question
and an answer, a worked solution or tests in separate columns. The instructions that published
files wrap around their questions come off: Winnow's recipes say how to ask
(`data.prompt_template`), so a question is best stored bare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from winnow.boxed import last_box_content
from winnow.data.columns import AFTER_MARK, VERL, Record, field_error, gsm8k_answer
from winnow.data.sources import Row, to_row

_DEGREES = re.compile(r"\^\\circ|\^\{\\circ\}|°")
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
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
# Of verl's preprocessing of Geometry3K.
_GEOMETRY = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    "answer MUST BE put in \\boxed{}."
)
_AROUND = (
    (_DAPO_BEFORE, _DAPO_AFTER),
    # verl's own preprocessing of gsm8k and MATH.
    ("", 'Let\'s think step by step and output the final answer after "####".'),
    ("", "Let's think step by step and output the final answer within \\boxed{}."),
    ("", _GEOMETRY),
)


def strip_instruction(prompt: str) -> str:
    """Take a known instruction, and white space at the ends, off a prompt."""
    prompt = prompt.strip()
    for before, after in _AROUND:
        if prompt.startswith(before) and prompt.endswith(after):
            return prompt[len(before) : len(prompt) - len(after)].strip()
    return prompt


def strip_instructions(row: Row) -> tuple[Row, bool]:
    """Take known instructions off the user's messages; True if there was one."""
    messages, removed = [], False
    for message in row.messages:
        role, content = message["role"], message["content"]
        if role == "user":
            content = strip_instruction(content)
            removed |= content != message["content"].strip()
        messages.append({"role": role, "content": content})
    return replace(row, messages=tuple(messages)), removed


def add_dapo_instruction(question: str) -> str:
    """Ask a bare question as the published DAPO files do."""
    return f"{_DAPO_BEFORE}{question}{_DAPO_AFTER}"


Reader = tuple[Callable[[str], str | None], str]
"""Reads a ground truth out of a column's text, and says what the column must hold."""
_MARKED: Reader = (gsm8k_answer, AFTER_MARK)
_AS_IT_STANDS: Reader = (str, "a text or a number")
_BOXED: Reader = (last_box_content, "a text with the final answer in \\boxed{}")
# The columns that may hold what is asked, and those of the ground truth with their readers.
_QUESTIONS = ("question", "problem", "Problem", "Question")
_GSM8K = {"answer": _MARKED, "Answer": _MARKED}
_MATHS = {"answer": _AS_IT_STANDS, "Answer": _AS_IT_STANDS, "solution": _BOXED, "Solution": _BOXED}


@dataclass(frozen=True)
class NamedSet:
    """A data set on the hub."""

    repo: str
    licence: str
    files: Mapping[str, tuple[str, ...]]
    """For each split, patterns of file names: the first one that finds any counts."""
    data_source: str
    """Given to rows that have none; routes to a scorer."""
    source_patterns: tuple[str, ...]
    """Patterns, in lower case, of the `data_source`s that rows of this set may have already."""
    truth: Mapping[str, Reader] = field(default_factory=dict)
    """Columns of the ground truth: the first that a row fills counts. Without any the ground truth
    is Python tests, in the columns of HumanEval or of MBPP."""
    is_integer: bool = False
    """True if ground truths are integers from 0 to 999, however they are written."""
    info: tuple[str, ...] = ()
    """Columns that go into `extra_info`."""
    renamed: str | None = None
    """An own source that says too little and becomes `data_source`."""
    dapo_scored: bool = True
    """True if the answer is asked for on a line `Answer:`."""
    instruction: str = ""
    """Put behind each question."""

    @property
    def ability(self) -> str:
        """The subject of its problems: `math` or `code`."""
        return "math" if self.truth else "code"


def _per_split(pattern: str) -> dict[str, tuple[str, ...]]:
    return {split: (pattern.format(split),) for split in ("train", "test")}


# fmt: off
SETS: Mapping[str, NamedSet] = {
    "gsm8k": NamedSet(
        "openai/gsm8k", "MIT", _per_split("main/{}-*.parquet"), "openai/gsm8k",
        ("gsm8k", "openai/gsm8k"), _GSM8K, info=("question", "answer"), dapo_scored=False,
    ),
    # Every row in one file a split, as verl takes it; EleutherAI/hendrycks_math holds the same
    # problems in 14 files, and the original hendrycks/competition_math is off the hub.
    "math": NamedSet(
        "DigitalLearningGmbH/MATH-lighteval", "MIT", _per_split("data/{}-*.parquet"), "MATH",
        ("math", "math-500*", "huggingfaceh4/math-500", "lighteval/math",
         "digitallearninggmbh/math-lighteval"),
        _MATHS, info=("level", "type", "subject", "unique_id"),
    ),
    "dapo-math-17k": NamedSet(
        "BytedTsinghua-SIA/DAPO-Math-17k", "Apache-2.0",
        {"train": ("data/dapo-math-17k.parquet", "data/*.parquet")}, "math_dapo",
        ("math_dapo*", "dapo_math*", "dapo-math*", "dapo-17k*"), _MATHS,
    ),
    # The DAPO authors' own file: 30 problems, each 32 times.
    "aime-2024": NamedSet(
        "BytedTsinghua-SIA/AIME-2024", "Apache-2.0",
        {"test": ("data/aime-2024.parquet", "data/*.parquet")}, "aime-2024",
        ("math_dapo", "aime-2024*", "aime_2024*", "aime2024*", "aime24*"), _MATHS,
        is_integer=True, info=("ID", "id", "url"), renamed="math_dapo",
    ),
    "aime-2025": NamedSet(
        "math-ai/aime25", "Apache-2.0",
        {"test": ("test.jsonl", "test*.parquet", "data/test*.parquet")}, "aime-2025",
        ("math_dapo", "aime-2025*", "aime_2025*", "aime2025*", "aime25*"), _MATHS,
        is_integer=True, info=("ID", "id", "url"), renamed="math_dapo",
    ),
    # AMC 12 of 2022 and 2023; answers are written as numbers such as 142.0.
    "amc": NamedSet(
        "AI-MO/aimo-validation-amc", "Apache-2.0",
        {"test": ("data/train-*.parquet", "data/*.parquet")}, "amc",
        ("amc*", "ai-mo/aimo-validation-amc", "math-ai/amc23"), _MATHS, info=("id", "url"),
    ),
    "geometry3k": NamedSet(
        "hiyouga/geometry3k", "MIT",
        {split: (f"data/{split}-*.parquet",) for split in ("train", "validation", "test")},
        "hiyouga/geometry3k", ("hiyouga/geometry3k", "geometry3k", "geo3k"), _MATHS,
        info=("id", "problem", "answer"), dapo_scored=False, instruction=f" {_GEOMETRY}",
    ),
    "humaneval": NamedSet(
        "openai/openai_humaneval", "MIT",
        {"test": ("openai_humaneval/test-*.parquet",)}, "humaneval",
        ("humaneval*",), info=("task_id", "canonical_solution"), dapo_scored=False,
    ),
    # The 427 problems that people went over; of the 974 many are ambiguous.
    "mbpp": NamedSet(
        "google-research-datasets/mbpp", "CC-BY-4.0", _per_split("sanitized/{}-*.parquet"), "mbpp",
        ("mbpp*",), info=("task_id", "code", "canonical_solution"), dapo_scored=False,
    ),
}
# fmt: on


def foreign_source(record: Record, named: NamedSet) -> str | None:
    """Return the row's data source if that is not one of the set's."""
    source = record.get("data_source")
    if not isinstance(source, str):
        return None
    name = source.strip().lower()
    is_match = any(fnmatchcase(name, pattern) for pattern in named.source_patterns)
    return None if is_match else source.strip()


def convert_row(record: Record, origin: str, named: NamedSet, folder: Path | None = None) -> Row:
    """Convert a row of a set, with the notes to keep in `extra_info`.

    Args:
        folder: relative paths of images start there.

    Raises:
        DataError: a column is missing, or the ground truth is not in it.
    """
    notes = {key: str(record[key]) for key in named.info if isinstance(record.get(key), str | int)}
    is_raw = "data_source" not in record and "reward_model" not in record
    if is_raw:
        read = _from_columns if named.truth else _from_tests
        question, answer = read(record, origin, named)
        verl = {"prompt": question, "reward_model": {"ground_truth": answer}}
        record = {**verl, "images": record.get("images")}
    row = to_row({"data_source": named.data_source, **record}, origin, "", VERL, folder)
    if not is_raw:
        info = row.extra.get("extra_info")
        index = info.get("index") if isinstance(info, dict) else None
        notes = {} if index is None else {"original_index": str(index)}
    truth = _to_text(row.ground_truth, origin, "reward_model.ground_truth")
    truth = _parse_integer(truth, origin) if named.is_integer else truth
    source = row.data_source
    source = named.data_source if source.lower() == named.renamed else source
    return replace(row, data_source=source, ground_truth=truth, extra={"extra_info": notes})


def _from_columns(record: Record, origin: str, named: NamedSet) -> tuple[str, str]:
    """Return the question as it stands, and the ground truth."""
    question = _first_filled(record, _QUESTIONS, origin, "a text in one of them")
    column = _first_filled(record, named.truth, origin, "the final answer, or a text with it")
    text = _to_text(record[column], origin, column)
    read, expected = named.truth[column]
    truth = read(text)
    if not truth:
        raise field_error(origin, column, text, expected)
    return _source_text(record, question, origin), truth


def _from_tests(record: Record, origin: str, named: NamedSet) -> tuple[str, str]:
    """Return what is asked, and the tests as JSON, as `winnow.rewards.scorers.code` reads them.

    The JSON has `test` with a function `check` and its `entry_point`, or `test_list` with asserts;
    `prompt` is code that the tests, and an answer that only goes on, may rely on.
    """
    prompt = _source_text(record, "prompt", origin)
    if "test_list" in record:
        tests = _lines_of_code(record, "test_list", origin)
        imports = _lines_of_code(record, "test_imports", origin)
        if not tests:
            raise field_error(origin, "test_list", None, "a list of Python asserts")
        question = _WRITE.format(prompt.strip(), "\n".join([*imports, *tests]))
        truth: dict[str, Any] = {"test_list": tests, "prompt": "\n".join(imports)}
    else:
        question = _COMPLETE.format(prompt.rstrip())
        truth = {name: _source_text(record, name, origin) for name in ("test", "entry_point")}
        truth["prompt"] = prompt
    return question, json.dumps(truth, ensure_ascii=False)


def _source_text(record: Record, column: str, origin: str) -> str:
    value = record.get(column)
    if not isinstance(value, str) or not value.strip():
        raise field_error(origin, column, value, "a text")
    return value


def _lines_of_code(record: Record, column: str, origin: str) -> list[str]:
    value = record.get(column, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise field_error(origin, column, value, "a list of texts")
    return value


def _parse_integer(answer: str, origin: str) -> str:
    """Normalise an AIME answer: some files write `033`, and one writes degrees."""
    digits = _DEGREES.sub("", answer).strip("$ ")
    if not re.fullmatch(r"[0-9]{1,3}", digits):
        raise field_error(origin, "the answer", answer, "an integer from 0 to 999")
    return str(int(digits))


def _to_text(value: Any, origin: str, column: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value)) if whole else str(value)
    if not isinstance(value, str) or not value.strip():
        raise field_error(origin, column, value, "a text or a number")
    return value.strip()


def _first_filled(record: Record, columns: Iterable[str], origin: str, expected: str) -> str:
    """Return the first of the columns that a row fills."""
    filled = next((column for column in columns if record.get(column) not in (None, "")), None)
    if filled is None:
        names = " or ".join(dict.fromkeys(name.lower() for name in columns))
        raise field_error(origin, names, None, expected)
    return filled
