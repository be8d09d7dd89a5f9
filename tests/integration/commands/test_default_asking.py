"""A model that belongs to no run is asked as the recipes ask, unless its rows or its user do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winnow.commands.evaluate import EvalRequest, EvalSetup, resolve_setup
from winnow.config.data import DataConfig
from winnow.config.load import parse_recipe
from winnow.data.prompts import PromptRenderer
from winnow.data.published import add_dapo_instruction
from winnow.data.sort_digits import build_tokenizer
from winnow.data.sources import read_rows

VERL = 'Let\'s think step by step and output the final answer after "####".'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def subject(folder: Path, rows: list[tuple[str, str]], *overrides: str) -> EvalSetup:
    file = folder / "rows.jsonl"
    made = [
        {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": "1"}}
        for source, prompt in rows
    ]
    file.write_text("\n".join(map(json.dumps, made)))
    return resolve_setup(EvalRequest(str(folder), overrides, (str(file),), out=str(folder / "out")))


def asked(data: DataConfig) -> list[str]:
    rows = read_rows(data.eval_files, data)
    return [prompt.text for prompt in PromptRenderer(build_tokenizer(), data).render(rows).prompts]


def test_bare_questions_are_asked_as_the_recipes_ask_them(folder: Path) -> None:
    rows = [("gsm8k", "1?"), ("openai/gsm8k", "2?"), ("aime-2024", "3?"), ("mine", "4?")]
    found = subject(folder, rows)
    gsm8k, dapo = (parse_recipe(n).data.prompt_template["*"] for n in ("gsm8k", "dapo-math"))
    assert asked(found.config.data) == [
        *(gsm8k.replace("{prompt}", question) for question in ("1?", "2?")),
        dapo.replace("{prompt}", "3?"),
        "4?",
    ]
    assert found.note.startswith("gsm8k, openai/gsm8k, aime-2024: bare questions; applying ")


def test_rows_with_an_instruction_and_a_template_of_the_users_come_first(folder: Path) -> None:
    rows = [("gsm8k", f"1? {VERL}"), ("math_dapo", add_dapo_instruction("2?")), ("MATH", "3?")]
    found = subject(folder, rows)
    assert asked(found.config.data)[:2] == [rows[0][1], rows[1][1]]
    assert found.note.startswith("MATH: bare questions")
    own = subject(
        folder, [("gsm8k", "1?"), ("mine", "2?")], 'data.prompt_template={*:"<{prompt}>"}'
    )
    assert asked(own.config.data) == ["<1?>", "<2?>"]
    assert own.note == ""
