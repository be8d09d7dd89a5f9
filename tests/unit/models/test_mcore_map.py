"""Where Megatron's ranks hold a model's weights: every number has one place, and comes back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_fsdp2 import model_of
from torch import Tensor

from winnow.errors import ModelError
from winnow.learning.strategy import tensors_of
from winnow.models.megatron.weights import Dimensions, Part, RankPlace, check_layout, parts_of

KINDS = ["tied", "untied", "qwen2", "llama", "three layers", "critic", "even experts"]


def dimensions_of(model: Any) -> Dimensions:
    tied = hasattr(model, "lm_head") and model.config.tie_word_embeddings
    return Dimensions.of(model.config, model.base_model_prefix, bool(tied))


def places(tensor: int, pipeline: int, expert: int) -> list[RankPlace]:
    ranks = itertools.product(range(tensor), range(pipeline), range(expert))
    return [RankPlace(tensor, pipeline, expert, t, stage, e) for t, stage, e in ranks]


@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
)
def test_each_number_lies_in_one_place_and_comes_back(
    kind: str, tensor: int, pipeline: int, expert: int
) -> None:
    model = model_of(kind, torch.float32)
    dimensions = dimensions_of(model)
    tensors = tensors_of(model)
    shapes = {name: t.shape for name, t in tensors.items()}
    expert = expert if dimensions.experts else 1
    back = {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}
    seen = {name: torch.zeros(t.shape, dtype=torch.int) for name, t in tensors.items()}
    for place in places(tensor, pipeline, expert):
        for parts in parts_of(shapes, dimensions, place).values():
            own = filled(parts, tensors)
            for part in parts:
                back[part.name][part.slices] = part.rectangle(own)
                # Experts lie once on the ranks of their axis; all else does on each of them.
                counts = place.expert_rank == 0 or ".experts." in part.name
                replicated = ".experts." in part.name and place.tensor_rank > 0
                if counts and not replicated and not part.is_copy:
                    seen[part.name][part.slices] += 1
    for name, wanted in tensors.items():
        assert torch.equal(back[name], wanted), name
        assert bool((seen[name] == 1).all()), name


def filled(parts: list[Part], tensors: dict[str, Tensor]) -> Tensor:
    """A rank's parameter, of the parts of the Hugging Face tensors that lie in it."""
    rows = sum(part.sizes[0] for part in parts)
    own = torch.full((rows, *parts[0].sizes[1:]), torch.nan)
    for part in parts:
        part.fill(own, tensors[part.name][part.slices])
    assert not own.isnan().any()
    return own


def test_the_first_stages_have_one_layer_more() -> None:
    dimensions = Dimensions("model", 7, 4, 2, 6, 29, 0, False)
    found = [list(dimensions.stage_layers(RankPlace(pipeline=3, stage=i))) for i in range(3)]
    assert found == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("place", "experts", "fault"),
    [
        (
            RankPlace(tensor=3),
            0,
            "tensor=3 does not divide the 4 attention heads of Q; set it to one of",
        ),
        (RankPlace(tensor=4), 0, "tensor=4 does not divide the 2 key/value heads of Q; .* one of"),
        (RankPlace(expert=2), 0, "expert=2: Q has no experts; set it to 1"),
        (RankPlace(expert=2), 5, r"expert=2 does not divide the 5 experts of Q; .* 1, 5"),
        (
            RankPlace(pipeline=8),
            0,
            "pipeline=8 exceeds the 7 layers of Q; set it to 7 or less",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_told(place: RankPlace, experts: int, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        Dimensions("model", 7, 4, 2, 6, 29, experts, False).check(place, "Q")


def test_a_tensor_without_a_place_and_a_width_that_cannot_be_cut_are_told() -> None:
    dimensions = Dimensions("model", 1, 4, 2, 6, 29, 0, False)
    for name in ("model.layers.0.mlp.shared_expert.up_proj.weight", "model.extra.weight"):
        with pytest.raises(ModelError, match=f"no place for {name}; .*fsdp2"):
            parts_of({name: (4, 4)}, dimensions, RankPlace())
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=f"{name} has 5 columns, which 2 .*a divisor"):
        parts_of({name: (4, 5)}, dimensions, RankPlace(tensor=2))


def test_models_that_megatrons_layers_do_not_compute_are_told() -> None:
    model: Any = model_of("tied", torch.float32)
    assert check_layout(model, RankPlace(tensor=2, pipeline=2), True).is_tied
    for name, other in (
        ("model_type", "gemma2"),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
    ):
        kept = getattr(model.config, name)
        setattr(model.config, name, other)
        with pytest.raises(ModelError, match=f"{name} is {other}, .*use trainer/strategy=fsdp2"):
            check_layout(model, RankPlace(), True)
        setattr(model.config, name, kept)


def test_experts_take_their_tokens_from_each_tensor_parallel_rank() -> None:
    model = model_of("even experts", torch.float32)
    with pytest.raises(
        ModelError, match=r"sequence_parallel=false: .* has experts.*set it to true"
    ):
        check_layout(model, RankPlace(tensor=2), False)


@pytest.mark.parametrize("frozen", ["q_proj", "up_proj", "_proj.weight"])
def test_a_matrix_of_which_a_part_is_frozen_is_told(frozen: str) -> None:
    model = model_of("qwen2", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    with pytest.raises(ModelError, match=rf"model.freeze has \S*{frozen}.* and not .*freeze both"):
        check_layout(model, RankPlace(pipeline=2), True)


def test_biases_may_be_frozen_alone() -> None:
    model = model_of("qwen2", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".bias" not in name)
    check_layout(model, RankPlace(pipeline=2), True)
