"""Hugging Face causal language models: loading, running and saving them.

Training packs sequences, decoding reads a cache; both run the same modules. They differ in how a
layer attends, so every model is loaded with an attention function that hands queries, keys and
values to an `AttentionLayout` given to the forward call. Masks, caches and packing are up to the
layout, and no Hugging Face cache or mask is ever built.

Shapes: `T` tokens of a forward call, `H` width, `N` query heads, `K` key/value heads, `D` head.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.models.fetch import is_remote, local_folder
from winnow.models.folders import (
    ADAPTER_CONFIG,
    LOADING,
    Loaded,
    ModelRef,
    Writer,
    explain_load_errors,
    quiet_transformers,
    read_config,
    tokenizer_files,
    write_files,
)
from winnow.models.vision import PlacedImages, check_vision, has_vision, load_image_processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from winnow.models.sharded_loading import Hollow

log = logging.getLogger(__name__)

ATTENTION = "winnow"
_UNSUPPORTED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class AttentionLayout(Protocol):
    """Decides which keys a query sees."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend with q [T, N, D] to k and v [T, K, D] of this call's tokens; returns [T, N, D].

        `window` is the sliding window of this layer in tokens, None for full attention.
        """


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: AttentionLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it; query is [1, N, T, D]."""
    assert layout is not None, "a model loaded by winnow needs a layout in each forward call"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layout.attend(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        sliding_window,
    )
    return out.unsqueeze(0), None


def use_layout_attention(model: PreTrainedModel) -> None:
    """Route every attention layer of `model` to the layout given to each forward call."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    # A vision tower keeps its own.
    model.config.get_text_config()._attn_implementation = ATTENTION


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    field: str = "model.path",
    hollow: Hollow = False,
) -> PreTrainedModel:
    """Load a causal LM in evaluation mode, with Winnow's attention.

    Args:
        path: a Hugging Face folder, a URL, or a hub name; of an adapter's folder, the adapter is
            merged into its model.
        field: the key of the recipe that gave `path`, for messages.
        hollow: leave the weights in their folder (`winnow.models.sharded_loading`).

    Raises:
        ModelError: no such folder, no usable or not all weights, or an attention or a head that
            this program cannot compute.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    where = find_model(path, field, dtype, trust_remote_code)
    config = read_config(where, trust_remote_code)
    check_vision(config, where)
    kind: Any = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    trust = {"trust_remote_code": trust_remote_code}
    build = partial(kind.from_config, config, **trust)
    model, loading = load_model(kind, build, where, config, dtype, hollow, **trust)
    check_weights(where, loading)
    if has_vision(config):
        model.image_processor = load_image_processor(where)
    for name in _UNSUPPORTED_HEADS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"{where}: its config sets {name}, which is not supported")
    if is_remote(path):  # an adapter of it names its place, not the copy's
        model.name_or_path = path
    return prepare(model, where, device)


