"""An engine over servers of the user's own, which speak `/inference/v1/generate`.

    submit ──► queue ──► the server with most room: a stream of tokens ──► event at its end
                 ▲                       │ cut, refused, silent, restarted
                 └── behind what is written ◄┘

    load_weights ──► folder of safetensors ──► every server reads it; those that come back, too

A server that cuts or refuses a connection counts as lost until it answers and has loaded the newest
weights once more: one that was restarted cannot be told from one that was not. A restart between
two answers breaks no connection, so each begins with a look at the name of the server's weights.

Answers are written free of ticks, each in a request of its own. What a server wrote has come here
token by token, so that nothing of it is lost with the server, and new weights interrupt no more
than a moment: an answer goes on behind its prefix, with keys and values that the new weights make.

Random numbers are the server's: a seed goes with each request, but where an answer is cut, and
so what follows, depends on time. With `exact_draws` the servers draw by `rollout.vllm.plugin`, and
an answer's tokens follow from weights and seed. Which answers are asked for depends on time all the
same: hence there is no deterministic mode.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from bisect import insort
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from winnow.errors import ConfigError, PublicationError, WorkerError
from winnow.http.client import RemoteError
from winnow.rollout.engine import CompletionEvent, EngineStatus, GroupRequest
from winnow.rollout.http.client import Chunk, GenerateServer
from winnow.rollout.tick_engine import QueueEngine, WrittenAnswer
from winnow.rollout.weights import WeightUpdate, tensors
from winnow.types import FinishReason

log = logging.getLogger(__name__)

_TRIES = 5
"""Requests for an answer that bring no token, before it is given up."""
_PAUSE_S = 0.5
"""Between two looks at a server that does not answer; it doubles, up to the longest."""
_LONGEST_PAUSE_S = 10.0
_PING_S = 10.0
"""Longest wait for a lost server's answer to anything; its machine may be gone."""
_SHARD_BYTES = 1 << 30


@dataclass(eq=False)
class _Writing(WrittenAnswer):
    """An answer, queued or at a server."""

    reason: FinishReason | None = None
    failures: int = 0
    """Requests in a row that brought no token."""
    task: asyncio.Task[None] | None = None

    @property
    def order(self) -> tuple[bool, int, int]:
        return not self.ids, self.group.priority, self.request.index


