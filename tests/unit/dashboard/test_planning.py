"""Plans that the dashboard makes: of a copy of a run, in a process that ends when it should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.services import listening
from tests.unit.dashboard.conftest import answer, group, write_step

from winnow.config.load import dump_config, load_recipe
from winnow.dashboard.service import Dashboard
from winnow.observe.rollouts import RolloutGroup

ASKED = {"nodes": 1, "gpus": 2, "gpu": "h100", "lengths": "drawn", "mean_response": 100.0}
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
GIVE_UP_S = 300
PLAN = "/api/run/plan?run=copy"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy of a run whose model is not here, with two answers of a step."""
    run = tmp_path / "runs" / "copy"
    (run / "rollouts").mkdir(parents=True)
    small = ("data.max_prompt_tokens=32", "rollout.max_response_tokens=480", "rollout.n=2")
    small += ("sampling.groups_per_step=4", "trainer.mini_batch_groups=null")
    small += ("trainer.microbatch_tokens=512", "reward.overlong.enabled=false")
    config = load_recipe("dapo_qwen2.5_32b", ["model.path=/nowhere/model", *small])
    (run / "config.yaml").write_text(dump_config(config))
    (run / "model.json").write_text(json.dumps(MODEL))
    kept = RolloutGroup(group(1, "row-1", answer(3, 1.0), answer(15, 0.0)), "all_wrong")
    write_step(run, 1, [kept], "rollouts")
    return run.parent


def client(runs: Path, token: str | None = None) -> TestClient:
    return TestClient(Dashboard([str(runs)], token).app, base_url="http://127.0.0.1")


@pytest.fixture
def long_runs(runs: Path) -> Path:
    """A copy whose plan takes longer than a test waits for an end."""
    (runs / "copy" / "model.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 4000}))
    return runs


def made(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_run_is_planned_from_its_copy_alone_with_its_own_lengths(runs: Path) -> None:
    asked = {**ASKED, "lengths": "run", "price": 2.0}
    *told, last = made(client(runs).post(PLAN, json=asked))
    assert {"told": "running one of 2 ranks on fake tensors"} in told
    plan = last["plan"]
    assert plan["machine"] == {"gpu": "h100", "nodes": 1, "gpus_each": 2}
    assert plan["run"]["mean_response"] == 9  # (3 + 15) / 2
    assert plan["run"].get("cost", plan["faults"])
    assert {"memory", "learning", "engine", "transfers"} <= plan.keys()


def test_what_cannot_be_planned_is_said_in_one_line(runs: Path) -> None:
    (runs / "copy" / "model.json").unlink()
    lines = made(client(runs).post(PLAN, json=ASKED))
    assert "model.path=/nowhere/model is no folder with a config.json" in lines[-1]["error"]
    assert "\n" not in lines[-1]["error"]
    (runs / "copy" / "config.yaml").write_text("run: {name: [")
    assert "config.yaml" in made(client(runs).post(PLAN, json=ASKED))[-1]["error"]


def test_code_that_a_run_names_is_not_run(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\ndef f(): ...\n")
    names = "algorithm/policy_loss=custom", f"algorithm.policy_loss.path={tmp_path / 'own.py'}:f"
    config = load_recipe("dapo_qwen2.5_32b", ["model.path=/nowhere/model", *names])
    (runs / "copy" / "config.yaml").write_text(dump_config(config))
    lines = made(client(runs).post(PLAN, json=ASKED))
    assert "is code that a run names, which the dashboard does not run" in lines[-1]["error"]
    assert not (tmp_path / "was-run").exists()


def test_only_the_dashboards_own_page_starts_a_process(runs: Path) -> None:
    asked = client(runs)
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
                    {"Content-Type": "text/plain"}):  # fmt: skip
        refused = asked.post(PLAN, content=json.dumps(ASKED), headers={
            "Content-Type": "application/json", **headers})  # fmt: skip
        assert refused.status_code == 403, headers
    assert asked.get(PLAN).status_code in (404, 405)
    assert asked.post(PLAN, json=ASKED, headers={"Host": "evil.example"}).status_code == 421
    assert client(runs, "s3cret").post(PLAN, json=ASKED).status_code == 401
    assert asked.post("/api/run/plan?run=nobody", json=ASKED).status_code == 404


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"nodes": 100_000}, "nodes: Input should be less than or equal to 1000"),
        ({"gpus": 0}, "gpus: Input should be greater than or equal to 1"),
        ({"gpu": "--help"}, "gpu: Input should be 'h100-pcie'"),
        ({"mean_response": "NaN"}, "mean_response: Input should be a valid number"),
        ({"words": ["trainer.steps=1"]}, "words: Extra inputs are not permitted"),
        ({"lengths": "x" * 20_000}, "the body must be at most 10,000 bytes"),
    ],
)
def test_inputs_are_bounded(runs: Path, wrong: dict[str, Any], told: str) -> None:
    refused = client(runs).post(PLAN, json={**ASKED, **wrong})
    assert refused.status_code == 422
    assert told in refused.json()["error"]


def planning(parent: int) -> list[int]:
    """Find the processes of plans that a dashboard's process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = re.search(rf"PPid:\s{parent}\n", (folder / "status").read_text())
            if is_child and b"winnow-plan-" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def ask(url: str) -> Any:
    options: Any = {"json": ASKED, "timeout": GIVE_UP_S}
    return httpx.Client(trust_env=False).stream("POST", url + PLAN, **options)


def test_one_plan_at_a_time_which_ends_with_its_client_and_with_the_dashboard(
    long_runs: Path,
) -> None:
    dashboard = Dashboard([str(long_runs)])
    with listening(dashboard) as url:
        with ask(url):
            until(lambda: planning(os.getpid()))
            (first,) = planning(os.getpid())
            with ask(url) as second:
                told = second.iter_lines()
                assert "another plan is being made" in next(told)
                assert planning(os.getpid()) == [first]
        until(lambda: not planning(os.getpid()))
        with ask(url), ask(url):
            until(lambda: planning(os.getpid()))
            dashboard.close()
            until(lambda: not planning(os.getpid()))
            assert dashboard._planner._is_closing


@pytest.fixture
def apart(long_runs: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A dashboard in a process of its own, and its address."""
    words = [sys.executable, "-u", "-m", "winnow.cli.main", "dashboard", str(long_runs)]
    process = subprocess.Popen([*words, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().split()[1].rstrip("/")
    process.kill()
    process.wait()


def test_a_plan_ends_with_a_dashboard_that_is_killed(
    apart: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = apart
    with ask(url) as reply:
        lines = reply.iter_lines()
        assert "told" in json.loads(next(lines))  # by the plan's process, which watches its parent
        (pid,) = planning(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not is_running(pid))
