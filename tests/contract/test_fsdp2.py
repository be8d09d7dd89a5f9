"""A model sharded over ranks learns what it learns in one process, from recorded rollouts.

Each case runs on real processes: a pass for log-probs, two updates with their gradients, the
weights after. The same in one process on the undivided update is what it is held against, per
tensor. Ranks share the work as in training, and each has nothing at all in one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.ranks import Ranks
from tests.recorded import VOCABULARY, recorded_groups
from tests.small_models import digits_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from winnow.balancing import share
from winnow.batching import (
    Batch,
    MicroBatch,
    gather_tokens,
    idle,
    micro_batches,
    pack,
    spread,
    update_of,
)
from winnow.config.model import LoraAdapter
from winnow.models import freeze, use_layout_attention
from winnow.workers.fsdp2 import FSDP2Strategy
from winnow.workers.lora import add_lora
from winnow.workers.objective import PolicyObjective
from winnow.workers.single import SingleStrategy
from winnow.workers.strategy import LossResult, Output, Outputs
from winnow.workers.units import Sharding

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
BUDGET = 150
LR = 1e-3
CLIP = 0.01
"""Below every gradient here, and each is clipped by a factor of its own, which Adam sees."""
Arrays = dict[str, NDArray[Any]]
POLICY: frozenset[Output] = frozenset({"logprob", "entropy"})
OUTPUTS: dict[str, frozenset[Output]] = {
    "critic": frozenset({"value"}),
    "reward model": frozenset({"score"}),
}
KINDS = ("tied", "untied", "lora", "frozen", "critic", "reward model")
TARGETS = ("q_proj", "o_proj", "down_proj")
SHAPE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 6,
    "intermediate_size": 20,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Layout:
    """How a model lies on the ranks."""

    mesh: tuple[int, int] = (1, 4)
    """Replicas, shards. With fewer than four ranks the others hold a copy of the whole test."""
    sharding: Sharding = field(default_factory=lambda: Sharding(bucket_bytes=3000))
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Learnt:
    """What a case came to."""

    outputs: Arrays
    gradients: list[Arrays]
    stats: list[dict[str, float]]
    weights: Arrays


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    """The same weights in every process; norms and heads are random too."""
    model: Any = digits_model(**SHAPE, tie_word_embeddings=kind != "untied")
    if kind in OUTPUTS:
        model = _with_number(kind, model)
    use_layout_attention(model)
    model = model.to(dtype).eval()
    if kind == "frozen":
        freeze(model, ["*.layers.0.*", "*embed_tokens*", "*q_norm*"])
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 1 or len(parameter) == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    if kind in OUTPUTS:
        model.score.to(torch.promote_types(dtype, torch.float32))
    if kind == "lora":
        add_lora(model, LoraAdapter(rank=3, alpha=5.0, target_modules=TARGETS), seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
            if "lora_" in name and dtype == torch.float64:
                parameter.data = parameter.data.double()
    return model


def _with_number(kind: str, model: Any) -> Any:
    from transformers import Qwen3ForSequenceClassification, Qwen3ForTokenClassification

    made = Qwen3ForTokenClassification if kind == "critic" else Qwen3ForSequenceClassification
    config = model.config
    config.num_labels = 1
    torch.manual_seed(0)
    return made(config)


@cache
def batch_of(kind: str, dtype: torch.dtype) -> Batch:
    """Three answers each to two recorded prompts, with the columns that a loss reads."""
    batch = pack(recorded_groups(2, 3))
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(len(batch.token_ids), generator=generator, dtype=torch.float64).to(exact)
    batch.columns["old"] = batch.behav.to(exact) + 0.2 * noise
    batch.columns["advantages"] = noise.flip(0)
    return batch


def objective_of(kind: str) -> Any:
    if kind in OUTPUTS:
        return numbers_loss
    return PolicyObjective("ppo_clip", {"clip_high": 0.28}, entropy_coef=0.01)


def numbers_loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """For heads of one number: a square, with each token's own weight."""
    (values,) = outputs.values()
    terms = (values - micro.columns["advantages"]).square() * (values != 0)
    total = terms.sum() / micro.counts.tokens
    return LossResult(total, {"sum": terms.detach().sum()}, {"most": terms.detach().max()})


