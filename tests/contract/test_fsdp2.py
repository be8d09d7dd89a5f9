"""A model sharded over ranks learns what it learns in one process, from recorded rollouts.

Each case runs on real processes: a pass for log-probs, an update with its gradients, in float64 a
second one and the weights after. The same in one process on the undivided update is what it is held
against, per tensor. Ranks share the work as in training, and each has nothing at all in one
micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from numpy.typing import NDArray
from tests import vision_models
from tests.examples import QUICK
from tests.objectives import policy_objective
from tests.ranks import Ranks
from tests.recorded import VOCABULARY, recorded_groups
from tests.small_models import digits_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from winnow.config.model import LoraAdapter
from winnow.learning.batch import (
    Batch,
    MicroBatch,
    MicroBatchSharder,
    gather_tokens,
    micro_batches,
    pack,
    split_update,
)
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, whole
from winnow.learning.runner import Output, Outputs
from winnow.learning.sequence import sequence_group
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.causal_lm import freeze, use_layout_attention
from winnow.models.lora import add_lora
from winnow.observe.metrics import Metrics

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
BUDGET = 150
LR = 1e-3
CLIP = 0.01
"""Below every gradient here, and each is clipped by a factor of its own, which Adam sees."""
Arrays = dict[str, NDArray[Any]]
HYPERPARAMETERS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "temperature": 0.7,
    "grad_clip": CLIP,
    "weight_decay": 0.1,
    "betas": (0.9, 0.98),
}
POLICY: frozenset[Output] = frozenset({"logprob", "entropy"})
MORE: frozenset[Output] = frozenset({"prob_square_sum"})
"""Of a policy, in passes without a gradient alone."""
OUTPUTS: dict[str, frozenset[Output]] = {
    "critic": frozenset({"value"}),
    "reward model": frozenset({"score"}),
}
TRAINED = ("tied", "untied", "lora", "frozen", "critic", "reward model", "experts")
VISION: dict[str, vision_models.Kind] = {"images": "qwen3_vl", "frozen tower": "qwen2_5_vl"}
KINDS = (*TRAINED, "reference", *VISION)
TARGETS = ("q_proj", "o_proj", "down_proj")
SHAPE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 6,
    "intermediate_size": 20,
    "initializer_range": 0.3,
}


CHANGED: dict[str, dict[str, int]] = {
    "even experts": {"num_experts": 4},
    "three layers": {"num_hidden_layers": 3, "pad_token_id": 8},
}
"""A token that samples have may be the one for padding, of which the embedding learns nothing."""
FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
"""Kinds that are no Qwen3."""


@dataclass(frozen=True)
class Layout:
    """How a model lies on the ranks."""

    mesh: tuple[int, int] = (1, 4)
    """Replicas, shards. With fewer than all ranks the others are sets of their own."""
    sharding: Sharding = field(default_factory=Sharding)
    options: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 1
    """Ranks that run each micro-batch together."""


@dataclass
class Learnt:
    """What a case came to."""

    outputs: Arrays
    gradients: Arrays
    """Of the first update."""
    stats: list[dict[str, float]]
    weights: Arrays
    """Exported after two updates in float64, before any in other formats: there Adam moves a weight
    of next to no gradient by the sign of a rounding."""


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    """The same weights in every process; norms and heads are random too."""
    if kind in VISION:
        return vision_model_of(kind, dtype)
    tied = kind != "untied"
    shape = {**SHAPE, **CHANGED.get(kind, {}), "tie_word_embeddings": tied}
    model: Any = digits_model("experts" in kind, **shape)
    if kind in FAMILIES:
        config, made = FAMILIES[kind]
        torch.manual_seed(0)
        model = made(config(vocab_size=VOCABULARY, num_key_value_heads=2, **shape))
    if kind in OUTPUTS:
        model = _with_number(kind, model)
    use_layout_attention(model)
    if "experts" in kind and dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped products know no float64
    model = model.to(dtype).eval()
    if kind == "frozen":
        freeze(model, ["*.layers.0.*", "*embed_tokens*", "*q_norm*"])
    if kind == "reference":
        model.requires_grad_(False)
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


def vision_model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    model = vision_models.vision_model(VISION[kind], dtype)
    if kind == "frozen tower":
        freeze(model, ["model.visual.*"])
    if dtype == torch.float64:
        module = import_module(type(model).__module__)
        module.apply_rotary_pos_emb_vision = vision_models.rotate
    return cast(nn.Module, model)


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
    groups = recorded_groups(2, 3)
    if kind in VISION:  # the first has none
        shown = vision_models.image(2, 3), vision_models.image(4, 1)
        groups[1] = replace(groups[1], prompt=vision_models.prompt(1, [7], *shown, [8]))
    batch = pack(groups)
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(len(batch.token_ids), generator=generator, dtype=torch.float64).to(exact)
    batch.columns["old"] = batch.behav.to(exact) + 0.2 * noise
    batch.columns["advantages"] = noise.flip(0)
    return batch


def objective_of(kind: str) -> Any:
    if kind in OUTPUTS:
        return numbers_loss
    if kind == "gspo":
        return policy_objective("gspo", entropy_coef=0.01)
    return policy_objective("ppo_clip", {"clip_high": 0.28}, entropy_coef=0.01)


def numbers_loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """For heads of one number: a square, with each token's own weight."""
    (values,) = outputs.values()
    terms = (values - micro.columns["advantages"]).square() * (values != 0)
    total = terms.sum() / micro.counts.tokens
    return LossResult(total, {"sum": terms.detach().sum()}, {"most": terms.detach().max()})


