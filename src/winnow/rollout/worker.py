"""The worker's end of a remote engine: holds a `TorchEngine` in a process of its own.

Every answer to the driver carries the engine's status, so that the driver never has to wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from winnow.errors import WorkerError
from winnow.models.causal_lm import Source, load_causal_lm, settled, torch_dtype
from winnow.rollout.detached_events import detach_arrays
from winnow.rollout.engine import AnswerRequest, CompletionEvent, EngineStatus, GroupRequest
from winnow.rollout.torch_engine import TorchEngine
from winnow.workers.array_refs import ArrayRef, SplitResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

ASKED = frozenset(
    {
        "submit",
        "progress",
        "abort",
        "load_weights",
        "begin_update",
        "take_bucket",
        "finish_update",
        "logprobs_of",
        "close",
    }
)
"""What an engine may be asked through `EngineWorker.ask`."""


@dataclass(frozen=True, eq=False)
class Reply:
    """What a call returned, and how the engine stood just then."""

    value: Any
    status: EngineStatus
    serial: int
    """Replies in the order in which the worker made them; they may arrive in another."""
    listened: int
    """Calls of `events` that had returned by then."""


class EngineWorker:
    """Answers a `RemoteEngine`."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._replies = self._listened = 0
        self._found: list[CompletionEvent] = []  # by a wait that has not returned yet

    @property
    def progress(self) -> int:
        """Moves with every token and every reply."""
        return self._replies + self._engine.status().generated_tokens

    async def ask(self, method: str, *args: Any) -> Reply | SplitResult:
        """Call a method of the engine; without one, just its status.

        Events come as a reply of which the tokens are kept (`shelving`).
        """
        assert not method or method in ASKED, method
        if method == "submit":
            args = (_readable(args[0]),)
        value: Any = await getattr(self._engine, method)(*args) if method else None
        if method == "progress":
            return self._told([*self._take_found(), *value])
        return self._reply(value)

    async def events(
        self,
        until: int | None,
        patience_s: float,
        groups: Sequence[GroupRequest] | None = None,
    ) -> Reply | SplitResult:
        """`Engine.events`, but [] when nothing happened for so long; tokens are kept.

        Args:
            groups: submitted first; all that happens up to `until` is then told at once, or what
                did in `patience_s`.
        """
        if groups:
            await self._engine.submit(_readable(groups))
        try:
            await asyncio.wait_for(self._find(until, groups is not None), patience_s)
        except TimeoutError:
            # What the wait had found when it was cut off is told now, without another tick: an idle
            # engine with nothing to say would seem to have lost its answers.
            await self._find(self._engine.status().tick)
        self._listened += 1
        return self._told(self._take_found())

    async def _find(self, until: int | None, whole: bool = False) -> None:
        while True:
            # Kept here at once: a call for progress may come before the wait above ends.
            events = await self._engine.events(until)
            self._found += events
            if not whole or not events or self._engine.status().tick == until:
                return

    def _take_found(self) -> list[CompletionEvent]:
        found, self._found = self._found, []
        return found

    def _told(self, events: list[CompletionEvent]) -> Reply | SplitResult:
        if not events:
            return self._reply([])
        bare, arrays = detach_arrays(events)
        return SplitResult(self._reply(bare), arrays)

    def _reply(self, value: Any) -> Reply:
        self._replies += 1
        return Reply(value, self._engine.status(), self._replies, self._listened)


def _readable(groups: Sequence[GroupRequest]) -> list[GroupRequest]:
    """The groups, prefixes that were lost with their node left out: those are written anew."""
    return [replace(g, answers=tuple(map(_with_prefix_here, g.answers))) for g in groups]


def _with_prefix_here(answer: AnswerRequest) -> AnswerRequest:
    written: object = None if answer.prefix is None else answer.prefix.token_ids
    if answer.prefix is None or not isinstance(written, ArrayRef):
        return answer
    try:
        ids, logprobs = np.asarray(answer.prefix.token_ids), np.asarray(answer.prefix.logprobs)
    except WorkerError as error:
        log.warning("an answer is begun anew: %s", error)
        return replace(answer, prefix=None)
    return replace(answer, prefix=replace(answer.prefix, token_ids=ids, logprobs=logprobs))


class Rank(Protocol):
    """What of `cluster.RankInfo` an engine looks at."""

    @property
    def device_index(self) -> int | None:
        """Which CUDA device is its own; None: the CPU."""
        ...


class TorchEngineWorker(EngineWorker):
    """An `EngineWorker` that makes its engine.

    Args:
        rank: its place in the group of workers.
        model: a Hugging Face folder, or what a config.json says; then the weights are random, and
            have to be published before anything is written.
        dtype: of the weights; must be what is published.
        tokenizer: its folder, where requests carry stop strings.
        options: of `TorchEngine`.

    Raises:
        ModelError: the model is not usable.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        model: str | Mapping[str, Any],
        dtype: Literal["float32", "bfloat16"],
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        index = rank.device_index
        device = torch.device("cpu" if index is None else f"cuda:{index}")
        if isinstance(model, str):
            made = load_causal_lm(model, torch_dtype(dtype), device, trust_remote_code)
        else:
            made = _random(model, torch_dtype(dtype), device)
        decode = None
        if tokenizer is not None:
            from transformers import AutoTokenizer

            read = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
            decode = partial(read.decode, skip_special_tokens=False)
        super().__init__(TorchEngine(made, decode=decode, **options))


def _random(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", dtype=dtype
    )
    return settled(made, Source("given as a config", "model"), device)
