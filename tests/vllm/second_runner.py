"""Answers of vLLM's second model runner; `test_second_runner.py` runs these in a process apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.contract.test_engine import drain
from tests.contract.test_routing import own_routes, routes_of, written_by
from tests.small_models import digits_model
from tests.vllm.test_answers import scheduler_of
from tests.vllm_engines import vllm_engine

from winnow.errors import ConfigError, WorkerError
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams

BLOCK = 32
"""Tokens of a block of the cache."""


def letters(ids: Any) -> str:
    return "".join(chr(ord("a") + int(i)) for i in ids)


def test_routes_are_the_models_whatever_the_scheduler_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are cut, found in the cache and read again; stop strings end some answers."""
    model = written_by()
    bytes_a_block = BLOCK * 3 * 2 * 2 * 32 * 4  # tokens, layers, K and V, heads, elements, float32
    engine = vllm_engine(
        model,
        slots=4,
        prefill_tokens=36,
        decode=letters,
        routes=True,
        cache_gib=9 * bytes_a_block / 2**30,
        longest=256,
        extra={"block_size": BLOCK},
    )
    rng, groups = np.random.default_rng(0), list[GroupRequest]()
    for number in range(3):
        # The third has the prompt of the first.
        prompt = groups[0].prompt_ids if number == 2 else rng.integers(2, 29, 50)
        sampling = SamplingParams(20, stop=tuple("bcdefg") if number == 2 else ())
        answers = tuple(AnswerRequest(i, 10 * number + i) for i in range(2))
        groups.append(GroupRequest(number, prompt, answers, sampling, number))
    scheduler = scheduler_of(engine)
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    parts, cached, preempted = list[int](), list[int](), list[str]()

    def scheduled(*args: Any) -> Any:
        found = schedule(*args)
        cached.extend(new.num_computed_tokens for new in found.scheduled_new_reqs)
        parts.append(max(found.num_scheduled_tokens.values(), default=0))
        return found

    def noted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", scheduled)
    monkeypatch.setattr(scheduler, "_preempt_request", noted)
    events = drain(engine, groups[:2]) | drain(engine, groups[2:])
    assert max(parts) < 50
    assert BLOCK in cached
    assert preempted
    assert "stop" in {event.finish_reason for event in events.values()}
    for (number, _), event in events.items():
        ids = [*groups[number].prompt_ids, *event.segment.token_ids]
        assert routes_of(event).tolist() == own_routes(written_by(), ids)[:-1].tolist()


def test_routes_of_another_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm_engine(written_by(), slots=1, prefill_tokens=12, routes=True)
    group = GroupRequest(0, np.arange(2, 6), (AnswerRequest(0, 0),), SamplingParams(2), 0)
    told = r"vLLM tells experts up to \d+ in \(5, 3, 2\) of 5"
    for name, wrong in (("experts", 2), ("choices", 3)):
        with monkeypatch.context() as other:
            other.setattr(engine, "_route_shape", replace(engine._route_shape, **{name: wrong}))
            asyncio.run(engine.submit([group]))
            with pytest.raises(WorkerError, match=told):
                asyncio.run(engine.events())
            asyncio.run(engine.close())


def test_a_model_without_experts_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.routing_replay=true.* only supports MoE models"
    ):
        vllm_engine(digits_model(head_dim=32), routes=True)
