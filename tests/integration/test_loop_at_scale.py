"""The driver's time and memory are linear in a step's samples (figures: benchmarks/results)."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.loop_scale import ANSWERS, SLOTS, UPDATE_GROUPS, Run

from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

SMALL, MIDDLE, LARGE = 512, 2048, 4096


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_eight_times_the_samples_take_eight_times_the_time(tmp_path: Path) -> None:
    Run(64, tmp_path / "warm").train(2)
    per_sample = {}
    for samples in (SMALL, LARGE):
        run = Run(samples, tmp_path / str(samples)).train(3)
        per_sample[samples] = run.step_seconds()[0] / samples
    assert per_sample[LARGE] < 2 * per_sample[SMALL], per_sample


def test_memory_grows_with_the_samples_of_a_step_and_not_with_the_steps(tmp_path: Path) -> None:
    Run(64, tmp_path / "warm").train(2)
    peaks = {}
    for samples, steps in ((SMALL, 6), (MIDDLE, 2)):
        gc.collect()
        tracemalloc.start()
        peaks[samples] = Run(samples, tmp_path / str(samples)).train(steps).peaks
        tracemalloc.stop()
    # The least of three, because one step's peak may meet a cache of the interpreter that grows.
    assert min(peaks[SMALL][3:]) < 1.25 * peaks[SMALL][1], peaks
    assert peaks[MIDDLE][1] / MIDDLE < 1.25 * peaks[SMALL][1] / SMALL, peaks


def test_the_run_that_is_measured_is_a_whole_one(tmp_path: Path) -> None:
    run = Run(SMALL, tmp_path).train(2)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["sampling/groups/trained"] == SMALL // ANSWERS
        assert record["sampling/groups/all_wrong"] > 0
        assert record["actor/updates"] == SMALL // ANSWERS // UPDATE_GROUPS
    assert run.engine.most_running == SLOTS
    trained = read_rollouts(tmp_path / "rollouts").column("outcome").to_pylist().count("trained")
    assert trained == 2 * SMALL
    assert (tmp_path / "checkpoints" / "step-2" / "manifest.json").is_file()
