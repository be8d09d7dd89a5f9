"""Scores end to end: shaping, failures and the metrics that a filter asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import children
from tests.scoring import LIMIT, PROMPT, SIGNATURE, UserRewards, answer, rewards_of

from winnow.config.reward import OverlongConfig, PartConfig, RewardConfig, UserFunction
from winnow.errors import RewardError
from winnow.rewards.pipeline import Rewards
from winnow.types import Prompt, Score


def ask(
    service: Rewards, text: str = "#1359", length: int = 10, training: bool = True,
    prompt: Prompt = PROMPT,
) -> Score:  # fmt: skip
    return asyncio.run(service.score(prompt, answer(length), text, training))


def test_an_answer_is_scored_by_its_source() -> None:
    service = rewards_of(RewardConfig(), LIMIT)
    right, wrong = ask(service), ask(service, "#1395")
    assert (right.reward, right.accuracy, right.parts) == (1.0, 1.0, {"task": 1.0})
    assert (wrong.reward, wrong.accuracy, wrong.parts) == (-1.0, 0.0, {"task": -1.0})
    assert right.error == wrong.error == ""


def test_length_is_shaped_in_training_only() -> None:
    shaped = RewardConfig(overlong=OverlongConfig(enabled=True, buffer_tokens=48))
    service = rewards_of(shaped, LIMIT)
    assert ask(service, length=104).parts == {"task": 1.0, "overlong": -0.5}
    assert ask(service, length=104).reward == 0.5
    assert ask(service, length=104).metric("task_reward") == 1.0
    assert ask(service, length=80).parts == {"task": 1.0, "overlong": 0.0}
    assert ask(service, "#1", length=128).reward == -2.0
    evaluated = ask(service, length=128, training=False)
    assert (evaluated.reward, evaluated.parts) == (1.0, {"task": 1.0})


def test_a_users_function_scores_every_source(user_service: UserRewards) -> None:
    service = user_service("return {'score': 3, 'acc': 1, 'seen': data_source}")
    service.check_sources(["whatever", "gsm8k"])
    score = ask(service, prompt=Prompt("a:1", np.array([1]), "a", "whatever", "x"))
    assert (score.reward, score.accuracy, score.extra) == (3.0, 1.0, {"seen": "whatever"})


def test_an_unknown_source_is_refused_before_training() -> None:
    with pytest.raises(RewardError, match=r"^data_source klingon has no scorer; name one of "):
        rewards_of(RewardConfig(), LIMIT).check_sources({"gsm8k", "klingon"})


FAILURES = [
    ("raise KeyError('x')", "KeyError: 'x' at {file}:2"),
    ("raise ValueError('two\\nlines')", "ValueError: two lines at {file}:2"),
    ("return 1 / 0", "ZeroDivisionError: division by zero at {file}:2"),
    ("import json; return json.loads('{')", "JSONDecodeError: Expecting property name enclosed in "
     "double quotes: line 1 column 2 (char 1) at {file}:2"),
    ("raise SystemExit", "SystemExit at {file}:2"),
    ("return float('nan')", "ValueError: the scorer returned nan as reward"),
    ("return float('inf')", "ValueError: the scorer returned inf as reward"),
    ("return None", "TypeError: score must be a number, got NoneType; return a float, or a dict "
     "with the key score"),
    ("return {'acc': 1}", "ValueError: the dict returned has no key score, only acc"),
]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("body", "error"), FAILURES)
def test_a_failed_scoring_is_marked_and_counts_as_wrong(
    body: str, error: str, workers: int, tmp_path: Path, user_service: UserRewards
) -> None:
    service = user_service(body, workers=workers)
    score = ask(service)
    assert score.error == error.format(file=tmp_path / "reward.py")
    assert (score.reward, score.accuracy, score.parts) == (-1.0, 0.0, {"task": -1.0})
    assert not score.outside
    assert service.failure_report.count == 1
    assert service.failure_report.first_error == f"{score.error} (prompt sort_digits:5391)"
    assert "Traceback (most recent call last)" in service.failure_report.first_traceback


def test_a_built_in_scorer_that_fails_gives_its_own_wrong_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = Prompt("a:1", np.array([1]), "a", "gsm8k", "2")
    service = rewards_of(RewardConfig(), LIMIT)
    broken: Any = object()
    score = asyncio.run(service.score(prompt, answer(1), broken, True))
    assert (score.reward, score.accuracy) == (0.0, 0.0)
    assert score.error.startswith("AttributeError: ")


def test_a_failed_scoring_is_fatal_where_the_recipe_says_so(
    tmp_path: Path, user_service: UserRewards
) -> None:
    service = user_service("raise KeyError('x')", on_failure="fatal")
    with pytest.raises(RewardError) as caught:
        ask(service)
    assert str(caught.value) == (
        "scoring an answer to prompt sort_digits:5391 failed and reward.on_failure is fatal: "
        f"KeyError: 'x' at {tmp_path}/reward.py:2; mend the scorer, or set reward.on_failure to "
        "wrong"
    )


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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_cancellation_of_the_scorers_own_is_its_failure(
    kind: str, workers: int, user_service: UserRewards
) -> None:
    body = "raise asyncio.CancelledError('theirs')"
    text = f"import asyncio\n{kind}def compute_score({SIGNATURE}):\n    {body}\n"
    assert ask(user_service(text, workers=workers)).error.startswith("CancelledError: theirs at ")


def test_a_part_that_is_unknown_leaves_no_worker(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"def compute_score({SIGNATURE}):\n    return 1\n")
    before = children()
    parts = {"x": PartConfig(scorer="klingon")}
    with pytest.raises(RewardError, match=r"^reward\.parts\.x\.scorer is klingon, which is no sc"):
        rewards_of(
            RewardConfig(function=UserFunction(path=str(file)), parts=parts, workers=1), LIMIT
        )
    assert children() == before


def test_what_fails_to_close_leaves_the_rest_to_be_closed() -> None:
    service = rewards_of(RewardConfig(), LIMIT)
    closed = []

    class Broken:
        def close(self) -> None:
            raise OSError("no")

    class Other:
        def close(self) -> None:
            closed.append(self)

    own: Any = service._pipeline
    own._manager, own._rules, own._judge = Broken(), Other(), Other()
    with pytest.raises(OSError, match="no"):
        service.close()
    assert closed == [own._rules, own._judge]


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
        f"{tmp_path}/reward.py:2 (prompt sort_digits:5391); mend the scorer (its traceback is in "
        "the log)"
    )
    assert service.failure_report.count == 0
    service.end_step()


COMMON = {"accuracy", "reward", "task_reward", "task"}


def test_the_metrics_of_built_in_scorers_are_known_before_training(
    user_service: UserRewards,
) -> None:
    assert rewards_of(RewardConfig(), LIMIT).known_metrics(["gsm8k"]) == COMMON
    shaped = RewardConfig(overlong=OverlongConfig(enabled=True))
    assert rewards_of(shaped, LIMIT).known_metrics(["gsm8k"]) == COMMON | {"overlong"}
    assert user_service("return 1").known_metrics(["gsm8k"]) is None


def test_every_known_metric_is_in_a_training_score() -> None:
    shaped = RewardConfig(overlong=OverlongConfig(enabled=True, buffer_tokens=48))
    service = rewards_of(shaped, LIMIT)
    known = service.known_metrics(["sort_digits"])
    assert known is not None
    assert all(np.isfinite(ask(service).metric(name)) for name in known)


def test_a_metric_that_no_scorer_gives_is_refused_before_training() -> None:
    with pytest.raises(RewardError) as caught:
        rewards_of(RewardConfig(), LIMIT).require_metric("format", ["gsm8k", "sort_digits"])
    assert str(caught.value) == (
        "sampling.filter.metric is format, which no scorer of these data sources gives; there are "
        "accuracy, reward, task, task_reward"
    )


def test_a_metric_of_a_users_function_is_checked_when_it_runs(user_service: UserRewards) -> None:
    body = "return {'score': 1, 'pred': 'x', 'format': float(solution_str)}"
    service = user_service(body)
    service.require_metric("format", ["gsm8k"])
    assert ask(service, "0.5").metric("format") == 0.5
    failed = ask(service, "not a number")
    assert (failed.error != "", failed.metric("format")) == (True, 0.0)

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
