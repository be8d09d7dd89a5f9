"""The HTTP engine and `winnow check-engine` against vLLM's own server.

Two servers serve all tests of this file: one with an untied head, which takes new weights as it
should, and one with a tied head, of which vLLM on a CPU keeps the old one. The second draws by
Winnow's processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.test_engine import groups_of, resumed, torch_engine
from tests.generate_server import GenerateServers
from tests.integration.commands.test_engine_check import check, failed
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process
from transformers import AutoModelForCausalLM

from winnow.errors import ConfigError
from winnow.observe.jsonl import read_metrics
from winnow.rollout.engine import CompletionEvent, SamplingParams, generate
from winnow.rollout.http.engine import HttpEngine, make_http_engine

ROOT = Path(__file__).parents[2]
ROWS = 64
EXACT = "rollout.engine.exact_draws=true"
SHAPE = {
    "vocab_size": ROWS, "hidden_size": 64, "head_dim": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "initializer_range": 0.2,
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class VllmServer:
    """A server of vLLM's, and the model that it was started with."""

    url: str
    model: Path
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> VllmServer:
        """Itself, once it answers."""
        while True:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    return self
            time.sleep(0.2)

    def kill(self) -> None:
        """End it and its engine, which is a process of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(
    model: Path, folder: Path, *options: str, module: str = "vllm.entrypoints.openai.api_server"
) -> VllmServer:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--model", str(model), "--host=127.0.0.1", f"--port={port}", "--enable-scale-out"]
    words += ["--dtype=float32", f"--kv-cache-memory-bytes={1 << 26}", "--enforce-eager"]
    words += ["--max-num-seqs=64", "--max-model-len=256"]
    log = folder / "server.log"
    environment = {
        **{"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
        **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words, *options],
        stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
        env={**os.environ, **environment},
    )  # fmt: skip
    return VllmServer(f"http://127.0.0.1:{port}", model, process, log)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, VllmServer]]:
    """The untied one and the tied one; vLLM's server may silently apply a model's own settings."""
    started = []
    for name, tied in (("untied", False), ("tied", True)):
        folder = tmp_path_factory.mktemp(name)
        model = digits_folder(folder / "model", **SHAPE, tie_word_embeddings=tied)
        settings = {"do_sample": True, "top_p": 0.8, "temperature": 0.5, "eos_token_id": 1}
        settings["repetition_penalty"] = 1.5
        (model / "generation_config.json").write_text(json.dumps(settings))
        mode = "processed_logits" if tied else "processed_logprobs"
        options = [f"--logprobs-mode={mode}"]
        if tied:
            options.append("--logits-processors=winnow.rollout.vllm.plugin:HashSampler")
        started.append(start(model, folder, *options))
    try:
        yield started[0].wait(), started[1].wait()
    finally:
        for server in started:
            server.kill()


def other_weights(folder: Path, to: Path) -> Path:
    """The model of a folder after updates of about 5 %."""
    torch.manual_seed(1)
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    moved = {name: t * (1 + 0.05 * torch.randn(t.shape)) for name, t in weights.items()}
    save_file(moved, to / "model.safetensors", metadata={"format": "pt"})
    return to


def engine_over(
    *urls: str, vocab_size: int = ROWS, exact: bool = False, slots: int = 32
) -> HttpEngine:
    options: dict[str, Any] = {"slots": slots, "live_updates": True, "exact_draws": exact}
    return make_http_engine(urls, None, 60.0, vocab_size, ROWS, 256, **options)


def check_logprobs(model: Path, done: dict[Any, Any], groups: Any, known: int) -> None:
    eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    prompts = {group.group_id: group.prompt_ids for group in groups}
    for (group_id, _), answer in done.items():
        assert answer.token_ids.max() < known
        ids = torch.from_numpy(np.concatenate([prompts[group_id], answer.token_ids]))[None]
        with torch.no_grad():
            logits = eager(ids).logits[0, len(prompts[group_id]) - 1 : -1, :known]
        chosen = ids[0, len(prompts[group_id]) :, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        np.testing.assert_allclose(answer.logprobs, expected, atol=5e-5)


def test_answers_stop_resume_and_keep_to_the_vocabulary(
    servers: tuple[VllmServer, VllmServer],
) -> None:
    server, _ = servers
    engine = engine_over(server.url, vocab_size=29)
    groups = [
        replace(group, prompt_ids=group.prompt_ids % 29)
        for group in groups_of(5, 4, SamplingParams(100, stop_token_ids=(5,)))
    ]

    async def run() -> tuple[list[CompletionEvent], dict[Any, Any]]:
        await engine.submit(groups)
        while engine.status().generated_tokens < 60:
            await asyncio.sleep(0.001)
        await engine.abort([group.group_id for group in groups])
        events = list(await engine.events())
        assert any(event.kind == "aborted" for event in events)
        return events, await generate(engine, resumed(groups, events))

    events, done = asyncio.run(run())
    check_logprobs(server.model, done, groups, known=29)
    for event in events:
        if event.kind == "aborted":
            whole = done[event.key].token_ids[: len(event.segment)]
            assert whole.tolist() == event.segment.token_ids.tolist()
    for answer in done.values():
        ids = answer.token_ids.tolist()
        assert 5 not in ids[:-1]
        assert answer.finish_reason == ("stop" if ids[-1] == 5 else "length")
        assert ids[-1] == 5 or len(ids) == 100
    asyncio.run(engine.close())


def test_a_right_server_passes_although_its_folder_asks_for_a_nucleus(
    servers: tuple[VllmServer, VllmServer], tmp_path: Path
) -> None:
    server, _ = servers
    other = other_weights(server.model, tmp_path / "other")
    words = ("--model", str(server.model), "--update", str(other), "rollout.temperature=0.8")
    code, found = check(server.url, tmp_path, *words)
    assert (code, failed(found)) == (0, set()), found
    assert found["update"][0] == "passed"


def test_the_head_that_a_reload_leaves_behind_is_found(
    servers: tuple[VllmServer, VllmServer], tmp_path: Path
) -> None:
    _, server = servers
    other = other_weights(server.model, tmp_path / "other")
    words = ("--model", str(server.model), "--update", str(other), EXACT, "rollout.temperature=0.7")
    code, found = check(server.url, tmp_path, *words)
    assert (code, failed(found) - {"sleep"}) == (1, {"update"}), found
    assert "new weights: " in found["update"][1]
    assert "first weights: " not in found["update"][1]


def test_a_run_trains_with_answers_of_the_server(
    servers: tuple[VllmServer, VllmServer], tmp_path: Path
) -> None:
    server, _ = servers
    settings = (
        *("warm_start=none", f"model.path={server.model}", "run.deterministic=false"),
        *("rollout/engine=http", f"rollout.engine.url={server.url}", "sampling/filter=none"),
        *("trainer.steps=3", "sampling.lookahead=1", "sampling.groups_per_step=4", "run.name=mine"),
        *("trainer.mini_batch_groups=4", "data.max_prompt_tokens=64", "optim.lr=1e-3"),
        *("evaluation.before=false", "evaluation.max_prompts=8"),
    )
    in_this_process("train", "quickstart", *settings, folder=tmp_path).check()
    rows = read_metrics(tmp_path / "runs" / "mine" / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 3
    assert all(0 <= row["publish/max_delta"] < 1e-3 for row in steps)
    # Log-probs that came with the tokens are the trainer's own.
    assert steps[0]["mismatch/abs_delta"] < 1e-4


def test_a_request_without_our_draws_is_refused_by_a_server_that_makes_them(
    servers: tuple[VllmServer, VllmServer],
) -> None:
    _, server = servers
    with pytest.raises(ConfigError, match=r"400: .*runs with rollout\.engine\.exact_draws=true"):
        engine_over(server.url)
    engine_over(server.url, exact=True).servers[server.url].close()


def test_exact_draws_are_the_torch_engines_though_a_server_is_killed(
    servers: tuple[VllmServer, VllmServer], tmp_path: Path
) -> None:
    """The other server has a `TorchEngine`: an answer that moves goes on with the same tokens."""
    _, mortal = servers
    others = GenerateServers(tmp_path)
    try:
        url, _ = others.start(mortal.model, "--slots=32", "--exact")
        # With few slots there is work left to deal out, however late this process sees the tokens.
        engine = engine_over(mortal.url, url, exact=True, slots=2)
        groups = groups_of(6, 4, SamplingParams(200, temperature=0.9, top_p=0.95))

        async def run() -> dict[Any, Any]:
            writing = asyncio.create_task(generate(engine, groups))
            while engine.status().generated_tokens < 300:
                await asyncio.sleep(0.001)
            mortal.kill()
            return await writing

        alone = engine_over(mortal.url, exact=True)
        whole = asyncio.run(generate(alone, groups))
        asyncio.run(alone.close())
        done = asyncio.run(run())
        assert list(engine.engines) == [url]
        model = AutoModelForCausalLM.from_pretrained(mortal.model).eval()
        wanted = asyncio.run(generate(torch_engine(model, slots=32), groups))
        for key, answer in wanted.items():
            for found in (whole[key], done[key]):
                assert found.token_ids.tolist() == answer.token_ids.tolist(), key
                np.testing.assert_allclose(found.logprobs, answer.logprobs, atol=5e-5)
        assert engine.status().generated_tokens == 24 * 200
        asyncio.run(engine.close())
    finally:
        others.close()
