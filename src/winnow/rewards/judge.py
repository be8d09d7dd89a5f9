"""A language model as a scorer: behind an OpenAI-compatible endpoint, or on engines of the run's.

    answer -> messages -> cache? -> slot -> rate limit -> request, tried again -> cache -> number

Two equal questions are one: a second caller waits for the same reply. A reply is kept as it came,
and read each time, so that another parse rule asks for nothing anew. All of this runs on the event
loop of the judge's client, whichever loop the answers are scored on. The client is that of
`reward/judge=openai`, which this module has, or of `reward/judge=engine`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from winnow.config.judge import TEMPLATES, LanguageModelJudge, OpenAiJudge
from winnow.errors import RewardError
from winnow.http.client import LONGEST_RETRY_AFTER_S, JsonClient, RemoteError, read_token
from winnow.rewards.judge_cache import JudgeReply, ReplyCache, cache_path
from winnow.rewards.judge_prompt import JudgePrompt
from winnow.rewards.task import Failure, ScoreFuture
from winnow.types import Prompt

log = logging.getLogger(__name__)
T = TypeVar("T")

_PATH = "chat/completions"
_NEVER = {401: "api_key_env", 403: "api_key_env", 404: "base_url and reward.judge.model"}
"""Settings to look at where a service refuses every request of a recipe, by status. After an
answer a 403 is one question's: some services refuse so what they will not talk about."""
_PASSING = (408, 409, 425, 429)
_SECOND_TEMPERATURE = 0.7
_BYTES_PER_TOKEN = 4
_SHOWN = 200
_MOST_TOKENS = 10**9
"""Usage beyond it is a service's mistake."""
_MINUTE_S = 60.0
_NOTHING = 1e-9
_NO_LIMIT = 10**15
_COUNTS = ("requests", "cache_hits", "tokens", "retries", "unparsed")


