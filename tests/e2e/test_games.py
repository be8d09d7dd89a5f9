"""Environments that exist, in training: no fault, and no token id that differs (make test-real)."""

from __future__ import annotations

import pytest
from benchmarks.environments import measure

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.parametrize("game", ["GuessTheNumber-v0", "Bandit-v0", "CliffWalking-v1"])
def test_a_game_trains_without_a_fault_or_a_token_that_differs(game, tmp_path):
    pytest.importorskip("gymnasium" if game == "CliffWalking-v1" else "textarena")
    figures = measure(game, 3, tmp_path)
    assert (figures["faults"], figures["mismatches"]) == (0, 0)
    assert figures["turns compared"] > 3 * 8
    assert figures["turns"] > 1.5
