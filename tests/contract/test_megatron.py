"""A model that Megatron's layers hold in parts learns what it learns in one process.

As in `test_fsdp2`, whose cases these are: recorded rollouts, a pass for log-probs, updates with
their gradients, the weights after, held against one process tensor by tensor. Megatron's layers run
on the CPU here, by answers to what they ask of CUDA (`tests/megatron_on_cpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.contract.test_fsdp2 import (
    HYPERPARAMETERS,
    POLICY,
    TOLERANCE,
    Arrays,
    Learnt,
    arrays,
    assert_alike,
    assert_near,
    batch_of,
    exported,
    learn,
    model_of,
    objective_of,
    shares_of,
    undivided,
)
from tests.megatron_layouts import use
from tests.ranks import Ranks
from tests.recorded import VOCABULARY
from tests.small_models import save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from winnow.models.causal_lm import load_causal_lm
from winnow.models.value import load_value_model

Cut = tuple[int, int, int]
"""Ranks of tensor, pipeline and expert parallelism; of four, the others run other shares."""
CUTS: dict[str, list[Cut]] = {
    "untied": [(1, 2, 1)],
    "tied": [(2, 2, 1)],
    "qwen2": [(2, 2, 1)],
    "llama": [(2, 1, 1)],
    "three layers": [(1, 2, 1)],
    "critic": [(2, 2, 1)],
    "reward model": [(2, 1, 1)],
    "frozen": [(1, 1, 1)],
    "even experts": [(1, 1, 4), (2, 1, 2), (2, 2, 2)],
}
"""`benchmarks.megatron_layouts` holds more of them against one process."""
CASES = [(kind, cut) for kind, cuts in CUTS.items() for cut in cuts]


def strategy_on_rank(kind: str, dtype: torch.dtype, cut: Cut, split: bool, **options: Any) -> Any:
    return watched(model_of(kind, dtype), cut, split, **HYPERPARAMETERS | options)


def watched(model: nn.Module, cut: Cut, split: bool, **options: Any) -> Any:
    from winnow.learning.megatron import MegatronStrategy, RankLayout

    class Watched(MegatronStrategy):
        """Keeps the whole gradients of the first step, by the names of the Hugging Face model."""

        gradients: Arrays | None = None

        def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
            if self.gradients is not None:
                return super()._norm(gradients)
            self.gradients = {}
            own = dict(zip(self._masters, gradients, strict=True))
            for name, like in self.model.named_parameters():
                if not like.requires_grad:
                    continue
                total = torch.zeros(like.shape, dtype=torch.float64)
                for held, parts in self._parts.items():
                    for part in parts:
                        if part.name == name and held in own and not part.is_copy:
                            total[part.slices] = part.rectangle(own[held]).double()
                dist.all_reduce(total)
                self.gradients[name] = total.numpy()
            return super()._norm(gradients)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    use(layout := RankLayout(*cut, sequence_parallel=split))
    return Watched(model, mesh, layout, **options)


def learn_on_rank(
    kind: str, dtype: torch.dtype, cut: Cut, split: bool, options: dict[str, Any]
) -> tuple[int, Learnt]:
    """The share of the batch that this rank is of, and what it came to."""
    strategy = strategy_on_rank(kind, dtype, cut, split, **options)
    dp = strategy.sharder.dp
    micro = shares_of(batch_of(kind, dtype), dp.shares)[dp.share]
    learnt = learn(strategy, micro, kind, dtype, holds_gradients=False)
    learnt.gradients = strategy.gradients
    return dp.share, learnt


def by_share(answers: Sequence[tuple[int, Learnt]]) -> list[Learnt]:
    """What ranks found, those of a share side by side; its first ones have the outputs."""
    return [found for _, found in sorted(answers, key=lambda answer: answer[0])]


@pytest.mark.parametrize(("kind", "cut"), CASES)
def test_a_model_in_parts_learns_what_it_learns_alone(ranks: Ranks, kind: str, cut: Cut) -> None:
    number = CASES.index((kind, cut))
    # A mixture's router weighs in fp32, so that float64 has no more digits there.
    dtype = torch.float32 if number % 2 else torch.float64
    split, recomputes = number % 3 != 1 or "experts" in kind, number % 4 > 1
    options = {"gradient_checkpointing": recomputes, "logprob_chunk_tokens": 7}
    answers = ranks.run(learn_on_rank, kind, dtype, cut, split, options)
    wanted = undivided(kind, dtype, 0, False)
    together = cut[0] * cut[1]
    assert_alike(by_share(answers), wanted, kind, dtype, TOLERANCE[dtype], together)


@pytest.mark.parametrize("kind", ["untied", "even experts"])
def test_bf16_is_as_far_from_the_truth_as_in_one_process(ranks: Ranks, kind: str) -> None:
    answers = ranks.run(learn_on_rank, kind, torch.bfloat16, (2, 2, 1), True, {})
    found, exact = answers[0][1], undivided(kind, torch.float64, 0, False)
    one = undivided(kind, torch.bfloat16, 1, False)
    away, usual = (distance(each.gradients, exact.gradients) for each in (found, one))
    # Partial products are rounded before they are summed over ranks.
    assert away <= 3 * usual, (away, usual)
    assert_near(found.weights, one.weights, 0.0)


def attention_runs_on_rank(checkpointing: bool) -> float:
    """Count how often each layer attends in an update, for each micro-batch."""
    options = {"gradient_checkpointing": checkpointing}
    strategy = strategy_on_rank("tied", torch.float32, (2, 1, 1), True, **options)
    layers, runs = strategy._stage.decoder.layers, list[None]()
    for layer in layers:
        attention = layer.self_attention.core_attention
        attention.register_forward_hook(lambda *_: runs.append(None))
    dp = strategy.sharder.dp
    micro = shares_of(batch_of("tied", torch.float32), dp.shares)[dp.share]
    strategy.forward_backward(micro, POLICY, objective_of("tied"))
    return len(runs) / len(layers) / len(micro)


def test_layers_are_recomputed_where_that_is_asked(ranks: Ranks) -> None:
    assert ranks.run(attention_runs_on_rank, False) == [1.0] * 4
    assert ranks.run(attention_runs_on_rank, True) == [2.0] * 4


LOADED = {"untied": load_causal_lm, "even experts": load_causal_lm, "critic": load_value_model}


def weights_read_on_rank(kind: str, folder: str) -> Arrays:
    model = LOADED[kind](folder, torch.float32, torch.device("cpu"), hollow=True)
    torch.use_deterministic_algorithms(True)  # memory that nothing is written to holds NaN
    try:
        strategy = watched(model, (2, 2, 1), True, vocab_size=VOCABULARY)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(own.isfinite().all()) for own in strategy._local_params.values())
    return exported(strategy)


@pytest.mark.parametrize("kind", LOADED)
def test_ranks_read_their_parts_of_a_folder(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    model: Any = model_of(kind, torch.float32)
    save(model, None, tmp_path)
    wanted = arrays({name: p.detach() for name, p in model.named_parameters()})
    for found in ranks.run(weights_read_on_rank, kind, str(tmp_path)):
        assert_near(found, wanted, 0.0)


def replay_on_rank(cut: Cut, checkpointing: bool) -> Any:
    """Gradients and loads after two updates of a group each, as `test_routing` has them."""
    from tests.contract import test_routing as routing

    options = {"temperature": routing.TEMPERATURE, "gradient_checkpointing": checkpointing}
    strategy = watched(routing.trainable(), cut, True, replays_routes=True, **options)
    assert strategy.replayed is not None
    groups, sharder = routing.routed_groups(), strategy.sharder
    batch = sharder.pack(groups, 60)
    weights = routing.weights_of(int(batch.lengths.sum()))
    batch.columns["advantages"] = batch.local_part(weights)
    batch.columns[routing.ROUTES] = routing.token_routes(groups, batch, strategy.replayed)
    for group in range(batch.n_groups):
        micro = sharder.cut_update(batch, [group], 60)
        strategy.forward_backward(micro, routing.LOGPROB, routing.weighted)
    load = strategy.expert_load()
    strategy.forward(micro, routing.LOGPROB)
    assert not strategy.expert_load().tokens.any(), "a pass without a gradient is not counted"
    strategy.optimizer_step(0.0)
    return strategy.gradients, load


@pytest.mark.parametrize("checkpointing", [False, True])
def test_replayed_routes_give_the_gradients_of_the_reference(
    ranks: Ranks, checkpointing: bool
) -> None:
    from tests.contract import test_routing as routing

    for gradients, load in ranks.run(replay_on_rank, (2, 2, 1), checkpointing):
        routing.assert_near({name: torch.from_numpy(g) for name, g in gradients.items()})
        routing.assert_load(load)


def distance(found: Arrays, wanted: Arrays) -> float:
    """Of all tensors together, over the length of what is wanted."""
    away = sum(float(np.sum((found[name] - wanted[name]) ** 2)) for name in wanted)
    return (away / sum(float(np.sum(each**2)) for each in wanted.values())) ** 0.5
