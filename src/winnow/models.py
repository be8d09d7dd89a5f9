"""Hugging Face causal language models, seen as a backbone, a head and an attention seam.

Training packs sequences, decoding reads a cache; both run the same modules. What differs is
how a layer attends, so every model is loaded with an attention function that hands queries,
keys and values to an `AttentionLayout` given to the forward call. Masks, caches and packing
are the layout's affair, and no Hugging Face cache or mask is ever built.

Shapes: `T` tokens of a forward call, `H` width, `N` query heads, `K` key/value heads, `D` head.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from winnow.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ATTENTION = "winnow"
_UNSUPPORTED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class AttentionLayout(Protocol):
    """Decides which keys a query sees."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """q [T, N, D], k and v [T, K, D] of the tokens of this call; returns [T, N, D].

        `window` is the sliding window of this layer in tokens, None for full attention.
        """
        ...


def _attend(
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
    """The function registered with transformers; query is [1, N, T, D]."""
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

    AttentionInterface.register(ATTENTION, _attend)
    model.config._attn_implementation = ATTENTION


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM from a Hugging Face folder (or hub name), in evaluation mode, with our attention.

    Raises:
        ModelError: no such folder, no usable or not all weights, or an attention or a head that
            this program cannot compute.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(path).expanduser()
    if folder.is_dir():
        path = str(folder)
    if folder.exists() and not (folder / "config.json").exists():
        raise ModelError(
            f"model.path {path}: the folder has no config.json; give a Hugging Face folder"
        )
    try:
        with quiet_transformers():
            model, loading = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # refused below, with a name
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = shorten(str(error), 200, placeholder=" …") or type(error).__name__
        raise ModelError(
            f"model.path {path}: cannot load a causal language model: {reason.rstrip('.')}; "
            "give a complete Hugging Face folder"
        ) from error
    _check_weights(path, loading)
    if not model._supports_attention_backend:
        raise ModelError(
            f"model.path {path}: the attention of {type(model).__name__} cannot be replaced, which "
            "packing and the embedded engine need; use a model of another architecture"
        )
    for name in _UNSUPPORTED_HEADS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ModelError(
                f"model.path {path}: its config sets {name}, which the log-prob kernel lacks"
            )
    use_layout_attention(model)
    # Weights come as views of a file, placed as its header happens to end. In memory of torch's
    # own they are aligned alike in every run, which the order of a product's sums may depend on.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return cast("PreTrainedModel", model.to(device).eval())


def _check_weights(path: str, loading: Mapping[str, Collection[Any]]) -> None:
    """What a checkpoint lacks was drawn at random, which nobody would notice."""
    misshapen = [key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"]]
    for names, fault in ((misshapen, "of another shape"), (loading["missing_keys"], "missing")):
        if names:
            raise ModelError(
                f"model.path {path}: weights are {fault} ({len(names)}, such as {min(names)}); "
                "give a folder whose weights belong to its config.json"
            )
    unused = loading["unexpected_keys"]
    if unused:
        log.warning(
            "model.path %s: %d weights are not used, such as %s", path, len(unused), min(unused)
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, and of what transformers logs the errors only: we say what matters."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def hidden_states(
    model: nn.Module, token_ids: Tensor, positions: Tensor, layout: AttentionLayout
) -> Tensor:
    """Final hidden states [T, H] of flat tokens [T] at their positions [T] in their sequences."""
    backbone = cast(Any, model).base_model
    output = backbone(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        layout=layout,
    )
    return cast(Tensor, output.last_hidden_state[0])


def output_head(model: nn.Module) -> nn.Linear:
    """The layer from hidden states to logits; may be tied to the embeddings."""
    head = cast(Any, model).get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"the output layer of {type(model).__name__} is {type(head).__name__}, not a linear "
            "layer; use a model of another architecture"
        )
    return head


def torch_dtype(name: Literal["float32", "bfloat16"]) -> torch.dtype:
    """The dtype a recipe names."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        cast(Any, model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def model_writer(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, Tensor], Path], None]:
    """Like `save_model`, with weights given by name, for a thread beside training.

    The tokenizer is written now and only copied later: a fast one must not be saved while
    another thread encodes with it.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        root = Path(name)
        files = {f.relative_to(root): f.read_bytes() for f in root.rglob("*") if f.is_file()}

    def write(weights: dict[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        cast(Any, model).save_pretrained(folder, state_dict=weights)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)

    return write
