"""A user's own function or class is found by its place, and a mistake in it costs one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow.errors import ConfigError
from winnow.user_code import load_user_object


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