class HttpEngine(QueueEngine[_Writing]):
    """Implements `Engine`; `engines` are what a canary asks.

    Args:
        servers: all with the same model.
        slots: answers that are under way at each of them at once.
        decode: token ids to text, where requests carry stop strings.
        live_updates: take new weights while answers run.
        folder: place for weights, which the servers see by the same path; None makes one.
        reload_timeout_s: longest time in which a server loads weights.
        restart_timeout_s: longest time without any server that answers.
    """

    def __init__(
        self,
        servers: Sequence[GenerateServer],
        slots: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        live_updates: bool = False,
        folder: Path | None = None,
        reload_timeout_s: float = 600.0,
        restart_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(_Writing, decode, live_updates)
        self._servers, self._slots = list(servers), slots
        self._parent = folder
        self._reload_s, self._restart_s = reload_timeout_s, restart_timeout_s
        self._root: tempfile.TemporaryDirectory[str] | None = None  # ends with the process, too
        self._count = itertools.count()
        self._weights: Path | None = None  # folder of the newest; its name is theirs
        self._reading: dict[GenerateServer, Path] = {}  # what servers load just now
        self._at: dict[GenerateServer, list[_Writing]] = {s: [] for s in servers}
        self._lost: dict[GenerateServer, asyncio.Task[None]] = {}  # and what waits for them
        self._silent_since = 0.0  # when the last of all servers was lost
        self._news = asyncio.Event()
        self._fault: BaseException | None = None
        self._is_open = True  # no weights are coming
        self._is_awaited = False  # `events` waits
        self._counted: int | None = None  # tokens at the last `progress`

    @property
    def engines(self) -> Mapping[str, GenerateServer]:
        """The servers that answer, by address."""
        return {s.url: s for s in self._servers if s not in self._lost}

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        await super().submit(groups)
        self._deal()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait until something happened; takes no notice of `until`, as there are no ticks.

        Raises:
            WorkerError: no server answers.
            ConfigError: one refuses what it is asked.
        """
        self._counted, self._is_awaited = None, True
        try:
            await self._until(lambda: bool(self._events) or not (self._queue or self._running))
        finally:
            self._is_awaited = False
        events, self._events = self._events, []
        return events

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while True:
            self._news.clear()
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if is_so():
                return
            await self._news.wait()

    async def progress(self) -> Sequence[CompletionEvent]:
        """Return events and answers begun, those too that wait to go on.

        Where no `events` waits, `status` tells the tokens of this moment until the next one, so
        that the token account agrees with it though servers write on.
        """
        events, self._events = self._events, []
        begun = [*self._running, *(w for w in self._queue if len(w.ids) > len(w.prefix))]
        running = [self._event(w, "running") for w in begun]
        self._counted = None if self._is_awaited else self._generated
        return [*events, *sorted(running, key=attrgetter("key"))]

    async def abort(self, group_ids: Collection[int]) -> None:
        wanted = set(group_ids)
        found = [w for w in (*self._running, *self._queue) if w.group.group_id in wanted]
        self._queue = [w for w in self._queue if w.group.group_id not in wanted]
        for writing in found:
            self._stop(writing)
        events = [self._event(w, "aborted") for w in found]
        self._events += sorted(events, key=attrgetter("key"))
        self._news.set()
        self._deal()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Have all servers load new weights from a folder; the version alone changes none.

        Raises:
            ValueError: answers are under way in an engine without live updates.
            PublicationError: a server could not load them.
            ConfigError: a server does not offer that, or the folder cannot be written.
            WorkerError: no server answers.
        """
        self._check_may_change()
        if update.tensors is None and update.shares is None:
            self._version = update.version
            return
        named = tensors(update.shares) if update.shares is not None else update.tensors
        assert named is not None
        folder = await self._write_weights(named, update.version)
        self._is_open = False
        try:
            for writing in self._running:
                self._requeue(writing)
            self._weights, self._version = folder, update.version
            await asyncio.gather(*map(self._publish, self.engines.values()))
            await self._until(lambda: bool(self.engines))
        finally:
            self._is_open = True
        used = {folder, *self._reading.values()}
        for older in set(folder.parent.iterdir()) - used:
            shutil.rmtree(older, ignore_errors=True)
        self._deal()

    def status(self) -> EngineStatus:
        told = super().status()
        return told if self._counted is None else replace(told, generated_tokens=self._counted)

    async def close(self) -> None:
        """Drop all answers, end all requests, and delete the folder of weights."""
        for writing in self._running:
            self._stop(writing)
        self._queue.clear()
        self._events.clear()
        for task in self._lost.values():
            task.cancel()
        for server in self._servers:
            server.close()
        if self._root is not None:
            self._root.cleanup()

    # -- answers ------------------------------------------------------------------------------

    @property
    def _slot_count(self) -> int:
        return self._slots * len(self._servers)

    @property
    def _running(self) -> Sequence[_Writing]:
        return [writing for each in self._at.values() for writing in each]

    def _tails(self, rows: Sequence[int], width: int) -> list[list[int]]:
        running = self._running
        return [running[row].ids[-width:] for row in rows]

    def _deal(self) -> None:
        """Give the servers what they have room for."""
        while self._is_open and self._queue:
            ready = self.engines.values()
            server = min(ready, key=lambda s: len(self._at[s]), default=None)
            if server is None or len(self._at[server]) >= self._slots:
                return
            writing = self._queue.pop(0)
            self._at[server].append(writing)
            writing.task = self._begin(self._write(writing, server))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task; an error that it does not expect is raised by `events`."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._raise_in_events(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _stop(self, writing: _Writing) -> None:
        """Take an answer from its server; tokens on their way are not waited for."""
        task, writing.task = writing.task, None
        if task is not None:
            task.cancel()
        for each in self._at.values():
            if writing in each:
                each.remove(writing)

    def _requeue(self, writing: _Writing) -> None:
        self._stop(writing)
        insort(self._queue, writing, key=attrgetter("order"))

    async def _write(self, writing: _Writing, server: GenerateServer) -> None:
        """Have a server go on with an answer, to its end or the server's."""
        begun, own, group = len(writing.ids), writing.task, writing.group
        sampling = group.sampling_of(writing.request)
        settings = {
            "max_tokens": sampling.max_tokens - begun,
            "stop_token_ids": list(sampling.stop_token_ids),
            **server.draws(sampling, writing.request.seed, len(group.prompt_ids), begun),
        }

        def receive(chunk: Chunk) -> None:
            if writing.task is own and writing.reason is None:
                self._take(writing, server.url, chunk)

        try:
            if self._weights is not None and await server.version() != self._weights.name:
                raise RemoteError(f"{server.url} was restarted, or given other weights")
            await server.write([*group.prompt_ids.tolist(), *writing.ids], settings, receive)
            if writing.reason is None:
                raise RemoteError(f"{server.url} ended an answer that has not come to its end", 500)
        except RemoteError as error:
            if writing.reason is not None:
                return
            writing.failures = 0 if len(writing.ids) > begun else writing.failures + 1
            status = error.status or 0
            if 400 <= status < 500 and status != 429:
                self._stop(writing)
                self._raise_in_events(ConfigError(f"rollout/engine=http: {error}"))
            elif writing.failures >= _TRIES:
                self._finish(writing, "failed", str(error))
            elif not status:
                self._lose(server, str(error))
            else:  # it is busy, or failed at this one
                await asyncio.sleep(_PAUSE_S * 2**writing.failures)
                self._requeue(writing)
                self._deal()

    def _take(self, writing: _Writing, url: str, chunk: Chunk) -> None:
        """Enter tokens of an answer, up to the one that ends it."""
        sampling, row = writing.group.sampling, self._running.index(writing)
        for token, logprob in zip(chunk.ids, chunk.logprobs, strict=True):
            writing.ids.append(token)
            writing.logprobs.append(logprob)
            self._generated += 1
            if token in sampling.stop_token_ids or (
                sampling.stop and self._with_stop_string([row])
            ):
                writing.reason = "stop"
            elif len(writing.ids) >= sampling.max_tokens:
                writing.reason = "length"
            if writing.reason is not None:
                break
        writing.spans = writing.spans_to(len(writing.ids), self._version)
        if chunk.finish_reason == "length" and writing.reason is None:
            length = len(writing.group.prompt_ids) + len(writing.ids)
            self._raise_in_events(
                ConfigError(
                    f"{url} ends answers at {length:,} tokens with their prompts; start it "
                    "with a larger --max-model-len"
                )
            )
        if writing.reason is not None:
            if chunk.finish_reason is not None:
                writing.task = None  # its request ends by itself
            self._finish(writing, "finished")

    def _finish(
        self, writing: _Writing, kind: Literal["finished", "failed"], error: str = ""
    ) -> None:
        self._stop(writing)
        self._events.append(self._event(writing, kind, error))
        self._news.set()
        self._deal()

    def _event(
        self,
        writing: _Writing,
        kind: Literal["finished", "aborted", "failed", "running"],
        error: str = "",
    ) -> CompletionEvent:
        reason = writing.reason if kind == "finished" else "aborted"
        assert reason is not None
        return CompletionEvent(*writing.key, kind, writing.segment(self._version), reason, 0, error)

    def _raise_in_events(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._news.set()

    # -- servers ------------------------------------------------------------------------------

    def _lose(self, server: GenerateServer, reason: str) -> None:
        """Ask a server nothing until it answers again, and holds the newest weights."""
        if server in self._lost:
            return
        log.warning("%s; its %d answers go on", reason, len(self._at[server]))
        self._lost[server] = self._begin(self._revive(server, reason))
        if not self.engines:
            self._silent_since = time.monotonic()
        for writing in list(self._at[server]):
            self._requeue(writing)
        self._deal()

    async def _revive(self, server: GenerateServer, reason: str) -> None:
        """Wait until a server answers, and give it the newest weights."""
        pause_s = _PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                await server.ping(_PING_S)
                await self._give_newest(server)
                break
            except RemoteError as error:
                reason = str(error)
            if not self.engines and time.monotonic() - self._silent_since > self._restart_s:
                raise WorkerError(
                    f"no server of rollout.engine.url has answered for {self._restart_s:g} s "
                    f"(rollout.engine.restart_timeout_s): {reason}",
                    "engine",
                    0,
                )
        del self._lost[server]
        log.warning("%s answers again", server.url)
        self._news.set()
        self._deal()

    async def _give_newest(self, server: GenerateServer) -> None:
        """Have a server load the newest weights, also those that come meanwhile."""
        held = None
        while self._weights != held:
            assert self._weights is not None
            held = self._reading[server] = self._weights
            try:
                await server.reload(str(held), held.name, self._reload_s)
            finally:
                del self._reading[server]

    async def _publish(self, server: GenerateServer) -> None:
        try:
            await self._give_newest(server)
        except RemoteError as error:
            if error.status is None:
                self._lose(server, str(error))
                return
            raise PublicationError(
                f"weights of version {self._version}: {error}; the servers must see the folder "
                "of rollout.engine.weights_folder by the same path"
            ) from None

    async def _write_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Write tensors as safetensors of bounded size; returns their folder."""
        from safetensors import SafetensorError

        try:
            if self._root is None:
                if self._parent is not None:
                    self._parent.mkdir(parents=True, exist_ok=True)
                self._root = tempfile.TemporaryDirectory(
                    prefix="winnow-weights-", dir=self._parent, ignore_cleanup_errors=True
                )
                Path(self._root.name).chmod(0o755)  # a server may run as another user
            root = Path(self._root.name)
            folder = root / f"{root.name}-{next(self._count)}-version-{version}"
            folder.mkdir()
            shard: dict[str, Tensor] = {}
            size = count = 0
            for name, tensor in named:
                if size and size + tensor.nbytes > _SHARD_BYTES:
                    await asyncio.to_thread(_save, shard, folder / f"model-{count:05}.safetensors")
                    shard, size, count = {}, 0, count + 1
                shard[name] = tensor.detach().cpu().contiguous()
                size += tensor.nbytes
            await asyncio.to_thread(_save, shard, folder / f"model-{count:05}.safetensors")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"rollout.engine.weights_folder: cannot write weights to "
                f"{self._parent or tempfile.gettempdir()}: {error}; name a folder with room that "
                "the servers see, too"
            ) from error
        return folder


def _save(shard: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(shard, file, metadata={"format": "pt"})
    file.chmod(0o644)


def make_http_engine(
    urls: Sequence[str],
    token: str | None,
    timeout_s: float,
    vocab_size: int,
    rows: int,
    longest: int,
    exact_draws: bool = False,
    **options: Any,
) -> HttpEngine:
    """Make the engine over servers that are up.

    Args:
        vocab_size: ids at or beyond it are never drawn.
        rows: logits that the model has.
        longest: most tokens of a request.
        exact_draws: they draw by our logits processor.
        options: of `HttpEngine`.

    Raises:
        ConfigError: a server does not answer, or does not offer what is needed.
    """
    servers = [GenerateServer(u, token, timeout_s, vocab_size, rows, exact_draws) for u in urls]
    try:
        for server in servers:
            server.probe_blocking(longest)
    except ConfigError:
        for server in servers:
            server.close()
        raise
    return HttpEngine(servers, **options)
