"""Short recipes that would fill any memory ("billion laughs"), given to a process with little."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.winnow_command import WINNOW

from winnow.config.files import MAX_FILE_BYTES, MAX_FILES, MAX_NODES
from winnow.config.load import MAX_CHARACTERS, parse_recipe

LEVELS, TIMES = 12, 10
"""Written out, each has more than 10^12 values."""
MEMORY = 1_000_000_000
"""Bytes of address space, of which the imports take most; torch is not among them."""


def repeated(text: str) -> str:
    return ", ".join([text] * TIMES)


def anchors(place: Path) -> list[str]:
    lines = [f"l0: &l0 [{repeated('ha')}]"]
    lines += [f"l{i}: &l{i} [{repeated(f'*l{i - 1}')}]" for i in range(1, LEVELS)]
    (place / "bomb.yaml").write_text("\n".join(lines) + "\n")
    return []


def merges(place: Path) -> list[str]:
    lines = ["l0: &l0 {a: 1}"]
    lines += [f"l{i}: &l{i} {{<<: [{repeated(f'*l{i - 1}')}]}}" for i in range(1, LEVELS)]
    (place / "bomb.yaml").write_text("\n".join(lines) + "\n")
    return []


def texts() -> dict[str, str]:
    def below(level: int) -> str:
        return f"${{data.prompt_template.p{level - 1}}}" * TIMES

    return {"p0": "{prompt}"} | {f"p{i}": below(i) for i in range(1, LEVELS)}


def references(place: Path) -> list[str]:
    lines = [f"    {key}: '{text}'" for key, text in texts().items()]
    (place / "bomb.yaml").write_text("\n".join(["data:", "  prompt_template:", *lines]) + "\n")
    return []


def typed_lists(place: Path) -> list[str]:
    (place / "bomb.yaml").touch()
    key = "reward.function.kwargs"
    levels = [
        f"+{key}.p{i}=[{','.join([f'${{{key}.p{i - 1}}}'] * TIMES)}]" for i in range(1, LEVELS)
    ]
    return [f"+{key}.p0=[1,2,3]", *levels]


def includes(place: Path) -> list[str]:
    for i in range(LEVELS):
        (place / f"part{i}.yaml").write_text(f"defaults: [{repeated(f'part{i + 1}')}]\n")
    (place / f"part{LEVELS}.yaml").touch()
    (place / "bomb.yaml").write_text("defaults: [part0]\n")
    return []


def data(place: Path) -> list[str]:
    with (place / "bomb.yaml").open("wb") as file:
        file.truncate(50_000_000_000)  # a hole: takes no disk
    return []


WRITTEN_OUT = f"its ${{…}} write out more than {MAX_CHARACTERS:,} characters; fix the value or"
BOMBS: list[tuple[Callable[[Path], list[str]], str]] = [
    (
        anchors,
        f"recipe bomb.yaml, line 5: more than {MAX_NODES:,} values after expanding "
        "anchors; use fewer anchors; fix the YAML there",
    ),
    (
        merges,
        f"recipe bomb.yaml, line 5: more than {MAX_NODES:,} values after expanding "
        "anchors; use fewer anchors; fix the YAML there",
    ),
    (references, f"data.prompt_template.p6: {WRITTEN_OUT} its ${{…}}"),
    (typed_lists, f"reward.function.kwargs.p5.7: {WRITTEN_OUT} its ${{…}}"),
    (
        includes,
        f"recipe bomb.yaml includes more than {MAX_FILES} recipes, the last of them "
        "part11.yaml; include each only once in `defaults`",
    ),
    (data, f"recipe bomb.yaml exceeds {MAX_FILE_BYTES:,} bytes; give a recipe, not data"),
]


@pytest.mark.parametrize(("bomb", "says"), BOMBS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bomb_is_refused_in_one_line_before_it_goes_off(
    bomb: Callable[[Path], list[str]], says: str, tmp_path: Path
) -> None:
    settings = bomb(tmp_path)
    done = subprocess.run(
        ["prlimit", f"--as={MEMORY}", WINNOW, "train", "bomb.yaml", *settings],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"winnow: {says}\n")


def test_what_a_recipe_may_need_passes(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "data:\n"
        f"  train_files: &files [{', '.join(f'part-{i}.parquet' for i in range(5000))}]\n"
        "  eval_files: *files\n"
        f"  prompt_template: {{a: '{'x' * 100_000} {{prompt}}', b: '${{.a}}'}}\n"
    )
    config = parse_recipe(str(tmp_path / "own.yaml"))
    assert config.data.eval_files == config.data.train_files
    assert config.data.prompt_template["b"] == config.data.prompt_template["a"]
