"""The engine over servers that speak `/inference/v1/generate`, with a real model behind them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests import vision_models as vm
from tests.contract.test_engine import (
    STOP,
    groups_of,
    reference_logprobs,
    resumed,
    to_the_end,
    torch_engine,
)
from tests.faulty_http import Step, noise, reply, serving
from tests.forked import Server
from tests.generate_server import GenerateServers
from tests.small_models import digits_folder
from transformers import AutoModelForCausalLM, PreTrainedModel

from winnow.errors import ConfigError, PublicationError, WinnowError, WorkerError
from winnow.http.client import RemoteError
from winnow.learning.canary import Canary
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.engine import CompletionEvent, SamplingParams, generate
from winnow.rollout.http.engine import HttpEngine, make_http_engine
from winnow.rollout.http.generate_client import continuation_seed
from winnow.rollout.weights import WeightUpdate

SHAPE = {"vocab_size": 40, "initializer_range": 0.3, "tie_word_embeddings": False}
LONGEST = 200
SAMPLING = SamplingParams(24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def other(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with other weights, those of the head alone 5 % apart."""
    made = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    return made


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[GenerateServers]:
    made = GenerateServers(tmp_path_factory.mktemp("servers"), server)
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(servers: GenerateServers, folder: Path) -> str:
    """A server that is well, for all tests that leave its weights alone."""
    return servers.start(folder)[0]


OPEN: list[HttpEngine] = []


def engine_over(*urls: str, **options: Any) -> HttpEngine:
    given = {"slots": 8, "live_updates": True, "decode": decode, **options}
    OPEN.append(make_http_engine(urls, None, 5.0, 40, 40, LONGEST, **given))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    while OPEN:
        asyncio.run(OPEN.pop().close())


async def until(engine: HttpEngine, tokens: int) -> None:
    """Wait for so many tokens to be written."""
    while engine.status().generated_tokens < tokens:
        await asyncio.sleep(0.001)


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def check_logprobs(model: PreTrainedModel, events: dict[Any, Any], groups: Sequence[Any]) -> None:
    prompts = {group.group_id: group.prompt_ids for group in groups}
    for (group_id, _), trajectory in events.items():
        expected = reference_logprobs(model, prompts[group_id], trajectory.token_ids)
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-4)


def test_answers_have_the_models_logprobs_and_end_where_they_should(
    url: str, model: PreTrainedModel
) -> None:
    engine = engine_over(url, slots=5)
    groups = groups_of(sampling=SamplingParams(24, stop_token_ids=(STOP, 5, 8), stop=("LM",)))
    done = asyncio.run(generate(engine, groups))
    check_logprobs(model, done, groups)
    assert engine.status().generated_tokens == sum(len(t.token_ids) for t in done.values())
    reasons = set()
    for answer in done.values():
        ids = answer.token_ids.tolist()
        text = decode(ids)
        ended = ids[-1] in (STOP, 5, 8) or text.endswith("LM")
        assert not {STOP, 5, 8} & set(ids[:-1])
        assert "LM" not in text[:-1]
        assert answer.finish_reason == ("stop" if ended else "length")
        assert ended or len(ids) == 24
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}


def test_exact_draws_are_the_torch_engines_though_answers_are_cut_and_a_server_dies(
    servers: GenerateServers, folder: Path, tmp_path: Path
) -> None:
    held = "--exact", "--holds_at=60", f"--until={tmp_path / 'cut'}"
    mortal = servers.start(folder, *held, "--dies_after=150")[0]
    engine = engine_over(mortal, servers.start(folder, *held)[0], exact_draws=True)
    groups = groups_of(6, 3, replace(SAMPLING, max_tokens=60, temperature=0.9, top_p=0.95))
    wanted = asyncio.run(
        generate(torch_engine(AutoModelForCausalLM.from_pretrained(folder).eval()), groups)
    )

    async def run() -> dict[Any, Any]:
        await engine.submit(groups)
        await until(engine, 100)
        await engine.abort([group.group_id for group in groups])
        (tmp_path / "cut").touch()
        return await generate(engine, resumed(groups, await engine.events()))

    done = asyncio.run(run())
    assert mortal not in engine.engines
    for key, answer in wanted.items():
        assert done[key].token_ids.tolist() == answer.token_ids.tolist(), key
        np.testing.assert_allclose(done[key].logprobs, answer.logprobs, atol=1e-5)


