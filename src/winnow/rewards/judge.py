"""A language model behind an OpenAI-compatible endpoint as a scorer (`reward/judge=openai`).

    answer -> messages -> cache? -> slot -> rate limit -> request, tried again -> cache -> number

Two equal questions are one: whoever asks later waits for the same reply. A reply is kept as it
came, and read each time, so that another parse rule asks for nothing anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from winnow.config.judge import BUILT_IN, OpenAiJudge
from winnow.errors import RewardError
from winnow.http.client import HttpJson, RemoteError
from winnow.rewards.judge_cache import Reply, ReplyCache, cache_path
from winnow.rewards.judge_prompt import JudgePrompt
from winnow.rewards.rate_limit import RateLimit
from winnow.rewards.task import Failure
from winnow.types import Prompt

log = logging.getLogger(__name__)

Verdict = asyncio.Future["float | Failure"]
_PATH = "chat/completions"
_NEVER = {401: "api_key_env", 403: "api_key_env", 404: "base_url and reward.judge.model"}
"""Statuses of a service that will answer nothing of this recipe, and where to look. After an answer
403 is one question's: some services refuse so what they will not talk about."""
_SECOND_TEMPERATURE = 0.7
_LONGEST_PAUSE_S = 60.0
_BYTES_PER_TOKEN = 4
_SHOWN = 200
_MOST_TOKENS = 10**9
"""What a service counts beyond it is no count."""


@dataclass
class JudgeCounts:
    """What became of questions; `judge/NAME` in the metrics."""

    requests: int = 0
    """Sent, tries after failures included."""
    cache_hits: int = 0
    """Questions whose reply was on disk."""
    tokens: int = 0
    """Of prompts and replies that came over the network."""
    retries: int = 0
    """Requests sent again after a failure."""
    unparsed: int = 0
    """Replies without a number."""


@dataclass(frozen=True)
class _Desk:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore
    turn: asyncio.Lock
    """Of whoever asks the rate limit: first come, first served."""
    under_way: dict[str, asyncio.Task[float | Failure]]


