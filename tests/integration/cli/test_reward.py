"""`winnow reward try`: one answer scored as a run would, everything shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.sandboxes import need_bubblewrap
from typer.testing import CliRunner, Result

from winnow.cli.main import app
from winnow.errors import ConfigError, DataError, RewardError, WinnowError

ROWS = [
    {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"What is {truth}?"}],
        "reward_model": {"ground_truth": truth},
        "extra_info": {"hint": truth},
    }
    for source, truth in (("gsm8k", "72"), ("math_dapo", "1000"), ("klingon", "Qapla"))
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def ask(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["reward", "try", *words], input=stdin)


def as_json(*words: str, stdin: str = "") -> dict[str, Any]:
    """What `--json` prints, but for the time that it took."""
    said = json.loads(ask(*words, "--json", stdin=stdin).stdout)
    assert isinstance(said, dict)
    assert said.pop("seconds") > 0
    return said


def shown(*words: str, stdin: str = "") -> dict[str, str]:
    result = ask(*words, stdin=stdin)
    assert result.exit_code == 0, result.output
    pairs = (line.split("  ", 1) for line in result.output.splitlines())
    return {label: value.lstrip() for label, value in pairs}


def test_the_row_the_scorer_and_the_truth_can_be_named(file: str) -> None:
    first = shown(file, "--answer", "So\n#### 72")
    assert first.pop("time").endswith(" s")
    assert first == {
        "scorer": "gsm8k (data source gsm8k)", "prompt": "What is 72?", "ground truth": "72",
        "answer": "So\\n#### 72", "reward": "1", "accuracy": "1", "part task": "1", "pred": "72",
    }  # fmt: skip
    assert as_json(file, "--row", "2", "--answer", "Answer: 1,000") == {
        "scorer": "dapo_math", "reward": 1, "accuracy": 1, "parts": {"task": 1},
        "extra": {"pred": "1000"}, "printed": "",
    }  # fmt: skip
    told = [file, "--row", "2", "--scorer", "gsm8k_flexible", "--answer", "It is 1,000."]
    assert as_json(*told)["reward"] == 1
    assert as_json(*told, "--truth", "7")["reward"] == 0
    said = as_json(file, "--source", "gsm8k", "--row", "3", "--answer", "#### Qapla")
    assert said["scorer"] == "gsm8k"


def test_without_a_file_the_truth_is_enough_and_the_answer_may_come_from_elsewhere() -> None:
    words = ["--truth", '{"target": 98, "numbers": [44, 19, 35]}', "--source", "countdown"]
    said = shown(*words, stdin="<answer>44 + 19 + 35</answer>\n")
    assert said["reward"] == "1"
    said = shown("--truth", "[sic]", "--scorer", "search_qa_em", "--answer", "<answer>sic</answer>")
    assert said["accuracy"] == "1"


@pytest.mark.parametrize(
    ("scorer", "answer", "truth", "reason"),
    [
        ("gsm8k", "It is 42", "42", "no answer was found: gsm8k reads the one number "
         "behind the last '####'"),
        ("gsm8k", "#### 41", "6 * 7\n#### 42", "read 41, expected 42"),
        ("gsm8k", "#### 42", "42", None),
        ("dapo_math", "It is 42", "42", "no answer was found: dapo_math reads the "
         "last line 'Answer: …' in the last 300 characters"),
        ("math", "It is 42", "42", "no answer was found: math reads the last "
         r"\boxed{} or the last line 'Answer: …'"),
        ("countdown", "<answer>1 + 1</answer>", '{"target": 3, "numbers": [1, 2]}',
         "read 1 + 1, expected {'target': 3, 'numbers': [1, 2]}"),
        ("think_boxed", "42", "42", "no answer was found: think_boxed reads "
         r"<think>…</think> and the last \boxed{}"),
    ],
)  # fmt: skip
def test_a_reason_is_given_where_an_answer_is_not_right(
    scorer: str, answer: str, truth: str, reason: str | None
) -> None:
    assert shown("--scorer", scorer, "--truth", truth, "--answer", answer).get("reason") == reason


def test_a_scorer_apart_is_asked_in_its_worker() -> None:
    said = as_json("--truth", "1/4", "--source", "MATH", "--answer", r"\boxed{0.25}")
    assert (said["scorer"], said["accuracy"]) == ("math_verify", 1)


OWN = """
import asyncio, os, time
print("loaded")
def judge(data_source, solution_str, ground_truth, extra_info):
    print("asked about", solution_str)
    value = 1 / inner(solution_str)
    return {"score": value, "acc": 0.5, "hint": extra_info["hint"], "pid": os.getpid()}
def inner(text):
    if text == "hang": time.sleep(600)
    if text == "end": os._exit(3)
    return len(text) - 4
