"""Demonstrations: a user's own conversations, as prompts and the answers to imitate.

A row holds a conversation (`messages`, or ShareGPT's `conversations`), or a prompt and its answer,
in columns that are known (`prompt` and `completion`, `question` and `answer`, …) or that
`sft.columns` names. Prompts are rendered as training and evaluation render theirs; an answer is
what the chat template writes behind its prompt, to the token that ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.data import DataConfig, Demonstrations, SftColumns
from winnow.data.columns import Record, field_error
from winnow.data.prompts import PromptRenderer, PromptSet
from winnow.data.sources import Message, Row, read_records, resolve_files
from winnow.errors import DataError
from winnow.types import Answer, Group, IntArray, Prompt, Score, Segment, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONVERSATIONS = ("messages", "conversations")
_PAIRS = (
    *(("prompt", "completion"), ("prompt", "response"), ("prompt", "answer")),
    *(("question", "answer"), ("problem", "solution"), ("instruction", "output")),
)
_ROLES = {"human": "user", "gpt": "assistant"}
_WRITER = "assistant"


@dataclass(frozen=True, eq=False)
class DemonstrationSet:
    """The demonstrations that fit, in the order of their rows."""

    prompts: PromptSet
    answers: Mapping[str, tuple[Segment, ...]]
    """Segments behind each prompt, by its uid; those of source "model" are imitated."""

    def make_group(self, number: int, prompt: Prompt) -> Group:
        """Return a demonstration as a group of one answer, which nobody scored."""
        answer = Answer(Trajectory(self.answers[prompt.uid], "stop"), Score(0.0, 0.0))
        return Group(number, prompt, (answer,))


def read_demonstrations(
    files: Sequence[str],
    config: Demonstrations,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
) -> DemonstrationSet:
    """Read and render files of demonstrations.

    Args:
        data: says how prompts are rendered.
        stop_ids: tokens that end an answer; the first ends one that has none.

    Raises:
        DataError: a file or a row is not usable, or none fits `sft.max_tokens`.
        ModelError: the chat template fails.
    """
    renderer = PromptRenderer(tokenizer, data)
    prompts: list[Prompt] = []
    answers: dict[str, tuple[Segment, ...]] = {}
    too_long = 0
    for path in resolve_files(files, data):
        for number, record in read_records(path):
            origin = f"{path} row {number}"
            single = record.get("image")  # a text may be anything, such as a container's
            shown = {"image": None if isinstance(single, str) else single}
            shown[data.image_key] = record.get(data.image_key)
            for column, images in shown.items():
                if images:
                    raise field_error(origin, column, images, "absent: such rows are texts")
            messages = _conversation(record, origin, config.columns)
            source = str(record.get("data_source") or "sft")
            row = Row(f"{path}:{number}", origin, source, messages, None)
            ids, *rest = renderer.render_turns(row, config.turns == "all", stop_ids)
            if len(ids) + sum(map(len, rest)) > config.max_tokens:
                too_long += 1
                continue
            text = "\n".join(m["content"] for m in messages if m["role"] == _WRITER)
            prompts.append(Prompt(row.uid, ids, tokenizer.decode(ids), source, text))
            answers[row.uid] = tuple(segments_of(rest))
    if files and not prompts:
        raise DataError(
            f"{', '.join(files)}: none of {too_long} demonstrations fits into "
            f"sft.max_tokens={config.max_tokens}; raise it, or give other files"
        )
    return DemonstrationSet(PromptSet(tuple(prompts), too_long), answers)


def segments_of(parts: Sequence[IntArray]) -> Iterator[Segment]:
    """Yield what the model is to write, and what stands between: they take turns."""
    for place, ids in enumerate(parts):
        logprobs = np.zeros(len(ids), np.float32)
        yield Segment(ids, logprobs, (), "environment" if place % 2 else "model")


def _conversation(record: Record, origin: str, columns: SftColumns) -> tuple[Message, ...]:
    """Return a record's messages, of which the last is an answer."""
    key = columns.messages or next((name for name in _CONVERSATIONS if name in record), None)
    if key is not None and not columns.prompt:
        messages = _messages(record.get(key), origin, key, "user")
    else:
        configured = (columns.prompt, columns.answer) if columns.prompt else None
        pair = configured or next((p for p in _PAIRS if p[0] in record and p[1] in record), None)
        if pair is None:
            raise DataError(
                f"{origin}: no known columns of a demonstration in {', '.join(record)}; name "
                "them: sft.columns.messages=COLUMN, or sft.columns.prompt and sft.columns.answer"
            )
        prompt, answer = pair[0], pair[1] or "answer"
        messages = _messages(record.get(prompt), origin, prompt, "user")
        messages += _messages(record.get(answer), origin, answer, _WRITER)
    if messages[-1]["role"] != _WRITER or len(messages) < 2:
        raise DataError(f"{origin}: the last message must be of role assistant, after another")
    return tuple(messages)


def _messages(value: Any, origin: str, name: str, role: str) -> list[Message]:
    """Return a column's messages; a text is one of `role`."""
    if isinstance(value, str) and value:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise field_error(origin, name, value, "a text or a list of messages")
    messages: list[Message] = []
    for number, message in enumerate(value):
        # Parquet gives every message each key that any of them has.
        entry = (
            {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        )
        who, what = entry.pop("from", entry.get("role")), entry.pop("value", entry.get("content"))
        if not isinstance(who, str) or not isinstance(what, str) or not what:
            raise field_error(
                origin, f"{name}[{number}]", message, "an object with role and content"
            )
        messages.append({**entry, "role": _ROLES.get(who, who), "content": what})
    return messages
