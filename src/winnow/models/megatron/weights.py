"""The parts of a Hugging Face model's weights on Megatron's ranks, and their order of rows.

A rank has one pipeline stage, of which tensor parallelism cuts matrices by rows or columns, expert
parallelism the stack of a layer's experts, and the vocabulary is padded to rows of equal number. In
Megatron's layers the queries, keys and values of a group of heads lie side by side, and gate above
up; all else is as in the Hugging Face model. So each of its tensors is on a rank one rectangle or
nothing, which is a band of rows of one of the rank's parameters, repeated for each group of heads:

    linear_qkv, 2 groups    q0 k0 v0 q1 k1 v1     q_proj: rows 0 … of each of 2 groups
    linear_fc1              gate up               up_proj: the second half of the rows

Nothing here needs processes or Megatron: parts are a function of a rank's place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.models.causal_lm import is_reward_model, is_value_model
from winnow.models.vision import refuse_vision

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
"""Model types of which Megatron's layers compute the same."""
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
}
_COLUMNS = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
_EXPERTS = {
    "mlp.experts.gate_up_proj": "mlp.experts.gate_up",
    "mlp.experts.down_proj": "mlp.experts.down",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class RankPlace:
    """A rank among those that hold a model once: sizes of the layout, and its coordinates."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    tensor_rank: int = 0
    stage: int = 0
    expert_rank: int = 0

    @property
    def is_first(self) -> bool:
        """True for the stage with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the head."""
        return self.stage == self.pipeline - 1


@dataclass(frozen=True)
class Part:
    """The rectangle of a Hugging Face tensor that lies in a parameter of a rank."""

    name: str
    """The tensor's."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...]
    """The rectangle's place in it, by dimension."""
    sizes: tuple[int, ...]
    """The rectangle's own shape."""
    groups: int
    """Equal bands that the parameter's rows are cut into."""
    rows: slice
    """Rows of each band that are the rectangle's."""
    is_copy: bool = False
    """True if another rank of those that hold the model once has it, too, and counts for it."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The rectangle, as an index of the whole tensor."""
        spans = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in spans)

    def of(self, parameter: Tensor) -> Tensor:
        """Return the rows [groups, rows, …] of a tensor that is shaped as the parameter, live."""
        bands = parameter.view(self.groups, -1, *parameter.shape[1:])
        return bands[:, self.rows]

    def rectangle(self, parameter: Tensor) -> Tensor:
        """Return the rectangle [sizes]; live where its rows lie together, else a copy."""
        return self.of(parameter).reshape(self.sizes)

    def fill(self, parameter: Tensor, rectangle: Tensor) -> None:
        """Copy a rectangle [sizes] into a tensor that is shaped as the parameter."""
        target = self.of(parameter)
        target.copy_(rectangle.reshape(target.shape))


