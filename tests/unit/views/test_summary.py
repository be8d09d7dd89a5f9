"""The closing screen, and what it is made from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from winnow.observe.format import (
    command_line,
    count,
    duration,
    number,
    percent,
    printable,
    safe_excerpt,
)
from winnow.observe.jsonl import Evaluation, evaluations, running_total, seconds_by_phase, series
from winnow.observe.metrics import SFT_S, START_S
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory
from winnow.views.summary import Sample, pick_samples, print_summary

Records = list[dict[str, float]]
WORKING = "1|539;3|59;5|9;9|#1359"
SAMPLE = Sample("5391:", [("", "1|539;3|59?" * 11)], False, [("", WORKING)], True)


def shown(
    records: Records,
    width: int = 100,
    encoding: str = "utf-8",
    sample: Sample = SAMPLE,
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    print_summary(
        Console(file=file, width=width, color_system=None),
        "quickstart: 80 steps in 2:05",
        [records[0] | {SFT_S: 60.0}, *records[1:]],
        samples=[sample],
        paths={"learning curve": Path("runs/quickstart-20260102-030405/curve.png")},
        commands={"winnow train quickstart seed=1": "the same with another seed"},
    )
    return raw.getvalue().decode(encoding)


def row(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.removeprefix(start).split()


def test_the_screen_shows_before_and_after(quickstart_records: Records) -> None:
    text = shown(quickstart_records)
    assert "2,000 held-out problems of sort_digits" in text
    assert row(text, "right, sampled (pass@1)") == ["30.0", "%", "87.6", "%"]
    assert row(text, "right, greedy") == ["57.0", "%", "95.4", "%"]
    assert row(text, "right at least once in 16") == ["95.0", "%", "98.8", "%"]
    assert row(text, "cut off at the limit") == ["10.0", "%", "0.4", "%"]
    assert row(text, "length of an answer") == ["52.0", "46.2"]
    assert "majority" not in text


def test_starts_of_the_process_and_the_warm_up_stand_before_the_phases(
    quickstart_records: Records,
) -> None:
    quickstart_records[0] |= {START_S: 10.0, SFT_S: 60.0}
    quickstart_records[7] |= {START_S: 5.0}  # resumed
    seconds = seconds_by_phase(quickstart_records)
    assert [*seconds.items()][:2] == [("start-up", 15.0), ("warm-up", 60.0)]


@pytest.mark.parametrize(("width", "encoding"), [(100, "utf-8"), (140, "utf-8"), (60, "ascii")])
def test_no_line_is_wider_than_the_screen_or_100_columns(
    quickstart_records: Records, width: int, encoding: str
) -> None:
    text = shown(quickstart_records, width, encoding)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    squeezed = "".join(text.split())
    assert "runs/quickstart-20260102-030405/curve.png" in squeezed
    assert "1,920,000" in text


def test_a_command_longer_than_the_screen_stays_whole(quickstart_records: Records) -> None:
    out, command = io.StringIO(), "winnow train " + "x" * 90
    commands = {command: "what it does"}
    print_summary(Console(file=out, width=80), "run", quickstart_records, commands=commands)
    assert f"{command}  # what it does" in out.getvalue().splitlines()


def test_a_command_names_the_program_by_its_path_unless_path_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, other = tmp_path / ".venv/bin/winnow", tmp_path / "other/winnow"
    for file in (program, other):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    monkeypatch.chdir(tmp_path)

    def command(typed: str, path: Path, python: Path = program) -> str:
        monkeypatch.setattr("sys.argv", [typed])
        monkeypatch.setattr("sys.executable", str(python.with_name("python")))
        monkeypatch.setenv("PATH", str(path))
        return command_line("eval", "my run")

    shown = ".venv/bin/winnow eval 'my run'"
    assert [command(".venv/bin/winnow", each) for each in (other.parent, tmp_path)] == [shown] * 2
    assert command(str(program), tmp_path) == shown
    assert command("notebook.py", other.parent) == shown
    assert command(str(program), program.parent) == "winnow eval 'my run'"
    assert command("notebook.py", tmp_path, python=tmp_path) == "winnow eval 'my run'"
    monkeypatch.chdir(program.parent)
    assert command("./winnow", other.parent) == "./winnow eval 'my run'"


def test_what_a_model_wrote_cannot_steer_the_terminal(quickstart_records: Records) -> None:
    evil = replace(SAMPLE, before=[("", "\x1b[2Jgone\u202e [red]x[/red]\r\n" + "é" * 3)])
    for encoding in ("utf-8", "ascii"):
        text = shown(quickstart_records, encoding=encoding, sample=evil)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert r"\x1b[2Jgone\u202e [red]x[/red]" in text


def test_of_a_conversation_each_turn_has_a_line_with_its_author(
    quickstart_records: Records, tmp_path: Path
) -> None:
    asked = [("model", "<call>37*48</call>"), ("environment", "1776"), ("model", "=1776")]
    for name, is_right, turns in (("old", NO, [("model", "=1623")]), ("new", YES, asked)):
        path = tmp_path / f"{name}.parquet"
        write(path, [is_right], {0})
        table = pq.read_table(path)
        column = [[{"author": author, "text": text} for author, text in turns]]
        if "turns" in table.column_names:
            table = table.drop_columns("turns")
        pq.write_table(table.append_column("turns", [column]), path)
    (sample,) = pick_samples(tmp_path / "old.parquet", tmp_path / "new.parquet")
    lines = shown(quickstart_records, sample=sample).splitlines()
    first = [line.strip() for line in lines].index("A held-out problem: question 0")
    assert [line.split() for line in lines[first + 1 : first + 5]] == [
        ["before", "wrong", "model", "=1623"],
        ["after", "right", "model", "<call>37*48</call>"],
        ["environment", "1776"],
        ["model", "=1776"],
    ]


def test_a_run_in_which_nothing_had_signal_does_not_read_as_a_success() -> None:
    flat = {f"score/advantage/{end}": 0.0 for end in ("min", "max", "mean")}
    records = [{"step": 0}, *({"step": n, "sampling/tokens/trained": 500, **flat} for n in (1, 2))]
    text = shown(records)
    assert "Nothing was learnt: all advantages were 0" in text
    assert row(text, "trained on, no signal")[:2] == ["1,000", "100.0"]
    assert row(text, "trained on  ")[0] == "0"
    records[1]["score/advantage/max"] = 1.0
    text = shown(records)
    assert "Nothing was learnt" not in text
    assert row(text, "trained on, no signal")[:2] == ["500", "50.0"]


def test_evaluations_are_read_by_source_with_slashes_in_its_name() -> None:
    record = {
        "eval/openai/gsm8k/avg@4": 0.25,
        "eval/openai/gsm8k/avg@4_se": 0.01,
        "eval/openai/gsm8k/maj@2": 0.3,
        "eval/openai/gsm8k/maj@4": 0.4,
        "eval/empty/prompts": 3,
    }
    assert evaluations(record) == {"openai/gsm8k": Evaluation(0.25, best_maj=(4, 0.4))}


def test_a_series_takes_the_first_name_that_any_record_has(quickstart_records: Records) -> None:
    steps, values = series(quickstart_records, "absent", "time/update_s")
    assert (steps[0], steps[-1], set(values)) == (1, 80, {0.5})
    assert series(quickstart_records, "absent") == ([], [])
    _, tokens = running_total(quickstart_records, "sampling/tokens/generated")
    assert tokens[:3].tolist() == [0.0, 36000.0, 72000.0]


def test_figures_are_short_and_gaps_are_dashes() -> None:
    assert [percent(0.4237), percent(None), percent(float("nan"))] == ["42 %", "-", "nan"]
    assert [number(1.005, 1), number(None)] == ["1.0", "-"]
    assert [count(12345.6), count(12_345_678), count(None)] == ["12,346", "12.3 M", "-"]
    assert [duration(59.6), duration(3723), duration(None)] == ["1:00", "1:02:03", "-"]
    left = "a" * 30 + " ... (1,205 characters) ... " + "b" * 15
    assert safe_excerpt("a" * 30 + "b" * 1220, 45) == left
    assert [safe_excerpt(" a\n\nb ", 3), safe_excerpt("\n", 9)] == ["a b", "(nothing)"]
    assert printable("5|\t\x07é", "ascii") == r"5|\t\x07\xe9"


# The question that is shown, from files of evaluations


def write(path: Path, rights: list[bool], text: set[int], greedy: Sequence[bool] = ()) -> None:
    """An evaluation of one answer a prompt; an answer's one token says what it is."""

    def group(place: int, is_right: bool, token: int) -> Group:
        ids = np.array([token])
        path = Trajectory((Segment(ids, np.zeros(1, np.float32), ()),), "stop")
        prompt = Prompt(str(place), np.array([1]), f"question {place}", "", "", None)
        return Group(place, prompt, (Answer(path, Score(float(is_right), float(is_right))),))

    kinds = ("held_out", 10, rights), ("held_out_greedy", 20, greedy)
    groups = [
        RolloutGroup(group(place, is_right, first + place), outcome)
        for outcome, first, answers in kinds
        for place, is_right in enumerate(answers)
    ]
    said = f"{path.stem} {{}}".format
    write_rollouts(path, 0, groups, version=0, text_groups=text, decode=lambda ids: said(*ids))


