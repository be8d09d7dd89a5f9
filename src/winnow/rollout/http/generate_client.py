"""A server that speaks `/inference/v1/generate`: token ids in, token ids and log-probs out.

vLLM's OpenAI server does so with `--enable-scale-out`. With `VLLM_SERVER_DEV_MODE=1` it also
loads new weights from a folder (`/collective_rpc`), and tells their version.

What is read of its answers stands in `Chunk`; all else of the protocol may change.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import numpy as np

from winnow.errors import ConfigError, WorkerError
from winnow.http.client import JsonClient, RemoteError
from winnow.rollout.draw import draw_arguments
from winnow.rollout.engine import SamplingParams
from winnow.types import FloatArray, IntArray

GENERATE = "/inference/v1/generate"
_PROCESSOR = "winnow.rollout.vllm.plugin:HashSampler"
_FORCED = 17
"""Tokens that a server is asked for by name, which none writes by chance."""
_SCORED_AT_ONCE = 64
"""Requests for scores that are under way at once."""
_CALM: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": True,
    "detokenize": False,
}
"""Sent with every request, so that no default of the server's takes effect."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that a server wrote, and how it ended if it did."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


class GenerateClient:
    """A client of one server.

    Args:
        url: its address.
        token: its key, if it asks for one.
        timeout_s: longest wait for the next token, or for any other answer.
        vocabulary: ids at or beyond it are never drawn.
        rows: logits that its model has.
        exact_draws: it draws by our logits processor.

    Raises:
        RewardError: the address is none.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_s: float = 600.0,
        vocabulary: int = 0,
        rows: int = 0,
        exact_draws: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._http = JsonClient(self.url, token, max_concurrent=_SCORED_AT_ONCE)
        self._timeout_s = timeout_s
        self._vocabulary, self._exact = vocabulary, exact_draws
        self._settings = dict(_CALM)
        if vocabulary < rows and not exact_draws:
            is_narrow = rows - vocabulary <= vocabulary
            self._settings |= (
                {"logit_bias": {str(i): -100.0 for i in range(vocabulary, rows)}}
                if is_narrow
                else {"allowed_token_ids": list(range(vocabulary))}
            )
        self.salt = f"winnow {uuid4().hex}"
        """Names the weights in the prefix cache: what older ones left there is not found again,
        those of other clients either."""
        self._count = itertools.count()

    def draw_settings(
        self,
        sampling: SamplingParams,
        seed: int,
        start: int,
        written: int = 0,
        forced: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return the settings by which tokens of an answer are drawn.

        Args:
            start: tokens of its prompt.
            written: tokens of the answer behind them.
            forced: ids that are taken instead of drawn ones, with exact draws.
        """
        if self._exact:
            own = draw_arguments(sampling, seed, start, self._vocabulary, forced)
            return {"temperature": 0.0, "extra_args": own}
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": continuation_seed(seed, written),
        }

    async def stream_answer(
        self,
        context: Sequence[int],
        settings: Mapping[str, Any],
        receive: Callable[[Chunk], None],
    ) -> None:
        """Have an answer written; `receive` is called with its tokens as they come.

        Raises:
            RemoteError: it was refused or cut short. What came before has been received.
        """
        loop = asyncio.get_running_loop()
        body = self._request_body(context, {"logprobs": 0, **settings}) | {"stream": True}

        async def listen() -> None:
            events = self._http.stream_events(GENERATE, body, self._timeout_s)
            async with aclosing(events):
                async for event in events:
                    for chunk in self._parse_chunks(event):
                        loop.call_soon_threadsafe(receive, chunk)

        await asyncio.wrap_future(self._http.submit(listen()))

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float = 1.0, last: int | None = None
    ) -> list[FloatArray]:
        """Return log-probs in nats of the last tokens of sequences [L], as `PublishedEngine` does.

        Each is asked for as the server would draw that token: behind the ones before it, at this
        temperature, from ids of the vocabulary. (Log-probs of a prompt would know of neither.)

        Raises:
            WorkerError: no answer came.
            ConfigError: the server refuses.
        """
        # Computed anew each time, so that nothing but the weights of now has a part in it.
        salt = f"{self.salt} score {next(self._count)}"
        firsts = [max(1, len(ids) - (last or len(ids))) for ids in sequences]
        found = []
        try:
            for first, ids in zip(firsts, sequences, strict=True):
                if self._exact:
                    found.append(await self._force(ids, first, temperature, salt))
                    continue
                asked = (self._score(ids, at, temperature, salt) for at in range(first, len(ids)))
                found.append(np.array(await asyncio.gather(*asked), np.float32))
        except RemoteError as error:
            if error.is_transient:
                raise WorkerError(str(error), "engine", 0) from None
            raise ConfigError(f"{error}; it must return log-probs of requested tokens") from None
        return found

    async def _force(self, ids: IntArray, first: int, temperature: float, salt: str) -> FloatArray:
        """Have tokens written from `first` on, whatever would be drawn; returns their log-probs.

        Raises:
            RemoteError: it refuses, or does not answer.
            ConfigError: it draws by itself.
        """
        forced = ids[first:].tolist()
        if not forced:
            return np.zeros(0, np.float32)
        draws = self.draw_settings(SamplingParams(0, temperature), 0, first, forced=forced)
        settings = {"max_tokens": len(forced), "logprobs": 0, **draws}
        body = self._request_body(ids[:first].tolist(), settings) | {"cache_salt": salt}
        answer = await self._http.post(GENERATE, body, self._timeout_s)
        got = next(iter(self._parse_chunks(answer)), None)
        if got is None or list(got.ids) != forced or not any(got.logprobs):
            raise ConfigError(
                f"{self.url} does not make exact draws (rollout.engine.exact_draws); start it with "
                f"--logits-processors {_PROCESSOR} --logprobs-mode processed_logits"
            )
        return np.array(got.logprobs, np.float32)

    async def _score(self, ids: IntArray, at: int, temperature: float, salt: str) -> float:
        wanted = int(ids[at])
        # It wants as many log-probs as ids, and leaves the last of them out for the drawn one.
        settings = {
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": 2,
            "logprob_token_ids": [wanted, wanted],
        }
        body = self._request_body(ids[:at].tolist(), settings) | {"cache_salt": salt}
        answer = await self._http.post(GENERATE, body, self._timeout_s)
        try:
            tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return next(float(top["logprob"]) for top in tops if top["token_id"] == wanted)
        except (LookupError, TypeError, StopIteration):
            raise self._http.make_error("returned no log-prob of a requested token") from None

    async def probe(self, positions: int | None = None) -> None:
        """Check that the server answers, and writes ids with log-probs.

        Args:
            positions: most tokens of a request.

        Raises:
            ConfigError: it does not; the line says what to do.
        """
        draws = self.draw_settings(SamplingParams(1), 0, 1)
        body = self._request_body([0], {"max_tokens": 1, "logprobs": 0, **draws})
        try:
            answer = await self._http.post(GENERATE, body, self._timeout_s)
            chunk = next(iter(self._parse_chunks(answer)), None)
            if chunk is None or len(chunk.ids) != 1:
                raise self._http.make_error(f"returned no token at {GENERATE}")
            if self._exact:
                await self._force(np.arange(_FORCED) % self._vocabulary, 1, 1.0, self.salt)
            models = await self._http.post("/v1/models", None, self._timeout_s)
        except RemoteError as error:
            raise ConfigError(f"{error}; {_remedy(error)}") from None
        listed = models.get("data") if isinstance(models, dict) else None
        limits = [m.get("max_model_len") for m in listed or () if isinstance(m, dict)]
        short = [limit for limit in limits if isinstance(limit, int) and limit < (positions or 0)]
        if short:
            raise ConfigError(
                f"{self.url} has max_model_len {short[0]:,}, but requests of prompts with answers, "
                f"or of weight checks, have up to {positions:,} tokens; start it with "
                f"--max-model-len {positions} or more"
            )

    def probe_blocking(self, positions: int | None = None) -> None:
        """Check the server as `probe` does, in a thread without an event loop."""
        self._http.submit(self.probe(positions)).result()

    async def load_folder(self, folder: str, version: str, timeout_s: float) -> None:
        """Have the server load the weights of a folder that it sees too, and remember their name.

        Raises:
            ConfigError: it does not offer that.
            RemoteError: it failed; it may be of no use then.
        """
        asked = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self._post_once("/collective_rpc", asked, timeout_s)
            await self._post_once("/update_weight_version", {"new_version": version}, timeout_s)
        except RemoteError as error:
            if error.status in (404, 405):
                raise ConfigError(
                    f"{self.url} has no endpoint to load weights (/collective_rpc); start vLLM "
                    "with VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from None
            raise
        self.salt = version

    async def ping(self, timeout_s: float) -> None:
        """Ask for anything.

        Raises:
            RemoteError: no answer came.
        """
        await self._post_once("/v1/models", None, timeout_s)

    async def weight_version(self) -> str:
        """Return the name of the weights that the server holds.

        Raises:
            RemoteError: it does not answer, or tells none.
        """
        said = await self._http.post("/weight_info", None, self._timeout_s)
        return str(said.get("weight_version")) if isinstance(said, dict) else ""

    async def _post_once(self, path: str, body: Any, timeout_s: float) -> Any:
        """Ask without a second try: a reload that takes too long must not be begun again."""
        work = self._http.attempt(path, body, timeout_s, 1)
        return await asyncio.wrap_future(self._http.submit(work))

    async def sleep_and_wake(self) -> bool:
        """Have the server let go of its memory and take it back; False where it cannot.

        Raises:
            RemoteError: it failed.
        """
        try:
            await self._http.post("/sleep?level=1", {}, self._timeout_s)
            slept = await self._http.post("/is_sleeping", None, self._timeout_s)
            await self._http.post("/wake_up", {}, self._timeout_s)
        except RemoteError as error:
            if error.status in (404, 405):
                return False
            raise
        return bool(slept.get("is_sleeping"))

    def close(self) -> None:
        """End all requests."""
        self._http.close()

    def _request_body(self, context: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
        sampling = {**self._settings, **settings}
        return {
            "token_ids": list(map(int, context)),
            "sampling_params": sampling,
            "cache_salt": self.salt,
        }

    def _parse_chunks(self, event: Any) -> Iterable[Chunk]:
        """Read an answer, or a part of one.

        Raises:
            RemoteError: it is neither.
        """
        try:
            if "error" in event:
                raise self._http.make_error(f"reported an error: {event['error']}", 500)
            for choice in event["choices"]:
                ids = tuple(map(int, choice["token_ids"] or ()))
                content = (choice["logprobs"] or {}).get("content") or ()
                if ids != tuple(entry["token_id"] for entry in content):
                    raise ValueError
                logprobs = tuple(float(entry["logprob"]) for entry in content)
                end = self._vocabulary or math.inf
                if not all(0 <= i < end for i in ids) or not all(map(math.isfinite, logprobs)):
                    said = f"returned ids outside the vocabulary of {end:,} or non-finite log-probs"
                    raise self._http.make_error(said, 500)
                yield Chunk(ids, logprobs, choice["finish_reason"])
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._http.make_error("returned no token ids with a log-prob each") from None


def continuation_seed(seed: int, written: int) -> int:
    """Return the seed, 63 bits, of a request that goes on behind so many tokens of an answer.

    A server begins its random numbers anew at each request: with the same seed, numbers that drew
    the first tokens would draw those behind the prefix, too.
    """
    digest = blake2b(f"{seed} {written}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _remedy(error: RemoteError) -> str:
    """Say what mends the first thing that goes wrong with a server."""
    if error.status in (401, 403) and "scale-out" not in error.line.lower():
        return "export its API key in the variable of token_env"
    if error.status in (403, 404, 405):
        return "start vLLM's server with --enable-scale-out"
    if error.is_transient:
        return "start the server, or correct the URL"
    return f"it must offer {GENERATE}, as vLLM's server does with --enable-scale-out"
