"""Folders of Hugging Face models: their configuration, files and faults."""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.models.fetch import brief, remedy_of
from winnow.observe.files import find_os_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER_CONFIG = "adapter_config.json"
"""File of a PEFT folder: where it is, the folder holds an adapter."""


@dataclass(frozen=True)
class ModelRef:
    """A model's place, and the key of the recipe that names it."""

    path: str
    """Its folder here, or a bare hub name."""
    field: str
    reference: str
    """Its name in the recipe, which may be a URL."""

    def __str__(self) -> str:
        return f"{self.field} {self.reference}"


def read_config(where: ModelRef, trust_remote_code: bool) -> Any:
    """Read a model's config.json.

    Raises:
        ModelError: it is not there, or damaged.
    """
    from transformers import AutoConfig

    with explain_load_errors(f"{where}: cannot read its config"):
        return AutoConfig.from_pretrained(where.path, trust_remote_code=trust_remote_code)


LOADING = {
    "attn_implementation": "eager",
    "ignore_mismatched_sizes": True,  # refused by `check_weights`, with a name
    "output_loading_info": True,
}
"""Options of transformers' loaders."""


Loaded = tuple["PreTrainedModel", Mapping[str, Collection[Any]]]
"""A model, and what transformers says of weights that do not fit."""


@contextlib.contextmanager
def explain_load_errors(
    fault: str,
    remedy: str = "give a complete Hugging Face folder",
    missing: str = "install that, or give weights that are not quantized",
) -> Iterator[None]:
    """Turn failures to read a folder into a ModelError of one line.

    Args:
        missing: the remedy where a package is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ModelError(f"{fault}: {brief(error)}; {missing}") from error
    except (
        *(OSError, ValueError, KeyError, RuntimeError),
        *(SafetensorError, UnpicklingError),
    ) as error:
        raise ModelError(f"{fault}: {brief(error)}; {remedy_of(error, remedy)}") from error


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


def torch_dtype(name: Literal["float32", "bfloat16"]) -> torch.dtype:
    """Return the dtype that a recipe names."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_vocabulary(where: str, tokens: int, rows: int, remedy: str) -> None:
    """Refuse a tokenizer that has more tokens than the model's embedding has rows.

    Raises:
        ModelError: it has.
    """
    if tokens > rows:
        raise ModelError(
            f"{where}: the tokenizer has {tokens} tokens, the model only {rows}; {remedy}"
        )


Writer = Callable[[dict[str, Tensor], Path], None]
"""Writes weights, given by name, and all that belongs to them into a folder."""


def tokenizer_files(tokenizer: Any) -> dict[Path, bytes]:
    """Return the files that a tokenizer or an image processor saves, by path within its folder.

    Raises:
        ModelError: the system's temporary folder takes no such files.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    # How it was loaded here, not what it is.
    getattr(tokenizer, "init_kwargs", {}).pop("local_files_only", None)
    try:
        with tempfile.TemporaryDirectory() as name:
            tokenizer.save_pretrained(name)
            root = Path(name)
            return {f.relative_to(root): f.read_bytes() for f in root.rglob("*") if f.is_file()}
    except Exception as error:
        # The tokenizers library, which writes one of the files, raises bare exceptions.
        if (cause := find_os_error(error)) is None:
            raise
        raise ModelError(
            f"cannot write the tokenizer to the folder for temporary files: {cause.strerror}; "
            "free some space there, or choose another one with TMPDIR=FOLDER"
        ) from error


def write_files(files: Mapping[Path, bytes], folder: Path) -> None:
    """Write a tokenizer's files beside a model's, by their paths within `folder`.

    The weights get the mode of a new file, as the umask has it: safetensors lets only their owner
    read them.
    """
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        for weights in folder.glob("*.safetensors"):
            weights.chmod(stat.S_IMODE((folder / path).stat().st_mode))


def has_adapter(model: nn.Module) -> bool:
    """Return whether an adapter was put into the model."""
    return bool(getattr(model, "peft_config", None))
