"""An engine in a process of its own: `EngineWorker` holds it there, `RemoteEngine` asks it here.

    RemoteEngine ── ask(method, arguments, answers not sent yet) ──► EngineWorker ─► Engine
                 ◄── Reply(value, status, serial), tokens apart ────

Every reply carries the engine's status, so that the driver never waits for it. Replies may overtake
each other on their way; the driver enters them in the order in which the worker made them, so that
all it knows was true in the worker at one moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np

from winnow.errors import WorkerError
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    Engine,
    EngineStatus,
    GroupRequest,
    WeightUpdate,
)
from winnow.rollout.weights import Bucket, Receiver, WeightReceipt, send
from winnow.types import FloatArray, IntArray, Segment
from winnow.workers.array_refs import ArrayBlock, ArrayRef, SplitResult

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""A call for events returns after so long without any: the status that the driver knows is then
hardly older, and neither the sampler's watchdog nor the workers' takes a long answer for a hang."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Reply:
    """The value that a call returned, and the engine's status at that moment."""

    value: Any
    status: EngineStatus
    serial: int
    """Number of the reply, in the order in which the worker made them."""


class EngineWorker:
    """The worker of a `RemoteEngine`; a subclass makes the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._replies = 0
        self._found: list[CompletionEvent] = []  # by a wait that has not returned yet

    @property
    def progress(self) -> int:
        """A count that moves with every token and every reply."""
        return self._replies + self._engine.status().generated_tokens

    async def ask(
        self, method: str, args: tuple[Any, ...] = (), groups: Sequence[GroupRequest] = ()
    ) -> Reply | SplitResult:
        """Submit groups, then call a method of the engine; "" asks for its status alone."""
        if groups:
            await self._engine.submit(
                [replace(g, answers=tuple(map(_readable, g.answers))) for g in groups]
            )
        value: Any = None
        if method == "events":
            await self._wait(*args)
        elif method:
            value = await getattr(self._engine, method)(*args)
        if method in ("events", "progress"):
            value, self._found = [*self._found, *(value or ())], []
        self._replies += 1
        block = _detach(value) if method in ("events", "progress") and value else None
        reply = Reply(value if block is None else block[0], self._engine.status(), self._replies)
        return reply if block is None else SplitResult(reply, block[1])

    async def _wait(self, until: int | None, patience_s: float, gather: bool) -> None:
        """Wait as `Engine.events` does, `patience_s` at most; gather all up to `until` if asked."""
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    # Kept here at once: a call for progress may come before this wait ends.
                    events = await self._engine.events(until)
                    self._found += events
                    if not (gather and events) or self._engine.status().tick == until:
                        return
        except TimeoutError:
            # Events found when the wait was cut off are told now, without another tick: an idle
            # engine with nothing to say would seem to have lost its answers.
            events = await self._engine.events(self._engine.status().tick)
            self._found += events


def _detach(events: Sequence[CompletionEvent]) -> tuple[list[CompletionEvent], ArrayBlock]:
    """Put token ids (int32) and log-probs (fp32) of events end to end in one block.

    One array of each is cheaper to send than two an answer, and may stay on this node.
    """
    segments = [event.segment for event in events]
    ids = np.concatenate([np.asarray(s.token_ids, np.int32) for s in segments])
    logprobs = np.concatenate([np.asarray(s.logprobs, np.float32) for s in segments])
    block, detached, stop = ArrayBlock((ids, logprobs)), [], 0
    for event, segment in zip(events, segments, strict=True):
        start, stop = stop, stop + len(segment)
        bare = Segment(
            cast("IntArray", ArrayRef(block, 0, start, stop, np.int64)),
            cast("FloatArray", ArrayRef(block, 1, start, stop, np.float32)),
            segment.spans,
            segment.source,
        )
        detached.append(replace(event, segment=bare))
    return detached, block


def _readable(answer: AnswerRequest) -> AnswerRequest:
    """Fetch an answer's prefix; one that was lost with its node is left out and written anew."""
    prefix = answer.prefix
    if prefix is None or not isinstance(cast("object", prefix.token_ids), ArrayRef):
        return answer
    try:
        ids, logprobs = np.asarray(prefix.token_ids), np.asarray(prefix.logprobs)
    except WorkerError as error:
        log.warning("an answer is begun anew: %s", error)
        return replace(answer, prefix=None)
    return replace(answer, prefix=replace(prefix, token_ids=ids, logprobs=logprobs))


