"""What goes wrong with weights on their way is found: by a checksum, a list, or the canary."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.errors import PublicationError, WorkerError
from winnow.learning.canary import ALLOWED, CEILING, LARGEST, LENGTHS, Canary
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.weights import Bucket, WeightUpdate, send_weights

Tensors = list[tuple[str, Tensor]]
VOCABULARY, POSITIONS, TEMPERATURE = 120, 300, 0.8
KNOWN = 117
"""Ids that the tokenizer has."""


def model_of(
    dtype: torch.dtype,
    seed: int = 0,
    tied: bool = True,
    layers: int = 3,
    initializer_range: float = 0.15,
) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    use_layout_attention(model)
    return model


def learned(model: Any, size: float = 0.05) -> Any:
    """The model after updates that changed each weight by about `size` of its value."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape)).to(parameter.dtype)
    return other


def engine_of(model: Any) -> TorchEngine:
    engine = TorchEngine(copy.deepcopy(model), slots=4, prefill_tokens=512, vocab_size=KNOWN)
    return engine


def strategy_of(model: Any) -> Strategy:
    return Strategy(model, temperature=TEMPERATURE, vocab_size=KNOWN)


def canary_of(dtype: torch.dtype) -> Canary:
    return Canary.random(KNOWN, POSITIONS, dtype, TEMPERATURE)


def publish(tensors: Iterable[tuple[str, Tensor]], engine: TorchEngine) -> None:
    """Send, compare checksums; not yet the canary."""

    async def take(bucket: Bucket) -> dict[str, int]:
        return {"engine 0": await engine.take_bucket(bucket)}

    async def run() -> None:
        await send_weights(WeightUpdate(5, tensors), take, 10_000)
        await engine.load_weights(WeightUpdate(5))

    asyncio.run(run())


def listen(canary: Canary, policy: Strategy, engine: TorchEngine) -> float:
    return asyncio.run(canary.check(canary.score(policy), 5, {"engine 0": engine}))


# Faults that checksums have nothing to say of. Each is given what is exported, and the engine.


def stale_head(tensors: Tensors, engine: TorchEngine) -> None:
    """The engine decodes with an output layer that it packed for itself before."""
    head = nn.Linear(32, VOCABULARY, bias=False)
    head.weight = nn.Parameter(engine._head.weight.detach().clone())
    engine._head = head
    publish(tensors, engine)


def swapped_layers(tensors: Tensors, engine: TorchEngine) -> None:
    """Two layers under each other's names."""

    def other(name: str) -> str:
        swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
        return next((name.replace(a, b) for a, b in swap.items() if a in name), name)

    publish([(other(name), tensor) for name, tensor in tensors], engine)


def not_a_number(tensors: Tensors, engine: TorchEngine) -> None:
    """One weight is NaN after its copy was made for the canary."""
    broken = [(n, t.detach().clone()) for n, t in tensors]
    broken[3][1].view(-1)[0] = float("nan")
    publish(broken, engine)


