"""Hugging Face causal language models: loading, running and saving them.

Training packs sequences, decoding reads a cache; both run the same modules. They differ in how a
layer attends, so every model is loaded with an attention function that hands queries, keys and
values to an `AttentionLayout` given to the forward call. Masks, caches and packing are up to the
layout, and no Hugging Face cache or mask is ever built.

Shapes: `T` tokens of a forward call, `H` width, `N` query heads, `K` key/value heads, `D` head.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.models.fetch import brief, is_elsewhere, local_folder, remedy_of
from winnow.observe.files import system_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from winnow.models.sharded_loading import Hollow

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
"""File of a PEFT folder: where it is, the folder holds an adapter."""
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
        ...


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
    """Attend as transformers asks for it; query is [1, N, T, D]."""
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
    model.config._attn_implementation = ATTENTION


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
    from transformers import AutoModelForCausalLM

    where = find_model(path, field, dtype, trust_remote_code)
    config = read_config(where, trust_remote_code)
    trust = {"trust_remote_code": trust_remote_code}
    build = partial(AutoModelForCausalLM.from_config, config, **trust)
    model, loading = load(AutoModelForCausalLM, build, where, config, dtype, hollow, **trust)
    check_weights(where, loading)
    for name in _UNSUPPORTED_HEADS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"{where}: its config sets {name}, which the log-prob kernel lacks")
    if is_elsewhere(path):  # an adapter of it names its place, not the copy's
        model.name_or_path = path
    return settled(model, where, device)


@dataclass(frozen=True)
class Source:
    """A model's place, and the key of the recipe that names it."""

    path: str
    """Its folder here, or a bare hub name."""
    field: str
    given: str
    """The recipe's word for it, which may be a URL."""

    def __str__(self) -> str:
        return f"{self.field} {self.given}"


