"""Scores end to end: shaping, failures, the metrics that a filter asks for, and when they come."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import children
from tests.scoring import LIMIT, PROMPT, SIGNATURE, UserRewards, answer, rewards_of

from winnow.builders.run import ASYNC_SCORE_LAG_TICKS, choose_score_lag_ticks
from winnow.config.load import load_recipe
from winnow.config.reward import (
    CustomManager,
    OverlongConfig,
    PartConfig,
    RewardConfig,
    UserFunction,
)
from winnow.errors import RewardError
from winnow.rewards.rewards import Rewards
from winnow.types import Prompt, Score


def ask(
    service: Rewards, text: str = "#1359", length: int = 10, training: bool = True,
    prompt: Prompt = PROMPT,
) -> Score:  # fmt: skip
    return asyncio.run(service.score(prompt, answer(length), text, training))


def test_a_failed_scoring_is_marked_and_counts_as_wrong(
    tmp_path: Path, user_service: UserRewards
) -> None:
    score = ask(user_service("import json; return json.loads('{')", workers=0))
    assert score.error == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 "
        f"(char 1) at {tmp_path / 'reward.py'}:2"
    )
    assert (score.reward, score.accuracy, score.parts) == (-1.0, 0.0, {"task": -1.0})
    assert not score.outside
    service = user_service("return None", workers=1)
    assert ask(service).error.startswith("TypeError: score must be a number, got NoneType; return")
    # What is wrong with a value that was returned has no place in the user's file.
    assert "Traceback (most recent" not in service.failure_report.first_traceback


def test_a_built_in_scorer_that_fails_gives_its_own_wrong_reward() -> None:
    prompt = Prompt("a:1", np.array([1]), "a", "gsm8k", "2")
    service = rewards_of(RewardConfig(), LIMIT)
    broken: Any = object()
    score = asyncio.run(service.score(prompt, answer(1), broken, True))
    assert (score.reward, score.accuracy) == (0.0, 0.0)
    assert score.error.startswith("AttributeError: ")


def test_cancelling_is_no_failure_of_the_scorer(user_service: UserRewards) -> None:
    text = f"import asyncio\nasync def compute_score({SIGNATURE}):\n    await asyncio.sleep(99)\n"
    service = user_service(text, workers=0)

    async def given_up() -> None:
        task = asyncio.ensure_future(service.score(PROMPT, answer(1), "x", True))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(given_up())
    assert service.failure_report.count == 0


def test_a_part_that_is_unknown_leaves_no_worker(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"def compute_score({SIGNATURE}):\n    return 1\n")
    before = children()
    parts = {"x": PartConfig(scorer="klingon")}
    with pytest.raises(
        RewardError, match=r"^reward\.parts\.x\.scorer is klingon, which is not a sc"
    ):
        rewards_of(
            RewardConfig(function=UserFunction(path=str(file)), parts=parts, workers=1), LIMIT
        )
    assert children() == before


def test_too_many_failures_stop_the_run_with_the_first(
    tmp_path: Path, user_service: UserRewards
) -> None:
    service = user_service("return int(solution_str[1:] or solution_str)")
    service.end_step()
    for text in ("x", "x", "x", *["x1"] * 12):
        ask(service, text)
    service.end_step()  # 3 of 15 are 20 %
    for text in ("x", "x", "x", *["x1"] * 11):
        ask(service, text)
    with pytest.raises(RewardError) as caught:
        service.end_step()
    assert str(caught.value) == (
        "scoring failed for 3 of 14 answers (21%), reward.max_failure_share is 0.2; the first "
        "failure: ValueError: invalid literal for int() with base 10: 'x' at "
        f"{tmp_path}/reward.py:2 (prompt sort_digits:5391); fix the scorer (its traceback is in "
        "the log)"
    )
    assert service.failure_report.count == 0
    service.end_step()


def test_the_metrics_of_built_in_scorers_are_known_before_training() -> None:
    common = {"accuracy", "reward", "task_reward", "task"}
    assert rewards_of(RewardConfig(), LIMIT).supported_metrics(["gsm8k"]) == common
    shaped = RewardConfig(overlong=OverlongConfig(enabled=True, buffer_tokens=48))
    service = rewards_of(shaped, LIMIT)
    known = service.supported_metrics(["sort_digits"])
    assert known == common | {"overlong"}
    assert all(np.isfinite(ask(service).metric(name)) for name in known)


def test_a_metric_of_a_users_function_is_checked_when_it_runs(user_service: UserRewards) -> None:
    service = user_service("return {'score': 1, 'pred': 'x', 'format': float(solution_str)}")
    service.require_metric("style", ["gsm8k"])
    assert ask(service, "0.5", training=False).error == ""
    with pytest.raises(RewardError) as caught:
        ask(service, "0.5")
    assert str(caught.value) == (
        "sampling.filter.metric is style, but the score has no such number; it has accuracy, "
        "reward, task, task_reward, format"
    )
    service.require_metric("pred", ["gsm8k"])
    with pytest.raises(
        RewardError, match=r"^sampling.filter.metric is pred, but the score has 'x'; "
    ):
        ask(service, "0.5")


NEIGHBOURLY = f"""
from neighbour_of_rewards import length

def compute_score({SIGNATURE}):
    return length(solution_str)

class Own:
    def __init__(self, config): ...
    def score(self, prompt, text):
        return length(text)
"""


@pytest.mark.parametrize("how", ["here", "in a worker", "class"])
def test_a_users_file_imports_its_neighbour(how: str, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("def length(text):\n    return len(text)\n")
    file = tmp_path / "reward.py"
    file.write_text(NEIGHBOURLY)
    function = UserFunction(path=str(file))
    config = {
        "here": RewardConfig(function=function, workers=0),
        "in a worker": RewardConfig(function=function, workers=1),
        "class": RewardConfig(manager=CustomManager(path=f"{file}:Own")),
    }[how]
    with contextlib.closing(rewards_of(config)) as rewards:
        score = ask(rewards, "abc")
    assert (score.reward, score.error) == (3.0, "")


@pytest.mark.parametrize(
    ("kind", "settings", "wanted"),
    [
        ("", "", 0),
        ("", "reward.workers=1", ASYNC_SCORE_LAG_TICKS),
        ("", "sampling.score_lag_ticks=3", 3),
        ("", "sampling.score_lag_ticks=0 reward.workers=1", 0),
        ("", "run.deterministic=false reward.workers=1", 0),
        ("def", "reward.workers=0", 0),
        ("async def", "reward.workers=0", ASYNC_SCORE_LAG_TICKS),
        ("def", "", ASYNC_SCORE_LAG_TICKS),
    ],
)
def test_scores_are_seen_later_if_scorers_run_beside_the_engine_unless_the_recipe_says(
    kind: str, settings: str, wanted: int, tmp_path: Path
) -> None:
    overrides = settings.split()
    if kind:
        file = tmp_path / "reward.py"
        file.write_text(f"{kind} compute_score(**_):\n    return 1.0\n")
        overrides.append(f"reward.function.path={file}")
    config = load_recipe("quickstart", overrides)
    with contextlib.closing(rewards_of(config.reward, 16)) as rewards:
        lag, deterministic = config.sampling.score_lag_ticks, config.run.deterministic
        assert choose_score_lag_ticks(lag, deterministic, rewards, {"sort_digits"}) == wanted
