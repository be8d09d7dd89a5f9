"""The model made on the spot, and its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.config.load import load_recipe
from winnow.config.model import SftWarmStart
from winnow.config.root import Config
from winnow.runs.warm_start import WarmStart, cache_folder, make_warm_start, tiny_model


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


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


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
    assert folders(first.folder.parent) == [first.folder]


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
        ("trainer.microbatch_tokens=100", False),
        ("optim.lr=1e-5", True),
        ("data.task.eval_problems=7", True),
    ],
)
def test_what_decides_the_start_decides_its_place(
    tmp_path: Path, override: str, same: bool
) -> None:
    plain, other = config_of(tmp_path), config_of(tmp_path, override)
    assert (cache_folder(plain, warm(plain)) == cache_folder(other, warm(other))) is same


@pytest.mark.parametrize("library", [torch, transformers, numpy])
def test_other_versions_have_a_place_of_their_own(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    before = cache_folder(config, warm(config))
    monkeypatch.setattr(library, "__version__", "99")
    assert cache_folder(config, warm(config)) != before


TWO = """
import sys, time
from pathlib import Path
from winnow.config.load import load_recipe
from winnow.runs.warm_start import make_warm_start

place = Path(sys.argv[1])
config = load_recipe("quickstart", [
    "warm_start.steps=4", "warm_start.warmup_steps=1", f"warm_start.cache_dir={place}",
])
(place / sys.argv[2]).touch()

def log(step, record):
    while len(list(place.glob("?"))) < 2:
        time.sleep(0.005)

made = make_warm_start(config, config.warm_start, False, log)
print(made.cached, made.folder)
"""


def test_of_two_processes_that_make_the_same_start_one_trains_and_the_other_waits(
    tmp_path: Path,
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(tmp_path), name],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for name in "ab"
    ]
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    config = config_of(tmp_path)
    folder = cache_folder(config, warm(config))
    assert sorted(said) == [f"False {folder}\n", f"True {folder}\n"]
    assert weights(folder)


def test_a_start_that_is_not_whole_is_made_anew(tmp_path: Path) -> None:
    made, _ = make(config_of(tmp_path))
    (made.folder / "config.json").unlink()
    again, losses = make(config_of(tmp_path))
    assert (again.folder, again.cached, len(losses)) == (made.folder, False, 4)
    assert weights(again.folder)
    assert folders(made.folder.parent) == [made.folder]


def test_what_a_process_that_died_left_behind_is_deleted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    target = cache_folder(config, warm(config))
    for kind in ("partial", "replaced"):
        (target.parent / f".{target.name}.{kind}" / "model").mkdir(parents=True)
    make(config)
    assert folders(target.parent) == [target]


def test_the_folder_holds_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    made, _ = make(config_of(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    assert len(tokenizer) == 29
    assert tokenizer.decode(tokenizer("5391:")["input_ids"]) == "5391:"
