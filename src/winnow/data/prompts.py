"""Rendering of data rows into prompts: template, chat template, token ids, length limit.

The data source's template goes around the last user message, the tokenizer's chat template
around them all. A begin-of-sequence token appears once, whoever writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.data.images import IMAGE_MARK, ImageReader, VisionInput, split_message
from winnow.data.sources import Row
from winnow.errors import ConfigError, DataError
from winnow.types import Image, IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "{prompt}"
_EVERY_SOURCE = "*"
FirstMessages = Callable[[Sequence[Row]], Sequence[Sequence[Mapping[str, Any]]]]
"""Returns the messages with which an environment begins for each row; none: the row's."""
TEMPLATE_S = 5.0
"""Seconds of CPU time in which a chat template must have rendered a prompt."""


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Rendered prompts in the order of their rows; a finite `PromptSource`."""

    prompts: tuple[Prompt, ...]
    filtered: int = 0
    """Rows left out because they were too long."""
    cut: int = 0
    """Rows cut to the length limit."""
    layouts: tuple[str, ...] = ()
    """Files and the columns that were taken of them, for the user."""

    @property
    def size(self) -> int:
        """The number of prompts."""
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
            digest.update("".join(image.digest for image in prompt.images).encode())
        return {file: digest.hexdigest() for file, digest in digests.items()}

    def prompt(self, index: int) -> Prompt:
        return self.prompts[index]

    def find(self, uid: str) -> Prompt:
        return self.prompts[self.index_by_uid[uid]]

    @cached_property
    def index_by_uid(self) -> dict[str, int]:
        return {prompt.uid: i for i, prompt in enumerate(self.prompts)}


class PromptRenderer:
    """Renders rows for one tokenizer by the rules of the section `data`.

    Args:
        tools: JSON schemas of the tools that the policy may call.
        first_messages: of an environment; None: conversations begin with the rows' messages.
        vision: of a vision-language model; None: rows have no images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        tools: Sequence[Mapping[str, Any]] = (),
        first_messages: FirstMessages | None = None,
        vision: VisionInput | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._config = config
        self._templates = _templates(config.prompt_template)
        self._chat = ChatTemplate(tokenizer, config, tools)
        self._images = ImageReader(config, vision)
        self._turns = TurnTokenizer(self._chat, tokenizer, (), vision)
        self._image = "".join(tokenizer.convert_ids_to_tokens(vision.tokens)) if vision else ""
        self._first_messages = first_messages
        self._use_chat_template = bool(self._chat.text)
        # Found by trying: not every tokenizer with a BOS token puts it in front.
        bos = self._tokenizer.bos_token_id
        adds_bos = bos is not None and self._tokenizer("a")["input_ids"][:1] == [bos]
        whole, *halves = self._tokenize(["a b", "a", " b"])
        self._adds_space = whole != [token for half in halves for token in half]
        self._bos: list[int] = [bos] if adds_bos and not self._use_chat_template else []

    def render(self, rows: Sequence[Row]) -> PromptSet:
        """Render all rows that fit, or are made to fit.

        Raises:
            DataError: a row cannot be rendered, is too long with `overlong_prompts: error`, or
                none fits.
            ModelError: the chat template fails.
        """
        fitted = list(self._render_within_limit(rows))
        prompts = tuple(prompt for _, prompt in fitted if prompt is not None)
        if rows and not prompts:
            raise self._none_fits_error(rows, [length for length, _ in fitted])
        limit = self._config.max_prompt_tokens
        cut = sum(length > limit for length, prompt in fitted if prompt is not None)
        files: dict[str, dict[str, None]] = {}
        for row in rows:
            files.setdefault(row.layout, {})[row.uid.rpartition(":")[0]] = None
        layouts = [f"{', '.join(names)} read as {each}" for each, names in files.items() if each]
        return PromptSet(prompts, len(rows) - len(prompts), cut, tuple(layouts))

    def first_fitting(self, candidates: Iterator[Row]) -> Prompt:
        """Render the first row that fits, or is made to fit; each candidate is tokenized once.

        Raises:
            DataError: none does, or one cannot be rendered.
        """
        for row in candidates:
            last = row
            ((length, prompt),) = self._render_within_limit([row])
            if prompt is not None:
                return prompt
        raise self._none_fits_error([last], [length])

    def _render_within_limit(self, rows: Sequence[Row]) -> Iterator[tuple[int, Prompt | None]]:
        """Yield each row's length before the limit, and its prompt; None where it is left out."""
        rows = [self._with_instructions(row) for row in rows]
        begin = self._first_messages
        firsts = [tuple(each) for each in begin(rows)] if begin else [()] * len(rows)
        begun = [replace(r, messages=f or r.messages) for r, f in zip(rows, firsts, strict=True)]
        shown = [self._with_images(row) for row in begun]
        texts = self._render_texts([row for row, _ in shown])
        limit, rule = self._config.max_prompt_tokens, self._config.overlong_prompts
        encoded = zip(rows, firsts, texts, shown, self._encode(texts), strict=True)
        for row, first, text, (begin_row, read), raw in encoded:
            # From outside: special tokens in them are text.
            prompt_ids = self._turns.prompt_ids(begin_row.messages) if first else raw
            ids, images = self._images.place(prompt_ids, read, row.origin)
            length = len(ids)
            if not length:
                raise DataError(f"{row.origin}: the prompt encodes to no tokens; give it some text")
            if length > limit and rule == "error":
                raise DataError(
                    f"{row.origin}: the prompt has {length} tokens, data.max_prompt_tokens is "
                    f"{limit}; raise it, or set data.overlong_prompts to filter, left, right or "
                    "middle"
                )
            if length > limit and (rule == "filter" or images):
                yield length, None
                continue
            if length > limit:
                ids = _truncate(ids, limit, rule)
                text = self._tokenizer.decode(ids)
            yield length, Prompt(
                row.uid, ids, text, row.data_source, row.ground_truth, row.extra,
                first or row.messages, row.messages if first else (), images,
            )  # fmt: skip

    def _with_images(self, row: Row) -> tuple[Row, list[Image]]:
        """Return a row whose marks became what is rendered for images, and its images."""
        images = self._images.read(row.images, row.origin)
        if not images:
            return row, images
        if self._use_chat_template:
            messages = tuple(split_message(message) for message in row.messages)
        else:
            texts = [m["content"].replace(IMAGE_MARK, self._image) for m in row.messages]
            messages = tuple({**m, "content": t} for m, t in zip(row.messages, texts, strict=True))
        return replace(row, messages=messages), images

    def _none_fits_error(self, rows: Sequence[Row], lengths: Sequence[int]) -> DataError:
        files = ", ".join(dict.fromkeys(row.uid.rpartition(":")[0] for row in rows))
        return DataError(
            f"{files}: none of the {len(rows)} prompts fits into "
            f"data.max_prompt_tokens={self._config.max_prompt_tokens} (shortest {min(lengths)} "
            f"tokens, longest {max(lengths)}); raise it, or set data.overlong_prompts to left, "
            "right or middle to cut them"
        )

    def render_turns(self, row: Row, every: bool, stop_ids: Sequence[int]) -> list[IntArray]:
        """Render a conversation whose last message is an answer: a prompt, an answer, then what
        stands between answers and answers in turn.

        Args:
            every: all messages of the role assistant are answers, else the last alone.
            stop_ids: tokens that end an answer; the first is added where the last one has none.

        Raises:
            DataError: it has several answers, which the template does not separate.
            ModelError: the chat template fails.
        """
        prompt = self._with_instructions(replace(row, messages=row.messages[:-1]))
        messages = (*prompt.messages, row.messages[-1])
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        texts, done = [], ""
        for place in places if every else places[-1:]:
            (before,) = self._render_texts([replace(row, messages=messages[:place])])
            through = before + messages[place]["content"]
            if self._use_chat_template:
                through = self._chat.render(messages[: place + 1], row.origin, answered=True)
            if not (before.startswith(done) and through.startswith(before)) or (
                done and not self._use_chat_template
            ):
                raise DataError(
                    f"{row.origin}: the chat template, or its absence, renders an earlier answer "
                    "differently once a later one follows; set sft.turns=last"
                )
            texts += [before[len(done) :], through[len(before) :]]
            done = through
        first, *rest = self._tokenize_parts(texts)
        for place in range(0, len(rest), 2):
            ids = rest[place]
            end = 1 + max((i for i, token in enumerate(ids) if token in stop_ids), default=-1)
            tail = ids[end:]
            if end and not self._tokenizer.decode(tail).strip():
                # A template's line break behind the token that ends an answer: nobody writes it.
                rest[place] = ids[:end]
                rest[place + 1 : place + 2] = [tail + ids for ids in rest[place + 1 : place + 2]]
        if not rest[-1] or rest[-1][-1] not in stop_ids:
            rest[-1] = [*rest[-1], stop_ids[0]]
        if not first:
            raise DataError(f"{row.origin}: the prompt encodes to no tokens; give it some text")
        return [np.array(ids, dtype=np.int64) for ids in (first, *rest)]

    def _render_texts(self, rows: Sequence[Row]) -> list[str]:
        """Render the conversations; a template that does not end is stopped in the main thread."""
        texts: list[str] = []
        done = -1

        def on_timer(*_: object) -> None:
            nonlocal done
            if done == len(texts):
                raise TimeoutError(f"it did not finish within {TEMPLATE_S:g} s")
            done = len(texts)

        with contextlib.ExitStack() as stack:
            is_main = threading.current_thread() is threading.main_thread()
            if self._use_chat_template and is_main:
                stack.callback(signal.signal, signal.SIGVTALRM, signal.getsignal(signal.SIGVTALRM))
                stack.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0)
                signal.signal(signal.SIGVTALRM, on_timer)
                signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_S, TEMPLATE_S)
            for row in rows:
                is_chat = self._use_chat_template
                texts.append(self._chat.render(row.messages, row.origin) if is_chat else row.text)
        return texts

    def _with_instructions(self, row: Row) -> Row:
        """Add the system prompt, and the source's template around the last user message."""
        messages, system = list(row.messages), self._config.system_prompt
        if system is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": system}, *rest]
        template = self._templates.get(row.data_source.lower(), self._templates.get(_EVERY_SOURCE))
        if template is not None:
            at = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
            if at is None:
                raise DataError(
                    f"{row.origin}: no message has the role user, which data.prompt_template "
                    "needs; add one, or remove the template"
                )
            content = template.replace(_PLACE, messages[at]["content"])
            messages[at] = {**messages[at], "content": content}
        return replace(row, messages=tuple(messages))

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return cast("list[list[int]]", encoded["input_ids"])

    def _tokenize_parts(self, texts: list[str]) -> list[list[int]]:
        """Tokenize texts that stand in a row, the first as a prompt.

        Some tokenizers put a space in front of whatever they are given: theirs are cut out of the
        text as a whole, where its tokens end with the texts before.
        """
        parts = self._tokenize(texts)
        if self._adds_space:
            done: list[int] = []
            for place, ids in enumerate(self._tokenize([*accumulate(texts)])):
                if ids[: len(done)] == done:
                    parts[place] = ids[len(done) :]
                done += parts[place]
        parts[:1] = self._encode(texts[:1])
        return parts

    def _encode(self, texts: list[str]) -> Iterable[list[int]]:
        if not texts:
            return
        for ids in self._tokenize(texts):
            yield ids if ids[:1] == self._bos else self._bos + ids


def _templates(configured: Mapping[str, str]) -> dict[str, str]:
    """Key the templates by lower-case source."""
    templates: dict[str, str] = {}
    for source, template in configured.items():
        if source.lower() in templates:
            raise ConfigError(
                f"data.prompt_template.{source} is set twice, in different case; keep one"
            )
        templates[source.lower()] = template
    return templates


def _truncate(ids: IntArray, limit: int, side: str) -> IntArray:
    """Keep `limit` of the ids; the rest goes on the side named."""
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
