"""The embedded engine samples from the model that the trainer scores: adapters and FP32 heads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_engine import groups_of, to_the_end
from tests.devices import DEVICE
from tests.small_models import digits_folder
from tests.written import answer

from winnow.config.model import LoraAdapter
from winnow.learning.batch import Batch, all_micro_batches, gather_tokens, pack
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.models.lora import add_lora
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import CompletionEvent, SamplingParams
from winnow.rollout.weights import WeightUpdate
from winnow.types import Group, Prompt

VOCABULARY = 29
TEMPERATURE = 0.7


def load(folder: Path, dtype: torch.dtype, **changes: Any) -> Any:
    digits_folder(folder, initializer_range=0.5, **changes)
    return load_causal_lm(str(folder), dtype, DEVICE)


def sampled(engine: TorchEngine, version: int = 0) -> Batch:
    """Answers of the engine as the trainer gets them."""
    sampling = SamplingParams(max_tokens=20, temperature=TEMPERATURE, stop_token_ids=(1,))
    requests = groups_of(4, sampling=sampling, seed=3, vocabulary=VOCABULARY)

    async def run() -> list[CompletionEvent]:
        await engine.load_weights(WeightUpdate(version=version))
        await engine.submit(requests)
        return await to_the_end(engine)

    events = asyncio.run(run())
    groups = [
        Group(
            request.group_id,
            Prompt(str(request.group_id), request.prompt_ids, "", "", None),
            tuple(answer(e.segment) for e in events if e.group_id == request.group_id),
        )
        for request in requests
    ]
    assert sum(len(group.answers) for group in groups) == 12
    return pack(groups)


def scored(strategy: Strategy, batch: Batch) -> torch.Tensor:
    micro = all_micro_batches(batch, 50)
    found = strategy.forward(micro, frozenset({"logprob"}))
    return gather_tokens(batch, micro, [each["logprob"] for each in found])


def gap(a: torch.Tensor, b: torch.Tensor, batch: Batch) -> float:
    return float((a - b).abs()[batch.gen_mask].max())


def imitation(micro: Any, outputs: Outputs) -> LossResult:
    return LossResult(-outputs["logprob"].sum() / micro.counts.tokens, {})


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_the_engine_samples_with_the_adapter_as_it_is_trained(tmp_path: Path, targets: Any) -> None:
    model = load(tmp_path, torch.float32, num_hidden_layers=2)
    add_lora(model, LoraAdapter(rank=4, target_modules=targets), seed=0)
    strategy = Strategy(model, temperature=TEMPERATURE)
    engine = TorchEngine(model, 6, 64, VOCABULARY)
    first = sampled(engine)
    before = scored(strategy, first)
    assert gap(before, first.behav, first) < 1e-5
    for _ in range(3):
        strategy.forward_backward(all_micro_batches(first, 500), frozenset({"logprob"}), imitation)
        strategy.optimizer_step(0.05)
    assert gap(scored(strategy, first), before, first) > 0.1
    second = sampled(engine, version=1)
    assert gap(scored(strategy, second), second.behav, second) < 1e-5
    with strategy.adapter_off():
        assert gap(scored(strategy, second), second.behav, second) > 0.1
        start = sampled(engine, version=2)
    assert torch.equal(start.behav, first.behav)


@pytest.mark.parametrize("tied", [True, False])
def test_an_fp32_head_is_the_same_in_engine_and_trainer_and_exact(
    tmp_path: Path, tied: bool
) -> None:
    model = load(tmp_path, torch.bfloat16, tie_word_embeddings=tied)
    # Layers that add nothing: what is left to differ is the head.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    # Or else a tied head says the last token again.
    norm = model.model.norm.weight.data
    norm.copy_(torch.randn(len(norm), generator=torch.Generator().manual_seed(0)))
    gaps = []
    for fp32_head in (True, False):
        strategy = Strategy(model, temperature=TEMPERATURE, fp32_head=fp32_head)
        batch = sampled(TorchEngine(model, 6, 64, VOCABULARY, fp32_head=fp32_head))
        found = scored(strategy, batch)
        assert gap(found, batch.behav, batch) < 1e-5
        gaps.append(gap(found, exact_logprobs(model, batch), batch))
    assert gaps[0] < 1e-5 < 1e-2 < gaps[1]


def exact_logprobs(model: Any, batch: Batch) -> torch.Tensor:
    """From the rounded states and weights, with every product in float64."""
    with torch.no_grad():
        embedded = model.model.embed_tokens(batch.token_ids.to(DEVICE))
        states = model.model.norm(embedded).double()
        logits = states @ model.get_output_embeddings().weight.double().T / TEMPERATURE
    logits = logits.cpu()
    logp = logits[:-1].log_softmax(-1).gather(1, batch.token_ids[1:, None])[:, 0]
    return torch.cat([logp.new_zeros(1), logp])
