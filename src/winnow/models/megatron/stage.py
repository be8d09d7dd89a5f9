"""A rank's part of a model as Megatron's layers compute it: one pipeline stage, tensors in parts.

The stage is put together of megatron-core's own layers, by which tensor, expert and sequence
parallelism work, with four pieces of ours in their places: the attention, which takes packed
samples through `AttentionLayout` with the rotary embedding of the Hugging Face model; the norm; the
experts of a layer as one stack, as Hugging Face has them; and a head that is never multiplied here,
as the log-prob kernel reads its rows. So samples are packed on every kind of device, and neither
Transformer Engine nor Apex is needed.

Shapes: `T` packed tokens, `n` of them on this rank (T, or with sequence parallelism a part of them,
the last ones padding), `H` width, `N` query heads and `K` key/value heads of this rank, `D` head,
`E` experts of this rank, `M` their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from winnow.models.causal_lm import AttentionLayout
from winnow.models.megatron.weights import Dimensions, RankPlace
from winnow.models.routing import LoadCounter


@dataclass(eq=False)
class PackedSamples:
    """Packed samples, as Megatron's layers hand them on to the attention."""

    layout: AttentionLayout
    cos: Tensor
    """[T, D] of the rotary embedding, in the model's dtype."""
    sin: Tensor
    """[T, D]"""
    routes: Tensor | None = None
    """[n, L, k] experts that tokens are to go to, -1 where a router chooses; None: everywhere."""
    counter: LoadCounter | None = None
    """Counts where tokens go, by layer of the whole model that is a mixture."""
    counted_tokens: int = 0
    """The first so many of n are counted; behind them is padding."""
    counted: set[int] = field(default_factory=set)
    """Layers that have run: one that runs again is recomputed, and was counted."""
    qkv_format: None = None
    """A layout of Transformer Engine's kernels, which are not used."""


class Stage(nn.Module):
    """One pipeline stage of a model, on one rank.

    Args:
        config: of the Hugging Face model.
        has_head: true for a causal LM.
        settings: of `megatron_config`.
    """

    def __init__(
        self,
        config: Any,
        dimensions: Dimensions,
        place: RankPlace,
        has_head: bool,
        settings: TransformerConfig,
    ) -> None:
        super().__init__()
        self.model_type = ModelType.encoder_or_decoder
        self.config = settings
        self._padding_id: int | None = config.pad_token_id
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        """Megatron's process groups."""
        layers = dimensions.stage_layers(place)
        windows = _windows(config)
        specs = [_layer_spec(config, layer, windows[layer]) for layer in layers]
        width = config.hidden_size
        rows = dimensions.vocabulary_rows(place)
        if place.is_first:
            self.embedding = VocabParallelEmbedding(
                rows * place.tensor,
                width,
                init_method=None,
                config=self.config,
                tp_group=self.groups.tp,
            )
        self.decoder = TransformerBlock(
            self.config,
            TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm),
            pre_process=place.is_first,
            post_process=place.is_last,
            pg_collection=self.groups,
        )
        for layer, block in zip(layers, self.decoder.layers, strict=True):
            if is_mixture(config, layer):
                router = block.mlp.router
                router.sums_to_one = config.norm_topk_prob
                router.number = sum(is_mixture(config, before) for before in range(layer))
                # Behind Megatron's back: attention, which gets the samples, runs first.
                block.self_attention.core_attention.routers.append(router)
        if has_head and place.is_last and not (dimensions.is_tied and place.is_first):
            self.head = Head(rows, width, settings.params_dtype)
        self.is_split = bool(self.config.sequence_parallel)
        """True if each tensor-parallel rank has a part of the tokens between matrices."""

    def set_input_tensor(self, input_tensors: Sequence[Tensor | None]) -> None:
        """Take the states [n, 1, H] of the stage before, as Megatron's schedules give them."""
        self.decoder.set_input_tensor(input_tensors[0])

    @property
    def head_weight(self) -> Tensor:
        """[V / ranks, H] this rank's rows of the head, on the last stage."""
        return cast(Tensor, (self.head if hasattr(self, "head") else self.embedding).weight)

    def forward(self, token_ids: Tensor, packed: PackedSamples) -> Tensor:
        """Return the states [n, 1, H] after the stage; those of the last one are normed."""
        states = None
        if hasattr(self, "embedding"):
            ids = F.pad(token_ids, (0, self._padding(len(token_ids))))
            states = self.embedding(ids[None]).transpose(0, 1).contiguous()
            if self._padding_id is not None and states.requires_grad:
                # The row of this id learns nothing as an input in the Hugging Face model either.
                is_padding = (ids == self._padding_id)[:, None, None]
                states.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))
            if self.is_split:
                states = scatter_to_sequence_parallel_region(states, group=self.groups.tp)
            if torch.is_grad_enabled() and not states.requires_grad:
                # Megatron's recomputation passes gradients on where an input requires them alone.
                states.requires_grad_()
        return cast(
            Tensor,
            self.decoder(hidden_states=states, attention_mask=None, packed_seq_params=packed),
        )

    def whole(self, states: Tensor, tokens: int) -> Tensor:
        """Return the states [T, H] of all tokens, of which every rank has the whole gradient."""
        if self.is_split:
            states = gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return states[:tokens, 0]

    def local_tokens(self, values: Tensor, fill: int) -> tuple[Tensor, int]:
        """Return values [T, …] of the n local tokens between matrices, and how many of n are real.

        Args:
            fill: in the place of padding.
        """
        if not self.is_split:
            return values, len(values)
        tokens, ranks = len(values), self.groups.tp.size()
        padding = values.new_full((self._padding(tokens), *values.shape[1:]), fill)
        n = (tokens + len(padding)) // ranks
        first = n * self.groups.tp.rank()
        real = min(max(tokens - first, 0), n)
        return torch.cat((values, padding))[first : first + n], real

    def _padding(self, tokens: int) -> int:
        return -tokens % self.groups.tp.size() if self.is_split else 0