@dataclass(frozen=True)
class Dimensions:
    """Facts of a Hugging Face model that its layout over ranks depends on."""

    prefix: str
    """Begins the names of the backbone's weights."""
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Channels of a head (D)."""
    vocabulary: int
    """Rows of the embedding (V)."""
    experts: int
    """Number of experts of a layer; 0 for a dense model."""
    is_tied: bool
    """True if the head is the embedding."""

    @classmethod
    def of(cls, config: Any, prefix: str, is_tied: bool) -> Dimensions:
        """Read them off a model's config."""
        heads = config.num_attention_heads
        return cls(
            prefix=prefix,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            experts=config.num_experts if config.model_type == "qwen3_moe" else 0,
            is_tied=is_tied,
        )

    def vocabulary_rows(self, place: RankPlace) -> int:
        """Return the rows of the vocabulary on each rank, padding included."""
        return -(-self.vocabulary // place.tensor)

    def stage_layers(self, place: RankPlace, stage: int | None = None) -> range:
        """Return the layers of a stage, by default this one; the first stages have one more."""
        each, remainder = divmod(self.layers, place.pipeline)
        at = place.stage if stage is None else stage
        start = at * each + min(at, remainder)
        return range(start, start + each + (at < remainder))

    def check(self, place: RankPlace, name: str, splits: bool = True) -> None:
        """Refuse a layout that the model cannot be cut into.

        Args:
            splits: with sequence parallelism.

        Raises:
            ModelError: names the field.
        """
        at = "trainer.strategy"
        for field, ranks, what, number in (
            ("tensor", place.tensor, "attention heads", self.heads),
            ("tensor", place.tensor, "key/value heads", self.kv_heads),
            ("expert", place.expert, "experts", self.experts),
        ):
            if number % ranks:
                fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
                raise ModelError(
                    f"{at}.{field}={ranks} does not divide the {number} {what} of {name}; "
                    f"set it to one of {fitting}"
                )
        if place.expert > 1 and not self.experts:
            raise ModelError(f"{at}.expert={place.expert}: {name} has no experts; set it to 1")
        if self.experts and place.tensor > 1 and not splits:
            raise ModelError(
                f"{at}.sequence_parallel=false: {name} has experts, which need sequence "
                "parallelism with tensor parallelism; set it to true"
            )
        if self.layers < place.pipeline:
            raise ModelError(
                f"{at}.pipeline={place.pipeline} exceeds the {self.layers} layers of {name}; set "
                f"it to {self.layers} or less"
            )


def check_layout(model: nn.Module, place: RankPlace, splits: bool) -> Dimensions:
    """Refuse a model that Megatron's layers do not compute, or that cannot be cut like this.

    Args:
        model: whole or hollow.
        place: of any rank.
        splits: with sequence parallelism.

    Returns:
        Its dimensions.

    Raises:
        ModelError: names what is other, or the field.
    """
    config = cast(Any, model).config
    refuse_vision(config, "trainer/strategy=megatron", "use trainer/strategy=fsdp2")
    unsupported = {
        "model_type": config.model_type not in FAMILIES,
        "hidden_act": config.hidden_act != "silu",
        "attention_dropout": bool(getattr(config, "attention_dropout", 0)),
    }
    for name in (name for name, is_unsupported in unsupported.items() if is_unsupported):
        raise ModelError(
            f"{config.name_or_path}: {name} is {getattr(config, name)}, which "
            "trainer/strategy=megatron does not support (supported model types: "
            f"{', '.join(FAMILIES)}); use trainer/strategy=fsdp2"
        )
    named = dict(model.named_parameters())
    has_number = is_value_model(model) or is_reward_model(model)
    is_tied = not has_number and "lm_head.weight" not in named
    dimensions = Dimensions.of(config, cast(Any, model).base_model_prefix, is_tied)
    dimensions.check(place, config.name_or_path, splits)
    shapes = {name: parameter.shape for name, parameter in named.items()}
    for stage in range(place.pipeline):
        stage_parts = parts_of(shapes, dimensions, replace(place, stage=stage))
        for key, parts in stage_parts.items():
            # Megatron computes no gradient of a bias beside a matrix that has none.
            matrix = stage_parts.get(key.replace(".bias", ".weight"), []) if ".bias" in key else []
            if matrix and not named[matrix[0].name].requires_grad:
                parts = [*parts, *matrix]
            learns = {part.name: named[part.name].requires_grad for part in parts}
            if len(set(learns.values())) > 1:
                frozen, free = (min(n for n in learns if learns[n] == is_) for is_ in (False, True))
                raise ModelError(
                    f"model.freeze has {frozen} and not {free}, but Megatron merges the two into "
                    "one layer; freeze both or neither, or set trainer/strategy=fsdp2"
                )
    return dimensions


def parts_of(
    shapes: Mapping[str, Sequence[int]], dimensions: Dimensions, place: RankPlace
) -> dict[str, list[Part]]:
    """Find a rank's part of each tensor.

    Args:
        shapes: of the model's tensors by their names, tied ones once.

    Returns:
        By the name of the rank's parameter, with the layer's number in the stage: the parts that
        fill it, up to rows that pad the vocabulary.

    Raises:
        ModelError: Megatron's layers have no place for a tensor.
    """
    parts: dict[str, list[Part]] = {}
    for name, shape in shapes.items():
        for key, part in _parts(name, tuple(shape), dimensions, place):
            parts.setdefault(key, []).append(part)
    return parts


def _parts(
    name: str, shape: tuple[int, ...], dimensions: Dimensions, place: RankPlace
) -> Iterator[tuple[str, Part]]:
    """Yield the parameters with a part of a tensor: none, one, or two of a tied embedding."""
    short = name.removeprefix(f"{dimensions.prefix}.")
    match = _LAYER.fullmatch(short)
    if match is not None:
        layers = dimensions.stage_layers(place)
        key, part = _layer_part(name, match[2], shape, dimensions, place)
        if int(match[1]) in layers:
            yield f"decoder.layers.{int(match[1]) - layers.start}.{key}", part
        return
    copied = place.tensor_rank > 0
    if short == "embed_tokens.weight":
        if place.is_first:
            yield "embedding.weight", _vocabulary_part(name, shape, dimensions, place)
        if dimensions.is_tied and place.is_last and not place.is_first:
            yield "head.weight", _vocabulary_part(name, shape, dimensions, place, is_copy=True)
    elif short == "norm.weight":
        if place.is_last:
            yield "decoder.final_layernorm.weight", _whole_part(name, shape, copied)
    elif name == "lm_head.weight":
        if place.is_last:
            yield "head.weight", _vocabulary_part(name, shape, dimensions, place)
    elif name in ("score.weight", "score.bias"):
        if place.is_last:
            yield name, _whole_part(name, shape, copied)
    else:
        raise _unknown_weight_error(name)


def _layer_part(
    name: str, kind: str, shape: tuple[int, ...], dimensions: Dimensions, place: RankPlace
) -> tuple[str, Part]:
    n, rank = place.tensor, place.tensor_rank
    if kind in _WHOLE:
        return _WHOLE[kind], _whole_part(name, shape, is_copy=rank > 0)
    if kind in _EXPERTS:
        return _EXPERTS[kind], _cut_axis(name, shape, 0, place.expert, place.expert_rank)
    if kind in _COLUMNS:
        return _COLUMNS[kind], _cut_axis(name, shape, 1, n, rank)
    projection, _, what = kind.removeprefix("self_attn.").rpartition(".")
    if projection in ("q_proj", "k_proj", "v_proj"):
        D = dimensions.head
        q = D * dimensions.heads // dimensions.kv_heads
        rows = {"q_proj": slice(q), "k_proj": slice(q, q + D), "v_proj": slice(q + D, q + 2 * D)}
        band = dimensions.kv_heads // n, rows[projection]
        return f"self_attention.linear_qkv.{what}", _cut_axis(name, shape, 0, n, rank, band)
    if kind in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        each = shape[0] // n
        start = each if "up_proj" in kind else 0
        return "mlp.linear_fc1.weight", _cut_axis(
            name, shape, 0, n, rank, (1, slice(start, start + each))
        )
    raise _unknown_weight_error(name)


def _cut_axis(
    name: str,
    shape: tuple[int, ...],
    axis: int,
    ranks: int,
    rank: int,
    band: tuple[int, slice] | None = None,
) -> Part:
    """Give a rank its share of an axis; `band` says where it lies, by default in all rows."""
    if shape[axis] % ranks:
        raise ModelError(
            f"{name} has {shape[axis]} {('rows', 'columns')[axis]}, which {ranks} tensor-parallel "
            "ranks do not divide; set trainer.strategy.tensor to a divisor"
        )
    each = shape[axis] // ranks
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[axis], sizes[axis] = rank * each, each
    groups, rows = band or (1, slice(sizes[0]))
    return Part(name, shape, tuple(offsets), tuple(sizes), groups, rows)


def _whole_part(name: str, shape: tuple[int, ...], is_copy: bool) -> Part:
    return Part(name, shape, (0,) * len(shape), shape, 1, slice(shape[0]), is_copy)


def _vocabulary_part(
    name: str,
    shape: tuple[int, ...],
    dimensions: Dimensions,
    place: RankPlace,
    is_copy: bool = False,
) -> Part:
    each = dimensions.vocabulary_rows(place)
    start = min(place.tensor_rank * each, shape[0])
    rows = min(start + each, shape[0]) - start
    return Part(name, shape, (start, 0), (rows, shape[1]), 1, slice(rows), is_copy)


def _unknown_weight_error(name: str) -> ModelError:
    return ModelError(
        f"Megatron's layers have no place for {name}; trainer/strategy=megatron takes models of "
        f"type {', '.join(FAMILIES)}, with no bias but that of q_proj, k_proj and v_proj: use "
        "trainer/strategy=fsdp2"
    )
