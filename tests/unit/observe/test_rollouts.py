"""rollouts/step-N.parquet, written and read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.config.root import ObserveConfig
from winnow.errors import WinnowError
from winnow.observe.rollouts import (
    RolloutGroup,
    choose_text_groups,
    problem_id,
    read_rollouts,
    write_rollouts,
)
from winnow.types import (
    Answer,
    Group,
    Image,
    IntArray,
    Prompt,
    Score,
    Segment,
    Trajectory,
    VersionSpan,
)

MakeGroup = Callable[..., Group]
Row = dict[str, Any]


def decode(ids: IntArray) -> str:
    return " ".join(map(str, ids))


def write(path: Path, *groups: RolloutGroup, step: int = 7, text: set[int] | None = None) -> None:
    write_rollouts(path, step, groups, version=5, text_groups=text or set(), decode=decode)


def rows(path: Path) -> list[Row]:
    return list(read_rollouts(path).to_pylist())


def test_each_answer_has_a_row_with_its_scalars(tmp_path: Path, make_group: MakeGroup) -> None:
    path = tmp_path / "rollouts" / "step-7.parquet"
    advantages = np.array([1.0, -1.0], dtype=np.float32)
    trained = RolloutGroup(make_group(11, versions=(2, 3)), "trained", advantages)
    write(path, trained, RolloutGroup(make_group(12, answers=1), "all_right"))
    assert rows(path)[1] == {
        "step": 7,
        "group": 11,
        "answer": 1,
        "kind": "sampled",
        "prompt_uid": "row-11",
        "data_source": "sort_digits",
        "problem": problem_id(trained.group.prompt),
        "outcome": "trained",
        "prompt_tokens": 4,
        "response_tokens": 3,
        "reward": -1.0,
        "part/task": -1.0,
        "accuracy": 0.0,
        "advantage": -1.0,
        "oldest_version": 2,
        "newest_version": 3,
        "staleness": 3,
        "finish_reason": "stop",
        "scorer_error": "",
        **dict.fromkeys(["pred", "prompt", "response"]),
        **dict.fromkeys(["prompt_ids", "token_ids", "logprobs", "versions"]),
        **dict.fromkeys(["mismatch", "trainer_logprobs", "entropies", "turns", "images"]),
    }
    assert [(r["group"], r["answer"], r["advantage"]) for r in rows(path)] == [
        (11, 0, 1.0),
        (11, 1, -1.0),
        (12, 0, None),
    ]


def test_a_problem_is_what_is_asked_and_compared_with_whatever_the_row_is_called() -> None:
    messages = ({"role": "user", "content": "5391:"},)
    prompt = Prompt("a.parquet:1", np.arange(4), "5391:", "sort_digits", "1359", {}, messages)
    other_order = ({"content": "5391:", "role": "user", "name": "x"},)
    like = replace(
        prompt, uid="b.jsonl:7", token_ids=np.arange(9), text="<5391:>", messages=other_order
    )
    assert problem_id(like) == problem_id(prompt)
    unlike = [
        replace(prompt, ground_truth="1395"),
        replace(prompt, data_source="gsm8k"),
        replace(prompt, messages=({"role": "user", "content": "5392:"},)),
        replace(prompt, messages=({"role": "system", "content": "5391:"},)),
        replace(prompt, messages=(), text="5391:\ud83d"),
    ]
    assert len({problem_id(each) for each in [prompt, *unlike]}) == 6


def test_a_greedy_baseline_has_a_row_behind_the_answers_that_were_sampled(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    baseline = make_group(0, answers=3, versions=(1,)).answers[2]
    group = replace(make_group(11), baseline=baseline)
    dropped = replace(make_group(12, answers=1), baseline=baseline)
    advantages = np.array([1.0, -1.0], dtype=np.float32)
    write(
        tmp_path / "a.parquet",
        RolloutGroup(group, "trained", advantages),
        RolloutGroup(dropped, "surplus"),
        RolloutGroup(make_group(13, answers=1), "held_out_greedy"),
        text={11},
    )
    found = rows(tmp_path / "a.parquet")
    assert [(r["group"], r["answer"], r["kind"], r["advantage"]) for r in found] == [
        (11, 0, "sampled", 1.0),
        (11, 1, "sampled", -1.0),
        (11, 2, "greedy", None),
        (12, 0, "sampled", None),
        (12, 1, "greedy", None),
        (13, 0, "greedy", None),
    ]
    row = found[2]
    assert (row["outcome"], row["reward"], row["response_tokens"]) == ("trained", -1.0, 3)
    assert (row["oldest_version"], row["staleness"], row["response"]) == (1, 4, "10 11 12")


def test_a_conversation_has_its_turns_whose_texts_are_kept_as_those_of_answers(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    def part(ids: list[int], *spans: VersionSpan, **more: Any) -> Segment:
        return Segment(np.array(ids), np.zeros(len(ids), np.float32), spans, **more)

    figures = {"calls": 1.0, "malformed": 2.0, "distance": 7.0}
    first = part([5, 6], VersionSpan(3, 2), reward=0.25, figures=figures)
    shown = (Image(0, (1, 1), b"later", "7" * 64),)
    segments = first, part([7], source="environment", images=shown), part([8], VersionSpan(4, 1))
    talk, none = Trajectory(segments, "length"), {"images": None}
    plain = make_group(1)
    first_image = Image(0, (1, 1), b"first", "1" * 64)
    plain = replace(plain, prompt=replace(plain.prompt, images=(first_image,)))
    answers = (*plain.answers, Answer(talk, Score(0.5, 1.0)))
    for text in ({1}, {2}):
        group = RolloutGroup(replace(plain, answers=answers), "surplus")
        write(tmp_path / "a.parquet", group, text=text)
        *others, row = rows(tmp_path / "a.parquet")
        assert [each["turns"] for each in others] == [None, None]
        texts = ["5 6", "7", "8"] if text == {1} else [None] * 3
        assert [turn.pop("text") for turn in row["turns"]] == texts
        assert row["turns"] == [
            {"author": "model", "tokens": 2, "reward": 0.25, "calls": 1, "malformed": 2, **none},
            {
                "author": "environment",
                "tokens": 1,
                "reward": None,
                "calls": None,
                "malformed": None,
                "images": [f"images/{'7' * 64}.png"] if text == {1} else None,
            },
            # It was cut off: its calls were not read.
            {
                "author": "model",
                "tokens": 1,
                "reward": 0.0,
                "calls": None,
                "malformed": None,
                **none,
            },
        ]
        prompt_image = (row["images"] or [""])[0]
        assert prompt_image == (f"images/{'1' * 64}.png" if text == {1} else "")
        assert row["response_tokens"] == 4
        assert row["versions"] == ([3, 3, -1, 4] if text == {1} else None)


def test_an_answer_that_failed_before_its_first_token_has_a_row(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    segment = Segment(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32), ())
    answer = Answer(Trajectory((segment,), "aborted"), Score(0.0, 0.0, error="engine failed"))
    group = Group(1, make_group(1).prompt, (answer,))
    write(tmp_path / "a.parquet", RolloutGroup(group, "failed"), text={1})
    (row,) = rows(tmp_path / "a.parquet")
    assert (row["response_tokens"], row["oldest_version"], row["staleness"]) == (0, None, None)
    assert (row["scorer_error"], row["token_ids"]) == ("engine failed", [])


def test_what_scorers_say_becomes_columns(tmp_path: Path, make_group: MakeGroup) -> None:
    first = make_group(1, answers=1, extra={"pred": 42, "format": True, "hint": "none"})
    second = make_group(2, answers=1, extra={"steps": np.int64(3)}, parts={"task": 1, "over": -0.5})
    write(tmp_path / "a.parquet", RolloutGroup(first, "trained"), RolloutGroup(second, "trained"))
    one, two = rows(tmp_path / "a.parquet")
    assert (one["pred"], one["extra/format"], one["extra/hint"]) == ("42", 1.0, "none")
    assert (one["extra/steps"], one["part/over"]) == (None, None)
    assert (two["pred"], two["extra/steps"], two["part/over"]) == (None, 3.0, -0.5)


@pytest.mark.parametrize(
    ("value", "kept"),
    [("half a pair \ud83d", "half a pair ?"), (10**400, str(10**400)), ([1, 2], "[1, 2]")],
)
def test_odd_values_of_a_scorer_are_kept_as_text(
    tmp_path: Path, make_group: MakeGroup, value: object, kept: str
) -> None:
    group = make_group(1, answers=1, extra={"odd": value, "pred": value})
    write(tmp_path / "a.parquet", RolloutGroup(group, "trained"))
    (row,) = rows(tmp_path / "a.parquet")
    assert (row["extra/odd"], row["pred"]) == (kept, kept)


def test_a_folder_reads_as_one_table_in_the_order_of_steps(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    for step in (10, 9):
        extra = {"x": 1.0} if step == 9 else {"x": "one", "y": 2}
        group = RolloutGroup(make_group(step, answers=1, extra=extra), "trained")
        write(tmp_path / f"step-{step}.parquet", group, step=step)
    (tmp_path / "notes.txt").write_text("not ours")
    found = [(row["step"], row["extra/x"], row["extra/y"]) for row in rows(tmp_path)]
    assert found == [(9, "1", None), (10, "one", 2.0)]


def test_a_damaged_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(WinnowError, match="no rollouts at"):
        read_rollouts(tmp_path)
    (tmp_path / "step-1.parquet").write_bytes(b"PAR1 rubbish")
    with pytest.raises(WinnowError, match=r"cannot read .*step-1\.parquet"):
        read_rollouts(tmp_path)


def test_the_choice_of_groups_follows_seed_and_step_and_takes_all_when_few(
    make_group: MakeGroup,
) -> None:
    groups = [RolloutGroup(make_group(id_), "trained") for id_ in range(50, 150)]
    some = ObserveConfig(rollout_text_groups=8)
    chosen = choose_text_groups(groups, some, seed=1, step=3)
    assert len(chosen) == 8
    assert chosen <= set(range(50, 150))
    assert chosen == choose_text_groups(reversed(groups), some, seed=1, step=3)
    assert chosen != choose_text_groups(groups, some, seed=1, step=4)
    assert chosen != choose_text_groups(groups, some, seed=2, step=3)
    assert choose_text_groups(groups[:2], some, seed=1, step=3) == {50, 51}
    none = ObserveConfig(rollout_text_groups=0)
    assert choose_text_groups(groups, none, seed=1, step=3) == set()


def test_text_is_kept_of_all_answers_up_to_a_number_of_tokens_and_always_of_failures(
    make_group: MakeGroup,
) -> None:
    groups = [RolloutGroup(make_group(id_), "trained") for id_ in range(100)]
    each = sum(len(s) for a in groups[0].group.scored for s in a.trajectory.segments)

    def chosen(tokens: int) -> set[int]:
        return choose_text_groups(groups, ObserveConfig(rollout_text_tokens=tokens), 1, 3)

    assert chosen(100 * each) == set(range(100))
    assert len(chosen(100 * each - 1)) == 99
    assert len(chosen(30 * each)) == 30
    assert chosen(30 * each) < chosen(31 * each)
    assert len(chosen(0)) == 8
    bad = replace(groups[0].group.answers[0], score=Score(0.0, 0.0, {}, {}, "boom"))
    group = replace(groups[0].group, id=200, answers=(*groups[0].group.answers, bad))
    groups.append(RolloutGroup(group, "failed"))
    none = ObserveConfig(rollout_text_groups=0)
    assert choose_text_groups(groups, none, seed=1, step=3) == {200}
