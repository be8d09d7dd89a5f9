"""Sets of `winnow data prepare` that are made on the spot: the same rows for the same seed."""

from __future__ import annotations

from collections.abc import Iterator

from winnow.config.data import ReasoningGymTask, SortDigitsTask
from winnow.data.prepare_rows import Item
from winnow.data.sources import Row
from winnow.data.tasks import countdown, procedural, sort_digits

TRAIN_PROBLEMS, TEST_PROBLEMS = 10_000, 400
# A task may take a second for a problem.
TRAIN_PROCEDURAL, TEST_PROCEDURAL = 1_000, 200


def generated(name: str, test: bool, rows: int | None, seed: int) -> tuple[Iterator[Item], str]:
    """The rows of a set's split, and where they come from, for a person.

    Raises:
        DataError: a task of reasoning-gym is missing, or there are not so many problems.
    """
    origin = "generated, held out from training" if test else f"generated with seed {seed}"
    if name.startswith(procedural.PREFIX):
        task = name.removeprefix(procedural.PREFIX)
        count = rows or (TEST_PROCEDURAL if test else TRAIN_PROCEDURAL)
        return _procedural(task, test, count, seed), origin
    count = rows or (TEST_PROBLEMS if test else TRAIN_PROBLEMS)
    if name == countdown.DATA_SOURCE:
        return map(_countdown, countdown.problems(seed, count, test)), origin
    return map(_item, _sort_digits(test, count, seed)), origin


def _sort_digits(test: bool, count: int, seed: int) -> Iterator[Row]:
    task = SortDigitsTask()
    if test:
        return map(sort_digits.row, sort_digits.held_out_problems(task, count))
    stream = sort_digits.SortDigitsStream(task, seed)
    return (stream.row(i) for i in range(count))


def _procedural(task: str, test: bool, count: int, seed: int) -> Iterator[Item]:
    settings = ReasoningGymTask(task=task, eval_problems=count)
    if test:
        return map(_item, procedural.held_out_rows(settings))
    return (_item(row) for row in procedural.training_rows(settings, seed, count))


def _item(row: Row) -> Item:
    messages = tuple((message["role"], message["content"]) for message in row.messages)
    notes = row.extra["extra_info"]
    ability = row.data_source.partition("/")[0]
    return Item(row.data_source, messages, row.ground_truth, notes, ability=ability)


def _countdown(problem: countdown.Problem) -> Item:
    asked = (("user", problem.question),)
    name = countdown.DATA_SOURCE
    return Item(name, asked, problem.ground_truth, {}, ability=name)