def find_model(
    path: str, field: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> Source:
    """Return the place of a Hugging Face folder, URL or hub name; it must have a config.json.

    Args:
        dtype: of the weights that an adapter's folder is merged to.

    Raises:
        ModelError: it has none, or cannot be fetched or merged.
    """
    here = local_folder(path, field)
    folder = Path(here).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        from winnow.models.lora import merged_folder

        return Source(str(merged_folder(folder, dtype, trust_remote_code)), field, path)
    where = Source(str(folder) if folder.is_dir() else here, field, path)
    if folder.exists() and not (folder / "config.json").exists():
        raise ModelError(f"{where}: the folder has no config.json; give a Hugging Face folder")
    return where


def read_config(where: Source, trust_remote_code: bool) -> Any:
    """Read a model's config.json.

    Raises:
        ModelError: it is not there, or damaged.
    """
    from transformers import AutoConfig

    with failures_told(f"{where}: cannot read its config"):
        return AutoConfig.from_pretrained(where.path, trust_remote_code=trust_remote_code)


LOADING = {
    "attn_implementation": "eager",
    "ignore_mismatched_sizes": True,  # refused by `check_weights`, with a name
    "output_loading_info": True,
}
"""Options of transformers' loaders."""
Loaded = tuple["PreTrainedModel", Mapping[str, Collection[Any]]]
"""A model, and what transformers says of weights that do not fit."""


def load(
    kind: Any,
    build: Callable[[], Any],
    where: Source,
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
    given = {"config": config, "dtype": dtype, **trust, **LOADING}
    with failures_told(f"{where}: cannot load its weights"), quiet_transformers():
        return cast(Loaded, kind.from_pretrained(where.path, **given))


@contextlib.contextmanager
def failures_told(
    fault: str, remedy: str = "give a complete Hugging Face folder"
) -> Iterator[None]:
    """Turn failures to read a folder into a ModelError of one line."""
    try:
        yield
    except ImportError as error:
        remedy = "install that, or give weights that are not quantized"
        raise ModelError(f"{fault}: {brief(error)}; {remedy}") from error
    except (
        *(OSError, ValueError, KeyError, RuntimeError),
        *(SafetensorError, UnpicklingError),
    ) as error:
        raise ModelError(f"{fault}: {brief(error)}; {remedy_of(error, remedy)}") from error


def settled(model: PreTrainedModel, where: Source, device: torch.device) -> PreTrainedModel:
    """Give the model Winnow's attention, evaluation mode and its device.

    Raises:
        ModelError: its attention cannot be replaced.
    """
    if not model._supports_attention_backend:
        raise ModelError(
            f"{where}: the attention of {type(model).__name__} cannot be replaced, which "
            "packing and the embedded engine need; use a model of another architecture"
        )
    use_layout_attention(model)
    if not hasattr(model, "saved_weights"):
        # Weights come as views of a file, placed as its header happens to end. In memory of torch's
        # own they are aligned alike in every run, as the order of a product's sums may ask for.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model.to(device)
    return cast("PreTrainedModel", model.eval())


def check_weights(where: Source, loading: Mapping[str, Collection[Any]]) -> None:
    """Refuse weights that are missing or of another shape: they would be drawn at random.

    Raises:
        ModelError: there are any.
    """
    misshapen = [key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"]]
    for names, fault in ((misshapen, "of another shape"), (loading["missing_keys"], "missing")):
        if names:
            raise ModelError(
                f"{where}: weights are {fault} ({len(names)}, such as {min(names)}); "
                "give a folder whose weights belong to its config.json"
            )
    unused = loading["unexpected_keys"]
    if unused:
        log.warning("%s: %d weights are not used, such as %s", where, len(unused), min(unused))


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch transformers' progress bars off, and within the block all that it logs but errors."""
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
    """Return final hidden states [T, H] of flat tokens [T] at their positions [T] in sequences."""
    backbone = cast(Any, model).base_model
    output = backbone(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        layout=layout,
    )
    return cast(Tensor, output.last_hidden_state[0])


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
        raise ModelError(
            f"model.freeze={list(patterns)} leaves nothing to train; take a pattern out of it"
        )


def torch_dtype(name: Literal["float32", "bfloat16"]) -> torch.dtype:
    """Return the dtype that a recipe names."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


Writer = Callable[[dict[str, Tensor], Path], None]
"""Writes weights, given by name, and all that belongs to them into a folder."""


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

    def write(weights: dict[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        cast(Any, model).save_pretrained(folder, state_dict=weights)
        add_files(files, folder)

    return write


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[Path, bytes]:
    """Return the files that a tokenizer saves, by path within its folder.

    Raises:
        ModelError: the system's temporary folder takes no such files.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer.init_kwargs.pop("local_files_only", None)  # how it was loaded here, not what it is
    try:
        with tempfile.TemporaryDirectory() as name:
            tokenizer.save_pretrained(name)
            root = Path(name)
            return {f.relative_to(root): f.read_bytes() for f in root.rglob("*") if f.is_file()}
    except Exception as error:
        # The tokenizers library, which writes one of the files, raises bare exceptions.
        if (cause := system_error(error)) is None:
            raise
        raise ModelError(
            f"cannot write the tokenizer to the folder for temporary files: {cause.strerror}; "
            "free some space there, or choose another one with TMPDIR=FOLDER"
        ) from error


def add_files(files: Mapping[Path, bytes], folder: Path) -> None:
    """Write a tokenizer's files beside a model's, by their paths within `folder`.

    The weights get the mode of a new file, as the umask has it: safetensors lets only their owner
    read them.
    """
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        for weights in folder.glob("*.safetensors"):
            weights.chmod(stat.S_IMODE((folder / path).stat().st_mode))


def is_value_model(model: nn.Module) -> bool:
    """Return whether the head gives a value a token."""
    from transformers.modeling_layers import GenericForTokenClassification

    return isinstance(model, GenericForTokenClassification)


def is_reward_model(model: nn.Module) -> bool:
    """Return whether the head gives a score a sequence."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(model, GenericForSequenceClassification)


def has_adapter(model: nn.Module) -> bool:
    """Return whether an adapter was put into the model."""
    return bool(getattr(model, "peft_config", None))
