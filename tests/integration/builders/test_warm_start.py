"""The model made on the spot, and its cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
import torch
import transformers
from rich.console import Console
from tests.forked import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.builders import warm_start
from winnow.builders.warm_start import make_warm_start, warm_start_folder
from winnow.checkpoints.opening import pin_microbatch_tokens
from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.observe.console import ConsoleSink, make_console


def config_of(cache: Path, *overrides: str) -> Config:
    small = ("warm_start.steps=4", "warm_start.warmup_steps=1", f"warm_start.cache_dir={cache}")
    return load_recipe("quickstart", [*small, *overrides])


def make(config: Config) -> tuple[Path, list[float]]:
    shown = Mock(spec=ConsoleSink)
    folder = make_warm_start(config, False, shown)
    losses = [told.args[1]["sft/loss"] for told in shown.log.call_args_list]
    begun = [(told.args[0].kind, told.args[0].steps) for told in shown.start.call_args_list]
    notes = [told.args[0] for told in shown.print_line.call_args_list]
    was_cached = f"Warm start: cached in {folder} (--fresh trains it again)"
    assert (begun, notes) == (([("warm_up", 4)], []) if losses else ([], [was_cached]))
    assert shown.close.call_count == len(begun)
    assert not shown.show_status.called  # there is no state within a step
    return folder, losses


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_start_is_made_once_and_then_taken_from_the_cache(tmp_path: Path) -> None:
    first, losses = make(config_of(tmp_path))
    again, none = make(config_of(tmp_path))
    assert (len(losses), none) == (4, [])
    assert losses[-1] < losses[0]
    assert first == again
    assert folders(first.parent) == [first]
    assert len(AutoTokenizer.from_pretrained(first)) == 29


def test_a_start_in_a_cache_that_may_not_be_written_to_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = make(config_of(tmp_path))

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(warm_start, "FileLock", refused)
    assert make(config_of(tmp_path)) == (first, [])


def test_what_decides_the_start_decides_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = warm_start_folder(config_of(tmp_path))
    for same in ("optim.lr=1e-5", "data.task.eval_problems=7"):
        assert warm_start_folder(config_of(tmp_path, same)) == plain
    default = config_of(tmp_path, "trainer.microbatch_tokens=null")  # as a run, which pins it
    assert warm_start_folder(default) == warm_start_folder(pin_microbatch_tokens(default))
    others = (
        *("seed=1", "warm_start.lr=1e-3", "warm_start.demonstrations.step_error=0.5"),
        *("rollout.max_response_tokens=100", "data.task.max_digits=7"),
        "trainer.microbatch_tokens=100",
    )
    places = {plain, *(warm_start_folder(config_of(tmp_path, other)) for other in others)}
    assert len(places) == 1 + len(others)
    for library in (torch, transformers, numpy):
        monkeypatch.setattr(library, "__version__", "99")
        places.add(warm_start_folder(config_of(tmp_path)))
    assert len(places) == 1 + len(others) + 3


def main() -> None:
    """Make the start in a folder, at the same time as another process."""
    place, name = Path(sys.argv[1]), sys.argv[2]
    (place / name).touch()

    def wait() -> None:
        while len(list(place.glob("?"))) < 2:
            time.sleep(0.005)

    make_warm_start(config_of(place), False, make_console("plain", Console(width=1000)), wait)


def test_of_two_processes_that_make_the_same_start_one_trains_and_the_other_waits(
    tmp_path: Path, server: Server
) -> None:
    outs = [tmp_path / f"{name}.out" for name in "ab"]
    module = "tests.integration.builders.test_warm_start"
    started = [server.start(module, [str(tmp_path), out.stem], out=out) for out in outs]
    assert [process.wait(200) for process in started] == [0, 0]
    folder = warm_start_folder(config_of(tmp_path))
    taken = f"Warm start: cached in {folder}"
    assert sorted(taken in out.read_text() for out in outs) == [False, True]
    assert weights(folder)


def test_a_start_that_is_not_whole_is_made_anew_and_what_others_left_behind_deleted(
    tmp_path: Path,
) -> None:
    made, _ = make(config_of(tmp_path))
    (made / "config.json").unlink()
    for kind in ("partial", "replaced"):
        (made.parent / f".{made.name}.{kind}" / "model").mkdir(parents=True)
    again, losses = make(config_of(tmp_path))
    assert (again, len(losses)) == (made, 4)
    assert weights(again)
    assert folders(made.parent) == [made]