def updates_of(kind: str, dtype: torch.dtype) -> int:
    if kind == "reference":
        return 0
    return 2 if dtype == torch.float64 else 1


def learn(
    strategy: Any,
    micro: Sequence[MicroBatch],
    kind: str,
    dtype: torch.dtype,
    holds_gradients: bool = True,
) -> Learnt:
    """A pass before anything is learnt, then updates."""
    batch, asked = batch_of(kind, dtype), OUTPUTS.get(kind, POLICY | MORE)
    updates = updates_of(kind, dtype)
    weights = exported(strategy) if updates < 2 else {}
    found = strategy.forward(micro, asked)
    outputs = {
        name: gather_tokens(batch, micro, [each[name] for each in found]).double().numpy()
        for name in asked
    }
    learnt = Learnt(outputs, {}, [], weights)
    asked, objective = OUTPUTS.get(kind, POLICY), objective_of(kind)
    for number in range(updates):
        stats = strategy.forward_backward(micro, asked, objective)
        if not number and holds_gradients:
            learnt.gradients = arrays(gradients_of(strategy))
        learnt.stats.append(stats | strategy.optimizer_step(LR))
    learnt.weights = learnt.weights or exported(strategy)
    return learnt


def exported(strategy: Any, **options: Any) -> Arrays:
    return arrays(dict(strategy.export_weights(**options)))


def arrays(tensors: dict[str, Tensor]) -> Arrays:
    """Copies, for the way between processes."""
    return {n: t.detach().to(torch.float64, copy=True).numpy() for n, t in tensors.items()}


def gradients_of(strategy: Strategy) -> dict[str, Tensor]:
    own = {n: m.grad for n, m in strategy._masters.items() if m.grad is not None}
    return {name: whole(gradient, strategy.device) for name, gradient in own.items()}


def alone(kind: str, dtype: torch.dtype, **options: Any) -> Strategy:
    return Strategy(model_of(kind, dtype), **{**HYPERPARAMETERS, **options})


