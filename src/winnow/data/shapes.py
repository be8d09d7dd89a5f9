"""The generated task `shapes`: count the squares or the circles of a picture.

A picture is a grid of cells, each with a square, a circle or nothing, in random colours. A problem
is asked as `<image>s?` or `<image>c?`, and answered by `=2`. Problems whose crc32 modulo 10 is 0
are held out for evaluation and never trained on.

Demonstrations for a warm start count shapes of both kinds, are right, or name any number.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.config.data import ShapesTask
from winnow.config.model import DemonstrationConfig
from winnow.data.images import IMAGE_MARK
from winnow.data.sort_digits import (
    DIGITS,
    EOS,
    PAD,
    UNKNOWN,
    Demonstration,
    is_held_out,
)
from winnow.data.sources import Row
from winnow.data.tokenizer import make_tokenizer
from winnow.errors import DataError
from winnow.models.vision import encode_png

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "shapes"
BEFORE, IMAGE, BEHIND, VIDEO = SPECIAL = ("<|before|>", "<|image|>", "<|behind|>", "<|video|>")
SQUARE, CIRCLE, NOTHING = "sc."
VOCABULARY = (PAD, EOS, UNKNOWN, *SPECIAL, *(DIGITS + "=?sc"))
IDS = {token: i for i, token in enumerate(VOCABULARY)}
PATCH, MERGE = 4, 2
CELL = PATCH * MERGE
"""Pixels of a cell's side: a cell is a token."""
_EVALUATION_SEED = "evaluation"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a Hugging Face tokenizer with a token a character, and those of images."""
    return make_tokenizer(VOCABULARY, SPECIAL)


def longest_prompt(task: ShapesTask) -> int:
    """Return the most tokens that a prompt has."""
    return task.side**2 + 4


class ShapesRows:
    """The problems of a seed, `TaskRows`. A training row depends on its index alone."""

    size = None
    data_sources = frozenset({DATA_SOURCE})

    def __init__(self, task: ShapesTask, seed: int) -> None:
        self._task, self._seed = task, seed
        self.fingerprints = {DATA_SOURCE: f"{task.side} x {task.side} cells, seed {seed}"}

    def candidates(self, index: int) -> Iterator[Row]:
        problems = _candidates(self._task, f"{self._seed}/{index}")
        yield _make_row(next(problem for problem in problems if not is_held_out(problem)))

    def candidates_of(self, uid: str) -> Iterator[Row]:
        problem = uid.removeprefix(f"{DATA_SOURCE}:")
        kind, cells, colours = [*problem.split("/"), "", ""][:3]
        fits = kind in (SQUARE, CIRCLE) and len(cells) == self._task.side**2
        if not fits or set(cells) - {*"sc."} or not colours.isdecimal() or is_held_out(problem):
            raise KeyError(uid)
        return iter([_make_row(problem)])

    def held_out(self) -> list[Row]:
        """Make rows of the first of the one fixed list of different held-out problems.

        Raises:
            DataError: there are not so many.
        """
        count, candidates = self._task.eval_problems, _candidates(self._task, _EVALUATION_SEED)
        tried = itertools.islice(candidates, 20_000 + 200 * count)
        problems = dict.fromkeys(problem for problem in tried if is_held_out(problem))
        if len(problems) < count:
            raise DataError(
                f"data.task.eval_problems is {count}, but there are only about {len(problems)} "
                "held-out problems; lower it, or raise data.task.side"
            )
        return [_make_row(each) for each in itertools.islice(problems, count)]


def demonstrations(
    count: int,
    config: DemonstrationConfig,
    task: ShapesTask,
    max_response_tokens: int,
    rng: np.random.Generator,
) -> list[Demonstration]:
    """Make `count` demonstrations on training problems."""
    problems = _candidates(task, f"demonstrations {rng.integers(2**62)}")
    examples: list[Demonstration] = []
    for problem in itertools.islice((p for p in problems if not is_held_out(p)), count):
        kind, cells, _ = problem.split("/")
        chance = rng.random()
        answer = cells.count(kind)
        if chance < config.guess_share:
            answer = len(cells) - cells.count(NOTHING)
        elif chance >= config.guess_share + config.working_share:
            answer = int(rng.integers(0, len(cells) + 1))
        image = encode_png(draw(problem), CELL)
        prompt = [BEFORE, *[IMAGE] * len(image), BEHIND, kind, "?"]
        ids = [np.array([IDS[t] for t in each]) for each in (prompt, [*f"={answer}", EOS])]
        examples.append(Demonstration(ids[0], (ids[1][:max_response_tokens],), (image.at(1),)))
    return examples


def draw(problem: str) -> Any:
    """Draw the picture of a problem; returns pixels [height, width, 3]."""
    _, cells, colours = problem.split("/")
    side = int(len(cells) ** 0.5)
    edge, rng = side * CELL, np.random.default_rng(int(colours))
    pixels = np.zeros((edge, edge, 3), np.uint8)
    x, y = np.meshgrid(np.arange(CELL), np.arange(CELL))
    circle = (x - (CELL - 1) / 2) ** 2 + (y - (CELL - 1) / 2) ** 2 < 2.2**2
    for place, cell in enumerate(cells):
        top, left = (CELL * each for each in divmod(place, side))
        colour = rng.integers(120, 256, 3)
        tile = pixels[top : top + CELL, left : left + CELL]
        if cell == SQUARE:
            tile[1:-1, 1:-1] = colour
        elif cell == CIRCLE:
            tile[circle] = colour
    return pixels


def _make_row(problem: str) -> Row:
    """Make a problem a row of data; its uid is the same whenever the problem comes round."""
    from PIL import Image

    kind, cells, _ = problem.split("/")
    Image.fromarray(draw(problem)).save(png := io.BytesIO(), "PNG")
    return Row(
        uid=f"{DATA_SOURCE}:{problem}",
        origin=f"{DATA_SOURCE} {problem}",
        data_source=DATA_SOURCE,
        messages=({"role": "user", "content": f"{IMAGE_MARK}{kind}?"},),
        ground_truth=str(cells.count(kind)),
        images=(png.getvalue(),),
    )


def _candidates(task: ShapesTask, key: str) -> Iterator[str]:
    """Yield random problems KIND/CELLS/COLOURS, all counts of a kind equally likely.

    They are of a hash, so that no library's generator can change the data.
    """
    size = task.side**2
    for attempt in itertools.count():
        digest = hashlib.blake2b(f"{key}/{attempt}".encode(), digest_size=16 + 2 * size).digest()
        asked, other = (SQUARE, CIRCLE) if digest[0] % 2 else (CIRCLE, SQUARE)
        count = int.from_bytes(digest[1:4], "big") % (size + 1)
        rest = int.from_bytes(digest[4:7], "big") % (size - count + 1)
        cells = asked * count + other * rest + NOTHING * (size - count - rest)
        ranks = np.frombuffer(digest[16:], ">u2")
        placed = "".join(cells[i] for i in np.argsort(ranks, kind="stable"))
        yield f"{asked}/{placed}/{int.from_bytes(digest[8:12], 'big')}"
