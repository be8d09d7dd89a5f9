"""A server that speaks vLLM's `/inference/v1/generate`, with a `TorchEngine` behind it.

It is a process of its own (`main`, which prints its port), so that it can be killed in the middle
of an answer, and can be made ill in the ways in which real servers are: it truncates what it
samples, keeps an old head, loads nothing, gives log-probs of another temperature, or is given new
weights by somebody else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.forked import Forked, Server


class Model:
    """Answers by a `TorchEngine`, all requests together."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from winnow.models.causal_lm import load_causal_lm
        from winnow.rollout.embedded.torch_engine import TorchEngine

        self.args, self.version = args, "default"
        model = load_causal_lm(args.model, torch.float32, torch.device("cpu"), False)
        self.engine = TorchEngine(model, slots=args.slots, prefill_tokens=1024)
        self.model, self.asked, self.sent = model, 0, 0
        self.news: dict[int, asyncio.Queue[Any]] = {}
        self.ticking: asyncio.Task[None] | None = None

    async def write(self, ids: list[int], given: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield (tokens, log-probs, how it ended) as they are drawn."""
        from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
        from winnow.types import Segment

        self.asked += 1
        number, seed, start = self.asked, given.get("seed") or self.asked, len(ids)
        keys = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        numbers = [given.get(key, default) for key, default in keys.items()]
        numbers[1] = min(numbers[1], self.args.top_p)
        if self.args.exact:
            own = given["extra_args"]["winnow"]
            numbers, seed, start = own["numbers"], own["seed"] % 2**64, own["start"]
        done = len(ids) - start
        prefix = Segment(np.array(ids[start:], np.int64), np.zeros(done, np.float32), ())
        stops = tuple(given.get("stop_token_ids") or ())
        sampling = SamplingParams(given["max_tokens"] + done, *numbers, stops)
        answer = AnswerRequest(0, seed, prefix)
        self.news[number] = queue = asyncio.Queue[Any]()
        group = GroupRequest(number, np.array(ids[:start]), (answer,), sampling, number)
        try:
            await self.engine.submit([group])
            if self.ticking is None or self.ticking.done():
                self.ticking = asyncio.create_task(self._tick())
            while True:
                event = await queue.get()
                segment = event.segment
                tokens = segment.token_ids[done:].tolist(), segment.logprobs[done:].tolist()
                reason = event.finish_reason if event.kind == "finished" else None
                done = len(segment)
                if tokens[0] or reason:
                    # Not what the engine has drawn: of that a token may not have gone out yet.
                    self.sent += len(tokens[0])
                    yield *tokens, reason
                if reason:
                    return
        finally:
            del self.news[number]
            await self.engine.abort([number])

    async def _tick(self) -> None:
        while self.news:
            tick = self.engine.status().tick
            ended = await self.engine.events(tick + 1)
            for event in [*ended, *await self.engine.progress()]:
                if event.group_id in self.news and event.kind in ("finished", "running"):
                    self.news[event.group_id].put_nowait(event)
            if self.args.renamed_after is not None and self.sent > self.args.renamed_after:
                self.version = "newer"
            if self.args.dies_after is not None and self.sent > self.args.dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            while self.sent >= self.args.holds_at and not os.path.exists(self.args.until):
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.args.tick_s)

    def load(self, folder: str) -> None:
        """Load the weights of a folder, all of them if this server is well."""
        import torch
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(folder)
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in ((n, t) for f in files for n, t in load_file(f).items()):
                if self.args.keeps_head and name == "lm_head.weight":
                    continue
                if not self.args.loads_nothing:
                    own[name].copy_(tensor)


def app(args: argparse.Namespace) -> Any:
    """Make the ASGI application."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    model = Model(args)

    def choice(ids: list[int], logprobs: list[float], reason: str | None, **more: Any) -> Any:
        rows = zip(ids, logprobs, strict=True)
        content = [{"token_id": i, "logprob": p, "top_logprobs": []} for i, p in rows]
        own = {"index": 0, "token_ids": ids, "finish_reason": reason}
        return {"choices": [own | {"logprobs": {"content": content}} | more]}

    async def score(ids: list[int], given: dict[str, Any]) -> Any:
        wanted = given["logprob_token_ids"][0]
        temperature = 1.0 if args.raw_logprobs else given["temperature"]
        (found,) = await model.engine.logprobs_of([np.array([*ids, wanted])], temperature, 1)
        body = choice([0], [-1.0], "length")
        tops = [{"token_id": wanted, "logprob": float(found[0])}]
        body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = tops
        return body

    async def force(ids: list[int], own: dict[str, Any]) -> Any:
        whole = np.array([*ids, *own["forced"]])
        number = len(own["forced"])
        (found,) = await model.engine.logprobs_of([whole], own["numbers"][0], number)
        return choice(own["forced"], found.tolist(), "length")

    async def generate(request: Request) -> Response:
        body = await request.json()
        ids, given = body["token_ids"], body["sampling_params"]
        if len(ids) + given["max_tokens"] > args.longest:
            given["max_tokens"] = args.longest - len(ids)
        if given.get("logprob_token_ids"):
            return JSONResponse(await score(ids, given))
        if args.exact and "forced" in given["extra_args"]["winnow"]:
            return JSONResponse(await force(ids, given["extra_args"]["winnow"]))
        if not body.get("stream"):
            all_ids: list[int] = []
            all_logprobs: list[float] = []
            async for some, logprobs, reason in model.write(ids, given):  # noqa: B007
                all_ids, all_logprobs = all_ids + some, all_logprobs + logprobs
            return JSONResponse(choice(all_ids, all_logprobs, reason))

        async def chunks() -> AsyncIterator[str]:
            async for some, logprobs, reason in model.write(ids, given):
                yield f"data: {json.dumps(choice(some, logprobs, reason))}\n\n"
            await asyncio.sleep(args.lingers_s)
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def rpc(request: Request) -> Response:
        try:
            model.load((await request.json())["kwargs"]["weights_path"])
        except FileNotFoundError as error:
            return JSONResponse({"error": {"message": f"no weights in {error}"}}, 500)
        return JSONResponse({"results": [None]})

    async def name(request: Request) -> Response:
        model.version = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def info(request: Request) -> Response:
        return JSONResponse({"weight_version": model.version})

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": args.model, "max_model_len": args.longest}]})

    async def sleep(request: Request) -> Response:
        return JSONResponse({"error": {"message": "no sleep mode"}}, 500)

    routes = [
        Route("/inference/v1/generate", generate, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
    ]
    if args.sleeps_badly:
        routes.append(Route("/sleep", sleep, methods=["POST"]))
    if not args.without_updates:
        routes += [
            Route("/collective_rpc", rpc, methods=["POST"]),
            Route("/update_weight_version", name, methods=["POST"]),
            Route("/weight_info", info, methods=["GET"]),
        ]
    return Starlette(routes=routes)


class GenerateServers:
    """Starts servers, as processes forked from one that has imported torch.

    Args:
        forks: what forks them; one of its own if None.
    """

    def __init__(self, folder: Path, forks: Server | None = None) -> None:
        self._folder, self._forks, self._ends_forks = folder, forks or Server(), forks is None
        self._started: list[Forked] = []

    def start(self, model: Path, *options: str, port: int = 0) -> tuple[str, Forked]:
        """Start a server; returns its address and process once it answers."""
        count = len(self._started)
        out, err = (self._folder / f"server-{count}.{end}" for end in ("out", "err"))
        words = [str(model), f"--port={port}", *options]
        process = self._forks.start("tests.generate_server", words, out=out, err=err)
        self._started.append(process)
        while not (out.exists() and out.read_text().endswith("\n")):
            assert process.poll() is None, err.read_text()
            time.sleep(0.01)
        return f"http://127.0.0.1:{int(out.read_text())}", process

    def close(self) -> None:
        """End all servers."""
        for process in self._started:
            process.kill()
        if self._ends_forks:
            self._forks.close()


def main() -> None:
    """Serve until killed."""
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--tick_s", type=float, default=0.0)
    parser.add_argument("--lingers_s", type=float, default=0.0)
    # So many tokens are written, those that engines try it with too, until this file is there.
    parser.add_argument("--holds_at", type=float, default=math.inf)
    parser.add_argument("--until", default="")
    parser.add_argument("--dies_after", type=int, default=None)
    parser.add_argument("--renamed_after", type=int, default=None)
    for flag in (
        "--keeps_head",
        "--loads_nothing",
        "--without_updates",
        "--raw_logprobs",
        "--sleeps_badly",
        "--exact",
    ):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    config = uvicorn.Config(app(args), "127.0.0.1", args.port, log_level="error")
    listener = config.bind_socket()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
