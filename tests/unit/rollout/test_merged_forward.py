"""Decoding from merged weights: which models have it, that it follows their weights, its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.test_engine import (
    CONFIGS,
    groups_of,
    model_of,
    reference_logprobs,
    to_the_end,
    torch_engine,
)
from torch import Tensor

from winnow.config.model import LoraAdapter
from winnow.learning.strategy import Strategy
from winnow.models.lora import add_lora
from winnow.rollout.embedded import merged_forward
from winnow.rollout.embedded.merged_forward import MergedForward, can_merge
from winnow.rollout.engine import SamplingParams
from winnow.rollout.weights import WeightUpdate

GROUPS = groups_of(2, sampling=SamplingParams(max_tokens=8))


def fp32_model(name: str = "qwen3") -> Any:
    return model_of(name, torch.float32)


def written_logprobs(engine: Any) -> dict[tuple[int, int], Any]:
    async def run() -> Any:
        await engine.submit(GROUPS)
        return {event.key: event.segment for event in await to_the_end(engine)}

    found: dict[tuple[int, int], Any] = asyncio.run(run())
    return found


def assert_current(engine: Any) -> None:
    """The engine writes with the weights that its model has now."""
    written, reference = written_logprobs(engine), engine._model.double()
    reference.config._attn_implementation = "eager"
    for (group, _), segment in written.items():
        want = reference_logprobs(reference, GROUPS[group].prompt_ids, segment.token_ids)
        np.testing.assert_allclose(segment.logprobs, want, atol=3e-5)


class Table:
    """An `AttentionLayout` of rows without a past: each sees its own key."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@pytest.mark.parametrize("packed", [1, 1 << 30])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_logits_equal_those_of_the_modules(
    name: str, packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_forward, "_PACKED", packed)
    model, ids = fp32_model(name), torch.tensor([3, 9, 30])
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are not their initial values
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    with torch.inference_mode():
        got = MergedForward(model).logits(ids, torch.tensor([0, 5, 200]), Table())
    with torch.no_grad():
        want = model.double()(input_ids=ids[:, None]).logits[:, 0]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


def step_of_a_learner(model: Any) -> None:
    strategy = Strategy(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    strategy.optimizer_step(0.1)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0].mul_(-3)


def in_other_memory(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = -1.3 * parameter.data


@pytest.mark.parametrize("change", [step_of_a_learner, in_place, in_other_memory])
def test_weights_that_change_between_ticks_are_merged_anew(change: Callable[[Any], None]) -> None:
    engine = torch_engine(fp32_model())
    before = written_logprobs(engine)
    merged = engine._merged
    assert merged is not None
    layers = merged._layers
    written_logprobs(engine)
    assert merged._layers is layers  # they did not change
    change(engine._model)
    after = written_logprobs(engine)
    assert any((after[key].logprobs != before[key].logprobs).any() for key in before)
    assert_current(engine)


def test_a_publication_is_merged_even_where_nothing_else_shows_it() -> None:
    engine = torch_engine(fp32_model())
    written_logprobs(engine)
    for parameter in engine._model.parameters():
        parameter.data.view(-1)[1:].mul_(-1.3)
    asyncio.run(engine.load_weights(WeightUpdate(version=1)))
    assert_current(engine)


def test_published_tensors_are_merged() -> None:
    engine, other = torch_engine(fp32_model()), fp32_model()
    written_logprobs(engine)
    tensors = [(name, -1.3 * tensor.detach()) for name, tensor in other.named_parameters()]
    asyncio.run(engine.load_weights(WeightUpdate(version=1, tensors=tensors)))
    assert_current(engine)


def with_adapter() -> Any:
    model = fp32_model()
    add_lora(model, LoraAdapter(rank=2, target_modules=("q_proj",)), seed=0)
    return model


def with_hook() -> Any:
    model = fp32_model()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "merges"),
    [
        *((lambda name=name: fp32_model(name), True) for name in ("llama", "qwen2", "qwen3")),
        *(
            (lambda name=name: fp32_model(name), False)
            for name in ("qwen2-window", "qwen3-experts")
        ),
        (lambda: model_of("qwen3", torch.bfloat16), False),
        (lambda: model_of("qwen3", torch.float64), False),
        (with_adapter, False),
        (with_hook, False),
    ],
)
def test_a_model_is_merged_if_nothing_but_its_weights_is_needed(
    make: Callable[[], Any], merges: bool
) -> None:
    assert can_merge(make()) == merges


def test_copies_and_cache_are_as_large_as_needed_and_given_back() -> None:
    engine = torch_engine(fp32_model(), slots=256)
    assert engine._merged is not None
    for end in (engine.sleep, engine.close):
        written_logprobs(engine)
        assert len(engine._merged._layers) == CONFIGS["qwen3"].num_hidden_layers
        keys = engine._slots.cache.layers[0][0]
        assert keys.shape[0] == sum(len(group.answers) for group in GROUPS) == 6
        asyncio.run(end())
        assert not engine._merged._layers
        assert engine._merged._head is None
        assert not engine._slots.cache.layers
