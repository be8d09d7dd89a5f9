"""`winnow rollouts`: printed once, as JSON, and browsed; the columns of docs/answers.md."""

from __future__ import annotations

import io
import json
import os
import pty
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tests.integration.dashboard.conftest import answer, group, write_step
from tests.winnow_command import WINNOW, Outcome, in_this_process

from winnow.checkpoints.strangers import mark_as_local
from winnow.cli.rollouts import Browser
from winnow.dashboard.pages import RunPages
from winnow.dashboard.runs import RunSet
from winnow.observe.files import RunFolder
from winnow.observe.rollouts import COLUMNS, RolloutGroup
from winnow.types import Trajectory

MakeRun = Callable[[str], RunFolder]
DOCS = Path(__file__).parents[3] / "docs" / "answers.md"


def rollouts(folder: Path, *words: str) -> Outcome:
    return in_this_process(
        "rollouts", str(folder), *words, folder=folder, environment={"COLUMNS": "80"}
    )


def listed(folder: Path, *words: str) -> list[int]:
    """Groups that a list shows, in order."""
    out = rollouts(folder, "--step", "2", *words).check().out
    return [int(found) for found in re.findall(r"^ *(\d+)  ", out, re.MULTILINE)]


def test_a_list_fits_80_columns_and_shows_no_control_codes(make_run: MakeRun) -> None:
    folder = make_run("a").path
    long = group(7, "\x1b[31mred\u202e " * 20, answer(3, 1.0), answer(2, 0.0))
    write_step(folder, 9, [RolloutGroup(long, "trained", np.array([1.0, -1.0]))], "rollouts")
    for words in (("--step", "9"), ("--group", "7")):
        out = rollouts(folder, *words).check().out
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "red" in out
    lines = rollouts(folder, "--step", "9").check().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"^ +7  ask .*…  trained +1/2 +-?0.00 +2 +-$", lines[2]), lines[2]


def test_words_that_only_a_stranger_writes_are_shown_as_they_are(make_run: MakeRun) -> None:
    folder = make_run("a").path
    odd = answer(3, 1.0)
    odd = replace(odd, trajectory=replace(odd.trajectory, finish_reason=cast(Any, "[red]odd")))
    outcome = cast(Any, "\x1b[2J[bold]won")
    write_step(folder, 9, [RolloutGroup(group(7, "p", odd), outcome)], "rollouts")
    assert "[bold]won" in (shown := rollouts(folder, "--step", "9").check().out)
    assert "\x1b" not in shown
    assert "[red]odd" in rollouts(folder, "--step", "9", "--group", "7").check().out


def test_without_a_step_the_steps_are_listed_with_what_became_of_their_answers(
    make_run: MakeRun,
) -> None:
    folder = make_run("a").path
    cut, failed = answer(6, 0.0), answer(3, 1.0)
    cut = replace(cut, trajectory=replace(cut.trajectory, finish_reason="length"))
    failed = replace(failed, score=replace(failed.score, error="boom"))
    entries = [group(7, "row-7", cut, answer(2, 1.0)), group(8, "row-8", failed)]
    write_step(folder, 1000, [RolloutGroup(each, "surplus") for each in entries], "rollouts")
    (folder / "rollouts" / "step-999.parquet").write_bytes(b"torn")
    lines = rollouts(folder).check().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("step-999.parquet" in line for line in lines)
    cells = [line.split() for line in lines]
    assert [
        *("step", "prompts", "answers", "right", "reward", "tokens", "cut", "off", "failed")
    ] in cells
    reward = sum(each.score.reward for each in (cut, answer(2, 1.0), failed)) / 3
    assert f"1000 2 3 67 % {reward:.2f} 3.7 33 % 1".split() in cells
    steps = [int(words[0]) for words in cells if words and words[0].isdecimal()]
    assert steps == sorted(steps, reverse=True)
    assert len(steps) == 5


def test_groups_are_filtered_and_searched(make_run: MakeRun) -> None:
    folder = make_run("a").path
    assert listed(folder) == [2, 80, 90]
    assert listed(folder, "--filter", "wrong") == [90]
    assert listed(folder, "--filter", "cut-off") == [2]
    assert listed(folder, "--filter", "overlong") == [2]
    assert listed(folder, "--filter", "failed") == [80]
    assert listed(folder, "--filter", "mismatch") == []
    assert listed(folder, "--search", "SAID 0 1 2 3") == [2, 80]
    assert listed(folder, "--search", "SAID 0 1 2 3", "--filter", "failed") == [80]