YES, NO = True, False


@pytest.mark.parametrize(
    ("old", "new", "greedy", "text", "shown"),
    [
        ([YES, NO, NO], [YES, NO, YES], ([], []), {0, 1, 2},
         Sample("question 2", [("", "old 12")], NO, [("", "new 12")], YES)),
        ([NO, NO], [YES, NO], ([YES, NO], [YES, YES]), {0, 1},
         Sample("question 1", [("", "old 21")], NO, [("", "new 21")], YES)),
        ([NO, YES, NO], [YES, NO, NO], ([], []), {1, 2},
         Sample("question 1", [("", "old 11")], YES, [("", "new 11")], NO)),
    ],
    ids=["became right", "greedy first", "else the first with its text"],
)  # fmt: skip
def test_it_is_a_question_that_became_right_of_greedy_answers_first_else_the_first_with_text(
    tmp_path: Path, old: list[bool], new: list[bool], greedy: tuple[list[bool], list[bool]],
    text: set[int], shown: Sample,
) -> None:  # fmt: skip
    before, after = tmp_path / "old.parquet", tmp_path / "new.parquet"
    write(before, old, text, greedy[0])
    write(after, new, text, greedy[1])
    assert pick_samples(before, after) == [shown]


def test_without_text_or_a_file_there_is_none(tmp_path: Path) -> None:
    before, after = tmp_path / "old.parquet", tmp_path / "new.parquet"
    write(before, [False], text=set())
    assert pick_samples(before, after) == []
    write(after, [True], text=set())
    assert pick_samples(before, after) == []