@cache
def undivided(
    kind: str, dtype: torch.dtype, ranks: int, fp32_head: bool, shares_prompts: bool = False
) -> Learnt:
    """In one process; in bf16 in the micro-batches of so many ranks, as each rounds its sums."""
    batch = batch_of(kind, dtype)
    micro = micro_batches(batch, range(batch.n_groups), 9999)
    if dtype == torch.bfloat16:
        micro = [each for own in shares_of(batch, ranks, shares_prompts) for each in own]
        micro = [each for each in micro if each.lengths]
    strategy = alone(kind, dtype, fp32_head=fp32_head)
    return learn(strategy, micro, kind, dtype)


def shares_of(batch: Batch, ranks: int, shares_prompts: bool = False) -> list[list[MicroBatch]]:
    every = range(batch.n_groups)
    # One rank more than there are samples, each of which has a rank to itself.
    width, samples = SHAPE["hidden_size"], batch.n_samples
    alone = split_update(batch, every, BUDGET, samples + 1, width, shares_prompts)
    (waiting,) = alone.micro_batches(samples)
    dealt = split_update(batch, every, BUDGET, ranks, width, shares_prompts)
    shares = [dealt.micro_batches(rank) for rank in range(ranks)]
    # Some begin with nothing to do, the others end so.
    return [[waiting, *own] if i % 2 else [*own, waiting] for i, own in enumerate(shares)]


@cache
def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """For all processes, or each set of them, by itself."""
    names = ("copy", "replicate", "shard")
    whole = init_device_mesh("cpu", (copies(shape), *shape), mesh_dim_names=names)
    return whole[("replicate", "shard") if shape[0] > 1 else ("shard",)]


def copies(shape: tuple[int, int]) -> int:
    """Sets of ranks among the processes."""
    return dist.get_world_size() // (shape[0] * shape[1])


sequence_of = cache(sequence_group)


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
        sequence_of(layout.sequence),
        **{**HYPERPARAMETERS, **layout.options},
    )


Case = tuple[torch.dtype, Layout]