def test_mismatch_puts_the_farthest_first(make_run: MakeRun) -> None:
    folder = make_run("a").path
    entries = [
        RolloutGroup(
            group(number, "row", answer(3, 1.0)), "trained", np.array([1.0]), np.array([distance])
        )
        for number, distance in ((1, 0.25), (2, 0.75), (3, 0.5))
    ]
    write_step(folder, 2, entries, "rollouts")
    assert listed(folder, "--filter", "mismatch") == [2, 3, 1]


def test_json_has_all_that_is_kept_of_each_answer(make_run: MakeRun) -> None:
    folder = make_run("a").path
    rows = pq.read_table(folder / "rollouts" / "step-2.parquet").to_pylist()
    out = rollouts(folder, "--step", "2", "--json").check().out
    assert [json.loads(line) for line in out.splitlines()] == rows
    out = rollouts(folder, "--step", "2", "--json", "--filter", "failed").check().out
    assert [json.loads(line)["group"] for line in out.splitlines()] == [80] * 3
    assert json.loads(out.splitlines()[1])["scorer_error"] == "boom"


def test_a_conversation_is_printed_turn_by_turn(make_run: MakeRun) -> None:
    folder = make_run("a").path
    first, last = answer(4, 1.0).trajectory.segments[0], answer(2, 1.0).trajectory.segments[0]
    reply = replace(first, spans=(), source="environment")
    first = replace(first, reward=-0.5, figures={"calls": 1.0, "malformed": 0.0})
    talk = replace(answer(2, 1.0), trajectory=Trajectory((first, reply, last), "stop"))
    write_step(folder, 9, [RolloutGroup(group(7, "row", talk), "surplus")], "rollouts")
    config = folder / "config.yaml"
    config.write_text(config.read_text() + 'environment: {calls: "(?P<n>[12]) "}\n')
    mark_as_local(folder)  # only then its regular expression is used
    out = rollouts(folder, "--step", "9", "--group", "7").check().out
    assert out.endswith(
        "1 model, 4 tokens, calls 1, reward -0.5\nsaid 0 1 2 3\n"
        "2 environment, 4 tokens\nsaid 0 1 2 3\n3 model, 2 tokens\nsaid 0 1\n"
    )
    (files,) = RunSet([str(folder)]).discover().values()
    (shown,) = RunPages(files).group("training", 9, 7)["answers"]
    assert shown["turns"][0]["pieces"] == [
        ("said 0 ", False), ("1 ", True), ("2 ", True), ("3", False),
    ]  # fmt: skip
    assert shown["turns"][1]["pieces"] == [("said 0 1 2 3", False)]