class Head(nn.Module):
    """Rows of the head, for the log-prob kernel to read."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device))


class Norm(nn.Module):
    """An RMS norm whose weight Megatron's other parts know how to treat."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        weight = torch.empty(hidden_size, dtype=config.params_dtype, device=device)
        self.weight, self._eps = nn.Parameter(weight), eps
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * weight."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class PackedAttention(nn.Module):
    """Attention over packed samples, in the place of Megatron's.

    Args:
        window: the layer's sliding window in tokens; None for full attention.
    """

    def __init__(
        self, *, layer_number: int, softmax_scale: float | None, window: int | None, **_: Any
    ) -> None:
        super().__init__()
        self._layer, self._scale, self._window = layer_number - 1, softmax_scale, window
        self.routers: list[MixtureRouter] = []
        """The layer's router, which gets the samples from here; none of a dense layer."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSamples,
        **_: Any,
    ) -> Tensor:
        """Attend with query [n, 1, N, D] to key and value [n, 1, K, D]; returns [n, 1, N D]."""
        for router in self.routers:
            router.samples = packed_seq_params
        cos, sin = packed_seq_params.cos[:, None], packed_seq_params.sin[:, None]
        tokens = len(cos)
        q, k, v = (x[:tokens, 0] for x in (query, key, value))
        q, k = (x * cos + _rotate_half(x) * sin for x in (q, k))
        scale = self._scale or q.shape[-1] ** -0.5
        out = packed_seq_params.layout.attend(self._layer, q, k, v, scale, self._window)
        out = F.pad(out.flatten(1), (0, 0, 0, len(query) - tokens))
        return out[:, None]


class MixtureRouter(nn.Module):
    """Choose each token's experts as the Hugging Face model does, in the place of Megatron's.

    Without Transformer Engine megatron-core 0.16.1 has no router that runs.
    """

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__()
        factory = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        weight = torch.empty(config.num_moe_experts, config.hidden_size, **factory)
        self.weight = nn.Parameter(weight)
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel
        self._chosen, self.sums_to_one = config.moe_router_topk, False
        """True if the weights of a token's experts are scaled to a sum of 1."""
        self.number = 0
        """The layer's place among those of the whole model that are mixtures."""
        self.samples: PackedSamples | None = None
        """The samples that run."""

    def set_layer_number(self, number: int) -> None:
        """Take the layer's number from Megatron; nothing here depends on it."""

    def forward(self, states: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Return, for states [n, 1, H], each expert's weight in a token and whether it is chosen.

        Both are [n, experts of the layer].
        """
        logits = F.linear(states[:, 0], self.weight)
        probabilities = logits.softmax(-1, torch.float)
        chosen = self._used_experts(torch.topk(probabilities, self._chosen).indices)
        weights = probabilities.gather(-1, chosen)
        if self.sums_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        spread = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        return spread, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    def _used_experts(self, topk: Tensor) -> Tensor:
        """Return the experts [n, k] to be used in the place of the router's; counts them."""
        now, chosen, replayed = self.samples, topk, None
        assert now is not None, "the layer's attention has run"
        if now.routes is not None:
            replayed = now.routes[:, self.number].long()
            chosen = torch.where(replayed < 0, topk, replayed)
        if now.counter is not None and self.number not in now.counted:
            now.counted.add(self.number)
            now.counter.add(self.number, topk, chosen, replayed, now.counted_tokens)
        return chosen


class StackedExperts(nn.Module):
    """The experts of a layer that are on this rank, each a gated feed-forward layer.

    Args:
        experts: their number (E).
    """

    def __init__(self, experts: int, config: Any, pg_collection: Any) -> None:
        super().__init__()
        H, M = config.hidden_size, config.moe_ffn_hidden_size
        factory = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * M, H, **factory))
        self.down = nn.Parameter(torch.empty(experts, H, M, **factory))

    def forward(self, x: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute the experts' outputs of tokens.

        Args:
            x: [n, H] sorted by expert.
            counts: [E] tokens of each expert.
            weights: [n] of each in the output of its token.
        """
        if not len(x):  # the backward pass is to send what it sends on other ranks all the same
            return x * weights[:, None] + 0.0 * (self.gate_up.sum() + self.down.sum()), None
        gate, up = _grouped_matmul(x, self.gate_up, counts).chunk(2, -1)
        out = _grouped_matmul(F.silu(gate) * up, self.down, counts)
        return (out * weights[:, None]).to(x.dtype), None


def megatron_config(
    config: Any,
    dimensions: Dimensions,
    place: RankPlace,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recomputes: bool,
) -> TransformerConfig:
    """Translate the config of a Hugging Face model.

    Args:
        sequence_parallel: split what lies between tensor-parallel matrices over their ranks.
        recomputes: keep a layer's input alone for the backward pass, while `training`.
    """
    mixture: dict[str, Any] = {}
    if dimensions.experts:
        mixture = {
            "num_moe_experts": dimensions.experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_pre_softmax": True,  # of a router that is not used
            "moe_router_load_balancing_type": "none",  # RL has no auxiliary losses
            "moe_aux_loss_coeff": 0.0,
            "expert_model_parallel_size": place.expert,
            "expert_tensor_parallel_size": 1,
        }
    if recomputes:
        full = {"recompute_granularity": "full", "recompute_method": "uniform"}
        mixture |= {**full, "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=dimensions.layers,
        hidden_size=config.hidden_size,
        num_attention_heads=dimensions.heads,
        num_query_groups=dimensions.kv_heads,
        kv_channels=dimensions.head,
        ffn_hidden_size=config.intermediate_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
        qk_layernorm=config.model_type.startswith("qwen3"),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        perform_initialization=False,
        tensor_model_parallel_size=place.tensor,
        pipeline_model_parallel_size=place.pipeline,
        pipeline_model_parallel_layout=_stages(dimensions, place),
        sequence_parallel=sequence_parallel and place.tensor > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # dense models need it, too
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,  # losses come divided by an update's counts
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **mixture,
    )


def _stages(dimensions: Dimensions, place: RankPlace) -> list[list[str]] | None:
    """Tell Megatron which layers are whose; it deals out equal numbers by itself."""
    if place.pipeline == 1:
        return None
    stages = [
        ["decoder"] * len(dimensions.stage_layers(place, stage)) for stage in range(place.pipeline)
    ]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _layer_spec(config: Any, layer: int, window: int | None) -> Any:
    """Say what a layer is made of."""
    qk_norm = Norm if config.model_type.startswith("qwen3") else None
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=lambda **options: PackedAttention(window=window, **options),
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    feed = ModuleSpec(
        MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    if is_mixture(config, layer):
        experts = MoESubmodules(router=MixtureRouter, experts=ModuleSpec(StackedExperts))
        feed = ModuleSpec(MoELayer, submodules=experts)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=attention,
            self_attn_bda=_residual_add,
            pre_mlp_layernorm=Norm,
            mlp=feed,
            mlp_bda=_residual_add,
        ),
    )


def is_mixture(config: Any, layer: int) -> bool:
    """Return whether a layer of a Hugging Face model has experts."""
    if config.model_type != "qwen3_moe" or layer in config.mlp_only_layers:
        return False
    return bool((layer + 1) % config.decoder_sparse_step == 0)


def _windows(config: Any) -> list[int | None]:
    """Return each layer's sliding window."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def _residual_add(training: bool, fused: bool) -> Any:
    """Add a layer's output to its input, in the place of Megatron's bias, dropout and sum."""

    def add(output: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        return output[0] + residual

    return add


def _rotate_half(x: Tensor) -> Tensor:
    """Return the channels of a rotary embedding's second halves, negated, before its first ones."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each token by its expert's matrix: x [n, I] by weight [E, O, I] to [n, O]."""
    if x.dtype == torch.float64:  # which the grouped product lacks
        parts = torch.split(x, counts.tolist())
        return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight, strict=True)])
    ends = counts.to(x.device).cumsum(0).to(torch.int32)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def rotary(model: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, D] of the Hugging Face model's rotary embedding at positions [T]."""
    embedding = cast(Any, model).base_model.rotary_emb
    like = torch.empty(0, dtype=dtype, device=positions.device)
    cos, sin = embedding(like, positions[None])
    return cos[0], sin[0]
