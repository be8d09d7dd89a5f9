"""The driver's time and memory are linear in a step's samples (figures: benchmarks/results)."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

from benchmarks.loop_scale import Run

SMALL, MIDDLE, LARGE = 256, 512, 2048


def test_eight_times_the_samples_take_eight_times_the_time(tmp_path: Path) -> None:
    Run(64, tmp_path / "warm").train(2)
    per_sample = {}
    for samples in (SMALL, LARGE):
        run = Run(samples, tmp_path / str(samples)).train(2)
        per_sample[samples] = run.step_seconds()[0] / samples
    assert per_sample[LARGE] < 2 * per_sample[SMALL], per_sample


def test_memory_grows_with_the_samples_of_a_step_and_not_with_the_steps(tmp_path: Path) -> None:
    Run(64, tmp_path / "warm").train(2)
    peaks = {}
    for samples, steps in ((SMALL, 5), (MIDDLE, 2)):
        gc.collect()
        tracemalloc.start()
        peaks[samples] = Run(samples, tmp_path / str(samples)).train(steps).peaks
        tracemalloc.stop()
    # The least of two, because one step's peak may meet a cache of the interpreter that grows.
    assert min(peaks[SMALL][3:]) < 1.25 * peaks[SMALL][1], peaks
    assert peaks[MIDDLE][1] / MIDDLE < 1.25 * peaks[SMALL][1] / SMALL, peaks
