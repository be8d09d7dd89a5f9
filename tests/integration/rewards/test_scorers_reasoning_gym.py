"""Tasks of reasoning-gym: the same problems in every process; they judge answers, and run none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from winnow.config.data import DataConfig, ReasoningGymTask
from winnow.data.loader import training_prompts
from winnow.data.reasoning_gym import UNSTABLE, ReasoningGymRows
from winnow.data.sort_digits import build_tokenizer
from winnow.data.sources import Row
from winnow.errors import DataError
from winnow.rewards.scorers import SCORERS
from winnow.rewards.scorers.reasoning_gym import EXPRESSIONS, LISTS, is_safe
from winnow.types import Score

NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks that judge answers and have none to show."""


def tasks() -> list[str]:
    """All tasks; to import the package takes a second, in each process that collects."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})


def rows(task: str, count: int) -> list[Row]:
    rows = ReasoningGymRows(ReasoningGymTask(task=task), 1)
    return [next(rows.candidates(index)) for index in range(count)]


@cache
def problems(task: str) -> list[Row]:
    """Three of a task; one of those that take seconds to set a few."""
    return rows(task, 1 if task in ("futoshiki", "knight_swap") else 3)


def score(row: Row, text: str) -> Score:
    return SCORERS["reasoning_gym"].score(row.data_source, text, row.ground_truth, row.extra)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_task_finds_its_own_answer_right_and_none_wrong(part: int) -> None:
    """Problems of each task, judged from what a row holds."""
    for task in tasks()[part::4]:
        for row in problems(task)[:2]:
            assert score(row, row.ground_truth).reward < 1, task
            if task in NO_ANSWER:
                assert row.ground_truth == ""
                continue
            found = score(row, f"<think>hm</think><answer>{row.ground_truth}</answer>")
            assert (found.reward, found.accuracy, found.extra["unreadable"]) == (1, 1, 0), task
            assert score(row, "<answer>\x00?!</answer>").accuracy == 0, task


def test_a_share_of_the_score_is_reward_and_no_accuracy() -> None:
    (row,) = rows("chain_sum", 1)
    near = score(row, f"<answer>{row.ground_truth} or so</answer>")
    assert 0 < near.reward < 1
    assert near.accuracy == 0
    assert near.parts == {"task": near.reward}
    assert score(row, f"It is {row.ground_truth}").reward == 0


def test_the_settings_of_a_task_come_with_the_row() -> None:
    task = ReasoningGymTask(task="chain_sum", options={"min_digits": 6, "max_digits": 6})
    row = next(ReasoningGymRows(task, 1).candidates(0))
    assert row.extra["extra_info"]["config"] == '{"min_digits": 6, "max_digits": 6}'
    assert score(row, f"<answer>{row.ground_truth}</answer>").accuracy == 1


def test_a_row_without_its_entry_is_a_failure_of_scoring() -> None:
    with pytest.raises(KeyError):
        SCORERS["reasoning_gym"].score("reasoning_gym/chain_sum", "x", "5", {"extra_info": {}})


@pytest.mark.parametrize("task", sorted(LISTS | EXPRESSIONS))
def test_an_answer_is_never_run(task: str, tmp_path: Path) -> None:
    (row,) = rows(task, 1)
    mark = tmp_path / "run"
    for code in (
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"open({str(mark)!r}, 'w')",
        f"[open({str(mark)!r}, 'w')]",
        f"open({str(mark)!r},'w').write('x') or 1 + 1",
        f"(lambda: open({str(mark)!r}, 'w'))()",
        f"[1, 2] + [].append(open({str(mark)!r}, 'w'))",
        "9**9**9**9",
        "[0] * 10**10",
    ):
        found = score(row, f"<answer>{code}</answer>")
        assert (found.reward, found.extra["unreadable"]) == (0, 1)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("task", "answer", "passes"),
    [
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", True),
        ("spiral_matrix", "[1, 2, -3.5]", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "print(1)", False),
        ("spiral_matrix", "f'{1}'", False),
        ("spiral_matrix", "[0]*9", False),
        ("countdown", "(1 + 2) * 3 / 4 - 0.5", True),
        ("simple_integration", "x**4/4 + 2*x**2 - sin(x)*exp(x) + C", True),
        ("intermediate_integration", "-2*Integral(x*sin(2*x), x) + C", False),
        ("simple_integration", "x**(3/2) + 2*x^2", True),
        ("simple_integration", "9**(999+0)", True),
        ("simple_integration", "9**(999+1)", False),
        ("simple_integration", "(9**99)**(99)", False),
        ("simple_integration", "9**(10**9)", False),
        ("n_queens", "entry['metadata']['solutions'][0]", False),
        ("string_insertion", "oracle_answer", False),
        ("string_insertion", "AABCD", True),
        ("puzzle24", "sqrt(4) * 6 * 2 * 1", False),
        ("polynomial_multiplication", "36*x**6 - 2*x**3*y**2", True),
        ("simple_integration", "x.__class__", False),
        ("simple_integration", "x.real", False),
        ("simple_integration", "open(x)", False),
        ("simple_integration", "'x'", False),
        ("simple_integration", "x[0]", False),
        ("simple_integration", "9**9**9", False),
        ("simple_integration", "9**(9)**9", False),
        ("simple_integration", "9**99999", False),
        ("simple_integration", "x" * 501, False),
        ("chain_sum", "__import__('os')", True),
    ],
)
def test_what_may_pass_holds_nothing_that_runs(task: str, answer: str, passes: bool) -> None:
    assert is_safe(task, answer) == passes


CONSTANTS = (
    *("0", "1", "-1", "24", "nan", "inf", "1e999", "0/1", "True", "no", "[]", "A", "x"),
    *("None", "possible", "entry['answer']", "oracle_answer", "6*4*1*1", "Integral(x, x)"),
    *("", "nan+nanj", "1+nanj", "n an + na ni", "-inf", "1e999+1e999i", "sNaN", "9" * 400),
)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_an_answer_that_never_changes_is_right_only_where_it_is_the_answer(part: int) -> None:
    """Problems of each task: `0` may stand for `0.0`, but nothing solves without a look, nor
    does NaN or infinity in place of each number."""
    for task in tasks()[part::4]:
        for answer in CONSTANTS:
            undeserved = []
            for row in problems(task):
                truth = str(row.ground_truth).strip().lower()
                found = score(row, f"<answer>{answer}</answer>")
                if answer.lower() != truth and truth not in ("", f"{answer}.0"):
                    assert found.accuracy == 0, (task, answer, truth)
                    undeserved.append(found.reward)
            assert sum(undeserved) < 0.6 * max(len(undeserved), 1), (task, answer)
        for row in problems(task):
            for hollow in (NUMBER.sub(word, row.ground_truth) for word in ("NaN", "Infinity")):
                if hollow != row.ground_truth:
                    assert score(row, f"<answer>{hollow}</answer>").accuracy == 0, (task, hollow)


def test_no_other_task_evaluates_answers() -> None:
    """A new version of the package may have more that do: look at each place."""
    import reasoning_gym

    folder = Path(reasoning_gym.__file__).parent
    calls = re.compile(r"(?<![\w.])(?:eval|exec)\(|parse_expr\(|sympify\(")
    found = {
        file.stem
        for file in folder.rglob("*.py")
        if "contrib" not in file.parts and calls.search(file.read_text(encoding="utf-8"))
    }
    # These evaluate what they made themselves, or read formulas with a parser of their own.
    harmless = {
        "basic_arithmetic", "bitwise_arithmetic", "codeio", "generators_00_49",
        "generators_50_99", "number_sorting", "propositional_logic",
    }  # fmt: skip
    assert found - harmless == LISTS | EXPRESSIONS


IN_ANOTHER = """
import sys
from winnow.config.data import ReasoningGymTask
from winnow.data.reasoning_gym import ReasoningGymRows
for name in sys.argv[1:]:
    rows = ReasoningGymRows(ReasoningGymTask(task=name), 3)
    print(*(next(rows.candidates(index)).uid for index in range(12)))
