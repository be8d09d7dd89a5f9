"""The question of the closing screen, from evaluation files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from winnow.errors import WinnowError
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.observe.summary import Sample, samples
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory


def write(
    path: Path, rights: list[bool], *, text: set[int], greedy: list[bool] | None = None
) -> None:
    """An evaluation of one answer a prompt; an answer's one token says what it is."""

    def group(place: int, is_right: bool, token: int) -> Group:
        ids = np.array([token])
        path = Trajectory((Segment(ids, np.zeros(1, np.float32), ()),), "stop")
        prompt = Prompt(str(place), np.array([1]), f"question {place}", "", "", None)
        return Group(place, prompt, (Answer(path, Score(float(is_right), float(is_right))),))

    groups = [RolloutGroup(group(i, r, 10 + i), "held_out") for i, r in enumerate(rights)]
    more = [
        RolloutGroup(group(i, r, 20 + i), "held_out_greedy") for i, r in enumerate(greedy or [])
    ]
    write_rollouts(
        path,
        0,
        [*groups, *more],
        version=0,
        text_groups=text,
        decode=lambda ids: f"{path.stem} {ids[0]}",
    )


def test_it_is_a_question_that_became_right(tmp_path: Path) -> None:
    before, after = tmp_path / "old.parquet", tmp_path / "new.parquet"
    write(before, [True, False, False], text={0, 1, 2})
    write(after, [True, False, True], text={0, 1, 2})
    assert samples(before, after) == [Sample("question 2", "old 12", False, "new 12", True)]


def test_greedy_answers_come_first(tmp_path: Path) -> None:
    before, after = tmp_path / "old.parquet", tmp_path / "new.parquet"
    write(before, [False, False], text={0, 1}, greedy=[True, False])
    write(after, [True, False], text={0, 1}, greedy=[True, True])
    assert samples(before, after) == [Sample("question 1", "old 21", False, "new 21", True)]


def test_without_such_a_question_it_is_the_first_whose_text_was_kept(tmp_path: Path) -> None:
    before, after = tmp_path / "old.parquet", tmp_path / "new.parquet"
    write(before, [False, True, False], text={1, 2})
    write(after, [True, False, False], text={1, 2})
    assert samples(before, after) == [Sample("question 1", "old 11", True, "new 11", False)]


def test_without_text_or_a_file_there_is_none(tmp_path: Path) -> None:
    before, after = tmp_path / "old.parquet", tmp_path / "new.parquet"
    write(before, [False], text=set())
    assert samples(before, after) == []
    write(after, [True], text=set())
    assert samples(before, after) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    before, after = tmp_path / "old.parquet", tmp_path / "new.parquet"
    write(before, [False], text={0})
    after.write_bytes(b"rubbish")
    with pytest.raises(WinnowError, match=r"cannot read .*new\.parquet"):
        samples(before, after)