class TokenBucket:
    """An allowance that fills with time.

    It holds a tenth of a minute's limit, so that what has been saved up cannot come at once, and
    fills at a rate that leaves room for it: no minute sees more than the limit.

    Args:
        limit: a minute's.
        whole: its unit is indivisible, as a request is.
        now: seconds of any clock that does not go back.
    """

    def __init__(self, limit: int, indivisible: bool, now: float) -> None:
        # One by one, a bucket of c lets fewer than c + 60 * rate + 1 through in less than a minute.
        self._capacity = float(max(1, limit // 10)) if indivisible else limit / 10
        self._rate = (limit - self._capacity + indivisible) / _MINUTE_S
        self._level = self._capacity
        self._since = now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until so much may be taken, or the bucket is full if it holds less."""
        self._level = min(self._level + (now - self._since) * self._rate, self._capacity)
        self._since = now
        lacking = min(amount, self._capacity) - self._level
        return max(lacking, 0.0) / self._rate if lacking > _NOTHING else 0.0

    def take(self, amount: float) -> None:
        """Take an amount, below zero if need be; a negative amount refunds."""
        self._level = min(self._level - amount, self._capacity)


class RateLimit:
    """Limits the requests and tokens of any minute.

    Args:
        clock: seconds; does not go back.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        now = clock()
        self._requests = TokenBucket(requests_per_minute or _NO_LIMIT, True, now)
        self._tokens = TokenBucket(tokens_per_minute or _NO_LIMIT, False, now)
        self._paused_until = now

    def try_acquire(self, tokens: float) -> float:
        """Take one request and its tokens and return 0, or return the seconds to wait."""
        now = self._clock()
        waits = (self._requests.wait_s(1.0, now), self._tokens.wait_s(tokens, now))
        wait_s = max(self._paused_until - now, *waits)
        if wait_s <= 0:
            self._requests.take(1.0)
            self._tokens.take(tokens)
        return max(wait_s, 0.0)

    def settle(self, estimated: float, used: float) -> None:
        """Replace a request's estimated tokens by those used."""
        self._tokens.take(used - estimated)

    def pause(self, seconds: float) -> None:
        """Block all requests for some seconds."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)


class JudgeClient(Protocol):
    """A client of a judge's model, on a separate event loop."""

    cache_scope: object
    """Plain data: replies from here are cached separately from others."""
    counts: Counter[str]
    has_answered: bool = False

    def settings(self) -> Mapping[str, Any]:
        """Return the fields of a request besides its messages; None leaves one out."""

    def check(self, messages: list[dict[str, str]]) -> None:
        """Raise a ValueError of one line where these cannot be put to the model."""
        return

    async def fetch_reply(self, body: Mapping[str, Any]) -> JudgeReply:
        """Request a reply, on the client's loop; RemoteError: only this request failed."""

    def progress(self) -> int:
        """Return a count that grows while the model generates, if that can be observed."""
        return 0

    def redact_token(self, text: str) -> str:
        """Return the text without secrets."""
        return text

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the client's loop."""

    def close(self) -> None:
        """Release the model."""


class _HttpClient(JsonClient, JudgeClient):
    """Chat completions: each try passes the rate limit, and counts.

    `counts` are by name: `requests` sent, tries after failures included; `tokens` of prompts and
    replies that came over the network; `retries` after failures.
    """

    def __init__(self, config: OpenAiJudge, backoff_s: float) -> None:
        key = read_token(config.api_key_env, "reward.judge.api_key_env")
        super().__init__(config.base_url, key, config.max_concurrent, config.retries + 1, backoff_s)
        self._config = config
        self.cache_scope = f"{config.base_url.rstrip('/')}/{_PATH}"
        self._limit = RateLimit(config.requests_per_minute, config.tokens_per_minute)
        self._turn = asyncio.Lock()
        self.counts = zero_counts()

    def settings(self) -> dict[str, Any]:
        config = self._config
        fields = {name: getattr(config, name) for name in ("model", "temperature", "max_tokens")}
        return {**fields, "seed": config.seed, **config.options}

    async def fetch_reply(self, body: Mapping[str, Any]) -> JudgeReply:
        reply: JudgeReply = await self.request(_PATH, body, self._config.timeout_s)
        return reply

    async def attempt(self, path: str, body: Any, timeout_s: float, number: int) -> JudgeReply:
        """Send a request once its turn comes."""
        # Bytes of UTF-8, because a script with long characters has more tokens.
        texts = [each["content"].encode("utf-8", "replace") for each in body["messages"]]
        prompt_tokens = sum(map(len, texts)) / _BYTES_PER_TOKEN
        estimated = prompt_tokens + self._config.max_tokens
        async with self._turn:  # first come, first served
            while (wait_s := self._limit.try_acquire(estimated)) > 0:
                await asyncio.sleep(wait_s)
        self.counts["requests"] += 1
        self.counts["retries"] += number > 1
        try:
            data = await super().attempt(path, body, timeout_s, number)
            reply = self._completion(data, prompt_tokens)
        except RemoteError as error:
            error.is_transient = True
            if error.status is not None:  # refused, so nothing was written
                self._limit.settle(estimated, 0.0)
                error.is_transient = error.status in _PASSING or error.status >= 500
            if error.retry_after_s is not None and error.is_transient:
                # The service speaks of all requests, not of this one.
                self._limit.pause(min(error.retry_after_s, LONGEST_RETRY_AFTER_S))
            raise
        self._limit.settle(estimated, reply.tokens)
        self.counts["tokens"] += reply.tokens
        self.has_answered = True
        return reply

    def _completion(self, data: Any, prompt_tokens: float) -> JudgeReply:
        """The reply in a chat completion."""
        try:
            choice = data["choices"][0]
            text = choice["message"]["content"]
            if text is not None and not isinstance(text, str):
                raise TypeError("content must be a text")
        except (TypeError, LookupError):
            message = f"answered with no chat completion: {json.dumps(data)}"
            raise self.make_error(message) from None
        text = text or ""
        usage = data.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        if type(tokens) is not int or not 0 <= tokens <= _MOST_TOKENS:
            tokens = round(prompt_tokens + len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN)
        return JudgeReply(text, tokens, choice.get("finish_reason") == "length")


def zero_counts() -> Counter[str]:
    """Return a judge's counts, by name, at its start."""
    return Counter(dict.fromkeys(_COUNTS, 0))


class Judge:
    """Scores answers by one model; safe to use from any event loop.

    Args:
        config: says how the number is made, what it is called and what it counts for.
        backoff_s: pause after a first failure; it doubles with each.
        client: asks the model; None asks the endpoint of an `OpenAiJudge`.

    Raises:
        RewardError: the key is missing, or the cache cannot be used. Nothing is connected yet.
    """

    takes_time = True
    """Scores come later."""

    def __init__(
        self, config: LanguageModelJudge, backoff_s: float = 1.0, client: JudgeClient | None = None
    ) -> None:
        self.config = config
        self._prompt = JudgePrompt(config)
        if client is None:
            assert isinstance(config, OpenAiJudge)
            client = _HttpClient(config, backoff_s)
        self._client = client
        path = cache_path(config.cache)
        self._cache = None if path is None else ReplyCache(path)
        if self._cache is not None:
            replies, size = self._cache.count_and_bytes()
            log.info("judge: %s holds %s replies, %s KiB", path, f"{replies:,}", f"{size >> 10:,}")
        self._counts = self._client.counts
        self._reported: Counter[str] = Counter()
        self._under_way: dict[str, Future[float | Failure]] = {}
        self._scored = 0

    @property
    def scored(self) -> int:
        """A count that grows with each answer, and while one is judged if that can be observed."""
        return self._scored + self._client.progress()

    def check(self, prompt: Prompt) -> None:
        """Check before training that the judge can be asked about answers to a prompt.

        Raises:
            RewardError: a template fails, or the question is too long.
        """
        try:
            self._client.check(self._prompt.messages(prompt, ""))
        except ValueError as error:
            raise RewardError(f"{error} on prompt {prompt.uid}; fix it") from error

    def begin_scoring(self, prompt: Prompt, text: str) -> ScoreFuture:
        """Start scoring an answer; the future gets its score or a `Failure`.

        The future raises RewardError where the endpoint refuses every request, or the cache fails.
        """
        try:
            messages = self._prompt.messages(prompt, text)
        except ValueError as error:
            self._scored += 1
            refused: ScoreFuture = asyncio.get_running_loop().create_future()
            refused.set_result(Failure(f"the judge: {error}"))
            return refused
        key = json.dumps(messages)
        work = self._under_way.get(key)
        if work is None:
            work = self._under_way[key] = self._client.submit(self._judge(messages))
            work.add_done_callback(lambda _: self._under_way.pop(key, None))
        # Shielded, because others may wait for it, too, and what was paid for should be kept.
        verdict = asyncio.shield(asyncio.wrap_future(work))
        # The first failure ends the run, and then no caller may be left to look at the others.
        verdict.add_done_callback(lambda done: done.cancelled() or done.exception())
        return verdict

    def figures(self) -> dict[str, int]:
        """Return `judge/NAME` for each count since the last call."""
        counts = Counter(self._counts)
        self._reported, before = counts, self._reported
        return {f"judge/{name}": counts[name] - before[name] for name in _COUNTS}

    def close(self) -> None:
        """Cancel what is in flight, and close the cache."""
        self._client.close()
        if self._cache is not None:
            self._cache.close()

    async def _judge(self, messages: list[dict[str, str]]) -> float | Failure:
        try:
            for attempt in range(2):
                body = self._request_body(messages, attempt)
                reply = await self._fetch_cached_reply(body, attempt)
                value = self._prompt.parse_reply(reply.text, reply.is_cut)
                if value is not None:
                    return value
                self._counts["unparsed"] += 1
        except RemoteError as error:
            is_one_question = error.status == 403 and self._client.has_answered
            if error.status in _NEVER and not is_one_question:
                raise RewardError(
                    f"the judge refuses every request: {error.line}; check reward.judge."
                    f"{_NEVER[error.status]}"
                ) from None
            return Failure(f"the judge: {error.line}")
        finally:
            self._scored += 1
        shown = self._client.redact_token(reply.text)
        end = f"it ends with {shown[-_SHOWN:]!r}" if shown else "it is empty"
        return Failure(
            f"the judge: reward.judge.parse matched no number in two replies; {end}"
            " (reward.judge.max_tokens may be too low)"
        )

    async def _fetch_cached_reply(self, body: Mapping[str, Any], attempt: int) -> JudgeReply:
        request = json.dumps([self._client.cache_scope, body, attempt], sort_keys=True)
        question = hashlib.sha256(request.encode()).digest()
        if self._cache is not None:
            cached = await asyncio.to_thread(self._cache.get, question)
            if cached is not None:
                self._counts["cache_hits"] += 1
                return cached
        reply = await self._client.fetch_reply(body)
        # Cut off, it is no reply to a built-in template; one of the user's own may want it short.
        if self._cache is None or (reply.is_cut and self.config.template in TEMPLATES):
            return reply
        return await asyncio.to_thread(self._cache.put, question, reply)

    def _request_body(self, messages: list[dict[str, str]], attempt: int) -> dict[str, Any]:
        """The request; a second one would get the first one's reply at the same sampling."""
        body: dict[str, Any] = {"messages": messages, **self._client.settings()}
        if attempt > 0:
            if isinstance(body["temperature"], int | float):
                body["temperature"] = max(body["temperature"], _SECOND_TEMPERATURE)
            if isinstance(body["seed"], int):
                body["seed"] += 1
        return {field: value for field, value in body.items() if value is not None}
