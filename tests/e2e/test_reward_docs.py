"""What docs/rewards.md tells one to write and to type, written and typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from benchmarks.kill import SETTINGS
from tests.winnow_command import WINNOW, in_this_process

TEXT = Path(__file__).parents[2].joinpath("docs/rewards.md").read_text(encoding="utf-8")
QUICK = (
    *SETTINGS, "trainer.steps=1", "run.name=nearly",
)  # fmt: skip


def section(title: str) -> str:
    """The text under a heading."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(title: str, kind: str) -> list[str]:
    """The fenced blocks of a kind under a heading."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", section(title), re.MULTILINE | re.DOTALL)
    return [text for named, text in fenced if named == kind]


def steady(said: str) -> list[str]:
    """Lines without what differs from run to run: time, folder, marks under a traceback's lines."""
    said = re.sub(r"^(time +)\S+ s$", r"\1T s", said, flags=re.MULTILINE)
    said = re.sub(r"(?<=[ \"])/\S*/(?=\w+\.py)", "", said)
    return [line for line in said.splitlines() if not re.fullmatch(r"[ ~^]*", line)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_starts: Path) -> Path:
    """A folder with the files of the docs."""
    place = tmp_path_factory.mktemp("newcomer")
    (place / "cache").symlink_to(warm_starts)
    for title in ("Write a reward in ten lines", "Debug one"):
        (code,) = blocks(title, "python")
        (name,) = set(re.findall(r"`(\w+\.py)`", section(title)))
        (place / name).write_text(code)
    prepare, *_ = blocks("Write a reward in ten lines", "sh")[0].splitlines()
    in_this_process(*shlex.split(prepare)[1:], folder=place).check()
    return place


def typed(command: str, place: Path, **more: str) -> tuple[int, str]:
    """A command as a shell runs it; what it prints to either stream."""
    assert command.startswith("winnow ")
    words = [str(WINNOW), *shlex.split(command)[1:]]
    if not WINNOW.exists():
        words[:1] = [sys.executable, "-m", "winnow.cli.main"]
    # Ray, in a test before in this process, has put a debugger of its own there.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONBREAKPOINT"}
    said = subprocess.run(
        words, cwd=place, env=environment, capture_output=True, text=True, check=False, **more
    )
    assert "" in (said.stdout, said.stderr) or said.returncode == 2
    return said.returncode, said.stdout + said.stderr


def test_the_reward_has_ten_lines_and_scores_as_shown(place: Path) -> None:
    (code,) = blocks("Write a reward in ten lines", "python")
    assert len(code.splitlines()) == 10
    (shown,) = blocks("Write a reward in ten lines", "text")
    _, command, _ = blocks("Write a reward in ten lines", "sh")[0].splitlines()
    status, said = typed(command, place)
    assert status == 0
    assert steady(said) == steady(shown)
    status, said = typed(command.replace("#245", "#2457999"), place)
    assert "\nreward        1\naccuracy      1\n" in said


def test_a_run_trains_by_it(place: Path) -> None:
    *_, command = blocks("Write a reward in ten lines", "sh")[0].splitlines()
    environment = {"WINNOW_CACHE": str(place / "cache")}
    words = [*shlex.split(command)[1:], *QUICK]
    in_this_process(*words, folder=place, environment=environment).check()
    rows = pq.read_table(place / "runs/nearly/rollouts/step-1.parquet").to_pylist()
    assert len(rows) >= 32
    assert not any(row["scorer_error"] for row in rows)
    for row in rows:
        assert (row["part/task"] == 1) == (row["accuracy"] == 1)
        assert row["accuracy"] == 1 or 0 <= row["part/task"] <= 0.5
    assert any(0 < row["part/task"] <= 0.5 and row["extra/begun"] > 0 for row in rows)


def test_a_failure_is_shown_as_in_the_docs(place: Path) -> None:
    (command,) = blocks("Debug one", "sh")[0].splitlines()
    (shown,) = blocks("Debug one", "text")
    status, said = typed(command, place)
    assert status == 2
    assert steady(said) == steady(shown)


def test_a_debugger_may_look_into_it(place: Path) -> None:
    text = (place / "shares.py").read_text()
    (place / "halted.py").write_text(text.replace("    return", "    breakpoint()\n    return"))
    command = "winnow reward try --truth 12 --answer '#13' --function halted.py reward.workers=0"
    status, said = typed(command, place, input="p digits * 2\ncontinue\n")
    assert status == 0
    assert "(Pdb) '1313'" in said
    assert re.search(r"^reward +0\.5$", said, re.MULTILINE)
