"""The soft overlong penalty at its corners."""

from __future__ import annotations

from typing import Any

import pytest

from winnow.algorithms.overlong import soft_overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)],
)
@pytest.mark.parametrize("form", ["verl", "paper"])
def test_the_papers_setting(length: int, penalty: float, form: Any) -> None:
    assert soft_overlong_penalty(length, 20480, 4096, form=form) == penalty


def test_beyond_the_limit_the_forms_part() -> None:
    assert soft_overlong_penalty(24, 20, 4, 0.5, "verl") == -1.0
    assert soft_overlong_penalty(24, 20, 4, 0.5, "paper") == -0.5


@pytest.mark.parametrize("buffer", [0, 21])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=rf"buffer must lie in \[1, limit 20\], got {buffer}"):
        soft_overlong_penalty(1, 20, buffer)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="form must be verl or paper, got 'soft'"):
        soft_overlong_penalty(1, 20, 4, form="soft")  # type: ignore[arg-type]