def learn(
    strategy: Any, micro: Sequence[MicroBatch], kind: str, dtype: torch.dtype, gradients: Any
) -> Learnt:
    batch, asked = batch_of(kind, dtype), OUTPUTS.get(kind, POLICY)
    objective = objective_of(kind)
    found = strategy.forward(micro, asked)
    outputs = {
        name: gather_tokens(batch, micro, [each[name] for each in found]).double().numpy()
        for name in asked
    }
    learnt = Learnt(outputs, [], [], {})
    for _ in range(2):
        stats = strategy.forward_backward(micro, asked, objective)
        learnt.gradients.append(arrays(gradients(strategy)))
        learnt.stats.append(stats | strategy.optimizer_step(LR))
    learnt.weights = arrays(dict(strategy.export_weights()))
    return learnt


def arrays(tensors: dict[str, Tensor]) -> Arrays:
    """For the way between processes."""
    return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def single_gradients(strategy: SingleStrategy) -> dict[str, Tensor]:
    return {n: m.grad.clone() for n, m in strategy._masters.items() if m.grad is not None}


def fsdp_gradients(strategy: FSDP2Strategy) -> dict[str, Tensor]:
    own = {n: p.grad for n, p in strategy._trained.items() if p.grad is not None}
    return {name: gradient.full_tensor().clone() for name, gradient in own.items()}  # type: ignore[attr-defined]


@cache
def undivided(kind: str, dtype: torch.dtype) -> Learnt:
    """In one process; of bf16 in the micro-batches of the ranks, as each rounds its own sums."""
    batch = batch_of(kind, dtype)
    micro = micro_batches(batch, range(batch.n_groups), 9999)
    if dtype == torch.bfloat16:
        micro = [each for own in shares_of(batch, 4) for each in own if each.lengths]
    strategy = SingleStrategy(model_of(kind, dtype), vocab_size=VOCABULARY, grad_clip=CLIP)
    return learn(strategy, micro, kind, dtype, single_gradients)


def shares_of(batch: Batch, ranks: int) -> list[list[MicroBatch]]:
    every = range(batch.n_groups)
    waiting = idle(batch, update_of(batch, every))
    shares = share(batch, every, BUDGET, ranks, SHAPE["hidden_size"]).ranks
    # Some begin with nothing to do, the others end so.
    return [[waiting, *own] if i % 2 else [*own, waiting] for i, own in enumerate(shares)]


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """For all processes, or each pair of them, by itself."""
    copies = 4 // (shape[0] * shape[1])
    names = ("copy", "replicate", "shard")
    whole = init_device_mesh("cpu", (copies, *shape), mesh_dim_names=names)
    return whole[("replicate", "shard") if shape[0] > 1 else ("shard",)]


def place(mesh: DeviceMesh) -> int:
    """This process among those of its mesh."""
    place = 0
    for axis in range(mesh.ndim):
        place = place * mesh.size(axis) + mesh.get_local_rank(axis)
    return place


def strategy_on_rank(kind: str, dtype: torch.dtype, layout: Layout) -> FSDP2Strategy:
    return FSDP2Strategy(
        model_of(kind, dtype),
        mesh_of(layout.mesh),
        layout.sharding,
        **{"vocab_size": VOCABULARY, "grad_clip": CLIP, **layout.options},
    )


def learn_on_rank(kind: str, dtype: torch.dtype, layout: Layout) -> Learnt:
    strategy = strategy_on_rank(kind, dtype, layout)
    micro = shares_of(batch_of(kind, dtype), strategy.mesh.size())[place(strategy.mesh)]
    return learn(strategy, micro, kind, dtype, fsdp_gradients)