def nothing(**row):
    print("asked about", row["solution_str"])
async def waits(data_source, solution_str, ground_truth, extra_info, factor=1):
    await asyncio.sleep(0)
    return factor * len(solution_str)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_ones_own_function_gets_the_row_and_what_it_gives_and_prints_is_shown(
    file: str, own: Path
) -> None:
    words = [file, "--row", "3", "--function", f"{own}:judge", "--answer", "abcde"]
    said = as_json(*words)
    assert said.pop("extra")["pid"] != os.getpid()
    assert said == {
        "scorer": "judge", "reward": 1, "accuracy": 0.5, "parts": {"task": 1},
        "printed": "loaded\nasked about abcde\n",
    }  # fmt: skip
    out = ask(*words).stdout
    assert "\nhint          Qapla\n" in out
    assert out.endswith("\n\nIt printed:\nloaded\nasked about abcde\n")
    here = as_json(*words, "reward.workers=0")
    assert here["printed"] == "loaded\nasked about abcde\n"
    assert here["extra"]["pid"] == os.getpid()


def test_settings_of_a_run_hold(file: str, own: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    function = f"{{path: {own}, name: waits, kwargs: {{factor: 2}}}}"
    recipe.write_text(f"reward: {{workers: 0, function: {function}}}")
    assert as_json(file, "--answer", "abc", "--recipe", str(recipe))["reward"] == 6
    words = [file, "--answer", "abc", "--recipe", str(recipe), "reward.function.kwargs.factor=3"]
    assert as_json(*words)["reward"] == 9
    # A row of the data, though its name has an equals sign.
    odd = tmp_path / "a=b.jsonl"
    odd.write_text(Path(file).read_text())
    assert as_json(str(odd), *words[1:])["reward"] == 9


def test_parts_beside_the_rules_are_shown() -> None:
    words = ["--truth", "1", "--scorer", "gsm8k", "--answer", "#### 1", "--recipe", "quickstart"]
    # 64 tokens at most: from 44 on the penalty falls to -1.
    said = as_json(*words, "--tokens", "54")
    assert (said["reward"], said["accuracy"]) == (0.5, 1)
    assert said["parts"] == {"task": 1, "overlong": -0.5}
    assert shown(*words, "--tokens", "64")["part overlong"] == "-1"
    result = ask(*words)
    assert str(result.exception).startswith(
        "reward.overlong.enabled=true needs the answer's length"
    )


@pytest.mark.parametrize(
    ("answer", "line", "trace"),
    [
        ("boom", "ZeroDivisionError: division by zero at OWN:6", "in judge\n    value = 1 /"),
        ("hang", "no score within reward.timeout_s=3", "Output of the process:\nloaded\nasked"),
        ("end", "the scorer's process ended with exit code 3", "asked about end"),
    ],
)
def test_of_a_function_that_fails_everything_is_told(
    answer: str, line: str, trace: str, file: str, own: Path
) -> None:
    words = [file, "--function", f"{own}:judge", "--answer", answer, "reward.timeout_s=3"]
    result = ask(*words)
    assert isinstance(result.exception, RewardError)
    said = line.replace("OWN", str(own))
    assert str(result.exception) == f"scoring this answer failed: {said}; fix the scorer or the row"
    assert "\nreward        -1 (scoring failed: a run drops the group" in result.stdout
    assert f"It printed:\nloaded\nasked about {answer}\n" in result.stdout
    assert trace in result.stderr
    assert "winnow/rewards" not in result.stderr  # a user's traceback is of the user's code
    if answer == "boom":
        data = json.loads(ask(*words, "reward.workers=0", "--json").stdout)
        assert (data["error"], data["reward"]) == (said, -1)
        assert "Traceback" in data["traceback"]


def test_a_function_that_returns_none_is_one_line(file: str, own: Path) -> None:
    result = ask(file, "--function", f"{own}:nothing", "--answer", "x", "reward.workers=0")
    assert str(result.exception) == (
        "scoring this answer failed: TypeError: score must be a number, got NoneType; return a "
        "float, or a dict with the key score; fix the scorer or the row"
    )
    assert result.stderr == ""


def test_code_runs_in_the_sandbox_and_the_failing_case_is_told() -> None:
    need_bubblewrap()
    truth = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
    words = ["--source", "taco", "--truth", truth]
    said = shown(*words, "--answer", "```python\nprint(sum(map(int, input().split())))\n```")
    assert said["sandbox"].startswith("bubblewrap, ")
    assert (said["reward"], said["pred"], "detail" in said) == ("1", "pass", False)
    said = shown(*words, "--answer", "print(3)", "reward.sandbox.credit=share")
    assert (said["reward"], said["pred"]) == ("0.5", "wrong")
    assert said["detail"] == "case 2: printed '3', expected '7'"
    said = shown(*words, "--answer", "1 / 0")
    assert said["detail"] == "case 1: ZeroDivisionError: division by zero"
    asserts = ["--source", "mbpp", "--truth", json.dumps({"assert_case": ["assert f(1) == 2"]})]
    said = shown(*asserts, "--answer", "def f(x): return x")
    assert said["detail"] == "AssertionError in assert f(1) == 2"
    said = shown(*asserts, "--answer", "def f(x): return {}[x]")
    assert said["detail"] == "KeyError: 1 in assert f(1) == 2"
    result = ask(*words, "--answer", "1", "reward.sandbox.python=/nowhere")
    assert str(result.exception).startswith("no program can be run: reward.sandbox.python is /now")


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["FILE", "--row", "4"], DataError, "--row must be 1 to 3 for FILE, got 4"),
        (["FILE", "--row", "0"], DataError, "--row must be 1 to 3 for FILE, got 0"),
        (["--row", "2", "--truth", "1"], DataError, "--row 2 needs a data file; add"),
        (["--truth", "1"], DataError, "no ground truth; pass FILE and --row, or"),
        (["--source", "gsm8k"], DataError, "no ground truth; pass FILE and"),
        (
            ["FILE", "--scorer", "a", "--function", "b"],
            RewardError,
            "--scorer a and --function b exclude",
        ),
        (
            ["FILE", "--function", "OWN", "reward/manager=custom", "reward.manager.path=a:B"],
            RewardError,
            "--function OWN conflicts with reward/manager=custom; drop --function",
        ),
        (
            ["FILE", "--scorer", "gsm8k", "reward/manager=remote", "reward.manager.url=http://a"],
            RewardError,
            "--scorer gsm8k conflicts with reward/manager=remote; drop --scorer",
        ),
        (["FILE", "--row", "3"], RewardError, "data_source klingon has no scorer; name one of "),
        (["FILE", "--scorer", "magic"], RewardError, "reward.scorers.* is magic, which is no"),
        (["none.jsonl"], DataError, "none.jsonl: no such file; check the path"),
        (["FILE", "b.jsonl"], DataError, "got 2 files, FILE and b.jsonl; pass one"),
        (["FILE", "reward.timeout=3"], ConfigError, "reward.timeout is not a known key"),
        (
            ["FILE", "--function", "OWN"],
            RewardError,
            "reward.function.path OWN has no callable "
            "compute_score; give one of judge, inner, nothing, waits",
        ),
    ],
)
def test_what_cannot_be_scored_is_told_in_one_line(
    words: list[str], kind: type[WinnowError], message: str, file: str, own: Path
) -> None:
    names = {"FILE": file, "OWN": str(own)}
    result = ask(*(names.get(word, word) for word in words), "--answer", "x")
    assert isinstance(result.exception, kind)
    assert result.exception.exit_code == 2
    said = str(result.exception).replace(file, "FILE").replace(str(own), "OWN")
    assert said.startswith(message)
    assert "\n" not in said


