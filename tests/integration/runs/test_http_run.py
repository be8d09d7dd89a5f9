"""Runs whose answers a server writes, in each mode of the trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.generate_server import GenerateServers
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("model"), initializer_range=0.2)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerateServers]:
    made = GenerateServers(tmp_path_factory.mktemp("servers"))
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_tokens_are_those_of_the_weights_that_their_spans_name(
    servers: GenerateServers, model: Path, tmp_path: Path, mode: str
) -> None:
    url, process = servers.start(model, "--slots=32", "--tick_s=0.004")
    settings = (
        *("warm_start=none", f"model.path={model}", "run.deterministic=false"),
        *("rollout/engine=http", f"rollout.engine.url={url}", "rollout.engine.slots=16"),
        *("trainer.steps=3", "sampling.groups_per_step=4", "sampling/filter=none", "run.name=mine"),
        *("sampling.lookahead=1", "sampling.max_staleness=2"),
        *("trainer.mini_batch_groups=4", "data.max_prompt_tokens=64", "optim.lr=1e-2"),
        *("optim.warmup_steps=0", "evaluation.before=false", "evaluation.max_prompts=8"),
        f"trainer/mode={mode}",
    )  # fmt: skip
    in_this_process("train", "quickstart", *settings, folder=tmp_path).check()
    process.kill()
    rows = [r for r in read_metrics(tmp_path / "runs" / "mine" / "metrics.jsonl") if r["step"]]
    assert len(rows) == 3
    assert all(0 <= row["publish/max_delta"] < 1e-4 for row in rows)
    # Tokens of the weights that learn have their log-probs, those of older weights have others.
    gaps = {
        age: [r[key] for r in rows if (key := f"mismatch/age_{age}/abs_delta") in r]
        for age in (0, 1, 2)
    }
    assert gaps[0]
    assert max(gaps[0]) < 1e-5
    assert gaps[1] + gaps[2]
    assert min(gaps[1] + gaps[2]) > 1e-3


def test_a_run_is_evaluated_by_servers_only_if_they_are_named_and_hold_its_model(
    servers: GenerateServers, model: Path, tmp_path: Path
) -> None:
    url, process = servers.start(model, "--slots=32")
    settings = (
        *("warm_start=none", f"model.path={model}", "run.deterministic=false", "run.name=mine"),
        *("rollout/engine=http", f"rollout.engine.url={url}", "sampling/filter=none"),
        *("trainer.steps=1", "sampling.groups_per_step=4", "trainer.mini_batch_groups=4"),
        *("data.max_prompt_tokens=64", "optim.lr=1e-1", "optim.warmup_steps=0"),
        *("evaluation.before=false", "evaluation.max_prompts=4", "evaluation.n=4"),
        "evaluation.greedy=false",
    )
    in_this_process("train", "quickstart", *settings, folder=tmp_path).check()
    process.kill()
    run = tmp_path / "runs" / "mine"

    def answers(out: str, *overrides: str) -> tuple[str, list[list[int]]]:
        words = ("eval", "runs/mine", "--out", out, *overrides)
        told = in_this_process(*words, folder=tmp_path).check()
        assert ("servers are not asked" in told.out) == (out == "silent")
        rows = read_rollouts(tmp_path / out / "answers.parquet").to_pylist()
        report = json.loads((tmp_path / out / "report.json").read_text())
        return report["engine"], [row["token_ids"] for row in rows]

    kind, own = answers("silent")
    assert (kind, own) == answers("torch", "rollout/engine=torch")
    assert len(own) == 16

    url, process = servers.start(model)
    words = ("eval", "runs/mine", "--out", "other", f"rollout.engine.url={url}")
    refused = in_this_process(*words, folder=tmp_path)
    process.kill()
    held = run / "checkpoints" / "step-1" / "model"
    assert refused.code == 2
    assert f"{url} does not answer as the trainer does" in refused.err
    assert f"start the server with --model {held}" in refused.err
    assert not (tmp_path / "other").exists()

    url, process = servers.start(held)
    kind, theirs = answers("named", f"rollout.engine.url={url}")
    process.kill()
    assert kind == "http"
    assert len(theirs) == 16
    assert theirs != own  # the server's random numbers

    url, process = servers.start(held, "--renamed_after=60")
    words = ("eval", "runs/mine", "--out", "changed", f"rollout.engine.url={url}")
    refused = in_this_process(*words, folder=tmp_path)
    process.kill()
    assert refused.code == 2
    assert f"{url} was given other weights (newer) while it wrote" in refused.err
    assert not (tmp_path / "changed").exists()
