"""Reading the pages of the documentation: their blocks of code and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
OPTIONAL = re.compile(r"\[(--[^\]]*)\]")
"""How a page writes that an option may be left out."""


def code_blocks(page: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each fenced block, and of indented ones as kind `indented`."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    yield from fenced.findall(page)
    for block in re.findall(r"(?<=\n\n)((?: {4} *\S.*\n)+)", fenced.sub("", page)):
        yield "indented", re.sub(r"^ {4}", "", block, flags=re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """The words of every `winnow` command of a page."""
    found = []
    for kind, block in code_blocks(page):
        if kind not in ("sh", "bash", "", "indented"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^(.venv/bin/|\$ )", "", line.strip()).replace(" …", "")
            line = line.replace("-tokens N", "-tokens 512")
            if not line.startswith("winnow ") or line.startswith("winnow train RECIPE: "):
                continue
            found.append(shlex.split(OPTIONAL.sub(r"\1", line), comments=True)[1:])
    return found
