"""From a row of data to what the policy is given: template, chat template, ids, length limit.

The data source's template goes around the last user message, the tokenizer's chat template
around them all. A begin-of-sequence token appears once, whoever writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from winnow.config.data import DataConfig
from winnow.data.sources import Message, Row
from winnow.data.wording import said
from winnow.errors import ConfigError, DataError, ModelError
from winnow.types import IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "{prompt}"
_EVERY_SOURCE = "*"


@dataclass(frozen=True)
class LengthReport:
    """What the length limit did to the rows, in tokens and prompts."""

    rows: int
    """Rows looked at."""
    filtered: int
    """Rows left out because they were too long."""
    cut: int
    """Rows cut to the limit."""
    shortest_tokens: int
    """Of all rows, before the limit."""
    longest_tokens: int
    """Of all rows, before the limit."""


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Rendered prompts in the order of their rows; a finite `PromptSource`."""

    prompts: tuple[Prompt, ...]
    report: LengthReport

    @property
    def size(self) -> int:
        """How many prompts there are."""
        return len(self.prompts)

    @cached_property
    def data_sources(self) -> frozenset[str]:
        """All their data sources."""
        return frozenset(prompt.data_source for prompt in self.prompts)

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        """A digest for each file, of the prompts as rendered and their ground truths."""
        digests: dict[str, Any] = {}
        for prompt in self.prompts:
            file = prompt.uid.rpartition(":")[0]
            digest = digests.setdefault(file, hashlib.blake2b(digest_size=16))
            digest.update(f"{prompt.uid}\0{prompt.data_source}\0{prompt.ground_truth!r}\0".encode())
            digest.update(prompt.token_ids.tobytes())
        return {file: digest.hexdigest() for file, digest in digests.items()}

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`."""
        return self.prompts[index]

    def find(self, uid: str) -> Prompt:
        """The prompt that a uid names.

        Raises:
            KeyError: there is none.
        """
        return self.prompts[self._index[uid]]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {prompt.uid: i for i, prompt in enumerate(self.prompts)}


class PromptRenderer:
    """Renders rows for one tokenizer by the rules of the section `data`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._tokenizer: Any = tokenizer
        self._config = config
        self._templates = _templates(config.prompt_template)
        self._use_chat_template = config.chat_template == "auto" and bool(
            self._tokenizer.chat_template
        )
        # Found by trying: not every tokenizer with a BOS token puts it in front.
        bos = self._tokenizer.bos_token_id
        adds_bos = bos is not None and self._tokenizer("a")["input_ids"][:1] == [bos]
        self._bos: list[int] = [bos] if adds_bos and not self._use_chat_template else []

    def render(self, rows: Sequence[Row]) -> PromptSet:
        """All rows that fit, or are made to fit.

        Raises:
            DataError: a row cannot be rendered, is too long with `overlong_prompts: error`, or
                none fits.
            ModelError: the chat template fails.
        """
        asked = [self._with_template(row) for row in rows]
        texts = [self._text(row, messages) for row, messages in zip(rows, asked, strict=True)]
        limit = self._config.max_prompt_tokens
        prompts: list[Prompt] = []
        lengths: list[int] = []
        cut = 0
        for row, messages, text, ids in zip(rows, asked, texts, self._encode(texts), strict=True):
            lengths.append(len(ids))
            if not ids:
                raise DataError(f"{row.origin}: the prompt has no tokens; give it a text")
            if len(ids) <= limit:
                prompts.append(_prompt(row, messages, text, ids))
            elif self._config.overlong_prompts == "error":
                raise DataError(
                    f"{row.origin}: the prompt has {len(ids)} tokens, data.max_prompt_tokens is "
                    f"{limit}; raise it, or set data.overlong_prompts to filter, left, right or "
                    "middle"
                )
            elif self._config.overlong_prompts != "filter":
                cut += 1
                ids = _cut(ids, limit, self._config.overlong_prompts)
                prompts.append(_prompt(row, messages, self._tokenizer.decode(ids), ids))
        report = LengthReport(
            len(rows),
            len(rows) - len(prompts),
            cut,
            min(lengths, default=0),
            max(lengths, default=0),
        )
        if rows and not prompts:
            raise DataError(_none_fits(rows, report, limit))
        return PromptSet(tuple(prompts), report)

    def keeps(self, row: Row) -> bool:
        """False where a row is too long and such rows are left out."""
        if self._config.overlong_prompts != "filter":
            return True
        (ids,) = self._encode([self._text(row, self._with_template(row))])
        return len(ids) <= self._config.max_prompt_tokens

    def prompt(self, row: Row) -> Prompt:
        """One row that must fit.

        Raises:
            DataError: it does not, or cannot be rendered.
        """
        return self.render([row]).prompts[0]

    def _text(self, row: Row, messages: Sequence[Message]) -> str:
        if not self._use_chat_template:
            return "\n".join(message["content"] for message in messages)
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(
                f"{row.origin}: the tokenizer's chat template fails: {said(error)}; mend it, or "
                "set data.chat_template=none"
            ) from error
        return cast(str, text)

    def _with_template(self, row: Row) -> Sequence[Message]:
        template = self._templates.get(row.data_source.lower(), self._templates.get(_EVERY_SOURCE))
        if template is None:
            return row.messages
        at = max((i for i, m in enumerate(row.messages) if m["role"] == "user"), default=None)
        if at is None:
            raise DataError(
                f"{row.origin}: no message has the role user, so data.prompt_template has no "
                "place; add one, or take the template away"
            )
        messages = list(row.messages)
        content = template.replace(_PLACE, messages[at]["content"])
        messages[at] = {**messages[at], "content": content}
        return messages

    def _encode(self, texts: list[str]) -> Iterable[list[int]]:
        if not texts:
            return
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        for ids in encoded["input_ids"]:
            yield ids if ids[:1] == self._bos else self._bos + ids


def _templates(given: Mapping[str, str]) -> dict[str, str]:
    """By lower-case source."""
    templates: dict[str, str] = {}
    for source, template in given.items():
        if source.lower() in templates:
            raise ConfigError(
                f"data.prompt_template.{source} is given twice, in different case; keep one"
            )
        templates[source.lower()] = template
    return templates


def _prompt(row: Row, messages: Sequence[Message], text: str, ids: list[int]) -> Prompt:
    token_ids: IntArray = np.array(ids, dtype=np.int64)
    return Prompt(
        row.uid, token_ids, text, row.data_source, row.ground_truth, row.extra, tuple(messages)
    )


def _cut(ids: list[int], limit: int, side: str) -> list[int]:
    """`limit` of the ids, taken away on the side named."""
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _none_fits(rows: Sequence[Row], report: LengthReport, limit: int) -> str:
    files = ", ".join(dict.fromkeys(row.uid.rpartition(":")[0] for row in rows))
    return (
        f"{files}: none of the {len(rows)} prompts fits into data.max_prompt_tokens={limit} "
        f"(shortest {report.shortest_tokens} tokens, longest {report.longest_tokens}); raise it, "
        "or set data.overlong_prompts to left, right or middle to cut them"
    )
