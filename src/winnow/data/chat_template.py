"""Chat templates: conversations as text, and the tokens between two sampled turns.

A conversation with an environment grows by token ids: what the policy sampled stays as it is, and
is never rendered or tokenized again. The tokens that follow a sampled turn are the difference of
two renderings of a made-up conversation, behind the token that ends its assistant turn:

    made up         user: q │ assistant: x <end>
    with a reply    user: q │ assistant: x <end> │ user: reply │ assistant:
                                                 └── reply_ids ───────────┘

A template that rewrites the past renders other tokens for the whole conversation than those that it
grew by. Where a recipe wants these (`environment.history=fork`), they are the `prompt_ids` of the
next turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from winnow.config.data import DataConfig
from winnow.data.columns import error_line, excerpt
from winnow.data.images import ImageReader, VisionInput, image_parts
from winnow.errors import ConfigError, ModelError
from winnow.types import BoolArray, Image, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
History = Literal["exact", "rewritten", "without reasoning"]
_IS_TEMPLATE = re.compile(r"\{[{%]")
_FAULTS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, TimeoutError),
)
"""Faults of a chat template besides jinja's errors."""
_ORIGIN = "the environment's images"
_PRIVATE_USE = range(0xE000, 0xF900)
"""Code points without a meaning, of which one marks where to cut a rendered text."""


