"""Loading of tokenizers, the ids that end an answer, and ids back to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from winnow.errors import ModelError
from winnow.models.fetch import brief, check_hub, check_model_path, local_folder, remedy_of
from winnow.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("spiece.model", "vocab.json", "vocab.txt"),
)


def load_tokenizer(
    path: str, trust_remote_code: bool = False, field: str = "model.path", ends_answers: bool = True
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder (or of a hub name), which `field` of the recipe gives.

    Args:
        ends_answers: True if it is of a model that writes, and so needs an end-of-sequence token.

    Raises:
        ModelError: no such folder, no tokenizer in it, or one without an end-of-sequence token.
    """
    from transformers import AutoTokenizer

    from winnow.models.folders import quiet_transformers

    check_model_path(path, field)
    local = local_folder(path, field)
    folder = Path(local).expanduser()
    is_folder = folder.is_dir()
    if is_folder and not has_tokenizer(local):
        raise ModelError(
            f"{field} {path}: the folder has no tokenizer (such as tokenizer.json); copy the "
            "tokenizer files of the original model into it"
        )
    if not is_folder:
        check_hub(path, field)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder) if is_folder else path, trust_remote_code=trust_remote_code
            )
    # A damaged tokenizer.json surfaces as a bare Exception of the tokenizers library.
    except Exception as error:
        remedy = "fix its files" if is_folder else "check the name and your access to it"
        raise ModelError(
            f"{field} {path}: cannot load its tokenizer: {brief(error)}; {remedy_of(error, remedy)}"
        ) from error
    if ends_answers and tokenizer.eos_token_id is None:
        raise ModelError(
            f"{field} {path}: its tokenizer has no end-of-sequence token, so no answer could "
            "end; set eos_token in tokenizer_config.json"
        )
    return cast("PreTrainedTokenizerBase", tokenizer)


def make_tokenizer(
    vocabulary: Sequence[str],
    roles: Sequence[str] = (),
    chat_template: str | None = None,
    pattern: str = r"[\s\S]",
) -> PreTrainedTokenizerFast:
    """Build a Hugging Face tokenizer of a generated task; it adds no tokens by itself.

    Args:
        vocabulary: tokens in the order of their ids: padding, end of sequence, unknown, others.
        roles: those of them that are special besides these three.
        pattern: a regular expression; each match in a text is a token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, eos, unknown = vocabulary[:3]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        unk_token=unknown,
        additional_special_tokens=list(roles),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def has_tokenizer(folder: str) -> bool:
    """Return whether a folder has a tokenizer's files."""
    return any((Path(folder).expanduser() / name).is_file() for name in _TOKENIZER_FILES)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_path: str | None = None, loaded: object = None
) -> tuple[int, ...]:
    """List the ids that end an answer: the tokenizer's EOS, then the model's other ones.

    Those stand in its generation config: chat models end a turn with a special token.

    Args:
        model_path: a folder, whose `generation_config.json` is read.
        loaded: `eos_token_id` of the loaded model's generation config: a hub name has no folder.

    Raises:
        ModelError: that file cannot be read.
    """
    ids = [cast(int, tokenizer.eos_token_id), *_as_list(loaded)]
    file = None
    if model_path:
        file = Path(local_folder(model_path)).expanduser() / "generation_config.json"
    if file is not None and file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: not readable as JSON ({error}); fix or remove it") from error
        ids += _as_list(config.get("eos_token_id") if isinstance(config, dict) else config)
        if not all(isinstance(i, int) for i in ids):
            raise ModelError(
                f"{file}: eos_token_id must be a token id or a list of them, got {ids[1:]}; fix "
                "or remove the file"
            )
    return tuple(dict.fromkeys(ids))


def _as_list(ids: Any) -> list[Any]:
    """Return the ids of `eos_token_id`, which may be one, several or none."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def make_decoder(
    tokenizer: PreTrainedTokenizerBase, special_tokens: bool = False
) -> Callable[[IntArray | Sequence[int]], str]:
    """Make a function from ids to text, with or without special tokens.

    Fast tokenizers are asked directly: the wrapper around them costs several times as much,
    and a step decodes each of its answers.
    """
    plain = tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
    inner: Any = tokenizer.backend_tokenizer if plain else tokenizer

    def decode(ids: IntArray | Sequence[int]) -> str:
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return cast(str, inner.decode(numbers, skip_special_tokens=not special_tokens))

    return decode
