"""What is particular to the single-process strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from winnow.learning.batch import MicroBatch, all_micro_batches, pack
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.models.packed_attention import PackedLayout
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan


def make_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    model = Qwen3ForCausalLM(config).eval()
    use_layout_attention(model)
    return model


def micro() -> list[MicroBatch]:
    segment = Segment(np.arange(5), np.zeros(5, np.float32), (VersionSpan(0, 5),))
    answer = Answer(Trajectory((segment,), "stop"), Score(0.0, 0.0))
    prompt = Prompt("0", np.array([7, 8]), "", "", None)
    return all_micro_batches(pack([Group(0, prompt, (answer, answer))]), 100)


def loss(batch: MicroBatch, outputs: Outputs) -> LossResult:
    return LossResult(-outputs["logprob"].sum(), {})


@pytest.mark.parametrize(("checkpointing", "calls"), [(False, 2), (True, 4)])
def test_checkpointing_runs_each_layer_again_in_training_only(
    checkpointing: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = Strategy(make_model(), gradient_checkpointing=checkpointing)
    seen: list[int] = []
    plain = PackedLayout.attend

    def counted(self: PackedLayout, layer: int, *args: Any) -> torch.Tensor:
        seen.append(layer)
        return plain(self, layer, *args)

    monkeypatch.setattr(PackedLayout, "attend", counted)
    strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
    assert len(seen) == calls
    seen.clear()
    strategy.forward(micro(), frozenset({"logprob"}))
    assert len(seen) == 2
    assert not any(module.training for module in strategy.model.modules())


def test_the_model_is_changed_in_place_and_shared() -> None:
    model = make_model()
    strategy = Strategy(model)
    exported = dict(strategy.export_weights())
    name, weight = next(iter(model.named_parameters()))
    assert exported[name].data_ptr() == weight.data_ptr()
    before = weight.detach().clone()
    strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
    strategy.optimizer_step(1e-2)
    assert exported[name].data_ptr() == weight.data_ptr()
    assert not torch.equal(weight, before)


def test_frozen_parameters_stay_and_have_no_optimizer_state() -> None:
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    strategy = Strategy(model)
    before = {n: t.clone() for n, t in strategy.export_weights()}
    strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
    strategy.optimizer_step(1e-2)
    moved = {n for n, t in strategy.export_weights() if not torch.equal(t, before[n])}
    trained = {n for n in before if "layers.1" in n}
    assert moved == trained == strategy.state_dict()["optimizer"].keys()


def test_gradients_of_several_calls_add_up() -> None:
    strategy = Strategy(make_model(), grad_clip=None)
    strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
    once = strategy.optimizer_step(0.0)["grad_norm"]
    for _ in range(3):
        strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
    assert strategy.optimizer_step(0.0)["grad_norm"] == pytest.approx(3 * once, rel=1e-5)


def test_a_step_without_gradients_changes_nothing() -> None:
    strategy = Strategy(make_model(), weight_decay=0.1)
    before = {n: t.clone() for n, t in strategy.export_weights()}
    assert strategy.optimizer_step(0.1) == {"grad_norm": 0.0, "skipped": 0.0}
    assert all(torch.equal(t, before[n]) for n, t in strategy.export_weights())


def test_a_state_for_a_frozen_parameter_is_refused() -> None:
    from winnow.errors import CheckpointError

    strategy = Strategy(make_model())
    strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
    strategy.optimizer_step(1e-3)
    model = make_model()
    model.get_input_embeddings().weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"not of this model.*embed_tokens.*resume with"):
        Strategy(model).load_state_dict(strategy.state_dict())


@pytest.mark.gpu
def test_bf16_on_cuda_learns() -> None:
    strategy = Strategy(make_model().to(torch.device("cuda"), torch.bfloat16))
    losses = []
    for _ in range(20):
        losses.append(strategy.forward_backward(micro(), frozenset({"logprob"}), loss)["loss"])
        strategy.optimizer_step(1e-2)
    assert losses[-1] < losses[0] / 2
