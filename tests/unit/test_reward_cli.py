"""`winnow reward try`: one answer scored as a run would, everything shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from winnow.cli import app
from winnow.errors import DataError, RewardError, WinnowError

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


def shown(*words: str, stdin: str = "") -> dict[str, str]:
    result = ask(*words, stdin=stdin)
    assert result.exit_code == 0, result.output
    pairs = (line.split("  ", 1) for line in result.output.splitlines())
    return {label: value.lstrip() for label, value in pairs}


def test_a_row_is_scored_by_its_source_and_every_part_is_shown(file: str) -> None:
    assert shown(file, "--answer", "So\n#### 72") == {
        "scorer": "gsm8k (data source gsm8k)",
        "prompt": "What is 72?",
        "ground truth": "72",
        "answer": "So\\n#### 72",
        "reward": "1",
        "accuracy": "1",
        "part task": "1",
        "pred": "72",
    }


def test_the_row_the_scorer_and_the_truth_can_be_named(file: str) -> None:
    result = ask(file, "--row", "2", "--answer", "Answer: 1,000", "--json")
    assert json.loads(result.output) == {
        "scorer": "dapo_math", "reward": 1, "accuracy": 1, "parts": {"task": 1},
        "extra": {"pred": "1000"},
    }  # fmt: skip
    told = ["--answer", "It is 1,000.", "--json"]
    result = ask(file, "--row", "2", "--scorer", "gsm8k_flexible", *told)
    assert json.loads(result.output)["reward"] == 1
    result = ask(file, "--row", "2", "--scorer", "gsm8k_flexible", "--truth", "7", *told)
    assert json.loads(result.output)["reward"] == 0
    result = ask(file, "--source", "gsm8k", "--row", "3", "--answer", "#### Qapla", "--json")
    assert json.loads(result.output)["scorer"] == "gsm8k"


def test_without_a_file_the_truth_is_enough_and_the_answer_may_come_from_elsewhere() -> None:
    words = ["--truth", '{"target": 98, "numbers": [44, 19, 35]}', "--source", "countdown"]
    said = shown(*words, stdin="<answer>44 + 19 + 35</answer>\n")
    assert said["reward"] == "1"
    said = shown("--truth", "[sic]", "--scorer", "search_qa_em", "--answer", "<answer>sic</answer>")
    assert said["accuracy"] == "1"


def test_a_scorer_apart_is_asked_in_its_worker() -> None:
    result = ask("--truth", "1/4", "--source", "MATH", "--answer", r"\boxed{0.25}", "--json")
    assert json.loads(result.output)["scorer"] == "math_verify"
    assert json.loads(result.output)["accuracy"] == 1


def test_ones_own_function_gets_the_row_and_what_it_gives_is_shown(
    file: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'boom': return 1 / 0\n"
        "    return {'score': len(solution_str), 'acc': 0.5, 'hint': extra_info['hint']}\n"
    )
    result = ask(file, "--row", "3", "--function", f"{own}:judge", "--answer", "abc", "--json")
    assert json.loads(result.output) == {
        "scorer": "judge", "reward": 3, "accuracy": 0.5, "parts": {"task": 3},
        "extra": {"hint": "Qapla"},
    }  # fmt: skip
    result = ask(file, "--function", f"{own}:judge", "--answer", "boom")
    assert isinstance(result.exception, RewardError)
    assert str(result.exception) == (
        f"judge failed at this answer: ZeroDivisionError: division by zero at {own}:2; mend it, or "
        "the row"
    )
    assert "Traceback" in result.stderr
    result = ask(file, "--function", str(own), "--answer", "abc")
    assert "own.py has no function compute_score; it has judge" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["FILE", "--row", "4"], DataError, "--row is 4, but FILE has rows 1 to 3; choose one"),
        (["FILE", "--row", "0"], DataError, "--row is 0, but FILE has rows 1 to 3; choose one"),
        (["--row", "2", "--truth", "1"], DataError, "--row is 2, but there is no FILE; name the"),
        (["--truth", "1"], DataError, "there is nothing to compare with; give FILE and --row, or"),
        (["--source", "gsm8k"], DataError, "there is nothing to compare with; give FILE and"),
        (["FILE", "--scorer", "a", "--function", "b"], RewardError, "--scorer is a and --functi"),
        (["FILE", "--row", "3"], RewardError, "data_source klingon has no scorer; name one of "),
        (["FILE", "--scorer", "magic"], RewardError, "reward.scorers.* is magic, which is no"),
        (["none.jsonl"], DataError, "none.jsonl: no such file; check the path"),
    ],
)
def test_what_cannot_be_scored_is_told_in_one_line(
    words: list[str], kind: type[WinnowError], message: str, file: str
) -> None:
    result = ask(*(file if word == "FILE" else word for word in words), "--answer", "x")
    assert isinstance(result.exception, kind)
    assert result.exception.exit_code == 2
    said = str(result.exception).replace(file, "FILE")
    assert said.startswith(message)
    assert "\n" not in said


def test_a_long_answer_shows_its_two_ends() -> None:
    said = shown("--truth", "5", "--scorer", "gsm8k", "--answer", "a" * 5_000 + "#### 5")
    text = said["answer"]
    assert len(text) < 400
    assert text.startswith("aaa")
    assert text.endswith("#### 5")
