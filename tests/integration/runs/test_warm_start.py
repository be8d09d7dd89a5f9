"""The model made on the spot, and its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
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
from winnow.observe.metrics import Record
from winnow.observe.sinks import RunInfo
from winnow.runs import warm_start
from winnow.runs.warm_start import cache_folder, make_warm_start, tiny_model


def config_of(cache: Path, *overrides: str) -> Config:
    small = ("warm_start.steps=4", "warm_start.warmup_steps=1", f"warm_start.cache_dir={cache}")
    return load_recipe("quickstart", [*small, *overrides])


@dataclass
class Shown:
    """A console that keeps what it is told."""

    losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    closed: int = 0

    def start(self, info: RunInfo) -> None:
        assert (info.kind, info.steps) == ("warm_up", 4)

    def log(self, step: int, record: Record) -> None:
        self.losses.append(record["sft/loss"])

    def close(self) -> None:
        self.closed += 1

    def note(self, text: str) -> None:
        self.notes.append(text)

    def status(self, text: str) -> None:
        raise AssertionError("the view of a warm-up has no state within a step")


def make(config: Config, fresh: bool = False) -> tuple[Path, list[float]]:
    shown = Shown()
    folder = make_warm_start(config, fresh, shown)
    was_cached = f"Warm start: taken from {folder} (made before; --fresh makes it anew)"
    assert (shown.notes, shown.closed) == (([], 1) if shown.losses else ([was_cached], 0))
    return folder, shown.losses


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
    assert first == again
    assert folders(first.parent) == [first]


def test_a_start_in_a_cache_that_may_not_be_written_to_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = make(config_of(tmp_path))

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(warm_start, "FileLock", refused)
    assert make(config_of(tmp_path)) == (first, [])


def test_fresh_ignores_the_cache_and_gives_the_same_bits(tmp_path: Path) -> None:
    first, _ = make(config_of(tmp_path))
    before = weights(first)
    again, losses = make(config_of(tmp_path), fresh=True)
    assert len(losses) == 4
    for name, tensor in weights(again).items():
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
    assert (cache_folder(plain) == cache_folder(other)) is same


@pytest.mark.parametrize("library", [torch, transformers, numpy])
def test_other_versions_have_a_place_of_their_own(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    before = cache_folder(config)
    monkeypatch.setattr(library, "__version__", "99")
    assert cache_folder(config) != before


TWO = """
import sys, time
from pathlib import Path
from rich.console import Console
from winnow.config.load import load_recipe
from winnow.observe.console import make_console
from winnow.runs.warm_start import make_warm_start

place = Path(sys.argv[1])
config = load_recipe("quickstart", [
    "warm_start.steps=4", "warm_start.warmup_steps=1", f"warm_start.cache_dir={place}",
])
(place / sys.argv[2]).touch()

def wait():
    while len(list(place.glob("?"))) < 2:
        time.sleep(0.005)

console = make_console("plain", Console(width=1000))
make_warm_start(config, False, console, wait)
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
    folder = cache_folder(config)
    waited = [f"Warm start: taken from {folder} (made before" in each for each in said]
    assert sorted(waited) == [False, True]
    assert weights(folder)


def test_a_start_that_is_not_whole_is_made_anew(tmp_path: Path) -> None:
    made, _ = make(config_of(tmp_path))
    (made / "config.json").unlink()
    again, losses = make(config_of(tmp_path))
    assert (again, len(losses)) == (made, 4)
    assert weights(again)
    assert folders(made.parent) == [made]


def test_what_a_process_that_died_left_behind_is_deleted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    target = cache_folder(config)
    for kind in ("partial", "replaced"):
        (target.parent / f".{target.name}.{kind}" / "model").mkdir(parents=True)
    make(config)
    assert folders(target.parent) == [target]


def test_the_folder_holds_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    made, _ = make(config_of(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert len(tokenizer) == 29
    assert tokenizer.decode(tokenizer("5391:")["input_ids"]) == "5391:"