class TorchEngineWorker(EngineWorker):
    """An `EngineWorker` with a `TorchEngine`.

    Args:
        rank: a `workers.RankInfo`; its `device_index` names the CUDA device, None the CPU.
        model: a Hugging Face folder, or the contents of a config.json; the weights are then random
            and have to be published before anything is written.
        dtype: of the weights; must be that of published ones.
        tokenizer: its folder, where requests carry stop strings.
        options: of `TorchEngine`.

    Raises:
        ModelError: the model is not usable.
    """

    def __init__(
        self,
        rank: Any,
        *,
        model: str | Mapping[str, Any],
        dtype: Literal["float32", "bfloat16"],
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        import torch

        from winnow.models.causal_lm import load_causal_lm, torch_dtype
        from winnow.rollout.torch_engine import TorchEngine

        device = torch.device("cpu" if rank.device_index is None else f"cuda:{rank.device_index}")
        if isinstance(model, str):
            made = load_causal_lm(model, torch_dtype(dtype), device, trust_remote_code)
        else:
            made = _random_model(model, torch_dtype(dtype), device)
        decode = None if tokenizer is None else decode_of(tokenizer, trust_remote_code)
        super().__init__(TorchEngine(made, decode=decode, **options))


def decode_of(tokenizer: str, trust_remote_code: bool) -> Callable[[Sequence[int]], str]:
    """Return what turns token ids to text, special tokens included, of a tokenizer's folder."""
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
    return lambda ids: cast("str", read.decode(ids, skip_special_tokens=False))


def _random_model(config: Mapping[str, Any], dtype: Any, device: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from winnow.models.causal_lm import Source, settled

    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", dtype=dtype
    )
    return settled(made, Source("given as a config", "model"), device)


class Workers(Protocol):
    """The part of a `workers.WorkerGroup` that an engine needs."""

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a worker; calls begin there in the order in which they are made."""
        ...


class RemoteEngine:
    """Implements `Engine`, and `weights.Receiver`, over a worker that is an `EngineWorker`.

    What is submitted goes with the next call, at once where a wait is under way. A call for events
    whose wait is cancelled goes on in the worker, to the tick it was given; what it brings is kept
    for the next one. All methods raise WorkerError when the worker fails; what the engine refuses
    is raised by the call with which it went.

    Args:
        workers: the group it belongs to. A group fails as a whole: engines that may die one by one
            are a group each.
        rank: which of them.
        first: what its worker replied to `ask("")`; `connect` asks it.
    """

    def __init__(self, workers: Workers, rank: int, first: Reply) -> None:
        self._workers, self._rank = workers, rank
        self._status, self._entered = first.status, first.serial
        self._turns: dict[int, asyncio.Future[None]] = {}  # of replies that came early
        self._unsent: list[GroupRequest] = []
        self._on_way = 0  # answers submitted of which no reply has told
        self._inbox: list[CompletionEvent] = []
        self._calls: set[asyncio.Task[Reply]] = set()
        self._listening: asyncio.Task[Reply] | None = None

    @classmethod
    async def connect(cls, workers: Workers, rank: int = 0) -> RemoteEngine:
        """Return an engine over a worker that has been started."""
        return cls(workers, rank, await workers.call_rank(rank, "ask", ""))

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        self._unsent += groups
        self._on_way += sum(len(group.answers) for group in groups)
        if self._listening is not None:  # a wait that does not know of them
            self._call("")

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        return await self._events(until, gather=False)

    async def events_to(self, tick: int) -> Sequence[CompletionEvent]:
        """Return all that happens up to a tick, or some of it where that takes long."""
        return await self._events(tick, gather=True)

    async def _events(self, until: int | None, gather: bool) -> Sequence[CompletionEvent]:
        while not self._inbox:
            if self._listening is None:
                self._listening = self._call("events", until, PATIENCE_S, gather)
            reply = await asyncio.shield(self._listening)
            status = self.status()
            if until is not None and status.tick >= until:
                break
            # Idle if the newest reply says so; one to another call may have left events to fetch.
            if reply.serial == self._entered and not status.running + status.queued:
                break
        return self._take_inbox()

    async def progress(self) -> Sequence[CompletionEvent]:
        while True:
            reply = await asyncio.shield(self._call("progress"))
            if reply.serial == self._entered:
                running = [event for event in reply.value if event.kind == "running"]
                return [*self._take_inbox(), *running]
            # Another reply was entered before this could go on: the look is out of date.

    async def abort(self, group_ids: Collection[int]) -> None:
        await self._ask("abort", list(group_ids))

    async def load_weights(self, update: WeightUpdate) -> None:
        self._check_may_change()
        if update.tensors is None and update.buckets is None:
            await self._ask("load_weights", update)
        else:
            await send(update, self._ask_alone)

    async def _ask_alone(self, do: Callable[[Receiver], Awaitable[T]]) -> Mapping[str, T]:
        return {f"engine {self._rank}": await do(self)}

    async def begin_update(self, version: int) -> None:
        self._check_may_change()
        await self._ask("begin_update", version)

    async def take_bucket(self, bucket: Bucket) -> int:
        return cast("int", await self._ask("take_bucket", bucket))

    async def finish_update(self) -> WeightReceipt:
        return cast("WeightReceipt", await self._ask("finish_update"))

    def _check_may_change(self) -> None:
        status = self.status()  # here, so that the worker need not fail
        if (status.running or status.queued) and not status.live_updates:
            raise ValueError("abort what runs before new weights: its cache is of the old ones")

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float = 1.0
    ) -> list[FloatArray]:
        """Return log-probs as `TorchEngine.logprobs_of` does."""
        found = await self._ask("logprobs_of", list(sequences), temperature)
        return cast("list[FloatArray]", found)

    def status(self) -> EngineStatus:
        status = self._status
        return replace(status, queued=status.queued + self._on_way) if self._on_way else status

    async def close(self) -> None:
        """Drop what the engine holds; the worker stays."""
        await self._ask("close")

    async def _ask(self, method: str, *args: Any) -> Any:
        return (await asyncio.shield(self._call(method, *args))).value

    def _call(self, method: str, *args: Any) -> asyncio.Task[Reply]:
        """Begin a call, which takes along what was submitted; it goes on if nobody waits."""
        groups, self._unsent = self._unsent, []
        task = asyncio.create_task(self._round_trip(method, args, groups))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Reply]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # raised to those that wait, and by the next call

    async def _round_trip(
        self, method: str, args: tuple[Any, ...], groups: list[GroupRequest]
    ) -> Reply:
        try:
            said = await self._workers.call_rank(self._rank, "ask", method, args, groups)
            reply: Reply = said.told if isinstance(said, SplitResult) else said
            if reply.serial != self._entered + 1:
                turn = self._turns[reply.serial] = asyncio.get_running_loop().create_future()
                await turn
        except BaseException as error:
            self._fail_turns(error)
            raise
        finally:
            if method == "events":
                self._listening = None
        self._status, self._entered = reply.status, reply.serial
        self._on_way -= sum(len(group.answers) for group in groups)
        if method in ("events", "progress"):
            self._inbox += [event for event in reply.value if event.kind != "running"]
        following = self._turns.pop(reply.serial + 1, None)
        if following is not None and not following.done():
            following.set_result(None)
        return reply

    def _fail_turns(self, error: BaseException) -> None:
        """Fail replies that wait for one that will not come."""
        for turn in self._turns.values():
            if not turn.done():
                turn.set_exception(error)
        self._turns.clear()

    def _take_inbox(self) -> list[CompletionEvent]:
        events, self._inbox = self._inbox, []
        return events
