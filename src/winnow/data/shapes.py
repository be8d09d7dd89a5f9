"""The generated task `shapes`: count the squares or the crosses of a picture.

A picture is a grid of cells, each with a square, a cross or nothing, in random colours. A problem
is asked as `<image>s?` or `<image>c?`, and answered by `=2`. Problems whose crc32 modulo 10 is 0
are held out for evaluation and never trained on.

Demonstrations for a warm start count shapes of both kinds, are right, or name any number.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.data import ShapesTask
from winnow.config.model import DemonstrationConfig
from winnow.data.images import IMAGE_MARK
from winnow.data.sort_digits import DIGITS, EOS, PAD, UNKNOWN, Demonstration, GeneratedRows
from winnow.data.tokenizer import make_tokenizer
from winnow.models.vision import encode_png
from winnow.types import Image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "shapes"
BEFORE, IMAGE, BEHIND, VIDEO = SPECIAL = ("<|before|>", "<|image|>", "<|behind|>", "<|video|>")
SQUARE, CROSS, NOTHING = "sc."
VOCABULARY = (PAD, EOS, UNKNOWN, *SPECIAL, *(DIGITS + "=?sc"))
IDS = {token: i for i, token in enumerate(VOCABULARY)}
PATCH, MERGE = 4, 2
CELL = PATCH * MERGE
"""Pixels of a cell's side: a cell is a token."""
_X = np.abs(np.arange(CELL) - (CELL - 1) / 2)
_Y = _X[:, None]
_MASKS = {SQUARE: np.maximum(_X, _Y) < 3, CROSS: _X + _Y < 3, NOTHING: _X + _Y < 0}
"""Pixels [CELL, CELL] of a shape in its cell."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a Hugging Face tokenizer with a token a character, and those of images."""
    return make_tokenizer(VOCABULARY, SPECIAL)


def longest_prompt(task: ShapesTask) -> int:
    """Return the most tokens that a prompt has."""
    return task.side**2 + 4


class ShapesRows(GeneratedRows[ShapesTask]):
    """The problems KIND/CELLS/COLOURS of a seed, all counts of a kind equally likely."""

    def __init__(self, task: ShapesTask, seed: int) -> None:
        super().__init__(task, seed, DATA_SOURCE, f"{task.side} x {task.side} cells", "side")
        self._cells = task.side**2
        self.digest_bytes = 16 + 2 * self._cells

    def make_problem(self, digest: bytes) -> str:
        size = self._cells
        asked, other = (SQUARE, CROSS) if digest[0] % 2 else (CROSS, SQUARE)
        count = int.from_bytes(digest[1:4], "big") % (size + 1)
        rest = int.from_bytes(digest[4:7], "big") % (size - count + 1)
        cells = asked * count + other * rest + NOTHING * (size - count - rest)
        ranks = np.frombuffer(digest[16:], ">u2")
        placed = "".join(cells[i] for i in np.argsort(ranks, kind="stable"))
        return f"{asked}/{placed}/{int.from_bytes(digest[8:12], 'big')}"

    def is_problem(self, text: str) -> bool:
        pattern = rf"[{SQUARE}{CROSS}]/[{SQUARE}{CROSS}{NOTHING}]{{{self._cells}}}/\d+"
        return re.fullmatch(pattern, text, re.ASCII) is not None

    def describe(self, problem: str) -> tuple[str, str, dict[str, Any]]:
        kind, cells, _ = problem.split("/")
        return f"{IMAGE_MARK}{kind}?", str(cells.count(kind)), {"images": (draw(problem).png,)}


def demonstrations(
    count: int,
    config: DemonstrationConfig,
    task: ShapesTask,
    max_response_tokens: int,
    rng: np.random.Generator,
) -> list[Demonstration]:
    """Make `count` demonstrations on training problems."""
    problems = ShapesRows(task, 0).training_problems(f"demonstrations {rng.integers(2**62)}")
    examples: list[Demonstration] = []
    for problem in itertools.islice(problems, count):
        kind, cells, _ = problem.split("/")
        chance = rng.random()
        answer = cells.count(kind)
        if chance < config.guess_share:
            answer = len(cells) - cells.count(NOTHING)
        elif chance >= config.guess_share + config.working_share:
            answer = int(rng.integers(0, len(cells) + 1))
        image = draw(problem)
        prompt = [BEFORE, *[IMAGE] * len(image), BEHIND, kind, "?"]
        ids = [np.array([IDS[t] for t in each]) for each in (prompt, [*f"={answer}", EOS])]
        examples.append(Demonstration(ids[0], (ids[1][:max_response_tokens],), (image.at(1),)))
    return examples


def draw(problem: str) -> Image:
    """Draw the picture of a problem."""
    _, cells, colours = problem.split("/")
    side, rng = math.isqrt(len(cells)), np.random.default_rng(int(colours))
    pixels = np.zeros((side * CELL, side * CELL, 3), np.uint8)
    for place, cell in enumerate(cells):
        top, left = divmod(place, side)
        tile = pixels[CELL * top : CELL * (top + 1), CELL * left : CELL * (left + 1)]
        tile[_MASKS[cell]] = rng.integers(120, 256, 3)
    return encode_png(pixels, CELL)
