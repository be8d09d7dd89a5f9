"""Problems of reasoning-gym as training data: the same each time, held out, found again."""

from __future__ import annotations

import re
import sys

import pytest

from winnow.config.data import ReasoningGymTask
from winnow.data import reasoning_gym
from winnow.data.reasoning_gym import ReasoningGymRows
from winnow.data.sources import Row
from winnow.errors import DataError

SUM = ReasoningGymTask(task="chain_sum", options={"max_terms": 3}, eval_problems=20)
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
FEW = ReasoningGymTask(task="chain_sum", options=ONE_DIGIT, eval_problems=10)
"""A few hundred problems, all of which come round."""


def uids(task: ReasoningGymTask, seed: int, count: int) -> list[str]:
    stream = ReasoningGymRows(task, seed)
    return [next(stream.candidates(i)).uid for i in range(count)]


def training_rows(task: ReasoningGymTask, count: int) -> list[Row]:
    rows = ReasoningGymRows(task, 0)
    return [next(rows.candidates(i)) for i in range(count)]


def test_a_row_depends_on_its_index_and_seed_alone() -> None:
    first = uids(SUM, 1, 30)
    stream = ReasoningGymRows(SUM, 1)
    assert [next(stream.candidates(i)).uid for i in reversed(range(30))] == first[::-1]
    assert uids(SUM, 2, 30) != first
    assert len(set(first)) == 30
    far = [next(stream.candidates(i)).messages[0]["content"] for i in (0, 500, 1_000, 10**9)]
    assert len(set(far)) == 4


def test_the_question_says_where_the_answer_goes_and_options_count() -> None:
    row = next(ReasoningGymRows(SUM, 0).candidates(0))
    text = row.messages[0]["content"]
    assert row.data_source == "reasoning_gym/chain_sum"
    assert text.endswith("give the final answer alone between <answer> and </answer>.")
    for row in training_rows(SUM, 20):
        terms = re.findall(r"([-+]?) ?(\d+)", row.messages[0]["content"].partition("=")[0])
        assert 2 <= len(terms) <= 3
        assert sum(int(sign + number) for sign, number in terms) == int(row.ground_truth)


def test_held_out_problems_are_different_and_never_trained_on() -> None:
    held = ReasoningGymRows(SUM, 0).held_out()
    asked = {row.messages[0]["content"] for row in held}
    assert len(held) == len(asked) == 20
    assert [row.uid for row in held] == [row.uid for row in ReasoningGymRows(SUM, 0).held_out()]
    held_small = {row.messages[0]["content"] for row in ReasoningGymRows(FEW, 0).held_out()}
    trained = {row.messages[0]["content"] for row in training_rows(FEW, 1_500)}
    assert len(trained) > 100
    assert not held_small & trained


def test_more_held_out_problems_than_there_are_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        ReasoningGymRows(FEW.model_copy(update={"eval_problems": 100}), 0).held_out()
    assert str(caught.value).startswith(
        "data.task.eval_problems is 100, but chain_sum gives only about "
    )


def test_a_task_whose_problems_are_all_held_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "is_held_out", lambda entry: True)
    with pytest.raises(DataError, match="chain_sum gives too few different problems to"):
        next(ReasoningGymRows(SUM, 0).candidates(0))


def test_a_uid_finds_its_row_again_and_no_other() -> None:
    stream = ReasoningGymRows(SUM, 1)
    row = next(stream.candidates(7))
    (again,) = ReasoningGymRows(SUM, 1).candidates_of(row.uid)
    assert (again.uid, again.messages, again.extra) == (row.uid, row.messages, row.extra)
    head = row.uid.partition("-")[0]
    for uid in (head, f"{head}-00000000", "reasoning_gym/chain_sum:x-1", "sort_digits:123", ""):
        with pytest.raises(KeyError):
            stream.candidates_of(uid)
    with pytest.raises(KeyError):
        ReasoningGymRows(SUM, 2).candidates_of(row.uid)


def test_wrong_tasks_and_options_are_told_in_one_line() -> None:
    for task, message in [
        (ReasoningGymTask(task="chain_sun"), "reasoning_gym/chain_sun: reasoning-gym has no such "
         "task; did you mean chain_sum or decimal_chain_sum?"),
        (ReasoningGymTask(task="klingon"), "reasoning_gym/klingon: reasoning-gym has no such "
         "task; see its list of tasks"),
        (ReasoningGymTask(task="chain_sum", options={"colour": 1}), 'data.task.options is '
         '{"colour": 1}, which reasoning-gym\'s chain_sum rejects ('),
        (ReasoningGymTask(task="chain_sum", options={"min_terms": 0}), 'data.task.options is '
         '{"min_terms": 0}, which reasoning-gym\'s chain_sum rejects ('),
        (ReasoningGymTask(task="composite"), "data.task.options is {}, which reasoning-gym's "
         "composite rejects (Must specify at least one dataset); change or remove them"),
    ]:  # fmt: skip
        with pytest.raises(DataError) as caught:
            ReasoningGymRows(task, 0)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    task = ReasoningGymTask(task="chain_sum", options={"max_terms": 4})  # not made before
    with pytest.raises(DataError, match=r"pip install 'winnow-rl\[reasoning-gym\]'$"):
        ReasoningGymRows(task, 0)