def find_model(
    path: str, field: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> ModelRef:
    """Return the place of a Hugging Face folder, URL or hub name; it must have a config.json.

    Args:
        dtype: of the weights that an adapter's folder is merged to.

    Raises:
        ModelError: it has none, or cannot be fetched or merged.
    """
    local_path = local_folder(path, field)
    folder = Path(local_path).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        from winnow.models.lora import merged_folder

        cpu, trust = torch.device("cpu"), trust_remote_code
        merged = merged_folder(folder, dtype, lambda base: load_causal_lm(base, dtype, cpu, trust))
        return ModelRef(str(merged), field, path)
    where = ModelRef(str(folder) if folder.is_dir() else local_path, field, path)
    if folder.exists() and not (folder / "config.json").exists():
        raise ModelError(f"{where}: the folder has no config.json; give a Hugging Face folder")
    return where


def load_model(
    kind: Any,
    build: Callable[[], Any],
    where: ModelRef,
    config: Any,
    dtype: torch.dtype,
    hollow: Hollow,
    **trust: bool,
) -> Loaded:
    """Load a folder's model with its weights, or hollow; whatever fails becomes a ModelError.

    Args:
        kind: a class with `from_pretrained`.
        build: makes the model without weights, on the default device.
    """
    if hollow:
        from winnow.models.sharded_loading import load_hollow

        return load_hollow(build, where, config, dtype, hollow)
    options = {"config": config, "dtype": dtype, **trust, **LOADING}
    with explain_load_errors(f"{where}: cannot load its weights"), quiet_transformers():
        return cast(Loaded, kind.from_pretrained(where.path, **options))


def use_fp32_sums() -> None:
    """Have the GPU products of this process round numbers to their own type alone.

    By default cuBLAS may add the parts of a long bf16 sum in bf16, in which the many small terms of
    a softmax's gradient vanish beside the label's, and cuDNN's convolutions round fp32 to TF32.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def prepare(model: PreTrainedModel, where: ModelRef, device: torch.device) -> PreTrainedModel:
    """Give the model Winnow's attention, evaluation mode and its device.

    Raises:
        ModelError: its attention cannot be replaced.
    """
    if not model._supports_attention_backend:
        raise ModelError(
            f"{where}: packing and the embedded engine must replace the attention, and "
            f"{type(model).__name__} does not allow it; use a model of another architecture"
        )
    use_layout_attention(model)
    use_fp32_sums()
    if not hasattr(model, "saved_weights"):
        # Weights come as views of a file, placed as its header happens to end. In memory of torch's
        # own they are aligned alike in every run, as the order of a product's sums may ask for.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model.to(device)
    return cast("PreTrainedModel", model.eval())


def check_weights(where: ModelRef, loading: Mapping[str, Collection[Any]]) -> None:
    """Refuse weights that are missing or of another shape: they would be drawn at random.

    Raises:
        ModelError: there are any.
    """
    misshapen = [key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"]]
    for names, fault in ((misshapen, "of another shape"), (loading["missing_keys"], "missing")):
        if names:
            raise ModelError(
                f"{where}: weights are {fault} ({len(names)}, such as {min(names)}); give a "
                "folder whose weights match its config.json"
            )
    unused = loading["unexpected_keys"]
    if unused:
        log.warning("%s: %d weights are not used, such as %s", where, len(unused), min(unused))


def hidden_states(
    model: nn.Module, token_ids: Tensor, positions: Tensor | PlacedImages, layout: AttentionLayout
) -> Tensor:
    """Return final hidden states [T, H] of flat tokens [T].

    Args:
        positions: [T] in their sequences; or images with features, which have coordinates.
    """
    backbone = text_model(model)
    inputs: dict[str, Any] = {"input_ids": token_ids.unsqueeze(0)}
    if isinstance(positions, PlacedImages):
        images, positions = positions, positions.rope
        assert images.features is not None
        embeddings = backbone.embed_tokens(token_ids)
        first, *deepstack = images.features.to(embeddings.dtype)
        embeddings = embeddings.index_copy(0, images.places, first)
        inputs = {"inputs_embeds": embeddings.unsqueeze(0)}
        if deepstack:
            mask = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(0, images.places, True)
            inputs |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deepstack}
    output = backbone(
        **inputs, position_ids=positions.unsqueeze(-2), use_cache=False, layout=layout
    )
    return cast(Tensor, output.last_hidden_state[0])


def text_model(model: nn.Module) -> Any:
    """Return the model below the head, of a vision-language model the part behind the tower."""
    backbone = cast(Any, model).base_model
    return getattr(backbone, "language_model", backbone)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model is a stack of, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def output_head(model: nn.Module) -> nn.Linear:
    """Return the layer from hidden states to logits, which may be tied to the embeddings."""
    head = cast(Any, model).get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"the output layer of {type(model).__name__} is {type(head).__name__}, not a linear "
            "layer; use a model of another architecture"
        )
    return head


def head_logits(head: nn.Linear, hidden: Tensor, fp32: bool = False) -> Tensor:
    """Compute logits [T, V] in fp32 from hidden states [T, H].

    Args:
        fp32: of a half-precision model, compute the product in fp32 too, from the same weights.
    """
    if not fp32 or hidden.dtype not in (torch.bfloat16, torch.float16):
        return cast(Tensor, head(hidden)).float()
    bias = None if head.bias is None else head.bias.float()
    return nn.functional.linear(hidden.float(), head.weight.float(), bias)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern; a tied one has two names.

    Raises:
        ModelError: a pattern matches no name, or nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        chosen = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if not chosen:
            near = difflib.get_close_matches(pattern.strip("*."), named, n=3, cutoff=0.0)
            raise ModelError(
                f"model.freeze: {pattern} matches none of the model's weights; "
                f"the nearest names are {', '.join(near)}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ModelError(f"model.freeze={list(patterns)} leaves nothing to train; remove a pattern")


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        OSError: the folder cannot be written.
    """
    with quiet_transformers():
        model_writer(model, tokenizer)(cast(Any, model).state_dict(), folder)


def model_writer(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """Make a writer of Hugging Face folders, for a thread beside training.

    The tokenizer is written now and only copied later: a fast one must not be saved while
    another thread encodes with it.
    """
    files = tokenizer_files(tokenizer)
    if (processor := getattr(model, "image_processor", None)) is not None:
        files |= tokenizer_files(processor)

    def write(weights: dict[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        cast(Any, model).save_pretrained(folder, state_dict=weights)
        write_files(files, folder)

    return write


def is_value_model(model: nn.Module) -> bool:
    """Return whether the head gives a value a token."""
    from transformers.modeling_layers import GenericForTokenClassification

    return isinstance(model, GenericForTokenClassification)


def is_reward_model(model: nn.Module) -> bool:
    """Return whether the head gives a score a sequence."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(model, GenericForSequenceClassification)
