"""Command lines that cannot be read: one line, exit code 2; help where nothing was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.winnow_command import in_this_process

WRONG = [
    ("trian", "no such command 'trian'. Did you mean 'train'? see `winnow --help`"),
    ("data prepar", "no such command 'prepar'. Did you mean 'prepare'? see `winnow data --help`"),
    ("train --zzz x", "no such option: --zzz; see `winnow train --help`"),
    ("export a", "missing argument 'target'; see `winnow export --help`"),
    ("recipes x", "got unexpected extra argument(s) (x); see `winnow recipes --help`"),
    ("eval a --step", "option '--step' requires an argument; see `winnow --help`"),
    ("train x --fresh=3", "option '--fresh' does not take a value; see `winnow --help`"),
    (
        "eval a --step x",
        "invalid value for '--step': Input should be a valid integer, unable to parse string as "
        "an integer, got 'x'; see `winnow eval --help`",
    ),
    (
        "data check f --max-prompt-tokens=q",
        "invalid value for '--max-prompt-tokens': Input should be a valid integer, unable to parse "
        "string as an integer, got 'q'; see `winnow data check --help`",
    ),
    (
        "data check f --max-prompt-tokens 0",
        "invalid value for '--max-prompt-tokens': Input should be greater than or equal to 1, got "
        "'0'; see `winnow data check --help`",
    ),
]


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_a_command_line_that_cannot_be_read_is_answered_in_one_line(
    words: str, says: str, tmp_path: Path
) -> None:
    said = in_this_process(*words.split(), folder=tmp_path)
    assert (said.code, said.out, said.err) == (2, "", f"winnow: {says}\n")


@pytest.mark.parametrize("words", ["", "data check"])
def test_without_arguments_a_command_shows_its_help(words: str, tmp_path: Path) -> None:
    said = in_this_process(*words.split(), folder=tmp_path)
    asked = in_this_process(*words.split(), "--help", folder=tmp_path)
    assert (said.code, said.err) == (2, "")
    assert asked.code == 0
    assert said.out.strip() == asked.out.strip() != ""
