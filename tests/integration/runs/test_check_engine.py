"""`winnow check-engine` against engines and servers, well ones and such with one illness each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.generate_server import GenerateServers
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, in_this_process
from transformers import AutoModelForCausalLM

from winnow.runs.check_engine import ALPHA, _binomial_sides, rank_bias

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
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerateServers]:
    made = GenerateServers(tmp_path_factory.mktemp("servers"))
    yield made
    made.close()


def check(target: str, folder: Path, *words: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and state and text of each finding."""
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
    code, found = check(url, tmp_path, *words)
    states = {name: state for name, (state, _) in found.items()}
    passed = dict.fromkeys(["weights", "support", "logprobs", "update"], "passed")
    assert states == {**passed, "sleep": "not offered"}
    assert code == 0
    assert "4,096 tokens are drawn from the whole softmax" in found["support"][1]
    # It holds the first weights again, and temperatures other than 1 are right, too.
    words = ("--model", str(first), "--json", "rollout.temperature=0.7", "model.dtype=float32")
    said = in_this_process("check-engine", url, *words, folder=tmp_path)
    assert said.code == 0
    rows = json.loads(said.out)
    assert [row["state"] for row in rows] == [*["passed"] * 3, "not offered", "not offered"]
    assert 0 < rows[0]["figures"]["largest"] < 1e-4
    assert rows[1]["figures"] == {"p_value": rows[1]["figures"]["p_value"], "tokens": 4096}


@pytest.mark.parametrize(
    ("illness", "words", "faults", "line"),
    [
        ("--top_p=0.8", (), {"support"}, "the least likely 20.0% of probability came"),
        ("--top_p=0.99", (), {"support"}, "the least likely 0.5% of probability came 0 times"),
        ("--raw_logprobs", ("rollout.temperature=0.7",), {"weights"}, "does not answer as the"),
        ("--keeps_head", ("update",), {"update"}, "the new weights: .* does not answer as the"),
        ("--sleeps_badly", (), {"sleep"}, "answered 500: .*no sleep mode"),
        ("--without_updates", ("update",), {"update"}, "start vLLM with VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_each_illness_of_a_server_is_found(
    servers: GenerateServers,
    first: Path,
    other: Path,
    tmp_path: Path,
    illness: str,
    words: tuple[str, ...],
    faults: set[str],
    line: str,
) -> None:
    url, process = servers.start(first, "--slots=64", illness)
    given_words = ("--update", str(other)) if words == ("update",) else words
    code, found = check(url, tmp_path, "--model", str(first), *given_words)
    process.kill()
    assert (code, failed(found)) == (1, faults)
    (fault,) = faults
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
    code, found = check("mine.yaml", tmp_path, "--update", str(other))
    assert code == 0
    assert found["update"][0] == "passed"


def refused(said: Outcome, line: str) -> None:
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert line in said.err


def test_bad_words_are_one_line_each(first: Path, tmp_path: Path) -> None:
    nowhere = ("check-engine", "http://127.0.0.1:1")
    refused(in_this_process(*nowhere, folder=tmp_path), "give its folder in --model FOLDER")
    model = ("--model", str(first), "model.dtype=float32")
    refused(in_this_process(*nowhere, *model, folder=tmp_path), "start the server, or mend the")
    same = ("--update", str(first))
    refused(in_this_process(*nowhere, *model, *same, folder=tmp_path), "its weights give the same")
    absent = ("--model", "/absent", "model.dtype=float32")
    refused(in_this_process(*nowhere, *absent, folder=tmp_path), "/absent")


def test_binomial_tails_equal_sums_in_whole_numbers() -> None:
    chance, count = Fraction(1, 50), 40
    each = [comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(count + 1)]
    for hits in (0, 1, 5, 40):
        below, above = _binomial_sides(hits, count, 0.02)
        assert below == pytest.approx(float(sum(each[: hits + 1])), rel=1e-9)
        assert above == pytest.approx(float(sum(each[hits:])), rel=1e-9)


@given(st.integers(0, 2**32 - 1))
def test_uniform_values_are_no_bias_and_a_lost_tail_is_one(seed: int) -> None:
    values = np.random.default_rng(seed).random(4096)
    assert rank_bias(values)[0] > ALPHA
    lost = values * 0.995  # no token of the least likely 0.5 %
    assert rank_bias(lost)[0] < ALPHA


def test_p_values_are_not_too_small() -> None:
    # Of 1,000 right engines about 1 % at most may have a p-value below 0.01.
    rng = np.random.default_rng(0)
    found = [rank_bias(rng.random(256))[0] for _ in range(1000)]
    assert np.mean(np.array(found) < 0.01) < 0.02
    assert np.mean(np.array(found) < 0.1) < 0.13
