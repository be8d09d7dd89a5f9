"""`winnow check-engine` against engines and servers, well ones and such with one illness each.

And runs whose answers a server writes, in each mode of the trainer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from math import comb
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.forked import Server
from tests.generate_server import GenerateServers
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, in_this_process
from transformers import AutoModelForCausalLM

from winnow.commands import engine_check
from winnow.commands.engine_check import ALPHA, _binomial_tails, tail_bias
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

SHAPE = {"initializer_range": 0.3, "tie_word_embeddings": False, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("first"), **SHAPE)


@pytest.fixture(scope="module")
def other(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after updates of about 5 %."""
    model = AutoModelForCausalLM.from_pretrained(first)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape))
    folder = tmp_path_factory.mktemp("other")
    for file in first.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[GenerateServers]:
    made = GenerateServers(tmp_path_factory.mktemp("servers"), server)
    yield made
    made.close()


def check(
    target: str, folder: Path, *words: str, prompts: int = 4
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and state and text of each finding, of fewer prompts than the command has."""
    with patch.object(engine_check, "PROMPTS", prompts):
        said = in_this_process("check-engine", target, "model.dtype=float32", *words, folder=folder)
    lines = [line.split(maxsplit=2) for line in said.out.splitlines()]
    found = {
        name: ("not offered", text.removeprefix("offered").strip())
        if state == "not"
        else (state, text)
        for name, state, text in lines
    }
    assert list(found) == ["weights", "support", "logprobs", "update", "sleep"], said
    return said.code, found


def failed(found: dict[str, tuple[str, str]]) -> set[str]:
    return {name for name, (state, _) in found.items() if state == "failed"}


def test_a_server_that_is_well_passes_and_keeps_its_weights(
    servers: GenerateServers, first: Path, other: Path, tmp_path: Path
) -> None:
    url, _ = servers.start(first, "--slots=64")
    words = ("--model", str(first), "--update", str(other))
    code, found = check(url, tmp_path, *words, prompts=engine_check.PROMPTS)
    states = {name: state for name, (state, _) in found.items()}
    passed = dict.fromkeys(["weights", "support", "logprobs", "update"], "passed")
    assert states == {**passed, "sleep": "not offered"}
    assert code == 0
    assert "4,096 tokens match the full softmax" in found["support"][1]
    # It holds the first weights again, and temperatures other than 1 are right, too.
    words = ("--model", str(first), "--json", "rollout.temperature=0.7", "model.dtype=float32")
    with patch.object(engine_check, "PROMPTS", 4):
        said = in_this_process("check-engine", url, *words, folder=tmp_path)
    assert said.code == 0
    rows = json.loads(said.out)
    assert [row["state"] for row in rows] == [*["passed"] * 3, "not offered", "not offered"]
    assert 0 < rows[0]["figures"]["largest"] < 1e-4
    assert rows[1]["figures"] == {"p_value": rows[1]["figures"]["p_value"], "tokens": 1024}


@pytest.mark.parametrize(
    ("illnesses", "words", "faults"),
    [
        (
            "--top_p=0.99 --sleeps_badly",
            (),
            {
                "support": "the least likely 0.5% of probability was drawn 0 times",
                "sleep": "answered 500: .*no sleep mode",
            },
        ),
        ("--raw_logprobs", ("rollout.temperature=0.7",), {"weights": "disagrees with the"}),
        ("--keeps_head", ("update",), {"update": "new weights: .* disagrees with the"}),
        ("--without_updates", ("update",), {"update": "start vLLM with VLLM_SERVER_DEV_MODE=1"}),
    ],
)
def test_each_illness_of_a_server_is_found(
    servers: GenerateServers,
    first: Path,
    other: Path,
    tmp_path: Path,
    illnesses: str,
    words: tuple[str, ...],
    faults: dict[str, str],
) -> None:
    url, process = servers.start(first, "--slots=64", *illnesses.split())
    given_words = ("--update", str(other)) if words == ("update",) else words
    prompts = engine_check.PROMPTS if "support" in faults else 4
    code, found = check(url, tmp_path, "--model", str(first), *given_words, prompts=prompts)
    process.kill()
    assert (code, failed(found)) == (1, set(faults))
    for fault, line in faults.items():
        assert re.search(line, found[fault][1]), found[fault]


def test_a_server_with_other_weights_is_found(
    servers: GenerateServers, first: Path, other: Path, tmp_path: Path
) -> None:
    url, _ = servers.start(other, "--slots=64")
    code, found = check(url, tmp_path, "--model", str(first))
    assert code == 1
    assert {"weights", "logprobs"} <= failed(found)


def test_the_engine_of_a_recipe_is_checked_without_a_server(
    first: Path, other: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"model: {{path: {first}}}\nrollout: {{engine: {{name: torch, slots: 64}}, "
        "max_response_tokens: 64}\ndata: {max_prompt_tokens: 64}\n"
    )
    sleeps = "rollout.engine.sleep=true", "rollout.engine.processes=1"
    code, found = check("mine.yaml", tmp_path, "--update", str(other), *sleeps)
    assert code == 0
    assert (found["update"][0], found["sleep"][0]) == ("passed", "passed")
    assert check("mine.yaml", tmp_path)[1]["sleep"][0] == "not offered"


def refused(said: Outcome, line: str) -> None:
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert line in said.err


def test_bad_words_are_one_line_each(first: Path, tmp_path: Path) -> None:
    nowhere = ("check-engine", "http://127.0.0.1:1")
    refused(in_this_process(*nowhere, folder=tmp_path), "pass --model FOLDER")
    model = ("--model", str(first), "model.dtype=float32")
    refused(in_this_process(*nowhere, *model, folder=tmp_path), "start the server, or correct the")
    same = ("--update", str(first))
    refused(in_this_process(*nowhere, *model, *same, folder=tmp_path), "same log-probs as")
    absent = ("--model", "/absent", "model.dtype=float32")
    refused(in_this_process(*nowhere, *absent, folder=tmp_path), "/absent")


def test_binomial_tails_equal_sums_in_whole_numbers() -> None:
    chance, count = Fraction(1, 50), 40
    each = [comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(count + 1)]
    for hits in (0, 1, 5, 40):
        below, above = _binomial_tails(hits, count, 0.02)
        assert below == pytest.approx(float(sum(each[: hits + 1])), rel=1e-9)
        assert above == pytest.approx(float(sum(each[hits:])), rel=1e-9)


@given(st.integers(0, 2**32 - 1))
def test_uniform_values_are_no_bias_and_a_lost_tail_is_one(seed: int) -> None:
    values = np.random.default_rng(seed).random(4096)
    assert tail_bias(values)[0] > ALPHA
    lost = values * 0.995  # no token of the least likely 0.5 %
    assert tail_bias(lost)[0] < ALPHA


def test_p_values_are_not_too_small() -> None:
    # Of 400 right engines about 1 % at most may have a p-value below 0.01.
    rng = np.random.default_rng(0)
    found = [tail_bias(rng.random(256))[0] for _ in range(400)]
    assert np.mean(np.array(found) < 0.01) < 0.02
    assert np.mean(np.array(found) < 0.1) < 0.13


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_tokens_are_those_of_the_weights_that_their_spans_name(
    servers: GenerateServers, first: Path, tmp_path: Path, mode: str
) -> None:
    url, process = servers.start(first, "--slots=32", "--tick_s=0.004")
    settings = (
        *("warm_start=none", f"model.path={first}", "run.deterministic=false"),
        *("rollout/engine=http", f"rollout.engine.url={url}", "rollout.engine.slots=16"),
        *("trainer.steps=3", "sampling.groups_per_step=4", "sampling/filter=none", "run.name=mine"),
        "rollout.n=4",
        *("sampling.lookahead=1", "sampling.max_staleness=2"),
        *("trainer.mini_batch_groups=4", "data.max_prompt_tokens=64", "optim.lr=1e-2"),
        *("optim.warmup_steps=0", "evaluation.before=false", "evaluation.max_prompts=1"),
        *("evaluation.n=1", "evaluation.greedy=false"),
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
    servers: GenerateServers, first: Path, tmp_path: Path
) -> None:
    url, process = servers.start(first, "--slots=32")
    settings = (
        *("warm_start=none", f"model.path={first}", "run.deterministic=false", "run.name=mine"),
        *("rollout/engine=http", f"rollout.engine.url={url}", "sampling/filter=none"),
        *("trainer.steps=1", "sampling.groups_per_step=4", "trainer.mini_batch_groups=4"),
        *("data.max_prompt_tokens=64", "optim.lr=1e-1", "optim.warmup_steps=0"),
        *("evaluation.before=false", "evaluation.max_prompts=4", "evaluation.n=2"),
        *("evaluation.greedy=false", "rollout.n=2", "trainer.save_every=null"),
    )
    in_this_process("train", "quickstart", *settings, folder=tmp_path).check()
    process.kill()
    run = tmp_path / "runs" / "mine"

    def answers(out: str, *overrides: str) -> tuple[str, list[list[int]]]:
        words = ("eval", "runs/mine", "--out", out, *overrides)
        told = in_this_process(*words, folder=tmp_path).check()
        assert ("Not using the run's servers" in told.out) == (out == "silent")
        rows = read_rollouts(tmp_path / out / "answers.parquet").to_pylist()
        report = json.loads((tmp_path / out / "report.json").read_text())
        return report["engine"], [row["token_ids"] for row in rows]

    kind, own = answers("silent")
    assert (kind, own) == answers("torch", "rollout/engine=torch")
    assert len(own) == 8

    url, process = servers.start(first)
    words = ("eval", "runs/mine", "--out", "other", f"rollout.engine.url={url}")
    refused = in_this_process(*words, folder=tmp_path)
    process.kill()
    held = run / "checkpoints" / "step-1" / "model"
    assert refused.code == 2
    assert f"{url} disagrees with the trainer" in refused.err
    assert f"start the server with --model {held}" in refused.err
    assert not (tmp_path / "other").exists()

    url, process = servers.start(held)
    kind, theirs = answers("named", f"rollout.engine.url={url}")
    process.kill()
    assert kind == "http"
    assert len(theirs) == 8
    assert theirs != own  # the server's random numbers

    url, process = servers.start(held, "--renamed_after=60")
    words = ("eval", "runs/mine", "--out", "changed", f"rollout.engine.url={url}")
    refused = in_this_process(*words, folder=tmp_path)
    process.kill()
    assert refused.code == 2
    assert f"{url} received other weights (newer) during" in refused.err
    assert not (tmp_path / "changed").exists()
