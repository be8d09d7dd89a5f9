"""The learning rate at the steps that matter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.learning.learner import lr_at


def test_the_quickstarts_course() -> None:
    course: dict[str, Any] = {
        "total_steps": 80,
        "lr": 4e-4,
        "warmup_steps": 5,
        "schedule": "linear",
    }
    at = [lr_at(step, **course) for step in range(1, 81)]
    assert at[:6] == pytest.approx([8e-5, 1.6e-4, 2.4e-4, 3.2e-4, 4e-4, 4e-4 * 75 / 76])
    assert at[79] == pytest.approx(4e-4 / 76)
    assert lr_at(81, **course) == 0.0


def test_cosine_is_halfway_in_the_middle_and_would_reach_its_floor_after_the_last_step() -> None:
    course: dict[str, Any] = {
        "total_steps": 20,
        "lr": 1.0,
        "schedule": "cosine",
        "final_lr_ratio": 0.1,
    }
    assert lr_at(1, **course) == 1.0
    assert lr_at(11, **course) == pytest.approx(0.55)
    assert lr_at(21, **course) == pytest.approx(0.1)


@given(
    total=st.integers(1, 50),
    warmup=st.integers(0, 60),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    floor=st.floats(0, 1),
)
def test_it_rises_to_the_peak_then_never_rises(
    total: int, warmup: int, schedule: Any, floor: float
) -> None:
    peak = max(warmup, 1)
    course: dict[str, Any] = {"lr": 1.0, "warmup_steps": warmup, "schedule": schedule}
    course["final_lr_ratio"] = floor
    at = [lr_at(step, total_steps=total, **course) for step in range(1, total + 1)]
    assert at[:peak] == sorted(at[:peak])
    assert at[peak - 1 :] == sorted(at[peak - 1 :], reverse=True)
    assert all(0 <= rate <= 1 for rate in at)
    if schedule != "constant":
        total = max(total, peak)
        assert lr_at(total + 1, total_steps=total, **course) == pytest.approx(floor)