def learn_on_rank(kind: str, cases: Sequence[Case]) -> dict[int, Learnt]:
    """Cases of one mesh and groups, by number; smaller than all ranks, its sets share them."""
    shape = cases[0][1].mesh
    mesh_of(shape)
    sequence_of(cases[0][1].sequence)
    found = {}
    own_set = dist.get_rank() * copies(shape) // dist.get_world_size()
    for number in range(own_set, len(cases), copies(shape)):
        dtype, layout = cases[number]
        strategy = strategy_on_rank(kind, dtype, layout)
        size, together = strategy.mesh.size(), layout.sequence
        shares = shares_of(batch_of(kind, dtype), size // together, together == 1)
        micro = shares[place(strategy.mesh) // layout.sequence]
        found[number] = learn(strategy, micro, kind, dtype)
    return found


def assert_near(found: Arrays, wanted: Arrays, tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    if not wanted:
        return
    away = {n: np.linalg.norm(found[n] - wanted[n]) / np.linalg.norm(wanted[n]) for n in wanted}
    worst = max(away, key=lambda name: away[name])
    assert away[worst] <= tolerance, f"{worst}: {away[worst]:.1e}"


def assert_learn_alike(
    ranks: Ranks, kind: str, cases: Sequence[Case], tolerances: Mapping[torch.dtype, float]
) -> None:
    answers: list[dict[int, Learnt]] = ranks.run(learn_on_rank, kind, cases)
    for number, (dtype, layout) in enumerate(cases):
        found = [answer[number] for answer in answers if number in answer]
        assert len(found) == layout.mesh[0] * layout.mesh[1]
        ranks_of_bf16 = len(found) // layout.sequence if dtype == torch.bfloat16 else 0
        alike = ranks_of_bf16, layout.options.get("fp32_head", False), layout.sequence == 1
        wanted = undivided(kind, dtype, *alike)
        try:
            # Routers round to fp32, of a prompt that is run once not as of its copies.
            tolerance = max(tolerances[dtype], 1e-7 if kind == "experts" else 0)
            assert_alike(found, wanted, kind, dtype, tolerance, layout.sequence)
        except AssertionError as error:
            error.add_note(f"in {dtype}, {layout}")
            raise


def assert_alike(
    found: Sequence[Learnt],
    wanted: Learnt,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    sequence: int,
) -> None:
    """What each rank of a mesh has found; those that run sequences together, the same."""
    for name, values in wanted.outputs.items():
        parts = [each.outputs[name] for each in found[::sequence]]
        assert_near({name: np.sum(parts, axis=0)}, {name: values}, tolerance)
    for each in found:
        assert each.stats == found[0].stats
        assert len(each.stats) == len(wanted.stats) == updates_of(kind, dtype)
        for ours, theirs in zip(each.stats, wanted.stats, strict=True):
            assert theirs["grad_norm"] > CLIP
            assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
        assert_near(each.gradients, wanted.gradients, tolerance)
        # An adapter is merged into what is exported, which rounds.
        rounds = len(each.stats) > 1 or kind == "lora"
        assert_near(each.weights, wanted.weights, tolerance if rounds else 0.0)


MESHES = {"2 shards": (1, 2), "2 replicas": (2, 1), "4 shards": (1, 4), "2 x 2": (2, 2)}
Options = tuple[bool, bool, bool]
"""Kept after forward, offloaded, recomputed: what a recipe may set."""
EVERY_OPTION = list(itertools.product((False, True), repeat=3))
FEW = [each for each in EVERY_OPTION if not sum(each) % 2]
"""Each pair of settings, set and not."""
THOROUGH = settings.default.max_examples > QUICK


def cases() -> Iterator[tuple[str, str, torch.dtype, Options]]:
    """Each kind on two meshes, in another format on each, and on each mesh each of `FEW`.

    How a layer is cut and gathered does not depend on what is trained of it.
    """
    if THOROUGH:
        yield from itertools.product(KINDS, MESHES, TOLERANCE, EVERY_OPTION)
        return
    options = {mesh: itertools.cycle(FEW) for mesh in MESHES}
    for number, kind in enumerate(KINDS):
        for turn, dtype in enumerate(TOLERANCE):
            mesh = list(MESHES)[(number + 2 * turn + number // 4) % len(MESHES)]
            yield kind, mesh, dtype, next(options[mesh])


def layout_of(mesh: tuple[int, int], options: Options, **others: Any) -> Layout:
    kept, offloaded, recomputed = options
    sharding = Sharding(not kept, offloaded)
    return Layout(mesh, sharding, {"gradient_checkpointing": recomputed, **others})


@pytest.mark.parametrize(("kind", "mesh", "dtype", "options"), list(cases()))
def test_every_kind_of_model_learns_on_ranks_what_it_learns_alone(
    ranks: Ranks, kind: str, mesh: str, dtype: torch.dtype, options: Options
) -> None:
    # In fp32 and float64 it does not matter how the head's tokens are cut.
    layout = layout_of(MESHES[mesh], options, logprob_chunk_tokens=7)
    assert_learn_alike(ranks, kind, [(dtype, layout)], TOLERANCE)


def test_weights_that_are_kept_on_a_part_of_the_ranks_change_nothing(ranks: Ranks) -> None:
    layout = Layout(sharding=Sharding(reshard_after_forward=2))
    assert_learn_alike(ranks, "tied", [(torch.float64, layout)], TOLERANCE)


def test_layers_that_are_gathered_ahead_leave_the_bits_as_they_are(ranks: Ranks) -> None:
    options = {"gradient_checkpointing": True}
    cases = [(torch.float64, Layout((1, 4), Sharding(prefetch=each), options)) for each in (0, 5)]
    for answers in ranks.run(learn_on_rank, "untied", cases):
        plain, ahead = answers[0], answers[1]
        assert ahead.stats == plain.stats
        for found, wanted in ((ahead.outputs, plain.outputs), (ahead.weights, plain.weights)):
            assert {n: a.tobytes() for n, a in found.items()} == {
                n: a.tobytes() for n, a in wanted.items()
            }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "untied"])
def test_bf16_differs_by_its_rounding_alone(ranks: Ranks, kind: str) -> None:
    # One process computes an adapter in fp32, sharded it is computed in bf16; a tower's images
    # fall together otherwise.
    tolerance = 0.1 if kind == "lora" else 0.05 if kind in VISION else 1e-5
    number = KINDS.index(kind)
    mesh = [(1, 4), (1, 2), (2, 2)][number % 3]
    layout = layout_of(mesh, FEW[number % 4], fp32_head=number % 2 > 0)
    assert_learn_alike(ranks, kind, [(torch.bfloat16, layout)], {torch.bfloat16: tolerance})


PLACES = [
    *(("tied", (1, 2), 2), ("tied", (1, 4), 4), ("lora", (1, 4), 2), ("reward model", (2, 2), 2)),
    *(("gspo", (4, 1), 2), ("critic", (1, 4), 4), ("experts", (1, 4), 2)),
]
"""Kinds, their meshes, and how many ranks run each micro-batch together: with token counts that no
number of ranks divides, and, where four ranks run one, fewer key heads than ranks. What sequences
are shared of does not depend on which weights learn."""
SEQUENCES: Iterable[tuple[str, tuple[int, int], int, Options]] = [
    (*place, (False, number % 4 > 1, number % 2 > 0)) for number, place in enumerate(PLACES)
]
if THOROUGH:
    places = dict.fromkeys(place[1:] for place in PLACES)
    SEQUENCES = (
        (kind, *place, (False, *options))
        for kind in (*TRAINED, "reference", "gspo")
        for place in places
        for options in itertools.product((False, True), repeat=2)
    )


@pytest.mark.parametrize(("kind", "mesh", "together", "options"), list(SEQUENCES))
def test_ranks_that_run_sequences_together_learn_what_one_process_learns(
    ranks: Ranks, kind: str, mesh: tuple[int, int], together: int, options: Options
) -> None:
    layout = layout_of(mesh, options)
    cases = [(torch.float64, replace(layout, sequence=together))]
    assert_learn_alike(ranks, kind, cases, TOLERANCE)


def test_shared_sequences_in_bf16_differ_by_their_rounding_alone(ranks: Ranks) -> None:
    # A weight's gradient is summed in bf16 over the tokens of a rank, and alone over all of them.
    layout = Layout((1, 4), Sharding(), sequence=2)
    assert_learn_alike(ranks, "tied", [(torch.bfloat16, layout)], {torch.bfloat16: 0.05})


def dealt(size: int) -> tuple[list[list[int]], Metrics, list[float]]:
    """This rank's samples, figures of how even the shares are, and what a pass finds."""
    batch = batch_of("tied", torch.float64)
    sharder = MicroBatchSharder(mesh_of((1, 4)), SHAPE["hidden_size"], size)
    micro = sharder.cut_update(batch, range(batch.n_groups), BUDGET)
    found = sharder.gather(batch, micro, [each.token_ids.double() for each in micro])
    return [each.samples.tolist() for each in micro], sharder.figures(), found.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_samples_are_dealt_to_groups_of_ranks(ranks: Ranks, size: int) -> None:
    batch = batch_of("tied", torch.float64)
    found = ranks.run(dealt, size)
    groups = [found[rank][0] for rank in range(0, 4, size)]
    assert [samples for samples, _, _ in found] == [own for own in groups for _ in range(size)]
    every = [sample for own in groups for samples in own for sample in samples]
    assert sorted(every) == list(range(batch.n_samples))
    lengths = batch.offsets.diff().double()
    work = lengths + lengths**2 / (12 * SHAPE["hidden_size"])
    sums = [float(work[[b for samples in own for b in samples]].sum()) for own in groups]
    for _, figures, tokens in found:
        spread = max(sums) / (sum(sums) / len(sums))
        assert figures.record()["ranks/spread"] == pytest.approx(spread)
        assert tokens == batch.token_ids.tolist()
