"""`winnow data check`: what it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.small_tokenizers import CHAT_TEMPLATE, train_bpe
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from winnow.cli.data import app
from winnow.data.check import check, exact_key, loose_key
from winnow.data.published import add_dapo_instruction
from winnow.data.sources import Row
from winnow.errors import DataError, ModelError

WriteJsonl = Callable[..., str]


def row(prompt: str, label: Any = "2", source: str = "gsm8k") -> dict[str, Any]:
    return {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": label}}


def look(path: str, evaluation: str | None = None) -> dict[str, Any]:
    return check(path, {"gsm8k": "gsm8k"}.get, evaluation=evaluation)


def user(text: str) -> Row:
    return Row("", "", "", ({"role": "user", "content": text},), "")


def test_rows_are_counted_by_source_and_sources_without_scorer_are_told(
    write_jsonl: WriteJsonl,
) -> None:
    report = look(write_jsonl([row("a", source="x"), row("b"), row("c")]))
    assert report["rows"] == 3
    assert report["sources"] == [
        {"source": "gsm8k", "rows": 2, "scorer": "gsm8k"},
        {"source": "x", "rows": 1, "scorer": None},
    ]


def test_lengths_without_a_tokenizer_are_characters(write_jsonl: WriteJsonl) -> None:
    lengths = look(write_jsonl([row("a" * n) for n in range(1, 101)]))["lengths"]
    assert lengths == {
        "unit": "characters", "shortest": 1, "median": 50, "p95": 95, "longest": 100,
        "limit": None, "beyond": None,
    }  # fmt: skip


def test_lengths_under_a_tokenizer_hold_its_chat_template_and_are_held_against_the_limit(
    write_jsonl: WriteJsonl,
) -> None:
    tokenizer = train_bpe(["What is 1 + 1?"], chat=CHAT_TEMPLATE)
    path = write_jsonl([row("1"), row("1 + 1 1 + 1 1 + 1")])
    lengths = check(path, lambda _: None, tokenizer=tokenizer, limit=20)["lengths"]
    short = tokenizer("<s>[user]1[assistant]", add_special_tokens=False)
    assert lengths["unit"] == "tokens"
    assert lengths["shortest"] == len(short["input_ids"]) <= 20 < lengths["longest"]
    assert lengths["beyond"] == 1


def test_copies_are_told_from_rows_that_share_a_prompt(write_jsonl: WriteJsonl) -> None:
    report = look(write_jsonl([row("a"), row(" a\n"), row("a", 3), row("A"), row("a", "2", "x")]))
    assert [report[key] for key in ("unique_prompts", "copies", "alike_prompts")] == [2, 1, 1]


def test_conflicting_labels_are_listed_with_their_rows(write_jsonl: WriteJsonl) -> None:
    report = look(write_jsonl([row("a", "2"), row("b"), row("a ", "3"), row("a", " 2 ")]))
    assert report["conflicts"] == [{"prompt": "a", "labels": ["2", "3"], "rows": [1, 3, 4]}]


def test_a_problem_typed_again_is_found_in_the_evaluation_file(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl(
        [row("Find  $\\left|x\\right|$ if x=1.5."), row("b"), row("find |x| if x=1.5")]
    )
    evaluation = write_jsonl(
        [
            row("Find $|x|$ if $x = 1.5$?.", "2", "MATH-500"),
            row("Find $|x|$ if $x = 15$", "2", "MATH-500"),
            row("find |x| if x=1.5", "7", "aime"),
        ],
        "eval.jsonl",
    )
    overlap = look(path, evaluation)["overlap"]
    assert overlap["shared_by_source"] == {"MATH-500": 1, "aime": 1}
    assert (overlap["rows_affected"], overlap["rows"]) == (2, 3)
    first, second = overlap["shared"]
    assert (first["rows"], first["evaluation_row"], first["same_label"]) == ([1, 3], 1, True)
    assert not second["same_label"]


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        ("z^4 + z^2 + 1 = 0", "z^4 - z^2 + 1 = 0", False),
        ("3.5", "35", False),
        ("a < b", "a > b", False),
        ("x/2", "x*2", False),
        ("??", "!!", False),
        ("What is $x_1$?", "what is x_{1}", True),
        ("\\left( a \\right)", "(a)", True),
        ("1,000 \u2212 2", "1000 - 2", True),
        ("5.", "5", True),
    ],
)
def test_prompts_that_differ_in_form_alone_are_alike(one: str, other: str, is_alike: bool) -> None:
    assert (loose_key(user(one)) == loose_key(user(other))) == is_alike


def test_a_prompt_is_the_same_with_and_without_a_known_instruction() -> None:
    assert exact_key(user(add_dapo_instruction("1+1?"))) == exact_key(user(" 1+1? "))
    assert exact_key(user("1+1?")) != exact_key(user("1+1"))


def test_the_table_names_what_it_counts(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([row("[red]a[/red]\x1b[2J", str(i), "Klingon") for i in range(7)])
    shown = CliRunner().invoke(app, ["check", path, "--eval", path]).output
    assert "Klingon 7 NO SCORER" in " ".join(shown.split())
    assert "conflicting labels 1 prompts" in " ".join(shown.split())
    assert "[red]a[/red]\ufffd[2J" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("settings", "numbers", "remedy"),
    [
        ([], [1, 2, 3], "set environment=tools and environment.tools=[FILE.py:NAME]"),
        (
            ["environment=tools", "environment.tools=[calc.py:calc]"],
            [2],
            "add FILE.py:look to it, or remove the key",
        ),
        (["environment=tools", "environment.tools=[a.py:calc,b.py:look]"], [], ""),
    ],
)
def test_rows_for_tools_that_the_recipe_does_not_have_are_reported(
    write_jsonl: WriteJsonl, settings: list[str], numbers: list[int], remedy: str
) -> None:
    extras = [{"calc": {}, "look": None}, {"look": {}}, {}, None]
    rows = [{**row(f"{i}"), "extra_info": {"tools_kwargs": e}} for i, e in enumerate(extras)]
    rows[2]["agent_name"] = "tool_agent"
    arguments = ["check", write_jsonl(rows), *settings]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [each.split()[2] for each in report["warnings"]] == [f"rows.jsonl:{i}" for i in numbers]
    assert all(remedy in each for each in report["warnings"])
    shown = CliRunner().invoke(app, arguments).output
    assert all(each in shown for each in report["warnings"])


def test_a_tokenizer_folder_is_taken_from_the_command_line(
    write_jsonl: WriteJsonl, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    bpe.save_pretrained(tmp_path / "model")
    arguments = ["check", write_jsonl([row("a b c d")]), "--tokenizer", str(tmp_path / "model")]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert report["lengths"]["unit"] == "tokens"
    assert (report["lengths"]["limit"], report["lengths"]["beyond"]) == (1024, 0)
    shown = CliRunner().invoke(app, [*arguments, "--max-prompt-tokens", "1"]).output
    assert "longer than 1 1 100.00 % of the rows" in " ".join(shown.split())


def test_what_cannot_be_checked_is_said_on_one_line(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([row("a"), {**row("b"), "reward_model": None}])
    empty = write_jsonl([row("a")], "fine.jsonl")
    for arguments, kind, message in [
        ([path], DataError, "row 2: reward_model is missing; it must be an object with the key"),
        ([empty, "--eval", path], DataError, "row 2: reward_model is missing"),
        ([f"{path}.parquet"], DataError, "no such file; check the path"),
        ([empty, "--prompt-key", "q"], DataError, "row 1: q is missing; it must be a text or a"),
        (
            [empty, "--max-prompt-tokens", "9"],
            DataError,
            "--max-prompt-tokens 9 needs a tokenizer; add --tokenizer FOLDER",
        ),
        ([empty, "--tokenizer", "/nowhere"], ModelError, "--tokenizer /nowhere: no such folder"),
    ]:
        error = CliRunner().invoke(app, ["check", *arguments]).exception
        assert isinstance(error, kind)
        assert message in str(error)
        assert "\n" not in str(error)