def test_exact_draws_are_refused_by_what_a_server_writes(url: str) -> None:
    remedy = r"exact_draws\); start it with --logits-proc.* --logprobs-mode processed_logits$"
    with pytest.raises(ConfigError, match=remedy):
        engine_over(url, exact_draws=True)


def test_a_prefix_is_not_drawn_on_with_the_numbers_that_drew_its_beginning() -> None:
    seeds = [
        continuation_seed(seed, written) for seed in (0, 1, 2**64 - 1) for written in range(50)
    ]
    assert len(set(seeds)) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_only_server_restarts_and_is_given_the_newest_weights(
    servers: GenerateServers, folder: Path, other: PreTrainedModel
) -> None:
    url, process = servers.start(folder, "--holds_at=200")
    engine, groups = engine_over(url), groups_of(4, 2, SamplingParams(100))

    async def run() -> dict[Any, Any]:
        await engine.load_weights(WeightUpdate(3, other.named_parameters()))
        writing = asyncio.create_task(generate(engine, groups))
        await until(engine, 200)
        process.kill()
        process.wait()
        servers.start(folder, port=int(url.rpartition(":")[2]))
        return await writing

    done = asyncio.run(run())
    check_logprobs(other, done, groups)
    assert {t.versions for t in done.values()} == {(3,)}


