r"""Recognition of the columns that hold prompt, ground truth and data source.

| schema | prompt | ground truth |
|---|---|---|
| verl | `data.prompt_key` | `reward_model.ground_truth` |
| GSM8K | `question` | `answer`, after its last `####` |
| TRL | `prompt` | `solution` |
| OpenRLHF | `input` | `label` |
| others | `prompt`, `problem`, `question`, `input` or `messages` | `solution`, `answer`, `label`, |
| | | `ground_truth` |

Of a `solution` the last `\boxed{}` counts where it has one; beside a `problem` or a `question` an
`answer` counts before the `solution`. `data.columns` names columns that nothing here knows. A data
source comes from the column `data_source`, else from `data.default_source`, else it is named by the
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from winnow.boxed import last_box_content
from winnow.config.data import DataConfig
from winnow.errors import DataError

Record = Mapping[str, Any]
AFTER_MARK = "a text with the final answer after ####"
VERL_TRUTH = "reward_model.ground_truth"
_SOURCE = "data_source"
_PROMPT = DataConfig().prompt_key
_PROMPTS = ("problem", "question", "input", "messages")
_TRUTHS = ("solution", "answer", "label", "ground_truth")
_NAMES = {("prompt", "solution"): "TRL's columns", ("input", "label"): "OpenRLHF's columns"}
_KINDS = {str: "text", list: "list", dict: "object", int: "number", float: "number"}


@dataclass(frozen=True)
class Layout:
    """The columns of a file that hold prompt, ground truth and data source."""

    name: str
    """Name of the schema, for the user."""
    prompt: str
    truth: str | None
    """A column, or keys of objects joined by dots; None where rows have no ground truth."""
    source: str | None
    """None: all rows are of `default_source`."""
    default_source: str | None = None
    """Data source of rows whose column holds none."""
    read: Callable[[str], str | None] | None = None
    """Reads the ground truth out of a text."""
    expected: str = "what the scorer compares with"
    """Says what the column of the truth must hold."""
    images: str = DataConfig().image_key
    """Column of images, if rows have any."""

    @property
    def is_verl(self) -> bool:
        """True for verl's schema, whose truth stands in an object."""
        return self.truth == VERL_TRUTH

    def __str__(self) -> str:
        truth = "no ground truth" if self.truth is None else f"ground truth from {self.truth}"
        if self.truth == "solution" and self.read:
            truth += " (its last \\boxed{} if it has one)"
        source = f"data_source {self.default_source} for all"
        source = f"data_source from {self.source}" if self.source else source
        return f"{self.name}: prompt from {self.prompt}, {truth}, {source}"

    def read_truth(self, record: Record, origin: str) -> Any:
        """Return the ground truth of a record.

        Raises:
            DataError: it has none.
        """
        if self.truth is None:
            return None
        value = _value(record, self.truth)
        if value is None and "." in self.truth and self.truth not in record:
            parent, key = self.truth.rsplit(".", 1)
            if not isinstance(container := _value(record, parent), dict):
                raise field_error(origin, parent, container, f"an object with the key {key}")
        if isinstance(value, str) and self.read is not None:
            value = self.read(value)
            if value is None:
                raise field_error(origin, self.truth, _value(record, self.truth), self.expected)
        elif not self.is_verl and type(value) in (int, float):
            whole = isinstance(value, float) and value.is_integer()
            value = str(int(value)) if whole else str(value)
        if value is None or value == "":
            raise field_error(origin, self.truth, value, self.expected)
        return value


VERL = Layout("verl's schema", "prompt", VERL_TRUTH, _SOURCE)


def detect_layout(record: Record, config: DataConfig, origin: str, name: str) -> Layout:
    """Recognise the columns of a file by its first record.

    Args:
        origin: names the record in messages.
        name: data source of rows that have none.

    Raises:
        DataError: the columns are not known, or more than one may be meant.
    """
    columns, key = config.columns, config.prompt_key
    layout = partial(Layout, images=config.image_key)
    source = columns.source or (_SOURCE if _SOURCE in record else None)
    default = config.default_source or (None if source else name)
    truths = [column for column in _TRUTHS if column in record]
    is_verl = VERL_TRUTH.partition(".")[0] in record or (_SOURCE in record and not truths)
    if not columns.truth and is_verl:
        return layout("verl's schema", columns.prompt or key, VERL_TRUTH, source, default)
    prompt = columns.prompt or (key if key != _PROMPT else None)
    prompt = prompt or _one_of(record, (_PROMPT, *_PROMPTS), origin, "prompt")
    if columns.truth:
        truth = None if columns.truth == "none" else columns.truth
        return layout("data.columns", prompt, truth, source, default)
    if {"answer", "solution"} <= record.keys() and prompt in ("problem", "question"):
        truths.remove("solution")
    truth = _one_of(record, tuple(truths), origin, "truth")
    if truth == "answer" and "####" in str(record[truth]):
        default = config.default_source or (None if source else "gsm8k")
        return layout("GSM8K", prompt, truth, source, default, gsm8k_answer, AFTER_MARK)
    read = (lambda text: last_box_content(text) or text.strip()) if truth == "solution" else None
    return layout(_NAMES.get((prompt, truth), "columns"), prompt, truth, source, default, read)


def _one_of(record: Record, names: tuple[str, ...], origin: str, part: str) -> str:
    """Return the one of these columns that a record has."""
    matches = [name for name in dict.fromkeys(names) if name in record]
    if len(matches) == 1:
        return matches[0]
    is_truth = part == "truth"
    what = "ground truth" if is_truth else "prompt"
    remedy = f"name the column: data.columns.{part}=COLUMN"
    if matches:
        raise DataError(f"{origin}: {' and '.join(matches)} may each hold the {what}; {remedy}")
    has = ", ".join(excerpt(name, 40) for name in [*record][:8]) or "none"
    none = " (none if the reward needs no ground truth)" if is_truth else ""
    raise DataError(f"{origin}: no known column holds the {what}; columns: {has}; {remedy}{none}")


def _value(record: Record, path: str) -> Any:
    """Return the value of a column, or of keys joined by dots within one; None without."""
    if path in record:
        return record[path]
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def field_error(origin: str, name: str, value: Any, expected: str) -> DataError:
    """Make the error of a column that is missing or has a wrong value."""
    fault = "is missing" if value is None else f"is {describe_value(value)}"
    return DataError(f"{origin}: {name} {fault}; it must be {expected}")


def describe_value(value: Any) -> str:
    """Name a value's type and show the value, cut short."""
    if isinstance(value, str | list | dict) and not value:
        return f"an empty {_KINDS[type(value)]}"
    shown = repr(value)
    name = _KINDS.get(type(value), type(value).__name__)
    return f"the {name} {shown if len(shown) <= 40 else shown[:37] + '...'}"


def gsm8k_answer(answer: str) -> str | None:
    """Return the final number of a GSM8K answer, after its last `####`; None without the mark."""
    _, mark, final = answer.rpartition("####")
    return final.strip().replace(",", "").replace("$", "") if mark else None


def excerpt(text: str, characters: int = 100) -> str:
    """Cut a text to its beginning, on one line and safe to print."""
    text = " ".join(text[: 10 * characters].split())
    cut = text if len(text) <= characters else f"{text[: characters - 1]}…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


def error_line(error: BaseException) -> str:
    """Quote the first line of another library's error, or else name its type."""
    lines = str(error).strip().splitlines()
    return (excerpt(lines[0], 300) if lines else "") or type(error).__name__