class ChatTemplate:
    """The chat template of a tokenizer, or that of `data.chat_template`.

    Args:
        tools: JSON schemas of the tools that the policy may call.

    Raises:
        ConfigError: the file of the template does not exist, or a variable is not the template's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer: Any = tokenizer
        self.config, self._tools = config, [dict(tool) for tool in tools] or None
        self.text = _read_template(self._tokenizer, config)
        """The template in Jinja; empty where prompts are rendered without one."""
        # Of several own ones the tokenizer chooses.
        self._chat_template = None if config.chat_template == "auto" else self.text

    def render(self, messages: Sequence[Message], origin: str, answered: bool = False) -> str:
        """Render a conversation.

        Args:
            origin: names the conversation in errors.
            answered: True if the last message is an answer; else the header of one follows.

        Raises:
            ModelError: the template fails.
        """
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools,
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=not answered,
                **self.config.chat_template_kwargs,
            )
        except (TemplateError, *_FAULTS) as error:
            is_custom = self.config.chat_template != "auto"
            whose = "data.chat_template" if is_custom else "the tokenizer's chat template"
            raise ModelError(
                f"{origin}: {whose} fails: {error_line(error)}; fix it, or set "
                "data.chat_template=none"
            ) from error
        return cast(str, text)


class TurnTokenizer:
    """Tokenizes the messages that an environment adds to a conversation.

    Texts of messages come from outside: special tokens that they spell are tokenized as plain text,
    so that none opens or ends a turn.

    Args:
        stop_ids: tokens that end a sampled turn.
        vision: of a vision-language model; None: messages have no images.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        vision: VisionInput | None = None,
    ) -> None:
        self._template, self._tokenizer = template, cast("Any", tokenizer)
        self._images = ImageReader(template.config, vision)
        self._stop_ids = np.array(stop_ids, np.int64)
        self._stop_number = lru_cache(maxsize=256)(self._count_stops)

    def prompt_ids(self, messages: Sequence[Message], trusted: int = 0) -> IntArray:
        """Return the ids [L] of the messages before a sampled turn, and its header.

        Args:
            trusted: messages from the start on whose special tokens count, as in prompts of data.

        Raises:
            ModelError: the template fails.
        """
        marked, mark = self._mark_special_tokens(messages, trusted)
        return self._encode(self._template.render(marked, "the conversation"), mark)

    def reply_ids(self, messages: Sequence[Message], stopped: bool = True) -> IntArray:
        """Return the ids [L] between a sampled turn and the next one.

        Args:
            messages: of the environment, such as results of tools or a user's reply.
            stopped: True if the sampled turn ends with a stop token; else the template's is the
                first of the ids.

        Raises:
            ModelError: the template fails, or ends an assistant turn with no stop token.
        """
        marked, mark = self._mark_special_tokens(messages)
        opening = opening_of(marked)
        whole = self._encode(self._template.render([*opening, *marked], "a reply"), mark)
        # A template may render the turn in another way once messages follow: its end is the stop
        # token of the same number.
        (ends,) = self._is_stop(whole).nonzero()
        number = self._stop_number(json.dumps(opening))
        if len(ends) < number:
            raise self._no_end_error()
        return whole[ends[number - 1] + stopped :]

    def read_images(self, parts: Sequence[dict[str, Any]]) -> None:
        """Replace the images in parts of an environment's messages by what the model sees.

        Raises:
            DataError: an image is not usable.
        """
        images = self._images.read([part["image"] for part in parts], _ORIGIN)
        for part, image in zip(parts, images, strict=True):
            part["image"] = image

    def place_images(
        self, ids: IntArray, before: Sequence[Image], messages: Sequence[Message], rendered: bool
    ) -> tuple[IntArray, tuple[Image, ...]]:
        """Repeat the tokens that stand for images, and return the images at their places.

        Args:
            ids: of messages whose images `read_images` read.
            before: images of the conversation before them.
            rendered: True if `ids` have the tokens of these, too.

        Raises:
            DataError: there are more images than the recipe or the template takes.
        """
        images = [*before, *(part["image"] for part in image_parts(messages))]
        return self._images.place(ids, images, _ORIGIN, 0 if rendered else len(before))

    def history(self, messages: Sequence[Message]) -> History:
        """Return what the template makes of a sampled turn once messages follow.

        The turn is a made-up one, with reasoning where the template knows of that.
        """
        question, answer = opening_of(messages)
        first = self._template.render([question], "a prompt")
        opens, closes = (first.rstrip().endswith(tag) for tag in ("<think>", "</think>"))
        reasons = "</think>" in self._template.text and not closes
        reasoned = "a\n</think>\n\nx" if opens else "<think>\na\n</think>\n\nx"
        text = reasoned if reasons else "x"
        turns = [question, {**answer, "content": text}, *messages]
        whole = self._template.render(turns, "a reply")
        if whole.startswith(first + text):
            return "exact"
        return "without reasoning" if reasons and "</think>" not in whole else "rewritten"

    def _count_stops(self, opening_json: str) -> int:
        """Return the number of stop tokens to the end of the made-up answer, its own included."""
        opening: list[Message] = json.loads(opening_json)
        question = self._encode(self._template.render(opening[:1], "a prompt"), "")
        before = self._is_stop(question).sum()
        turns = self._encode(self._template.render(opening, "a turn", answered=True), "")
        (ends,) = self._is_stop(turns).nonzero()
        tail = turns[ends[before] + 1 :] if len(ends) > before else turns
        # Some templates end a whole conversation with one more.
        if self._tokenizer.decode(tail[~self._is_stop(tail)]).strip():
            raise self._no_end_error()
        return int(before) + 1

    def _is_stop(self, ids: IntArray) -> BoolArray:
        # Of a few numbers; np.isin takes ten times as long for a short reply.
        return cast("BoolArray", (ids[:, None] == self._stop_ids).any(1))

    def _no_end_error(self) -> ModelError:
        names = ", ".join(self._tokenizer.convert_ids_to_tokens(self._stop_ids.tolist()))
        return ModelError(
            f"the chat template ends no assistant turn with a stop token ({names}), so no turn can "
            "follow one; set data.chat_template to a template that does"
        )

    def _mark_special_tokens(
        self, messages: Sequence[Message], trusted: int = 0
    ) -> tuple[list[Message], str]:
        """Put a mark into the spelling of each special token in the texts; return the mark, too.

        The policy's turns keep tokens that are added and not special, such as `<think>`.
        """
        used = json.dumps(messages, ensure_ascii=False, default=str)
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)

        def cut(spelled: re.Match[str]) -> str:
            return spelled[0][0] + mark + spelled[0][1:]

        def marked(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, Mapping):
                return {marked(k, pattern): marked(v, pattern) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return [marked(each, pattern) for each in value]
            return pattern.sub(cut, value) if isinstance(value, str) else value

        patterns = [self._patterns[message["role"] == "assistant"] for message in messages]
        parts = [marked(*pair) for pair in zip(messages, patterns, strict=True)]
        return [*messages[:trusted], *parts[trusted:]], mark

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Match the tokens that the tokenizer looks for before it splits a text: all of them, and
        those that decoding leaves out."""
        added = self._tokenizer.added_tokens_decoder.items()
        special = (token for i, token in added if token.special or i in self._stop_ids)
        return _any_of(token for _, token in added), _any_of(special)

    def _encode(self, text: str, mark: str) -> IntArray:
        """Tokenize a text in the pieces between marks, of which none spells a marked token."""
        pieces = text.split(mark) if mark else [text]
        encoded = self._tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([token for ids in encoded for token in ids], np.int64)


def _any_of(tokens: Iterable[Any]) -> re.Pattern[str]:
    """Match the spelling of any of these tokens."""
    names = sorted(map(str, tokens), key=len, reverse=True)
    # Of one character there is none to cut; and no text spells nothing.
    return re.compile("|".join(re.escape(n) for n in names if len(n) > 1) or "(?!)")


def opening_of(messages: Sequence[Message]) -> list[Message]:
    """Return a made-up question and answer that these messages can follow.

    Results of tools follow an answer with as many calls: some templates check that.
    """
    calls = [
        {
            "type": "function",
            "id": message.get("tool_call_id", f"call{place:05d}"),
            "function": {"name": message.get("name", "f"), "arguments": {"a": 1}},
        }
        for place, message in enumerate(messages)
        if message["role"] == "tool"
    ]
    answer = {"role": "assistant", "content": "x", **({"tool_calls": calls} if calls else {})}
    return [{"role": "user", "content": "q"}, answer]


def _read_template(tokenizer: Any, config: DataConfig) -> str:
    """Return the text of the chat template; empty where there is none.

    Raises:
        ConfigError: the file is not there, or a variable is not the template's.
    """
    template = config.chat_template
    if template == "auto":
        template = str(tokenizer.chat_template or "")
    elif template == "none":
        template = ""
    elif not _IS_TEMPLATE.search(template):
        try:
            template = Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.chat_template {excerpt(template)}: {getattr(error, 'strerror', error)}; "
                "give auto, none, a template in Jinja, or the file that holds it"
            ) from error
    for name in config.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template has no variable of that "
                "name; remove it, or set another template in data.chat_template"
            )
    return template
