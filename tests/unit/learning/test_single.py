"""What is particular to the single-process strategy, and passes without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.small_models import digits_model
from tests.written import group_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from winnow.learning.batch import (
    NO_SHARDING,
    Batch,
    MicroBatch,
    MicroBatchSharder,
    all_micro_batches,
    pack,
)
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass, score_sequences
from winnow.models.causal_lm import use_layout_attention
from winnow.models.packed_attention import PackedLayout, attention_operations


def make_model() -> Any:
    model = digits_model(num_hidden_layers=2)
    use_layout_attention(model)
    return model.eval()


def micro() -> list[MicroBatch]:
    return all_micro_batches(pack([group_of([range(5), range(5)])]), 100)


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
    with pytest.raises(
        CheckpointError, match=r"does not match this model.*embed_tokens.*resume with"
    ):
        Strategy(model).load_state_dict(strategy.state_dict())


@pytest.mark.gpu
def test_bf16_on_cuda_learns() -> None:
    strategy = Strategy(make_model().to(torch.device("cuda"), torch.bfloat16))
    losses = []
    for _ in range(20):
        losses.append(strategy.forward_backward(micro(), frozenset({"logprob"}), loss)["loss"])
        strategy.optimizer_step(1e-2)
    assert losses[-1] < losses[0] / 2


class Reader:
    """Reads token ids."""

    sharder = NO_SHARDING

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        return [{name: self.read(name, micro) for name in outputs} for micro in microbatches]

    def read(self, name: str, micro: MicroBatch) -> Tensor:
        if name == "logprob":
            return torch.where(micro.gen_mask, -micro.token_ids.float(), 0.0)
        # 100 times the last id, plus the length; an earlier token's would be seen.
        score = torch.full((len(micro.token_ids),), -1.0)
        last = micro.offsets[1:] - 1
        score[last] = 100.0 * micro.token_ids[last] + micro.offsets.diff()
        return score


def batch_of(*answers: Sequence[int]) -> Batch:
    return pack([group_of(answers)])


def test_outputs_are_gathered_in_one_order_whatever_the_order_of_a_set() -> None:
    gathered: list[float] = []

    class Ranks(MicroBatchSharder):
        def gather(
            self, batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
        ) -> Tensor:
            gathered.append(float(values[0][-1]))
            return super().gather(batch, microbatches, values)

    reader = Reader()
    reader.sharder = Ranks()
    for outputs in (("score", "logprob"), ("logprob", "score")):
        run_pass(reader, batch_of([7]), cast(Any, dict.fromkeys(outputs)), 100)  # type: ignore[arg-type]
    assert gathered == [-7.0, 703.0, -7.0, 703.0]


@pytest.mark.parametrize("budget", [1, 7, 100])
def test_scores_are_of_the_last_tokens_in_the_order_given(budget: int) -> None:
    sequences = [np.array(ids) for ids in ([3], [1, 2, 7], [4, 4, 4, 4, 5], [6, 1])]
    found = score_sequences(Reader(), sequences, budget)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    assert found.tolist() == [301.0, 703.0, 505.0, 102.0]


def test_no_sequence_has_no_score_and_an_empty_one_is_refused() -> None:
    assert score_sequences(Reader(), [], 100).tolist() == []  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tokens"):
        score_sequences(Reader(), [np.array([1]), np.array([], np.int64)], 100)  # type: ignore[arg-type]


class Attended(TorchDispatchMode):
    """Counts calls of the kernel that attends on a CPU."""

    calls = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else nothing is compiled within

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is attention_operations()[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiles", [False, True])
def test_attention_that_is_kept_is_not_computed_again_and_changes_no_bit(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    gradients = []
    for recomputes, calls in ((True, 4), (False, 2)):
        torch.manual_seed(0)
        options = {"gradient_checkpointing": True, "recompute_attention": recomputes}
        strategy = Strategy(make_model(), compiles=compiles, **options)
        with Attended() as attended:
            strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
        assert attended.calls == calls
        gradients.append([p.grad for p in strategy.model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_an_optimizer_step_on_more_threads_has_the_same_bits() -> None:
    seen: list[int] = []
    weights = []
    for threads in (None, 3):
        torch.manual_seed(0)
        model = digits_model(num_hidden_layers=2, hidden_size=88)
        use_layout_attention(model)
        strategy = Strategy(model.eval())
        strategy.step_threads = threads
        strategy._optimizer.register_step_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        for _ in range(2):
            strategy.forward_backward(micro(), frozenset({"logprob"}), loss)
            strategy.optimizer_step(1e-2)
        weights.append([p.detach().clone() for p in strategy.model.parameters()])
    assert seen == [torch.get_num_threads()] * 2 + [3] * 2
    assert all(map(torch.equal, *weights))
