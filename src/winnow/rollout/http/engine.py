"""An engine over external servers with `/inference/v1/generate`.

    HttpEngine, a group ──assigns──► ServerEngine ──► a streaming request per answer ──► event
         ▲                              │ server closed the connection, timed out, restarted
         └──── continues the prefix ◄───┘

    load_weights ──► folder of safetensors ──► all servers load it, restarted ones later

A server that closes or refuses a connection counts as dead until it responds and has loaded the
newest weights again, since it may have been restarted. A restart between two requests breaks no
connection, so the version name of the server's weights is compared before each request.

Each answer is a separate streaming request, without ticks. Its tokens are received one by one, so
that none is lost with the server, and new weights interrupt an answer only for a moment: it
continues from its prefix, with keys and values of the new weights.

The server draws the random numbers: each request has a seed, but where an answer is interrupted
depends on timing, and so do its later tokens. With `exact_draws` servers draw by
`rollout.vllm.plugin`, and an answer's tokens depend on weights and seed alone. Which answers are
requested still depends on timing: there is no deterministic mode.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from winnow.errors import ConfigError, PublicationError, WorkerError
from winnow.http.client import RemoteError
from winnow.rollout.engine import CompletionEvent, EngineStatus, GroupRequest
from winnow.rollout.engine_group import EngineClient, EngineGroup
from winnow.rollout.http.generate_client import Chunk, GenerateClient
from winnow.rollout.request_queue import Key
from winnow.rollout.tick_engine import WrittenAnswer, WrittenRows
from winnow.rollout.weights import WeightUpdate, unpack_tensors
from winnow.types import FinishReason, Image

log = logging.getLogger(__name__)

_TRIES = 5
"""Requests of an answer in a row without a token, after which it fails."""
_PAUSE_S = 0.5
"""First delay between two pings of a dead server; it doubles up to the longest."""
_LONGEST_PAUSE_S = 10.0
_PING_S = 10.0
"""Timeout of a ping of a dead server, whose machine may be down."""
_SHARD_BYTES = 1 << 30


class WeightFolders:
    """The folders of published weights, which servers read at the same path.

    Args:
        parent: their parent; None creates a temporary one.
    """

    def __init__(self, parent: Path | None) -> None:
        self._parent = parent
        self._root: tempfile.TemporaryDirectory[str] | None = None  # ends with the process, too
        self._count = itertools.count()
        self.newest: Path | None = None
        """Folder of the newest weights; its name is their version name."""
        self.version = 0

    async def write(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write tensors to safetensors files of bounded size in a new folder.

        Raises:
            ConfigError: the folder cannot be written.
        """
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
                    await asyncio.to_thread(_save_shard, shard, folder, count)
                    shard, size, count = {}, 0, count + 1
                shard[name] = tensor.detach().cpu().contiguous()
                size += tensor.nbytes
            await asyncio.to_thread(_save_shard, shard, folder, count)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"rollout.engine.weights_folder: cannot write weights to "
                f"{self._parent or tempfile.gettempdir()}: {error}; name a folder with free space "
                "that the servers can read"
            ) from error
        self.newest = folder

    def remove_older(self, used: Collection[Path | None]) -> None:
        """Remove all folders but the newest one and those in use."""
        if self.newest is not None:
            for older in {*self.newest.parent.iterdir()} - {self.newest, *used}:
                shutil.rmtree(older, ignore_errors=True)

    def close(self) -> None:
        """Delete all folders."""
        if self._root is not None:
            self._root.cleanup()


def _save_shard(shard: dict[str, Tensor], folder: Path, number: int) -> None:
    from safetensors.torch import save_file

    file = folder / f"model-{number:05}.safetensors"
    save_file(shard, file, metadata={"format": "pt"})
    file.chmod(0o644)


