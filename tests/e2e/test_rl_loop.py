"""`examples/rl_loop.py` learns, and goes on from its state."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from benchmarks.kill import SETTINGS
from tests.pages import ROOT

import winnow

FILE = ROOT / "examples/rl_loop.py"
SHORT = [
    *("--groups=32", "--min-digits=2", "--max-digits=4", "--limit=32", "--lr=1e-3"),
    *SETTINGS,
]


@pytest.mark.slow
def test_dapo_on_one_page_learns(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("WINNOW_CACHE", str(home / "cache"))
    main = runpy.run_path(str(FILE))["main"]
    before, after = main(["--steps=6", *SHORT])
    assert after > before + 0.1
    assert main(["--steps=1", "--state=states/step-24", *SHORT])[0] == after
    assert "the state is in states/step-28" in capsys.readouterr().out


def test_it_uses_public_names_alone() -> None:
    text = FILE.read_text("utf-8")
    assert set(re.findall(r"winnow\.(\w+)", text)) <= set(winnow.__all__)
    assert not re.findall(r"\.(_\w+)", text)
