"""The model made on the spot, and its cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.config.warm_start import SftWarmStart
from winnow.trainer.warm_start import WarmStart, cache_folder, make_warm_start, tiny_model


def config_of(cache: Path, *overrides: str) -> Config:
    small = ("warm_start.steps=4", "warm_start.warmup_steps=1", f"warm_start.cache_dir={cache}")
    return load_recipe("quickstart", [*small, *overrides])


def warm(config: Config) -> SftWarmStart:
    assert isinstance(config.warm_start, SftWarmStart)
    return config.warm_start


def make(config: Config, fresh: bool = False) -> tuple[WarmStart, list[float]]:
    losses: list[float] = []
    made = make_warm_start(
        config, warm(config), fresh, lambda _, record: losses.append(record["sft/loss"])
    )
    return made, losses


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_the_model_is_that_of_the_issue() -> None:
    model = tiny_model(SftWarmStart(), vocabulary=29, positions=256, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 108_736


def test_a_start_is_made_once_and_then_taken_from_the_cache(tmp_path: Path) -> None:
    first, losses = make(config_of(tmp_path))
    again, none = make(config_of(tmp_path))
    assert (len(losses), none) == (4, [])
    assert losses[-1] < losses[0]
    assert (first.cached, again.cached) == (False, True)
    assert first.folder == again.folder
    assert list(tmp_path.glob("**/*.partial")) == []


def test_fresh_ignores_the_cache_and_gives_the_same_bits(tmp_path: Path) -> None:
    first, _ = make(config_of(tmp_path))
    before = weights(first.folder)
    again, losses = make(config_of(tmp_path), fresh=True)
    assert len(losses) == 4
    assert not again.cached
    for name, tensor in weights(again.folder).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("seed=1", False),
        ("warm_start.lr=1e-3", False),
        ("warm_start.demonstrations.step_error=0.5", False),
        ("rollout.max_response_tokens=100", False),
        ("data.task.max_digits=7", False),
        ("optim.lr=1e-5", True),
        ("data.task.eval_problems=7", True),
    ],
)
def test_what_decides_the_start_decides_its_place(
    tmp_path: Path, override: str, same: bool
) -> None:
    plain, other = config_of(tmp_path), config_of(tmp_path, override)
    assert (cache_folder(plain, warm(plain)) == cache_folder(other, warm(other))) is same


def test_the_folder_holds_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    made, _ = make(config_of(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    assert len(tokenizer) == 29
    assert tokenizer.decode(tokenizer("5391:")["input_ids"]) == "5391:"