def test_a_file_of_an_older_version_is_read(make_run: MakeRun) -> None:
    folder = make_run("a").path
    path = folder / "rollouts" / "step-2.parquet"
    late = ["mismatch", "trainer_logprobs", "entropies", "versions", "problem", "turns"]
    pq.write_table(pq.read_table(path).drop_columns(late), path)
    assert listed(folder) == [2, 80, 90]
    shown = rollouts(folder, "--step", "2", "--group", "80").check().out
    assert "scoring failed: boom" in shown
    assert "said 0 1 2 3 4\n" in shown
    assert len(rollouts(folder, "--step", "2", "--json").check().out.splitlines()) == 7


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--filter", "odd"], "--filter must be one of all, wrong, cut-off"),
        (["--step", "77"], "a has no rollouts/step-77.parquet"),
        (["--step", "2", "--group", "5"], "has no group 5"),
        (["--step", "2", "--group", "5", "--json"], "has no group 5"),
        (["--held-out"], "a has no answers yet"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(
    words: list[str], told: str, make_run: MakeRun
) -> None:
    done = rollouts(make_run("a").path, *words)
    assert done.code == 2
    assert told in done.err
    assert done.err.count("\n") == 1


def test_a_folder_of_several_runs_is_refused_by_their_names(make_run: MakeRun) -> None:
    folder = make_run("a").path.parent
    make_run("b")
    assert "found a, b; pass one" in rollouts(folder).err


def browsed(
    place: str, *words: str, between: Callable[[], None] = lambda: None, lists_steps: bool = False
) -> list[str]:
    """What is printed after each word."""
    [files] = RunSet([place]).discover().values()
    out = io.StringIO()
    console = Console(file=out, width=80, height=13)
    browser = Browser(RunPages(files), console, "training", lists_steps=lists_steps)
    seen: list[str] = []
    left = iter(words)

    def ask(_: str) -> str:
        seen.append(out.getvalue())
        out.truncate(0)
        out.seek(0)
        between()
        word = next(left, None)
        if word is None:
            raise EOFError
        return word

    browser.browse(ask)
    return seen


def test_a_run_is_browsed_from_steps_to_prompts_to_answers(make_run: MakeRun) -> None:
    folder = make_run("a").path
    fifty = [group(n, f"row-{n}", answer(3, 0.0), answer(2, 1.0)) for n in range(50)]
    write_step(folder, 5, [RolloutGroup(each, "surplus") for each in fifty], "rollouts")
    seen = browsed(
        str(folder), "", "s 2", "80", "2", "n", "n", "p", "p", "b", "f wrong", "/nothing",
        "90", "n", "what?", "p", "s",
    )  # fmt: skip
    heads = [re.search(r"a, (step .*?) ─", each) for each in seen]
    assert [head and head[1] for head in heads] == [
        "step 5 of 5, 50 prompts", "step 5 of 5, 50 prompts", "step 2 of 5, 3 prompts",
        "step 2, group 80, failed", "step 2, group 80, failed", "step 2, group 90, all_wrong",
        "step 2, group 90, all_wrong", "step 2, group 80, failed", "step 2, group 2, trained",
        "step 2 of 5, 3 prompts",
        "step 2 of 5, 1 prompt, wrong", "step 2 of 5, 0 prompts, wrong, with nothing",
        "step 2, group 90, all_wrong", "step 2, group 90, all_wrong", "step 2, group 90, all_wrong",
        "step 2, group 90, all_wrong", "step 5 of 5, 0 prompts, wrong, with nothing",
    ]  # fmt: skip
    assert "row-4 " in seen[0]
    assert "row-5 " in seen[1]
    assert "said 0 1 2 3 4\n" in seen[3]
    assert "said 0 1 2 3 4 5 6\n" in seen[4]
    assert "unknown command 'what?'" in seen[14]


def test_the_tokens_at_which_the_policy_was_least_sure_are_named(make_run: MakeRun) -> None:
    folder = make_run("a").path
    entropies = np.array([0.25, 1.5, 0.0], np.float32)
    entry = RolloutGroup(
        group(7, "row", answer(3, 1.0), answer(2, 1.0)),
        "trained",
        np.array([1.0, -1.0]),
        entropies=[entropies, np.array([0.5, 0.25], np.float32)],
    )
    write_step(folder, 9, [entry], "rollouts")
    out = rollouts(folder, "--group", "7").check().out
    assert re.search(r"^ +1 .* 0\.58  stop", out, re.MULTILINE)
    assert re.search(r"^ +2 .* 0\.38  stop", out, re.MULTILINE)
    assert "\nhighest entropies: token 2 1.50, 1 0.25, 3 0.00 nats\n" in out
    assert "\nhighest entropies: token 1 0.50, 2 0.25 nats\n" in out


def test_on_a_terminal_it_asks(make_run: MakeRun) -> None:
    folder = make_run("a").path
    child, terminal = pty.fork()
    if child == 0:
        os.execv(WINNOW, ["winnow", "rollouts", str(folder)])
    with os.fdopen(terminal, "r+b", buffering=0) as file:
        seen = b""
        for word in (b"2\n", b"q\n"):
            while not seen.endswith(b"rollouts> "):
                seen += file.read(4096)
            file.write(word)
            seen += word
        with suppress(OSError):  # its end
            while file.read(4096):
                pass
    assert os.waitpid(child, 0)[1] == 0
    assert b"a, 4 steps, newest first" in seen
    assert b"step 2 of 4, 3 prompts" in seen


def test_the_page_describes_each_column_with_its_type() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    assert {name: kind for name, kind, _ in rows if "NAME" not in name} == {
        name: str(kind).replace("element: ", "").replace("item: ", "")
        for name, kind in COLUMNS.items()
    }
    assert [name for name, _, _ in rows if "NAME" in name] == ["part/NAME", "extra/NAME"]