def test_a_server_that_restarts_unseen_is_given_the_newest_weights_first(
    servers: GenerateServers,
    folder: Path,
    other: PreTrainedModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, process = servers.start(folder)
    engine, groups = engine_over(url), groups_of(2, 2, SAMPLING)

    async def run() -> dict[Any, Any]:
        await engine.load_weights(WeightUpdate(1, other.named_parameters()))
        process.kill()
        process.wait()
        servers.start(folder, port=int(url.rpartition(":")[2]))
        with contextlib.suppress(RemoteError):
            await engine.servers[url].ping(5.0)  # no connection is left that would break
        return await generate(engine, groups)

    done = asyncio.run(run())
    assert "was restarted or has loaded other weights" in caplog.text
    check_logprobs(other, done, groups)
    assert engine.status().generated_tokens == sum(len(t.token_ids) for t in done.values())


async def test_what_a_dead_server_wrote_is_told_while_its_answers_wait(
    servers: GenerateServers, folder: Path
) -> None:
    url, process = servers.start(folder, "--holds_at=60")
    engine = engine_over(url)
    await engine.submit(groups_of(2, 2, SamplingParams(100)))
    await until(engine, 50)
    process.kill()
    while engine.servers:
        await asyncio.sleep(0.001)
    running = await engine.progress()
    assert sum(len(e.segment) for e in running) == engine.status().generated_tokens >= 50
    OPEN.remove(engine)
    await engine.close()


async def test_a_dead_server_is_held_against_the_answers_that_it_wrote_alone(
    servers: GenerateServers, folder: Path
) -> None:
    url, process = servers.start(folder, "--holds_at=60")
    engine = engine_over(url, slots=1)
    await engine.submit(groups_of(1, 2, SamplingParams(100)))
    await until(engine, 5)
    process.kill()
    while engine.servers:
        await asyncio.sleep(0.001)
    assert sorted(ask.deaths for ask in engine._queue) == [0, 1]
    OPEN.remove(engine)
    await engine.close()


def test_without_any_server_the_run_ends_with_a_line(
    servers: GenerateServers, folder: Path
) -> None:
    url, process = servers.start(folder)
    engine = engine_over(url, restart_timeout_s=0.1)
    process.kill()
    process.wait()
    with pytest.raises(WorkerError, match=r"no server .*restart_timeout_s\): .*cannot be reached"):
        asyncio.run(generate(engine, groups_of(1, 1)))


def test_folders_of_older_weights_go_though_a_server_is_lost(
    servers: GenerateServers,
    folder: Path,
    model: PreTrainedModel,
    other: PreTrainedModel,
    tmp_path: Path,
) -> None:
    url, process = servers.start(folder)
    mortal, gone = servers.start(folder)
    engine = engine_over(url, mortal, folder=tmp_path / "weights")
    gone.kill()
    gone.wait()

    async def run() -> None:
        for version in range(4):
            author = (model, other)[version % 2]
            await engine.load_weights(WeightUpdate(version, author.named_parameters()))
        assert list(engine.engines) == [url]
        (own,) = (tmp_path / "weights").iterdir()
        assert [folder.name.rpartition("-")[2] for folder in own.iterdir()] == ["3"]
        await engine.close()

    asyncio.run(run())
    assert not list((tmp_path / "weights").iterdir())
    process.kill()


def test_answers_go_on_across_new_weights_and_say_which_wrote_what(
    servers: GenerateServers,
    folder: Path,
    model: PreTrainedModel,
    other: PreTrainedModel,
    tmp_path: Path,
) -> None:
    url, _ = servers.start(folder, "--holds_at=100", f"--until={tmp_path / 'loaded'}")
    engine, groups = engine_over(url), groups_of(3, 2, SamplingParams(80))

    async def run() -> dict[tuple[int, int], CompletionEvent]:
        await engine.load_weights(WeightUpdate(4, model.named_parameters()))
        await engine.submit(groups)
        await until(engine, 100)
        await engine.load_weights(WeightUpdate(5, other.named_parameters()))
        (tmp_path / "loaded").touch()
        return {event.key: event for event in await to_the_end(engine)}

    done = asyncio.run(run())
    assert len(done) == 6
    prompts = {group.group_id: group.prompt_ids for group in groups}
    both = 0
    for (group_id, _), event in done.items():
        start = 0
        for span in event.segment.spans:
            author = {4: model, 5: other}[span.version]
            expected = reference_logprobs(author, prompts[group_id], event.segment.token_ids)
            mine = slice(start, span.stop)
            np.testing.assert_allclose(event.segment.logprobs[mine], expected[mine], atol=1e-4)
            start = span.stop
        assert start == len(event.segment)
        both += len(event.segment.spans) == 2
    assert both, "no answer was interrupted"


@pytest.mark.parametrize("illness", [None, "--keeps_head", "--loads_nothing"])
def test_a_canary_tells_whether_new_weights_took_effect(
    servers: GenerateServers, folder: Path, other: PreTrainedModel, illness: str | None
) -> None:
    url, _ = servers.start(folder, *([illness] if illness else []))
    engine = engine_over(url)
    canary = Canary.random(40, 256, torch.float32, temperature=0.7)
    trainer = copy.deepcopy(other)
    use_layout_attention(trainer)
    expected = canary.score(Strategy(trainer, temperature=0.7))

    async def run() -> float:
        await engine.load_weights(WeightUpdate(1, other.named_parameters()))
        return await canary.check(expected, 1, engine.engines)

    if illness is None:
        assert asyncio.run(run()) < 1e-4
    else:
        with pytest.raises(PublicationError, match="disagrees with the trainer"):
            asyncio.run(run())


def test_a_server_without_the_endpoint_for_weights_is_told_how_to_have_it(
    servers: GenerateServers, folder: Path, other: PreTrainedModel
) -> None:
    engine = engine_over(servers.start(folder, "--without_updates")[0])
    update = WeightUpdate(1, other.named_parameters())
    with pytest.raises(ConfigError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
        asyncio.run(engine.load_weights(update))


def test_a_server_that_cannot_read_the_weights_says_so(
    url: str, other: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_over(url)
    monkeypatch.setattr("winnow.rollout.http.engine._save_shard", lambda *_: None)
    with pytest.raises(PublicationError, match=r"version 1: .* 500: .*weights_folder"):
        asyncio.run(engine.load_weights(WeightUpdate(1, other.named_parameters())))


def test_a_folder_that_cannot_be_written_is_named(
    url: str, other: PreTrainedModel, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    engine = engine_over(url, folder=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"rollout\.engine\.weights_folder: cannot write .*file"):
        asyncio.run(engine.load_weights(WeightUpdate(1, other.named_parameters())))


def test_weights_that_take_too_long_to_load_are_not_loaded_a_second_time(
    url: str, other: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_over(url, reload_timeout_s=0.1)
    with serving([lambda *_: time.sleep(0.5)]) as served:
        server = engine.servers[url]
        server._http._url = httpx.URL(served.url)
        with pytest.raises(RemoteError, match=r"did not answer within 0\.1 s"):
            asyncio.run(server.load_folder("/folder", "1", 0.1))
    assert len(served.requests) == 1


def test_a_server_with_too_short_a_context_is_refused(
    servers: GenerateServers, folder: Path
) -> None:
    url, _ = servers.start(folder, "--longest=100")
    with pytest.raises(ConfigError, match=r"max_model_len 100, .* --max-model-len 200"):
        engine_over(url)


def test_a_server_that_ignores_images_is_refused(url: str) -> None:
    ids, images = vm.shown(vm.image(2, 3))
    with pytest.raises(ConfigError, match=r"takes no images \(content_parts\) with token ids; "):
        engine_over(url, prompt=(ids.tolist(), images))


PAGE = b"<html><body>Welcome to nginx!</body></html>"
GOOD = {"choices": [{"token_ids": [1], "logprobs": None, "finish_reason": "length"}]}


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (
            reply(401, {"error": "Unauthorized"}),
            r"answered 401.*; export its API key in the variable",
        ),
        (reply(403, {"error": "Scale-out endpoints are disabled"}), "403.*--enable-scale-out"),
        (reply(404, {"detail": "Not Found"}), r"answered 404.*--enable-scale-out"),
        (reply(200, raw=PAGE), r"43 bytes that are not JSON; it must offer /inference"),
        (reply(500, raw=b"Internal Server Error"), r"answered 500: Internal Server Error"),
        (reply(503, {"error": "busy"}), r"answered 503.*\(3 attempts\); start the server"),
        (reply(200, {"text": "hello"}), "returned no token ids with a log-prob each"),
        (reply(200, GOOD), "returned no token ids with a log-prob each"),
        (noise, "cannot be reached: .*; start the server, or correct the URL"),
    ],
)
def test_what_is_no_such_server_is_one_line_with_a_remedy(
    step: Step, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.http.client.JsonClient._retry_delay_s", lambda *_: 0.0)
    before = set(threading.enumerate())
    with serving([step]) as served, pytest.raises(ConfigError, match=line) as caught:
        make_http_engine([served.url], "hush", 10.0, 40, 40, LONGEST, slots=1)
    assert set(threading.enumerate()) <= before
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)
    assert served.requests[0].headers["authorization"] == "Bearer hush"


def token(number: int, logprob: float) -> Step:
    """One token of a stream."""
    choice = {"token_ids": [number], "finish_reason": None,
              "logprobs": {"content": [{"token_id": number, "logprob": logprob}]}}  # fmt: skip
    raw = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
    return reply(200, headers={"Content-Type": "text/event-stream"}, raw=raw)


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (reply(500, {"error": "out of memory"}), "out of memory"),
        (token(40, -1.0), "returned ids outside the vocabulary of 40"),
        (token(-1, -1.0), "returned ids outside the vocabulary of 40"),
        (token(3, math.nan), "or non-finite log-probs"),
    ],
)
def test_a_request_that_always_fails_ends_as_a_failed_answer(
    step: Step, line: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.rollout.http.engine._PAUSE_S", 0.001)
    engine = engine_over(url)
    with serving([step]) as served:
        engine.servers[url]._http._url = httpx.URL(served.url)

        async def run() -> Sequence[CompletionEvent]:
            await engine.submit(groups_of(1, 1))
            return await engine.events()

        (event,) = asyncio.run(run())
    assert (event.kind, len(served.requests)) == ("failed", 5)
    assert line in event.error
    assert len(event.segment) == 0
    status = engine.status()
    assert (status.slots, status.running, status.queued) == (8, 0, 0)
    assert list(engine.engines) == [url]


def test_a_request_that_is_refused_ends_the_run(url: str) -> None:
    engine = engine_over(url)
    with serving([reply(400, {"error": "no such parameter"})]) as served:
        engine.servers[url]._http._url = httpx.URL(served.url)
        with pytest.raises(WinnowError, match=r"engine=http: .* 400: .*no such parameter"):
            asyncio.run(generate(engine, groups_of(1, 1)))
