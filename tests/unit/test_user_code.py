"""A user's own function or class is found by its place, and a mistake in it costs one line."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from winnow.errors import ConfigError
from winnow.user_code import load_user_object, place_of, program_objects


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_function_in_a_file_or_an_installed_module_is_found_by_its_name(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.py", "def double(x):\n    return 2 * x\n")
    assert load_user_object(f"{file}:double", "a.path", ConfigError)(3) == 6
    assert load_user_object(file, "a.path", ConfigError, name="double")(4) == 8
    assert load_user_object("math:sqrt", "a.path", ConfigError)(9) == 3


def test_a_file_can_import_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "neighbour_of_mine.py", "FACTOR = 7\n")
    file = write(
        tmp_path / "mine.py",
        "from neighbour_of_mine import FACTOR\n\ndef times(x):\n    return FACTOR * x\n",
    )
    assert load_user_object(f"{file}:times", "a.path", ConfigError)(2) == 14


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "mine.py", f"def which():\n    return {number}\n")
    found = [
        load_user_object(f"{tmp_path}/{number}/mine.py:which", "a.path", ConfigError)()
        for number in (1, 2)
    ]
    assert found == [1, 2]


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        (None, "{}:f", "no such file; give the Python file"),
        ("def g(): ...\n", "{}:f", "has no callable f; give one of g"),
        ("f = 3\n", "{}:f", "has no callable f; define f in it"),
        ("x = 1\nimport nowhere_to_be_found\n", "{}:f", "line 2: importing it fails with Module"),
        ("x = = 1\n", "{}:f", "line 1: importing it fails with SyntaxError"),
        ("raise SystemExit(3)\n", "{}:f", "importing it fails with SystemExit: 3"),
        ("def f(): ...\n", "f", "names no object; give FILE.py:NAME"),
    ],
)
def test_a_mistake_names_field_place_and_remedy(
    text: str | None, place: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_user_object(place.format(file), "loss.path", ConfigError)
    line = str(caught.value)
    assert line.startswith("loss.path ")
    assert said in line
    assert "\n" not in line


def test_an_object_has_a_place_where_other_processes_can_import_it() -> None:
    assert place_of(write) == f"{__name__}:write"
    assert place_of(json.dumps) == "json:dumps"
    assert place_of(ast.parse) == f"{ast.__file__}:parse"
    assert place_of(lambda: 0) == "function"
    assert place_of(partial(write)) == "partial"
    assert place_of(write_again()) == "inner"


def write_again() -> Callable[..., None]:
    def inner() -> None: ...

    return inner


def test_an_object_of_the_program_is_known_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(program_objects, "twice", write)
    assert load_user_object("program:twice", "a.path", ConfigError) is write
    assert load_user_object("program", "a.path", ConfigError, name="twice") is write
    with pytest.raises(ConfigError) as caught:
        load_user_object("program:thrice", "a.path", ConfigError)
    assert str(caught.value) == (
        "a.path=program: thrice is an object of the program that began the run, which no other "
        "process can import; continue the run by that program's winnow.Trainer, or define it in a "
        "file"
    )