class Judge:
    """Asks one endpoint.

    Args:
        config: what the number is called and counts for, and how it is come by.
        backoff_s: pause after a first failure; it doubles with each.
    """

    def __init__(self, config: OpenAiJudge, backoff_s: float = 1.0) -> None:
        """Read the key and open the cache; nothing is connected yet.

        Raises:
            RewardError: the key is missing, or the cache cannot be used.
        """
        self.config = config
        self._backoff_s = backoff_s
        self._key = _key(config.api_key_env)
        self._prompt = JudgePrompt(config)
        self._limit = RateLimit(config.requests_per_minute, config.tokens_per_minute)
        try:
            self._http = HttpJson(
                config.base_url,
                token=self._key or None,
                max_concurrent=config.max_concurrent,
                # Each try passes the rate limit, so trying again is done here.
                retries=1,
                retry_statuses=frozenset(),
            )
        except ValueError as error:
            field = "api_key_env" if "token" in str(error) else "base_url"
            given = getattr(config, field)
            raise RewardError(f"reward.judge.{field} {given}: {error}") from None
        path = cache_path(config.cache)
        self._cache = None if path is None else ReplyCache(path)
        if self._cache is not None:
            replies, size = self._cache.size()
            log.info("judge: %s holds %s replies, %s KiB", path, f"{replies:,}", f"{size >> 10:,}")
        self._counts = JudgeCounts()
        self._has_answered = False
        self._desk: _Desk | None = None
        self.scored = 0
        """Answers so far."""

    def check(self, prompt: Prompt) -> None:
        """See before training that an answer to a prompt can be put to the judge.

        Raises:
            RewardError: a template fails.
        """
        try:
            self._prompt.messages(prompt, "")
        except ValueError as error:
            raise RewardError(f"{error} on prompt {prompt.uid}; mend it") from error

    def begin(self, prompt: Prompt, text: str) -> Verdict:
        """What will hold the judge's number, or why there is none.

        It raises RewardError where the endpoint refuses whatever is asked, or the cache fails.
        """
        desk = self._desk_here()
        try:
            messages = self._prompt.messages(prompt, text)
        except ValueError as error:
            self.scored += 1
            refused: Verdict = desk.loop.create_future()
            refused.set_result(Failure(f"the judge: {error}", ""))
            return refused
        key = json.dumps(messages)
        task = desk.under_way.get(key)
        if task is None:
            task = desk.under_way[key] = desk.loop.create_task(self._judged(desk, messages))
            task.add_done_callback(lambda _: desk.under_way.pop(key, None))
        # Shielded, because others may wait for it, too, and what was paid for should be kept.
        verdict = asyncio.shield(task)
        # The first that fails ends the run; nobody may be left to look at the others.
        verdict.add_done_callback(lambda done: done.cancelled() or done.exception())
        return verdict

    def figures(self) -> dict[str, int]:
        """`judge/NAME` for each count since the last call."""
        counts, self._counts = self._counts, JudgeCounts()
        return {f"judge/{each.name}": getattr(counts, each.name) for each in fields(counts)}

    def close(self) -> None:
        """End the connections, and close the cache."""
        self._http.close()
        if self._cache is not None:
            self._cache.close()

    def _desk_here(self) -> _Desk:
        loop = asyncio.get_running_loop()
        if self._desk is None or self._desk.loop is not loop:
            slots = asyncio.Semaphore(self.config.max_concurrent)
            self._desk = _Desk(loop, slots, asyncio.Lock(), {})
        return self._desk

    async def _judged(self, desk: _Desk, messages: list[dict[str, str]]) -> float | Failure:
        try:
            for attempt in range(2):
                reply = await self._reply(desk, self._body(messages, attempt), attempt)
                value = self._prompt.read(reply.text, reply.is_cut)
                if value is not None:
                    return value
                self._counts.unparsed += 1
        except RemoteError as error:
            if self._refuses_all(error):
                raise RewardError(
                    f"the judge answers nothing: {error.line}; see to reward.judge."
                    f"{_NEVER[error.status or 0]}"
                ) from None
            return Failure(f"the judge: {error.line}", "")
        finally:
            self.scored += 1
        said = self._without_key(reply.text)
        end = f"it ends with {said[-_SHOWN:]!r}" if said else "it is empty"
        return Failure(
            f"the judge: no number was read from its reply by reward.judge.parse, twice over; {end}"
            " (reward.judge.max_tokens may have cut it off)",
            "",
        )

    async def _reply(self, desk: _Desk, body: Mapping[str, Any], attempt: int) -> Reply:
        place = f"{self.config.base_url.rstrip('/')}/{_PATH}"
        asked = json.dumps([place, body, attempt], sort_keys=True)
        question = hashlib.sha256(asked.encode()).digest()
        if self._cache is not None:
            kept = await self._cache.get(question)
            if kept is not None:
                self._counts.cache_hits += 1
                return kept
        async with desk.slots:
            reply = await self._asked(desk, body)
        # Cut off, it is no reply to a built-in template; one of the user's own may want it short.
        if self._cache is None or (reply.is_cut and self.config.template in BUILT_IN):
            return reply
        return await self._cache.put(question, reply)

    def _refuses_all(self, error: RemoteError) -> bool:
        if error.kind != "status" or (error.status == 403 and self._has_answered):
            return False
        return error.status in _NEVER

    def _body(self, messages: list[dict[str, str]], attempt: int) -> dict[str, Any]:
        """The request; a second one would get the first one's reply at the same sampling."""
        config = self.config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            "seed": config.seed,
            **config.options,
        }
        if attempt > 0:
            if isinstance(body["temperature"], int | float):
                body["temperature"] = max(body["temperature"], _SECOND_TEMPERATURE)
            if isinstance(body["seed"], int):
                body["seed"] += 1
        return {field: value for field, value in body.items() if value is not None}

    async def _asked(self, desk: _Desk, body: Mapping[str, Any]) -> Reply:
        """One reply from the network, however many requests that takes.

        Raises:
            RemoteError: none came.
        """
        prompt_tokens = _bytes(body["messages"]) / _BYTES_PER_TOKEN
        estimated = prompt_tokens + self.config.max_tokens
        for attempt in range(self.config.retries + 1):
            await self._let_through(desk, estimated)
            self._counts.requests += 1
            self._counts.retries += attempt > 0
            try:
                data = await self._http.post(_PATH, body, self.config.timeout_s)
                reply = self._read(data, prompt_tokens)
            except RemoteError as error:
                if error.kind == "status":  # refused, so nothing was written
                    self._limit.settle(estimated, 0.0)
                if attempt == self.config.retries or not _may_pass(error):
                    raise
                await self._pause(error, attempt)
            else:
                self._limit.settle(estimated, reply.tokens)
                self._counts.tokens += reply.tokens
                self._has_answered = True
                return reply
        raise AssertionError("unreachable")

    async def _let_through(self, desk: _Desk, tokens: float) -> None:
        async with desk.turn:
            while (wait_s := self._limit.ask(tokens)) > 0:
                await asyncio.sleep(wait_s)

    async def _pause(self, error: RemoteError, attempt: int) -> None:
        if error.after_s is not None:
            # The service speaks of all requests, not of this one.
            self._limit.pause(min(error.after_s, _LONGEST_PAUSE_S))
        most = min(self._backoff_s * 2.0**attempt, _LONGEST_PAUSE_S)
        # Jitter is no part of a run's random numbers: it moves times, never scores.
        await asyncio.sleep(most * random.SystemRandom().uniform(0.5, 1.0))

    def _read(self, data: Any, prompt_tokens: float) -> Reply:
        """What an answer of the service says.

        Raises:
            RemoteError: it is no chat completion.
        """
        try:
            choice = data["choices"][0]
            text = choice["message"]["content"]
            if text is not None and not isinstance(text, str):
                raise TypeError("content must be a text")
        except (TypeError, LookupError):
            shown = self._without_key(json.dumps(data))[:_SHOWN]
            line = f"{self._http.place} answered with no chat completion: {shown}"
            raise RemoteError("garbage", 200, line) from None
        text = text or ""
        usage = data.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        if type(tokens) is not int or not 0 <= tokens <= _MOST_TOKENS:
            tokens = round(prompt_tokens + len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN)
        return Reply(text, tokens, choice.get("finish_reason") == "length")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "(secret)") if self._key else text


def _bytes(messages: Any) -> int:
    """Of what the messages say, in UTF-8: a script with long characters has more tokens."""
    return sum(len(each["content"].encode("utf-8", "replace")) for each in messages)


def _key(variable: str | None) -> str:
    """The key, or nothing where none is asked for.

    Raises:
        RewardError: the variable is not set.
    """
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise RewardError(
            f"reward.judge.api_key_env is {variable}, which is not set in the environment; "
            f"export {variable}=KEY, or set reward.judge.api_key_env=null"
        )
    return key


def _may_pass(error: RemoteError) -> bool:
    """Whether the same request may be answered later."""
    status = error.status or 0
    return error.kind != "status" or status in (408, 409, 425, 429) or status >= 500
