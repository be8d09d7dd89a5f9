"""A client of servers with `/inference/v1/generate`: token ids in, token ids and log-probs out.

vLLM's OpenAI server offers it with `--enable-scale-out`. With `VLLM_SERVER_DEV_MODE=1` it also
loads weights from a folder (`/collective_rpc`) and returns their version (`/weight_info`).
"""

from __future__ import annotations

import asyncio
import base64
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
from winnow.rollout.engine import ImageLists, SamplingParams
from winnow.types import FloatArray, Image, IntArray

GENERATE = "/inference/v1/generate"
_PROCESSOR = "winnow.rollout.vllm.plugin:HashSampler"
_FORCED = 17
"""Number of forced tokens in a check, which no server draws by chance."""
_SCORED_AT_ONCE = 64
"""Most concurrent requests."""
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
"""Sent with every request, so that no default of the server applies."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of an answer, and its finish reason if it has ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


class GenerateClient:
    """A client of one server.

    Args:
        url: base URL of the server.
        token: API key, if the server requires one.
        timeout_s: longest wait for the next token, or for any other response.
        vocabulary: ids at or beyond it are never drawn.
        rows: size of the model's logits.
        exact_draws: the server has Winnow's logits processor.

    Raises:
        RewardError: the URL is not valid.
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
        """Cache salt of the current weights, which separates their prefix cache from that of older
        weights and other clients."""
        self._count = itertools.count()

    def draw_settings(
        self,
        sampling: SamplingParams,
        seed: int,
        start: int,
        written: int = 0,
        forced: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return the sampling settings of a request.

        Args:
            start: number of prompt tokens.
            written: number of the answer's tokens so far.
            forced: ids to use instead of drawn ones, with exact draws.
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
        context: list[int],
        settings: dict[str, Any],
        receive: Callable[[Chunk], None],
        images: Sequence[Image] = (),
    ) -> None:
        """Request an answer; `receive` is called with its tokens as they arrive.

        Args:
            images: placed in the context.

        Raises:
            RemoteError: the request failed; tokens that arrived before have been received.
        """
        loop = asyncio.get_running_loop()
        body = self._request_body(context, {"logprobs": 0, **settings}, images) | {"stream": True}

        async def listen() -> None:
            events = self._http.stream_events(GENERATE, body, self._timeout_s)
            async with aclosing(events):
                async for event in events:
                    for chunk in self._parse_chunks(event, context):
                        loop.call_soon_threadsafe(receive, chunk)

        await asyncio.wrap_future(self._http.submit(listen()))

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float, last: int, images: ImageLists = ()
    ) -> list[FloatArray]:
        """Return log-probs in nats of the last tokens of sequences [L], as `PublishedEngine` does.

        Each is requested as if the server drew that token: after its predecessors, at this
        temperature, from ids of the vocabulary. (vLLM's prompt log-probs use neither.)

        Raises:
            WorkerError: the server does not respond.
            ConfigError: the server refuses the request.
        """
        # A new salt each time: keys and values are computed with the current weights.
        salt = f"{self.salt} score {next(self._count)}"
        found = []
        try:
            for ids, shown in zip(sequences, images or [()] * len(sequences), strict=True):
                first = max(1, len(ids) - last)
                if self._exact:
                    found.append(await self._force(ids, first, temperature, shown, salt))
                    continue
                places = range(first, len(ids))
                asked = (self._score(ids, at, temperature, shown, salt) for at in places)
                found.append(np.array(await asyncio.gather(*asked), np.float32))
        except RemoteError as error:
            if error.is_transient:
                raise WorkerError(str(error), "engine", 0) from None
            raise ConfigError(f"{error}; it must return log-probs of requested tokens") from None
        return found

    async def _force(self, ids: IntArray, first: int, temperature: float, *rest: Any) -> FloatArray:
        """Return log-probs of the tokens from `first` on, by a request that forces them.

        Args:
            rest: images and salt.

        Raises:
            RemoteError: the request failed.
            ConfigError: the server has drawn other tokens.
        """
        forced = ids[first:].tolist()
        if not forced:
            return np.zeros(0, np.float32)
        draws = self.draw_settings(SamplingParams(0, temperature), 0, first, forced=forced)
        settings = {"max_tokens": len(forced), "logprobs": 0, **draws}
        body = self._request_body(ids[:first].tolist(), settings, *rest)
        answer = await self._http.post(GENERATE, body, self._timeout_s)
        got = next(iter(self._parse_chunks(answer)), None)
        if got is None or list(got.ids) != forced or not any(got.logprobs):
            raise ConfigError(
                f"{self.url} does not make exact draws (rollout.engine.exact_draws); start it with "
                f"--logits-processors {_PROCESSOR} --logprobs-mode processed_logits"
            )
        return np.array(got.logprobs, np.float32)

    async def _score(self, ids: IntArray, at: int, temperature: float, *rest: Any) -> float:
        wanted = int(ids[at])
        # vLLM needs as many log-probs as ids, and replaces the last by that of the drawn token.
        settings = {
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": 2,
            "logprob_token_ids": [wanted, wanted],
        }
        body = self._request_body(ids[:at].tolist(), settings, *rest)
        answer = await self._http.post(GENERATE, body, self._timeout_s)
        try:
            tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return next(float(top["logprob"]) for top in tops if top["token_id"] == wanted)
        except (LookupError, TypeError, StopIteration):
            raise self._http.make_error("returned no log-prob of a requested token") from None

    async def probe(self, positions: int, context: list[int], images: Sequence[Image]) -> None:
        """Check that the server responds, and returns ids with log-probs.

        Args:
            positions: most tokens of a request.
            context: prompt of a request, with images if the model takes some.

        Raises:
            ConfigError: the server cannot be used; the message has the remedy.
        """
        draws = self.draw_settings(SamplingParams(1), 0, len(context))
        body = self._request_body(context, {"max_tokens": 1, "logprobs": 0, **draws}, images)
        try:
            answer = await self._http.post(GENERATE, body, self._timeout_s)
            chunk = next(iter(self._parse_chunks(answer, context)), None)
            if images and not answer.get("prompt_token_ids"):
                raise self._http.make_error("takes no images (content_parts) with token ids")
            if chunk is None or len(chunk.ids) != 1:
                raise self._http.make_error(f"returned no token at {GENERATE}")
            if self._exact:
                await self._force(np.arange(_FORCED) % self._vocabulary, 1, 1.0, ())
            models = await self._http.post("/v1/models", None, self._timeout_s)
        except RemoteError as error:
            raise ConfigError(f"{error}; {_remedy(error)}") from None
        listed = models.get("data") if isinstance(models, dict) else None
        limits = [m.get("max_model_len") for m in listed or () if isinstance(m, dict)]
        short = [limit for limit in limits if isinstance(limit, int) and limit < positions]
        if short:
            raise ConfigError(
                f"{self.url} has max_model_len {short[0]:,}, but requests of prompts with answers, "
                f"or of weight checks, have up to {positions:,} tokens; start it with "
                f"--max-model-len {positions} or more"
            )

    def probe_blocking(self, *arguments: Any) -> None:
        """Check the server as `probe` does, from a thread without an event loop."""
        self._http.submit(self.probe(*arguments)).result()

    async def load_folder(self, folder: str, version: str, timeout_s: float) -> None:
        """Have the server load the weights of a folder that it can read, under a version name.

        Raises:
            ConfigError: the server has no such endpoint.
            RemoteError: loading failed; the server may be unusable.
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
        """Check that the server responds.

        Raises:
            RemoteError: it does not.
        """
        await self._post_once("/v1/models", None, timeout_s)

    async def weight_version(self) -> str:
        """Return the version name of the server's weights.

        Raises:
            RemoteError: the request failed.
        """
        said = await self._http.post("/weight_info", None, self._timeout_s)
        return str(said.get("weight_version")) if isinstance(said, dict) else ""

    async def _post_once(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send a request without retries: a reload that times out must not start again."""
        work = self._http.attempt(path, body, timeout_s, 1)
        return await asyncio.wrap_future(self._http.submit(work))

    async def sleep_and_wake(self) -> bool:
        """Have the server free its GPU memory and allocate it again; return False if it cannot.

        Raises:
            RemoteError: a request failed.
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
        """Cancel all requests."""
        self._http.close()

    def _request_body(
        self, context: list[int], settings: dict[str, Any], images: Sequence[Image], salt: str = ""
    ) -> dict[str, Any]:
        ids, salt, parts = [*context], salt or self.salt, list[Any]()
        for image in reversed(images):  # the server repeats an image's token itself
            del ids[image.start + 1 : image.start + len(image)]
            url = f"data:image/png;base64,{base64.b64encode(image.png).decode()}"
            # By `uuid` vLLM caches what a tower made of an image; later weights have another.
            parts.insert(0, {"type": "image_url", "url": url, "uuid": f"{salt} {image.digest}"})
        return {
            "token_ids": ids,
            "sampling_params": {**self._settings, **settings},
            "cache_salt": salt,
            **({"content_parts": parts, "return_token_ids": True} if parts else {}),
        }

    def _parse_chunks(self, event: Any, context: Sequence[int] = ()) -> Iterable[Chunk]:
        """Parse a response, or one event of a stream.

        Args:
            context: compared with the ids that the server has read, if it returns them.

        Raises:
            RemoteError: it is not valid.
        """
        try:
            if "error" in event:
                raise self._http.make_error(f"reported an error: {event['error']}", 500)
            if context and (read := event.get("prompt_token_ids") or context) != context:
                if len(read) == len(context):  # a single answer fails
                    raise self._http.make_error("took a generated image token for an image", 500)
                said = f"resizes images: {len(context):,} tokens of a prompt become {len(read):,}"
                remedy = "start it with --mm-processor-kwargs of data.min_pixels and max_pixels"
                raise self._http.make_error(f"{said}; {remedy}", 400)
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
    """Return the seed, 63 bits, of a request that continues an answer after `written` tokens.

    A server restarts its random numbers with each request: with the same seed it would draw the
    first tokens after the prefix with the numbers of the answer's first tokens.
    """
    digest = blake2b(f"{seed} {written}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _remedy(error: RemoteError) -> str:
    """Return the remedy for an error of a server's first request."""
    if error.status in (401, 403) and "scale-out" not in error.line.lower():
        return "export its API key in the variable of token_env"
    if error.status in (403, 404, 405):
        return "start vLLM's server with --enable-scale-out"
    if error.is_transient:
        return "start the server, or correct the URL"
    return f"it must offer {GENERATE}, as vLLM's server does with --enable-scale-out"