def assert_near(found: Arrays, wanted: Arrays, tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    away = {n: np.linalg.norm(found[n] - wanted[n]) / np.linalg.norm(wanted[n]) for n in wanted}
    worst = max(away, key=lambda name: away[name])
    assert away[worst] <= tolerance, f"{worst}: {away[worst]:.1e}"


def assert_learns_alike(
    ranks: Ranks, kind: str, dtype: torch.dtype, layout: Layout, tolerance: float
) -> None:
    wanted = undivided(kind, dtype)
    found: list[Learnt] = ranks.run(learn_on_rank, kind, dtype, layout)
    every = layout.mesh[0] * layout.mesh[1]
    for name, values in wanted.outputs.items():
        parts = [each.outputs[name] for each in found[:every]]
        assert_near({name: np.sum(parts, axis=0)}, {name: values}, tolerance)
    # In fp32 Adam moves a weight of next to no gradient by the sign of a rounding.
    updates = 2 if dtype == torch.float64 else 1
    for each in found:
        assert each.stats == found[0].stats
        for i in range(updates):
            assert wanted.stats[i]["grad_norm"] > CLIP
            assert each.stats[i] == pytest.approx(wanted.stats[i], rel=tolerance, abs=tolerance)
            assert_near(each.gradients[i], wanted.gradients[i], tolerance)
        assert each.weights.keys() == wanted.weights.keys()
        if updates == 2:
            assert_near(each.weights, wanted.weights, tolerance)


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)], ids=["4 shards", "2 replicas of 2 shards"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_learns_sharded_what_it_learns_alone(
    ranks: Ranks, kind: str, mesh: tuple[int, int]
) -> None:
    assert_learns_alike(ranks, kind, torch.float64, Layout(mesh), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_too(ranks: Ranks, kind: str) -> None:
    assert_learns_alike(ranks, kind, torch.float32, Layout((1, 2)), 1e-5)


OPTIONS = {
    "two ranks": Layout((1, 2)),
    "kept after forward": Layout(sharding=Sharding(reshard_after_forward=False)),
    "kept on two": Layout(sharding=Sharding(reshard_after_forward=2)),
    "offloaded": Layout(sharding=Sharding(offload=True)),
    "recomputed": Layout(options={"gradient_checkpointing": True}),
    "recomputed, offloaded, replicated, kept": Layout(
        (2, 2), Sharding(False, True), {"gradient_checkpointing": True}
    ),
}


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *(("tied", option) for option in OPTIONS),
        *(("lora", option) for option in list(OPTIONS)[3:]),
    ],
)
def test_no_option_changes_what_is_learnt(ranks: Ranks, kind: str, option: str) -> None:
    assert_learns_alike(ranks, kind, torch.float64, OPTIONS[option], 1e-10)


@pytest.mark.parametrize("kind", ["tied", "lora", "frozen", "critic"])
def test_bf16_differs_by_its_rounding_alone(ranks: Ranks, kind: str) -> None:
    # One process computes an adapter in fp32, sharded it is computed in bf16.
    tolerance = 0.1 if kind == "lora" else 1e-4
    assert_learns_alike(ranks, kind, torch.bfloat16, Layout(), tolerance)


def five_steps(strategy: Any, micro_of: Callable[[Batch], list[MicroBatch]]) -> list[float]:
    """The losses of five steps on recorded answers, each by the log-probs at its beginning."""
    losses = []
    for step in range(5):
        batch = pack(recorded_groups(2, 3))
        rewards = torch.tensor([math.sin(1.0 + step + b) for b in range(batch.n_samples)])
        batch.columns["advantages"] = spread(rewards, batch)
        batch.columns["old"] = batch.behav
        micro = micro_of(batch)
        objective = PolicyObjective("reinforce", {})
        losses.append(strategy.forward_backward(micro, objective.outputs, objective)["loss"])
        strategy.optimizer_step(3e-3)
    return losses


def five_steps_on_rank(mesh: tuple[int, int]) -> list[float]:
    strategy = strategy_on_rank("tied", torch.float32, Layout(mesh))
    own, of = place(strategy.mesh), strategy.mesh.size()
    return five_steps(strategy, lambda batch: shares_of(batch, of)[own])


def test_what_five_steps_learn_does_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    alone = SingleStrategy(model_of("tied", torch.float32), vocab_size=VOCABULARY, grad_clip=CLIP)
    wanted = five_steps(alone, lambda batch: micro_batches(batch, range(batch.n_groups), 9999))
    assert max(wanted) - min(wanted) > 0.01
    for mesh in ((1, 1), (1, 2), (1, 4)):
        for losses in ranks.run(five_steps_on_rank, mesh):
            assert losses == pytest.approx(wanted, abs=1e-4)
