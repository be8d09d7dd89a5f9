"""Throughput, and the watch over failed scorings."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch
from tests.scoring import rewards_of

from winnow.config.reward import RewardConfig, UserFunction
from winnow.errors import RewardError
from winnow.rewards.pipeline import Rewards
from winnow.runs.metrics import Passes, Throughput
from winnow.types import Prompt, Score, Segment, Trajectory

PROMPT = Prompt("0", np.array([3]), "12:", "sort_digits", "12")
ANSWER = Trajectory((Segment(np.array([4, 5]), np.zeros(2, np.float32), ()),), "stop")


def test_flop_are_two_forwards_and_four_backwards_a_weight_and_token() -> None:
    work = Throughput(Passes(1_000_000, epochs=2), torch.device("cpu"), peak_tflops=1.0)
    times = {"time/step_s": 3.0, "time/evaluate_s": 1.0, "time/update_s": 0.5}
    figures = work.figures(generated_tokens=1000, packed_tokens=2000, times=times)
    # (2*1000 rollout + 2*2000 old + 2*6*2000 update) * 1e6 weights in 2 seconds.
    assert figures["throughput/tflops"] == pytest.approx(30_000e6 / 2 / 1e12)
    assert figures["throughput/mfu"] == figures["throughput/tflops"]
    assert figures["throughput/tokens_per_s"] == 500
    assert figures["time/update_us_per_token"] == pytest.approx(0.5e6 / 4000)
    assert 0.01 < figures["memory/peak_gib"] < 1000


def scores_with(tmp_path: object, body: str, patience: int = 100) -> Rewards:
    file = tmp_path / "reward.py"  # type: ignore[operator]
    file.write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}"
    )
    config = RewardConfig(function=UserFunction(path=str(file)))
    rewards = rewards_of(config, 16, decode=lambda ids: "#" + "".join(map(str, ids)))
    rewards.patience = patience
    return rewards


def score(scores: Rewards, times: int) -> list[Score]:
    async def run() -> list[Score]:
        return [await scores.score(PROMPT, ANSWER) for _ in range(times)]

    return asyncio.run(run())


def test_the_scorer_gets_the_decoded_answer(tmp_path: object) -> None:
    (got,) = score(scores_with(tmp_path, "    return float(solution_str == '#45')\n"), 1)
    assert got.reward == 1.0


def test_a_broken_scorer_stops_the_run_within_a_steps_worth_of_answers(
    tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    scores = scores_with(tmp_path, "    raise KeyError('nothing')\n", patience=8)
    assert all(one.error for one in score(scores, 7))
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(RewardError, match=r"scoring failed for 8 of 8 answers.*max_failure_share"),
    ):
        score(scores, 1)
    assert "Traceback" in caplog.text


def test_a_step_is_judged_by_all_its_answers_not_by_its_last_ones(tmp_path: object) -> None:
    count = "    compute_score.n = getattr(compute_score, 'n', 0) + 1\n"
    scores = scores_with(tmp_path, f"{count}    return 1 / (compute_score.n - 9)\n", patience=8)
    assert sum(bool(one.error) for one in score(scores, 10)) == 1
    scores.end_step()


def test_failures_below_the_limit_are_forgotten_at_the_next_check(tmp_path: object) -> None:
    count = "    compute_score.n = getattr(compute_score, 'n', 0) + 1\n"
    body = f"{count}    return 1 / (compute_score.n % 10)\n"
    scores = scores_with(tmp_path, body)
    for _ in range(5):
        assert sum(bool(one.error) for one in score(scores, 10)) == 1
        scores.end_step()
