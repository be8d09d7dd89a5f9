"""Models whose sequences ranks cannot share are refused before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.small_models import digits_folder, digits_model

from winnow.config.load import load_recipe
from winnow.errors import ModelError
from winnow.learning.sequence import check_model
from winnow.ranks.models import load_policy


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("layer_types", ["full_attention", "linear_attention"], "layers of .*linear_attention"),
        ("rope_parameters", {"rope_type": "dynamic"}, "rotary embedding of .*dynamic"),
        ("rope_parameters", {"full": {"rope_type": "longrope"}}, "rotary embedding of .*longrope"),
    ],
)
def test_what_needs_whole_sequences_elsewhere_is_refused(
    field: str, value: object, told: str
) -> None:
    model = digits_model()
    check_model(model, 2)
    setattr(model.config, field, value)
    check_model(model, 1)
    with pytest.raises(ModelError, match=rf"sequence=2 .*{told}.*; set .*sequence=1$"):
        check_model(model, 2)


def test_a_run_is_refused_where_it_reads_the_model(tmp_path: Path) -> None:
    path = str(digits_folder(tmp_path / "model", num_attention_heads=6, num_key_value_heads=2))
    ranks = "trainer/strategy=fsdp2", "trainer.strategy.ranks=12"
    settings = f"model.path={path}", "warm_start=none", *ranks
    for size in (1, 2, 3, 6):
        config = load_recipe("quickstart", [*settings, f"trainer.strategy.sequence={size}"])
        load_policy(config, path, torch.device("cpu"), hollow=True)
    config = load_recipe("quickstart", [*settings, "trainer.strategy.sequence=4"])
    with pytest.raises(ModelError) as caught:
        load_policy(config, path, torch.device("cpu"), hollow=True)
    assert str(caught.value) == (
        f"trainer.strategy.sequence=4 does not divide the 6 attention heads of {path}; set it to "
        "one of 1, 2, 3, 6"
    )