"""
STABLE = ["chain_sum", "group_anagrams", "family_relationships", "course_schedule", "sudoku",
          "word_sorting", "syllogism", "simple_equations", "prime_factorization"]  # fmt: skip


def in_another_process(*names: str) -> list[list[str]]:
    """Ids of rows, in a process whose sets have another order than this one's."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    words = [sys.executable, "-c", IN_ANOTHER, *names]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    said = subprocess.check_output(words, env=environment, text=True)
    return [line.split() for line in said.splitlines()]


def test_rows_are_the_same_in_every_process_or_the_task_is_refused() -> None:
    shaky = ["ransom_note", "isomorphic_strings"]
    there, here = in_another_process(*STABLE, *shaky), []
    for name in (*STABLE, *shaky):
        rows = ReasoningGymRows(ReasoningGymTask(task=name), 3)
        here.append([next(rows.candidates(index)).uid for index in range(12)])
    assert here[: len(STABLE)] == there[: len(STABLE)]
    assert all(a != b for a, b in zip(here[len(STABLE) :], there[len(STABLE) :], strict=True))
    assert set(shaky) <= UNSTABLE
    config = DataConfig(task=ReasoningGymTask(task="ransom_note"))
    with pytest.raises(DataError, match="`winnow data prepare reasoning_gym/ransom_note`"):
        training_prompts(config, build_tokenizer(), 0)
