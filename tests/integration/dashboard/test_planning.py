"""Plans that the dashboard makes: of a copy of a run, in a process that ends when it should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from tests.integration.dashboard.conftest import answer, group, write_step
from tests.processes import descendants, is_alive
from tests.services import listening

from winnow.config.load import dump_config, load_recipe
from winnow.dashboard.planning import PlanForm, _write_inputs
from winnow.dashboard.runs import RunFiles
from winnow.dashboard.service import Dashboard
from winnow.observe.rollouts import RolloutGroup

ASKED = {"nodes": 1, "gpus": 2, "gpu": "h100", "lengths": "drawn", "mean_response": 100.0}
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4000, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
GIVE_UP_S = 300
PLAN = "/api/run/plan?run=copy"


ANY_RANKS = "cluster=local", "trainer/strategy=single", "rollout/engine=torch"
"""Without its layout, the recipe has as many ranks as there are GPUs."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy of a run whose model is not here, and whose plan takes longer than a test waits."""
    run = tmp_path / "runs" / "copy"
    run.mkdir(parents=True)
    config = load_recipe("dapo_qwen2.5_32b", ["model.path=/nowhere/model", *ANY_RANKS])
    (run / "config.yaml").write_text(dump_config(config))
    (run / "model.json").write_text(json.dumps(MODEL))
    return run.parent


def client(runs: Path, token: str | None = None) -> TestClient:
    return TestClient(Dashboard([str(runs)], token).app, base_url="http://127.0.0.1")


def made(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_plan_is_made_of_copies_of_the_recipe_the_models_config_and_the_newest_answers(
    runs: Path, tmp_path: Path
) -> None:
    run, folder = runs / "copy", tmp_path / "plan"
    folder.mkdir()
    model = run / "checkpoints" / "step-1" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("of a checkpoint")
    (model / "preprocessor_config.json").write_text("of images")
    kept = RolloutGroup(group(1, "row-1", answer(3, 1.0), answer(15, 0.0)), "all_wrong")
    write_step(run, 1, [kept], "rollouts")
    form = PlanForm.parse(json.dumps({**ASKED, "lengths": "run", "price": 2.0}).encode())
    _write_inputs(RunFiles(fsspec.filesystem("file"), str(run), "copy"), form, folder)
    assert (folder / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()
    assert json.loads((folder / "config.json").read_text()) == MODEL
    assert (folder / "preprocessor_config.json").read_text() == "of images"
    table = pq.read_table(folder / "rollouts" / "step-1.parquet")
    assert table["response_tokens"].to_pylist() == [3, 15]
    assert "prompt" not in table.column_names
    assert form.arguments(folder) == [
        *("plan", str(folder / "config.yaml"), "--json", "--gpu=h100", "--nodes=1", "--gpus=2"),
        *("model.trust_remote_code=false", f"model.path={folder}", "warm_start=none"),
        *(f"--lengths={folder}", "--price-per-gpu-hour=2.0"),
    ]


def test_code_that_a_run_names_is_not_run(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\ndef f(): ...\n")
    names = "algorithm/policy_loss=custom", f"algorithm.policy_loss.path={tmp_path / 'own.py'}:f"
    config = load_recipe("dapo_qwen2.5_32b", ["model.path=/nowhere/model", *ANY_RANKS, *names])
    (runs / "copy" / "config.yaml").write_text(dump_config(config))
    (runs / "copy" / "model.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 1}))
    lines = made(client(runs).post(PLAN, json=ASKED))
    assert "is code of the run, which the dashboard does not execute" in lines[-1]["error"]
    assert "\n" not in lines[-1]["error"]
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
    """The processes of plans that a dashboard's process has started."""
    return [pid for pid, line in descendants(parent).items() if "winnow-plan-" in line]


def until(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def ask(url: str) -> Any:
    options: Any = {"json": ASKED, "timeout": GIVE_UP_S}
    return httpx.Client(trust_env=False).stream("POST", url + PLAN, **options)


def test_one_plan_at_a_time_which_ends_with_its_client_and_with_the_dashboard(runs: Path) -> None:
    dashboard = Dashboard([str(runs)])
    with listening(dashboard) as url:
        with ask(url):
            until(lambda: planning(os.getpid()))
            (first,) = planning(os.getpid())
            with ask(url) as second:
                told = second.iter_lines()
                assert "another plan is running" in next(told)
                assert planning(os.getpid()) == [first]
        until(lambda: not planning(os.getpid()))
        with ask(url), ask(url):
            until(lambda: planning(os.getpid()))
            dashboard.close()
            until(lambda: not planning(os.getpid()))
            assert dashboard._planner._is_closing


@pytest.fixture
def apart(runs: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A dashboard in a process of its own, and its address."""
    words = [sys.executable, "-u", "-m", "winnow.cli.main", "dashboard", str(runs)]
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
        until(lambda: not is_alive(pid))
