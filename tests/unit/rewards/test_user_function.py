"""A user's file with `compute_score`: loading it, calling it, reading what it returns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.errors import RewardError
from winnow.rewards.task import Failure, UserScorer, parse_result, score_by_call
from winnow.types import Score

SIGNATURE = "data_source, solution_str, ground_truth, extra_info"


def scorer(folder: Path, code: str, **config: Any) -> UserScorer:
    file = folder / "reward.py"
    file.write_text(code)
    return UserScorer(str(file), **{"name": "compute_score", "kwargs": {}, **config})


def scored(user: UserScorer, *arguments: Any) -> Score:
    got = asyncio.run(score_by_call(user, [arguments]))
    assert not isinstance(got, Failure), got
    (score,) = got
    assert isinstance(score, Score)
    return score


def error_of(folder: Path, code: str, **config: Any) -> str:
    with pytest.raises(RewardError) as caught:
        scorer(folder, code, **config)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_is_called_as_verl_calls_it(kind: str, tmp_path: Path) -> None:
    code = f"{kind} compute_score({SIGNATURE}, **kwargs):\n    return dict(score=2, **locals())\n"
    extra = {"extra_info": {"index": 3}, "ability": "math"}
    user = scorer(tmp_path, code, kwargs={"strict": True})
    score = scored(user, "src", "text", "gold", extra)
    assert score.reward == 2.0
    assert score.extra == {
        "data_source": "src",
        "solution_str": "text",
        "ground_truth": "gold",
        "extra_info": {"index": 3},
        "kwargs": {"strict": True},
    }


def test_a_row_without_extra_info_gives_an_empty_one(tmp_path: Path) -> None:
    user = scorer(tmp_path, f"def f({SIGNATURE}):\n    return len(extra_info)\n", name="f")
    assert scored(user, "s", "t", "g", {}).reward == 0.0
    assert scored(user, "s", "t", "g", {"extra_info": None}).reward == 0.0


@pytest.mark.parametrize(
    ("result", "reward", "accuracy", "extra"),
    [
        (1.5, 1.5, 1.0, {}),
        (0, 0.0, 0.0, {}),
        (True, 1.0, 1.0, {}),
        (np.float32(0.5), 0.5, 1.0, {}),
        ({"score": 1.0}, 1.0, 1.0, {}),
        ({"score": -1.0, "acc": 0.25, "pred": "x", "format": 1}, -1.0, 0.25,
         {"pred": "x", "format": 1}),
        ({"score": 0.3, "acc": np.bool_(False)}, 0.3, 0.0, {}),
    ],
)  # fmt: skip
def test_a_number_or_a_dict_is_a_score(
    result: Any, reward: float, accuracy: float, extra: dict[str, Any]
) -> None:
    score = parse_result(result)
    assert (score.reward, score.accuracy, score.extra) == (reward, accuracy, extra)
    assert score.has_accuracy == (isinstance(result, dict) and "acc" in result)
    assert score.parts == {"task": reward}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "score must be a number, got NoneType; return a float, or a dict with the key "
         "score"),
        ("1", "score must be a number, got str; return a float, or a dict with the key score"),
        ({"acc": 1, "pred": 2}, "the dict returned has no key score, only acc, pred"),
        ({"score": 1, "acc": "yes"}, "acc must be a number, got str; return a float, or a dict "
         "with the key score"),
        ({"score": 1, "acc": 3}, "acc must lie in [0, 1], got 3"),
        ({"score": 1, "acc": float("nan")}, "acc must lie in [0, 1], got nan"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(result: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        parse_result(result)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "kwargs", "reason"),
    [
        ("a, b", {}, "missing a required argument: 'a'"),
        (SIGNATURE + ", more", {}, "missing a required argument: 'more'"),
        (SIGNATURE, {"k": 1}, "got an unexpected keyword argument 'k'"),
    ],
)
def test_a_function_with_other_arguments_is_refused(
    arguments: str, kwargs: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    message = error_of(tmp_path, f"def compute_score({arguments}): ...\n", kwargs=kwargs)
    assert message == (
        f"reward.function.path {tmp_path}/reward.py: compute_score({arguments}) cannot be called "
        f"with {', '.join([SIGNATURE, *kwargs])} ({reason}); change its arguments, or "
        "reward.function.kwargs"
    )
