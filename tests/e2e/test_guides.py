"""The plans that guides show: made again at full size, line by line."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from tests.pages import ROOT, code_blocks, write_shown_files
from tests.winnow_command import in_this_process


def squeezed(text: str) -> list[str]:
    """The lines, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("page", ["one_gpu", "eight_gpus", "sixteen_nodes", "cookbook"])
def test_a_guides_recipe_fits_and_its_plan_has_the_lines_that_are_shown(
    page: str, tmp_path: Path
) -> None:
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    write_shown_files(text, tmp_path)
    blocks = list(code_blocks(text))
    plans = [
        (shlex.split(typed[0])[1:], shown)
        for (kind, block), (_, shown) in pairwise(blocks)
        if kind == "sh" and (typed := re.findall(r"^winnow plan .*", block, re.MULTILINE))
    ]
    assert plans
    for words, shown in plans:
        done = in_this_process(*words, folder=tmp_path).check()
        assert "FITS as it is" in squeezed(done.out)
        assert [line for line in squeezed(shown) if line not in squeezed(done.out)] == []
