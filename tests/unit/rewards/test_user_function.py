"""A user's file with `compute_score`: loading it, calling it, reading what it returns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.config.reward import RewardConfig, UserFunction
from winnow.errors import RewardError
from winnow.rewards.managers import make_manager
from winnow.rewards.task import Failure, UserScorer, parse_result, score_by_call
from winnow.types import Prompt, Score

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


ROW = {"prompt": "1+1=", "answer": "2", "extra_info": {"index": 3}}
TALK = {**ROW, "prompt": [{"role": "user", "content": "1+1="}]}


@pytest.mark.parametrize(
    ("parameters", "row", "passed"),
    [
        ("solution_str", ROW, ("text",)),
        ("ground_truth, solution_str", ROW, ("gold", "text")),
        ("response, extra", ROW, ("text", ROW)),
        ("completions", ROW, (["text"],)),
        ("completions, prompts, answer", ROW, (["text"], ["1+1="], ["2"])),
        ("prompts, completions", TALK,
         ([TALK["prompt"]], [[{"role": "assistant", "content": "text"}]])),
        ("completions, data_source, ground_truth", ROW, (["text"], ["src"], ["gold"])),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_parameters_tell_the_signature_of_verl_of_scorers_and_of_trl(
    kind: str, parameters: str, row: dict[str, Any], passed: tuple[Any, ...], tmp_path: Path
) -> None:
    result = "[0.5]" if "completions" in parameters else "0.5"
    code = f"SEEN = []\n{kind} f({parameters}):\n    SEEN.append(({parameters},))\n"
    user = scorer(tmp_path, f"{code}    return {result}\n", name="f")
    assert scored(user, "src", "text", "gold", row).reward == 0.5
    assert user._function.__globals__["SEEN"] == [passed]


def test_a_function_of_trl_gets_all_columns_and_may_give_no_reward(tmp_path: Path) -> None:
    code = (
        "def f(completions, prompts, **columns):\n"
        "    assert list(columns) == ['data_source', 'ground_truth', 'answer', 'extra_info']\n"
        "    return [None if text == 'text' else 1 for text in completions]\n"
    )
    user = scorer(tmp_path, code, name="f")
    row = ROW | {"completions": "the row's"}  # of a column of that name the answers come first
    none, one = scored(user, "s", "text", "g", row), scored(user, "s", "other", "g", row)
    assert (none.reward, none.parts, none.has_accuracy) == (0.0, {}, False)
    assert (one.reward, one.parts, one.accuracy) == (1.0, {"task": 1.0}, 1.0)


@pytest.mark.parametrize(
    ("content", "passed"), [("1+1=", "1+1="), ([{"type": "image"}], "<user><image>")]
)
def test_a_prompt_reaches_a_function_of_trl_as_text(
    content: Any, passed: str, tmp_path: Path
) -> None:
    scorer(tmp_path, "def f(completions, prompts): return [len(prompts[0])]\n", name="f")
    function = UserFunction(path=str(tmp_path / "reward.py"), name="f")
    messages = ({"role": "user", "content": content},)
    prompt = Prompt("1", np.arange(2), "<user><image>", "s", None, {}, messages)
    manager = make_manager(RewardConfig(function=function, workers=0))
    score = asyncio.run(manager.score(prompt, "2"))
    assert isinstance(score, Score)
    assert score.reward == len(passed)


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ("0.5", "TypeError: the function must return a list of scores, got float"),
        ("[1, 2]", "ValueError: the function returned 2 scores for 1 answers"),
        ("[None, solution]", "TypeError: f() missing 1 required positional argument: 'solution'"),
    ],
)
def test_a_function_of_trl_with_another_result_or_column_fails(
    result: str, line: str, tmp_path: Path
) -> None:
    parameters = "completions, solution" if "solution" in result else "completions"
    user = scorer(tmp_path, f"def f({parameters}):\n    return {result}\n", name="f")
    failed = asyncio.run(score_by_call(user, [("s", "t", "g", ROW)]))
    assert isinstance(failed, Failure)
    assert failed.line.startswith(line)


def test_a_score_of_a_scorers_signature_is_taken_as_it_is(tmp_path: Path) -> None:
    code = (
        "from winnow.types import Score\n"
        "def f(response):\n    return Score(0.25, 1.0, extra={'pred': response})\n"
    )
    score = scored(scorer(tmp_path, code, name="f"), "s", "t", "g", ROW)
    assert (score.parts, score.accuracy, score.extra) == ({"task": 0.25}, 1.0, {"pred": "t"})


def test_a_function_that_takes_no_answer_is_refused(tmp_path: Path) -> None:
    message = error_of(tmp_path, "def f(ground_truth): ...\n", name="f", field="reward.parts.x")
    assert message == (
        f"reward.parts.x.path {tmp_path}/reward.py: f(ground_truth) cannot be called with "
        f"{SIGNATURE} (it takes no solution_str); change its arguments, or reward.parts.x.kwargs"
    )
