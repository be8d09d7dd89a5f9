"""Prompt and answer as a reward model reads them: its own chat template, its own tokens.

The policy's token ids never come here. Its answer is text, which goes into the template as the
last turn; so does what only looks like a mark of the template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.judge import SequenceClassifier
from winnow.errors import ModelError
from winnow.types import IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """Encodes answers for one reward model.

    Args:
        pad_token_id: the model's, if it has one.
        positions: tokens that it takes, if that is known.
    """

    def __init__(
        self,
        config: SequenceClassifier,
        tokenizer: PreTrainedTokenizerBase,
        pad_token_id: int | None,
        positions: int | None,
    ) -> None:
        """See that there is a template, and room.

        Raises:
            ModelError: there is none, or `max_tokens` is beyond `positions`.
        """
        self._config, self._tokenizer = config, tokenizer
        self._pad_token_id = pad_token_id
        if config.chat_template == "auto" and not tokenizer.chat_template:
            raise ModelError(
                f"reward.model.path {config.path}: its tokenizer has no chat template; set "
                "reward.model.chat_template=none, or to the template that the model was made with"
            )
        if config.max_tokens and positions and config.max_tokens > positions:
            raise ModelError(
                f"reward.model.max_tokens {config.max_tokens} does not fit the model's "
                f"{positions} positions ({config.path}); lower it"
            )
        self.max_tokens = config.max_tokens or positions

    def check(self, prompt: Prompt) -> None:
        """See before training that a prompt can be encoded.

        Raises:
            ModelError: it cannot.
        """
        try:
            self.encode(prompt, "")
        except ValueError as error:
            raise ModelError(
                f"reward.model.path {self._config.path}: no answer to prompt {prompt.uid} could "
                f"be scored: {error}"
            ) from error

    def encode(self, prompt: Prompt, answer: str) -> IntArray:
        """[L] ids up to the last token that is not padding: the one whose state is scored.

        Raises:
            ValueError: the template fails, nothing is left, or it is too long; in one line.
        """
        assert prompt.messages, "a prompt comes from a row, which has messages"
        text = self._rendered(prompt, answer)
        has_template = self._config.chat_template != "none"
        encoded: Any = self._tokenizer(
            text, add_special_tokens=not has_template, return_attention_mask=False, verbose=False
        )
        ids: IntArray = np.array(encoded["input_ids"], dtype=np.int64)
        # Transformers' classifiers look for the last such token, wherever padding may stand.
        real = np.flatnonzero(ids != self._pad_token_id)
        ids = ids[: real[-1] + 1] if len(real) else ids[:1]
        if not len(ids):
            raise ValueError("prompt and answer have no tokens for the reward model")
        limit = self.max_tokens
        if limit is None or len(ids) <= limit:
            return ids
        if self._config.overlong == "error":
            raise ValueError(
                f"{len(ids)} tokens with the prompt, the reward model takes {limit}; lower "
                "rollout.max_response_tokens, or set reward.model.overlong=left"
            )
        return ids[-limit:]

    def _rendered(self, prompt: Prompt, answer: str) -> str:
        template = self._config.chat_template
        if template == "none":
            return "\n".join(message["content"] for message in prompt.messages) + answer
        from jinja2 import TemplateError

        turns = [*map(dict, prompt.messages), {"role": "assistant", "content": answer}]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, chat_template=None if template == "auto" else template
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"its chat template fails: {reason}; mend it, or set reward.model.chat_template"
            ) from error
        return str(text)