CANARY = "disagrees with"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fault", [stale_head, swapped_layers, not_a_number], ids=lambda fault: fault.__name__
)
def test_each_fault_is_caught(
    fault: Callable[[Tensors, TorchEngine], None], dtype: torch.dtype
) -> None:
    before = model_of(dtype)
    engine, policy = engine_of(before), strategy_of(learned(before, 0.3))
    fault(list(policy.export_weights(dtype)), engine)
    with pytest.raises(PublicationError, match=CANARY) as caught:
        listen(canary_of(dtype), policy, engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_what_arrived_whole_passes_with_a_third_of_what_is_allowed(
    dtype: torch.dtype, tied: bool
) -> None:
    before = model_of(dtype, tied=tied)
    engine, policy = engine_of(before), strategy_of(learned(before))
    canary = canary_of(dtype)
    with pytest.raises(PublicationError, match=r"version 5: engine 0 .* nats and"):
        listen(canary, policy, engine)  # not published yet
    publish(policy.export_weights(dtype), engine)
    assert listen(canary, policy, engine) <= canary.score(policy).limits.largest / 3


@pytest.mark.parametrize(("layers", "initializer_range"), [(3, 0.4), (24, 0.15)])
def test_an_engine_that_rounds_otherwise_passes_with_a_peaked_and_with_a_deep_model(
    layers: int, initializer_range: float
) -> None:
    model = model_of(torch.bfloat16, layers=layers, initializer_range=initializer_range)
    exact = copy.deepcopy(model).float()  # computes in fp32 with the same weights
    use_layout_attention(exact)
    policy, canary = strategy_of(model), canary_of(torch.bfloat16)
    found = listen(canary, policy, engine_of(exact))
    limits = canary.score(policy).limits
    flat = canary.score(strategy_of(model_of(torch.bfloat16, initializer_range=0.02))).limits
    assert flat.largest < found < limits.largest / 2  # one limit for all would not do
    # What is allowed there is still far from the answers of other weights.
    with pytest.raises(PublicationError, match=CANARY):
        listen(canary, strategy_of(learned(model, 0.3)), engine_of(model))


@pytest.mark.bits
def test_limits_come_from_the_trainers_weights_and_are_the_same_each_time() -> None:
    policy, canary = strategy_of(model_of(torch.bfloat16)), canary_of(torch.bfloat16)
    once, again = canary.score(policy), canary.score(policy)
    assert once.limits == again.limits
    for one, two in zip(once.logprobs, again.logprobs, strict=True):
        np.testing.assert_array_equal(one, two)  # the nudge left nothing behind
    exact = canary_of(torch.float32).score(strategy_of(model_of(torch.float32))).limits
    peaked = canary.score(strategy_of(model_of(torch.bfloat16, initializer_range=0.4))).limits
    assert exact.mean < once.limits.mean / 500
    assert peaked.mean > once.limits.mean * 2


@pytest.mark.parametrize(
    ("dtype", "moved", "rounding"),
    [
        # Log-probs of -7 and -3 nats: their mean is 5, their standard deviation 2.
        (torch.bfloat16, [0.02, -0.04], 0.03),
        (torch.bfloat16, [9.0, -9.0], CEILING * 2**-7 * 2),
        (torch.float32, [1e-6, -2e-6], 1.5e-6),
        (torch.float32, [0.5, -0.5], CEILING * 2**-23 * 2),
        (torch.float32, [0.0, 0.0], 2**-23 * 5),
        (torch.float64, [1e-15, 1e-15], 2**-23 * 5),
    ],
)
def test_limits_are_multiples_of_what_rounding_moves_between_two_bounds(
    dtype: torch.dtype, moved: list[float], rounding: float
) -> None:
    limits = canary_of(dtype)._limits(np.float32([-7, -3]), np.float32(moved))
    assert limits.mean == pytest.approx(ALLOWED[dtype] * rounding, rel=1e-5)
    assert limits.largest == pytest.approx(LARGEST * limits.mean)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_a_small_update_that_did_not_arrive_is_seen(dtype: torch.dtype, size: float) -> None:
    # In bf16 no single token says so, all of them together do.
    before = model_of(dtype)
    with pytest.raises(PublicationError, match=CANARY):
        listen(canary_of(dtype), strategy_of(learned(before, size)), engine_of(before))


@pytest.mark.parametrize(
    ("largest", "mean", "is_refused"),
    [
        *((0.9, 0.0, False), (1.1, 0.0, True), (np.nan, 0.0, True)),
        *((0.0, 0.9, False), (0.0, 1.1, True)),
    ],
)
def test_one_token_may_be_off_by_the_larger_limit_and_all_of_them_by_the_smaller(
    largest: float, mean: float, is_refused: bool
) -> None:
    policy, canary = strategy_of(model_of(torch.float32)), canary_of(torch.float32)
    expected = canary.score(policy)

    class Off:
        async def logprobs_of(self, *_: Any) -> list[Any]:
            found = [values + mean * expected.limits.mean for values in expected.logprobs]
            found[2][7] += largest * expected.limits.largest
            return found

    refused = pytest.raises(PublicationError, match="disagrees with the trainer")
    with refused if is_refused else contextlib.nullcontext():
        asyncio.run(canary.check(expected, 1, {"one": Off()}))


def test_an_engine_that_died_is_left_out_and_a_last_one_is_an_error() -> None:
    policy = strategy_of(model_of(torch.float32))
    canary = canary_of(torch.float32)

    class Dead:
        async def logprobs_of(self, *_: Any) -> list[Any]:
            raise WorkerError("the process was killed", "engine", 0)

    def check(**engines: Any) -> float:
        return asyncio.run(canary.check(canary.score(policy), 1, engines))

    alive = engine_of(policy.model)
    assert check(one=Dead(), two=alive) < 1e-5
    with pytest.raises(PublicationError, match="two disagrees"):
        check(one=Dead(), two=engine_of(learned(policy.model)))
    with pytest.raises(WorkerError, match="was killed"):
        check(one=Dead())


def test_sequences_are_the_same_each_time_short_and_long_and_of_known_ids() -> None:
    one, two = canary_of(torch.float32), canary_of(torch.float32)
    assert [ids.tolist() for ids in one.sequences] == [ids.tolist() for ids in two.sequences]
    assert [len(ids) for ids in one.sequences] == [25, 25, 25, 300]
    assert [len(i) for i in Canary.random(9, 9999, torch.float32).sequences] == list(LENGTHS)
    every = np.concatenate(one.sequences)
    assert every.min() == 0
    assert every.max() == KNOWN - 1
    other = Canary.random(KNOWN, POSITIONS, torch.float32, seed=1)
    assert other.sequences[3].tolist() != one.sequences[3].tolist()
