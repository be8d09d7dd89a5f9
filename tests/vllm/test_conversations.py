"""Conversations whose turns a real vLLM writes."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.contract.test_engine import model_of, torch_engine
from tests.unit.environments.test_conversation import Counting, make, requests, run, transcript
from tests.vllm_engines import vllm_engine


@pytest.mark.parametrize("abort_after", [None, 3])
@pytest.mark.parametrize("deterministic", [True, False])
def test_they_are_the_conversations_of_the_torch_engine(
    deterministic: bool, abort_after: int | None
) -> None:
    model = model_of(dtype=torch.float32)
    plain = asyncio.run(run(make(torch_engine(model, slots=5), Counting()), requests()))
    environments = Counting()
    engine = make(vllm_engine(model, slots=5), environments, deterministic)
    done = asyncio.run(run(engine, requests(), abort_after))
    assert {k: transcript(e) for k, e in done.items()} == {
        k: transcript(e) for k, e in plain.items()
    }
    assert not environments.alive
