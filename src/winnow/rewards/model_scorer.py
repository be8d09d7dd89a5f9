"""A reward model as a scorer: answers that wait at the same time are run together.

The company of an answer depends on what else happens in the event loop, and the last bits of its
score on that company. So a deterministic run has each run alone: an answer then has the same
score in any company, in a resumed run too.

The model reads text, in its own chat template and its own tokens; the policy's token ids never
come here. An answer goes into the template as the last turn; so does what only looks like a mark
of the template.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.judge import SequenceClassifier
from winnow.errors import ModelError
from winnow.observe.files import one_line
from winnow.rewards.task import Failure, ScoreFuture
from winnow.types import IntArray, Prompt
from winnow.workers.threads import set_outcome

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Forward = Callable[[Sequence[IntArray]], Awaitable[Sequence[float]]]
"""From the token ids of sequences to a number for each, here or by other processes."""


@dataclass(eq=False)
class ModelScorer:
    """Scores answers by a model in this process, in the event loop's thread, or in others.

    The model gets what waits, one call after the other.

    Raises:
        ModelError: there is no template, or `max_tokens` is beyond `positions`.
    """

    config: SequenceClassifier
    """Says what the model's number is called, and what it counts for."""
    forward: Forward
    """Runs the model."""
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int | None
    """The model's, if it has one."""
    positions: int | None
    """Tokens that it takes, if that is known."""
    one_by_one: bool
    """True if each answer has a separate call."""
    takes_time: bool
    """True if scores come later, from other processes."""
    scored: int = 0
    """Answers so far."""
    _waiting: list[tuple[IntArray, ScoreFuture]] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        config, tokenizer, positions = self.config, self.tokenizer, self.positions
        if config.chat_template == "auto" and not tokenizer.chat_template:
            raise ModelError(
                f"reward.model.path {config.path}: its tokenizer has no chat template; set "
                "reward.model.chat_template=none, or to the template of the model's training"
            )
        if config.max_tokens and positions and config.max_tokens > positions:
            raise ModelError(
                f"reward.model.max_tokens {config.max_tokens} does not fit the model's "
                f"{positions} positions ({config.path}); lower it"
            )
        self._limit_tokens = config.max_tokens or positions

    def check(self, prompt: Prompt) -> None:
        """Check before training that a prompt can be encoded.

        Raises:
            ModelError: it cannot.
        """
        try:
            self._encode(prompt, "")
        except ValueError as error:
            raise ModelError(
                f"reward.model.path {self.config.path}: no answer to prompt {prompt.uid} could "
                f"be scored: {error}"
            ) from error

    def begin_scoring(self, prompt: Prompt, text: str) -> ScoreFuture:
        """Start scoring an answer; the future gets its score or a `Failure`."""
        loop = asyncio.get_running_loop()
        score: ScoreFuture = loop.create_future()
        try:
            ids = self._encode(prompt, text)
        except ValueError as error:
            score.set_result(Failure(f"the reward model: {error}"))
            return score
        self._waiting.append((ids, score))
        if self._task is None or self._task.done():
            # It begins behind all that is ready to run now, and may ask as well.
            self._task = loop.create_task(self._run())
        return score

    async def _run(self) -> None:
        while self._waiting:  # with what has come meanwhile
            waiting = [each for each in self._waiting if not each[1].done()]  # not cancelled
            self._waiting = []
            try:
                is_single = self.one_by_one or not waiting
                for call in [[each] for each in waiting] if is_single else [waiting]:
                    values = await self.forward([ids for ids, _ in call])
                    for (_, score), value in zip(call, values, strict=True):
                        failure = Failure(f"the reward model: its score is {value}")
                        set_outcome(score, value if math.isfinite(value) else failure)
                    self.scored += len(call)
            except Exception as error:  # belongs to those who wait, who would wait for ever
                for _, score in waiting:
                    set_outcome(score, error)

    def _encode(self, prompt: Prompt, answer: str) -> IntArray:
        """Return the [L] ids up to the last that is not padding: the one whose state is scored.

        Raises:
            ValueError: the template fails, nothing is left, or it is too long; in one line.
        """
        assert prompt.messages, "a prompt comes from a row, which has messages"
        text = self._render(prompt, answer)
        has_template = self.config.chat_template != "none"
        encoded: Any = self.tokenizer(
            text, add_special_tokens=not has_template, return_attention_mask=False, verbose=False
        )
        ids: IntArray = np.array(encoded["input_ids"], dtype=np.int64)
        # Transformers' classifiers look for the last such token, wherever padding may stand.
        real = np.flatnonzero(ids != self.pad_token_id)
        ids = ids[: real[-1] + 1] if len(real) else ids[:1]
        if not len(ids):
            raise ValueError("prompt and answer encode to no tokens")
        limit = self._limit_tokens
        if limit is None or len(ids) <= limit:
            return ids
        if self.config.overlong == "error":
            raise ValueError(
                f"{len(ids)} tokens with the prompt, the reward model's limit is {limit}; lower "
                "rollout.max_response_tokens, or set reward.model.overlong=left"
            )
        return ids[-limit:]

    def _render(self, prompt: Prompt, answer: str) -> str:
        template = self.config.chat_template
        if template == "none":
            return "\n".join(message["content"] for message in prompt.messages) + answer
        from jinja2 import TemplateError

        turns = [*map(dict, prompt.messages), {"role": "assistant", "content": answer}]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, chat_template=None if template == "auto" else template
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"its chat template fails: {one_line(error)}; fix it, or set "
                "reward.model.chat_template"
            ) from error
        return str(text)