def test_a_long_answer_shows_its_two_ends() -> None:
    said = shown("--truth", "5", "--scorer", "gsm8k", "--answer", "a" * 5_000 + "\n#### 5")
    text = said["answer"]
    assert len(text) < 400
    assert text.startswith("aaa")
    assert text.endswith("\\n#### 5")


GUESS = """
from winnow.environments import Step

class Guess:
    def reset(self, row):
        return "Guess."

    def step(self, turn):
        right = turn.text == "72"
        return Step("no", 1.0 if right else -0.25, right, {"success": float(right)})
"""


def test_a_conversation_is_replayed_through_the_environment(file: str, tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(GUESS)
    custom = "environment=custom", f"environment.path={tmp_path / 'guess.py'}:Guess"
    turns = ["70", "<tool_call>72", "72", "behind the end"]
    answer = json.dumps(
        [{"role": role, "content": t} for t in turns for role in ("assistant", "user")]
    )
    said = as_json(file, *custom, "reward/manager=environment", "--answer", answer)
    assert [turn["reward"] for turn in said["turns"]] == [-0.25, -0.25, 1.0]
    assert [turn["malformed"] for turn in said["turns"]] == [0, 1, 0]
    assert (said["reward"], said["accuracy"], said["parts"]) == (0.5, 1.0, {"environment": 0.5})
    both = shown(file, *custom, "--answer", answer)
    assert both["turn 1"] == "reward -0.25, calls 0, malformed 0, success 0"
    assert (both["answer"], both["part environment"]) == ("72", "0.5")
    assert shown(file, "--answer", answer)["answer"] == "behind the end"
