"""Which weights a pattern takes out of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_models import digits_folder

from winnow.errors import ModelError
from winnow.models.causal_lm import freeze, load_causal_lm


def model_of(folder: Path, **changes: Any) -> Any:
    return load_causal_lm(str(digits_folder(folder, **changes)), torch.float32, torch.device("cpu"))


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_patterns_match_whole_names(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    every = trained(model)
    freeze(model, ["*.embed_tokens.*", "model.layers.?.self_attn.*"])
    left = {n for n in every if "embed_tokens" not in n and "self_attn" not in n}
    assert trained(model) == left < every


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_goes_by_both_its_names(tmp_path: Path, tied: bool) -> None:
    model = model_of(tmp_path, tie_word_embeddings=tied)
    freeze(model, ["lm_head.*"])
    assert ("model.embed_tokens.weight" in trained(model)) is not tied
    assert "lm_head.weight" not in trained(model)


@pytest.mark.parametrize(
    ("patterns", "fault"),
    [
        (
            ["*.embed_tokens.*", "*.embed_token.weight"],
            r"^model\.freeze: \*\.embed_token\.weight matches none.*"
            r"the nearest names are model\.embed_tokens\.weight, ",
        ),
        (["embed_tokens"], "embed_tokens matches none"),
        (["*"], r"model\.freeze=\['\*'\] leaves nothing to train"),
    ],
)
def test_a_pattern_that_matches_nothing_or_everything_is_refused(
    patterns: list[str], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=fault):
        freeze(model_of(tmp_path), patterns)