@dataclass(eq=False)
class ServedAnswer(WrittenAnswer):
    """A queued answer, or one that a server writes."""

    task: asyncio.Task[None] | None = None
    """The task of its request, until it is complete or cancelled."""

    def stop(self) -> None:
        """Cancel the request; further tokens are ignored."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()


class ServerEngine(WrittenRows[ServedAnswer]):
    """A member of `HttpEngine`: one server and its answers.

    Its methods raise WorkerError if the server does not respond; `stop` then returns the answers'
    tokens so far.

    Args:
        weights: folders of published weights.
        reload_timeout_s: timeout for loading them.
        options: `slots`, `decode` and `live_updates` of `QueueEngine`.
    """

    def __init__(
        self, server: GenerateClient, weights: WeightFolders, reload_timeout_s: float, *options: Any
    ) -> None:
        super().__init__(ServedAnswer, *options)
        self.server, self._weights, self._reload_s = server, weights, reload_timeout_s
        self.logprobs_of = server.logprobs_of
        self._news = asyncio.Event()
        self._fault: tuple[ServedAnswer, BaseException] | None = None  # raised by `events`
        self._loaded: Path | None = None  # weights that it was given since it last answered anew
        self.loading: Path | None = None
        """The folder that the server is loading; answers wait meanwhile."""

    def _free_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows[row].stop()
        self._rows = [answer for row, answer in enumerate(self._rows) if row not in rows]
        self._news.set()

    def status(self) -> EngineStatus:
        # A dead server loads the newest weights before it gets requests again.
        return replace(super().status(), weight_version=self._weights.version)

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        await super().submit(groups)
        self._start_requests()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait until there are events; `until` only means not to wait, since there are no ticks.

        Raises:
            WorkerError: the server does not respond.
            ConfigError: the server refuses a request.
        """
        while not self._events and (self._rows or self._queue) and until is None:
            self._news.clear()
            if self._fault is not None:
                (answer, fault), self._fault = self._fault, None
                if any(answer is row for row in self._rows):  # else it was aborted since
                    raise fault
                continue
            await self._news.wait()
        events, self._events = self._events, []
        return events

    async def abort(self, group_ids: Collection[int]) -> None:
        await super().abort(group_ids)
        self._start_requests()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Have the server load the newest weights, unless it has them.

        Raises:
            RemoteError: loading failed.
            WorkerError: the server does not respond.
            ConfigError: the server has no such endpoint.
        """
        if self._loaded != self._weights.newest:
            for answer in self._rows:
                answer.stop()
            self._fault = None  # of requests that are no more
        try:
            await self.load_newest_weights()
        except RemoteError as error:
            if error.status is not None:
                raise
            raise WorkerError(str(error), "engine", 0) from None
        self._start_requests()

    async def load_newest_weights(self) -> None:
        """Have the server load the newest weights, also those that are published meanwhile.

        Raises:
            RemoteError, ConfigError: as `GenerateClient.load_folder` raises them.
        """
        while (folder := self._weights.newest) != self._loaded:
            assert folder is not None
            self.loading = folder
            try:
                await self.server.load_folder(str(folder), folder.name, self._reload_s)
            finally:
                self.loading = None
            self._loaded = folder
        self._version = self._weights.version

    def stop(self) -> list[CompletionEvent]:
        """Drop all answers of a dead server; return its events, and `running` ones of the rest."""
        rows = range(len(self._rows))
        events = [*self._events, *self._make_events(rows, "running")]
        self._queue.clear()
        self._events.clear()
        self._free_rows(rows)
        self._fault = self._loaded = None
        return events

    async def close(self) -> None:
        """Drop all answers and cancel all requests."""
        await super().close()
        self.server.close()

    def _start_requests(self) -> None:
        """Start requests for queued and interrupted answers, as far as slots are free."""
        if self.loading is not None:
            return
        while self._queue and len(self._rows) < self._slot_count:
            self._rows.append(self._queue.pop(0))
        for answer in self._rows:
            if answer.task is None:
                answer.task = asyncio.create_task(self._write_answer(answer))
                answer.task.add_done_callback(self._on_request_done)

    def _on_request_done(self, task: asyncio.Task[None]) -> None:
        answer = next((answer for answer in self._rows if answer.task is task), None)
        if answer is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._set_fault(answer, error)

    def _set_fault(self, answer: ServedAnswer, error: BaseException) -> None:
        self._fault = self._fault or (answer, error)
        self._news.set()

    async def _write_answer(self, answer: ServedAnswer) -> None:
        """Request an answer until it is complete, with retries; raise if the server is dead."""
        task, failures = answer.task, 0
        while answer.task is task:
            begun = len(answer.ids)
            try:
                await self._request_rest(answer)
            except RemoteError as error:
                if answer.task is not task:  # it is complete
                    return
                failures = 0 if len(answer.ids) > begun else failures + 1
                status = error.status or 0
                if 400 <= status < 500 and status != 429:
                    raise ConfigError(f"rollout/engine=http: {error}") from None
                if not status:
                    raise WorkerError(str(error), "engine", 0) from None
                if failures >= _TRIES:
                    self._finish_answer(answer, "aborted", str(error))
                else:  # the server is busy, or failed at this answer
                    await asyncio.sleep(_PAUSE_S * 2**failures)

    async def _request_rest(self, answer: ServedAnswer) -> None:
        """Request the rest of an answer.

        Raises:
            RemoteError: the answer is not complete.
        """
        task, url, group, begun = answer.task, self.server.url, answer.group, len(answer.ids)
        sampling = group.sampling_of(answer.request)
        start, seed = len(group.prompt_ids), answer.request.seed
        settings = {
            "max_tokens": sampling.max_tokens - begun,
            "stop_token_ids": list(sampling.stop_token_ids),
            **self.server.draw_settings(sampling, seed, start, begun),
        }

        def receive(chunk: Chunk) -> None:
            if answer.task is task:
                self._append_tokens(answer, chunk)

        if self._loaded is not None and await self.server.weight_version() != self._loaded.name:
            raise RemoteError(f"{url} was restarted or has loaded other weights")
        context = [*group.prompt_ids.tolist(), *answer.ids]
        await self.server.stream_answer(context, settings, receive, answer.images)
        if answer.task is task:
            raise RemoteError(f"{url} ended the stream of an unfinished answer", 500)

    def _append_tokens(self, answer: ServedAnswer, chunk: Chunk) -> None:
        """Append new tokens to an answer, up to the one that ends it."""
        sampling, row = answer.group.sampling, self._rows.index(answer)
        reason: FinishReason | None = None
        for token, logprob in zip(chunk.ids, chunk.logprobs, strict=True):
            answer.ids.append(token)
            answer.logprobs.append(logprob)
            self._generated += 1
            if token in sampling.stop_token_ids or (sampling.stop and self._rows_at_stop([row])):
                reason = "stop"
            elif len(answer.ids) >= sampling.max_tokens:
                reason = "length"
            if reason is not None:
                break
        answer.spans = answer.spans_to(len(answer.ids), self._version)
        if reason is not None:
            if chunk.finish_reason is not None:
                answer.task = None  # its request ends by itself
            self._finish_answer(answer, reason)
        elif chunk.finish_reason == "length":
            length = len(answer.group.prompt_ids) + len(answer.ids)
            self._set_fault(
                answer,
                ConfigError(
                    f"{self.server.url} stops at {length:,} tokens of prompt and answer; "
                    "start it with a larger --max-model-len"
                ),
            )

    def _finish_answer(self, answer: ServedAnswer, reason: FinishReason, error: str = "") -> None:
        row = self._rows.index(answer)
        (event,) = self._make_events([row], "failed" if error else "finished", {row: reason})
        self._events.append(replace(event, error=error))
        self._free_rows([row])
        self._start_requests()


class HttpEngine(EngineGroup):
    """Implements `Engine`: a group of servers that may die and come back.

    Args:
        servers: all with the same model.
        slots: most concurrent answers of each server.
        decode: token ids to text, for stop strings.
        live_updates: accept new weights while answers run.
        folder: parent of the weights' folders, at the same path for servers; None creates one.
        reload_timeout_s: timeout for loading weights.
        restart_timeout_s: longest time without any server that responds.
    """

    def __init__(
        self,
        servers: Sequence[GenerateClient],
        slots: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        live_updates: bool = False,
        folder: Path | None = None,
        reload_timeout_s: float = 600.0,
        restart_timeout_s: float = 300.0,
    ) -> None:
        self._weights = WeightFolders(folder)
        options = self._weights, reload_timeout_s, slots, decode, live_updates
        members = [ServerEngine(server, *options) for server in servers]
        # They take weights from the folder, not in buckets.
        super().__init__(cast(Any, members), deterministic=False)
        self._members = dict(zip(self._clients, members, strict=True))
        for client, member in self._members.items():
            client.name = member.server.url
        self._restart_s = restart_timeout_s
        self._silent_since = 0.0  # when the last of all servers died

    @property
    def servers(self) -> Mapping[str, GenerateClient]:
        """The servers that respond, by URL."""
        return {client.name: self._members[client].server for client in self._alive()}

    async def load_weights(self, update: WeightUpdate) -> None:
        """Have all servers load new weights from a folder, if the update has tensors.

        Raises:
            ValueError: answers are running in an engine without live updates.
            PublicationError: a server could not load them.
            ConfigError: a server has no such endpoint, or the folder cannot be written.
            WorkerError: no server responds.
        """
        self._check_update_allowed()
        named = unpack_tensors(update.stored) if update.stored is not None else update.tensors
        if named is not None:
            await self._weights.write(named, update.version)
        self._weights.version = update.version
        if named is None and not self._alive():
            return  # servers that come back get that version
        await self._wait_for_server()
        try:
            await super().load_weights(WeightUpdate(update.version))
        except RemoteError as error:
            raise PublicationError(
                f"weights of version {update.version}: {error}; the servers must have "
                "rollout.engine.weights_folder at the same path"
            ) from None
        await self._wait_for_server()
        self._weights.remove_older([member.loading for member in self._members.values()])

    async def close(self) -> None:
        """Drop all answers, cancel all requests, and delete the weights' folders."""
        await super().close()
        for member in self._members.values():
            await member.close()
        self._weights.close()

    def _alive(self) -> list[EngineClient]:
        return [client for client in self._clients if not client.is_dead]

    async def _wait_for_server(self) -> None:
        while not self._alive():
            self._news.clear()
            self._raise_fault()
            await self._news.wait()

    def _started_keys(self, client: EngineClient) -> Collection[Key]:
        """Stop a server's requests; return the answers that it had started."""
        running = self._members[client].stop()
        client.receive(running)
        return {event.key for event in running}

    def _on_retired(self, client: EngineClient, error: WorkerError | PublicationError) -> None:
        """Send no requests until the server responds and has loaded the newest weights."""
        if not self._alive():
            self._silent_since = time.monotonic()
        client.task = asyncio.create_task(self._revive(client, str(error)))
        client.task.add_done_callback(lambda task: self._on_client_done(client, task))

    async def _revive(self, client: EngineClient, reason: str) -> None:
        """Wait until a server responds, and have it load the newest weights."""
        member, pause_s = self._members[client], _PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                await member.server.ping(_PING_S)
                await member.load_newest_weights()
                break
            except RemoteError as error:
                reason = str(error)
            if not self._alive() and time.monotonic() - self._silent_since > self._restart_s:
                self._fault = WorkerError(
                    f"no server of rollout.engine.url has answered for {self._restart_s:g} s "
                    f"(rollout.engine.restart_timeout_s): {reason}",
                    "engine",
                    0,
                )
                return
        client.is_dead, client.task = False, None
        log.warning("%s answers again", client.name)
        await self._dispatch()
        self._news.set()


def make_http_engine(
    urls: Sequence[str],
    token: str | None,
    timeout_s: float,
    vocab_size: int,
    rows: int,
    longest: int,
    exact_draws: bool = False,
    prompt: tuple[list[int], Sequence[Image]] = ([0], ()),
    **options: Any,
) -> HttpEngine:
    """Check the servers and make the engine over them.

    Args:
        vocab_size: ids at or beyond it are never drawn.
        rows: size of the model's logits.
        longest: most tokens of a request.
        exact_draws: the servers have Winnow's logits processor.
        prompt: ids and images of a first request.
        options: of `HttpEngine`.

    Raises:
        ConfigError: a server does not respond, or cannot be used.
    """
    servers = [GenerateClient(u, token, timeout_s, vocab_size, rows, exact_draws) for u in urls]
    try:
        for server in servers:
            server.probe_blocking(longest, *prompt)
    except ConfigError:
        for server in servers:
            server.close()
        raise
    return HttpEngine(servers, **options)
