"""Pictures of the ideas in the documentation, with numbers from Winnow's functions.

    python -m benchmarks.pictures [FOLDER]      # docs/pictures by default

A picture is an SVG of 640 units, light or dark as its page is, whose text a phone can show. What
is fixed here are examples: lengths, rewards, the seconds of a step. What they lead to is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from winnow.algorithms.aggregation import UpdateCounts, aggregate
from winnow.algorithms.losses import LossTerms, LossTokens, ppo_clip
from winnow.config.load import parse_recipe
from winnow.config.rollout import VarianceFilter
from winnow.data.calc import VOCABULARY, encode
from winnow.learning.batch import all_micro_batches, pack, pack_sequences
from winnow.rewards.pipeline import overlong_penalty
from winnow.sampling.filters import apply_filter
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WIDTH = 640
COLOURS = {  # light and dark, of frontend/src/style.css
    "panel": ("#ffffff", "#1a1d21"),
    "line": ("#d5d5d0", "#3a3f46"),
    "ink": ("#1b1d20", "#e4e6e9"),
    "dim": ("#5e636a", "#a3a9b2"),
    "blue": ("#3866d6", "#7b9dff"),
    "orange": ("#c96a10", "#f0a04f"),
    "green": ("#1f8459", "#55c795"),
    "red": ("#bf4a5e", "#ef8496"),
    "mark": ("#e8edfb", "#232c44"),
}
Points = Sequence[tuple[float, float]]


class Picture:
    """An SVG under construction; positions are units from the upper left corner."""

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, colour: str = "ink", at: str = "start", size: int = 19
    ) -> None:
        """Write words with their base line at y; `at` is start, middle or end."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{colour}" text-anchor="{at}" '
            f'font-size="{size}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, colour: str, words: str = "", share: float = 1
    ) -> None:
        """Fill a rectangle with `share` of a colour, with words in the middle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="4" '
            f'class="{colour}" fill-opacity="{share:.3f}"/>'
        )
        if words:
            is_pale = colour in ("mark", "line") or share < 0.6
            self.text(x + w / 2, y + h / 2 + 6, words, "ink" if is_pale else "panel", "middle", 17)

    def line(
        self, points: Points, colour: str = "line", width: float = 1.5, dash: str = ""
    ) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" class="s-{colour}" stroke-width="{width}"'
            f'{dashes} stroke-linejoin="round"/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "dim") -> None:
        """Draw an arrow along one of the axes."""
        self.line([(x, y), (to_x, to_y)], colour, 2)
        dx, dy = np.sign(to_x - x) * 9, np.sign(to_y - y) * 9
        ends = [(to_x - dx + s * dy * 0.6, to_y - dy + s * dx * 0.6) for s in (1, -1)]
        self.line([ends[0], (to_x, to_y), ends[1]], colour, 2)

    def svg(self) -> str:
        """Return the file's text."""
        light, dark = (
            "".join(f"--{name}:{pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1)
        )
        rules = "".join(
            f".{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in COLOURS
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
            f'role="img" font-family="system-ui, sans-serif"><title>{escape(self._title)}</title>'
            f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}{rules}"
            f'</style><rect width="{WIDTH}" height="{self._height}" rx="10" class="panel"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def dynamic_sampling() -> Picture:
    """Nine groups in the order of their admission, and the step of four that is cut from them."""
    picture, target, taken = Picture(458, "Dynamic sampling"), 4, 0
    picture.text(20, 34, "group")
    picture.text(110, 34, "4 answers")
    picture.text(260, 34, "filter")
    accuracies = ("1110", "1111", "0100", "0000", "1010", "1111", "0001", "1100", "0000")
    for n, row in enumerate(accuracies):
        y = 48 + 44 * n
        scores = [Score(2.0 * int(a) - 1, float(a)) for a in row]
        verdict = apply_filter(scores, VarianceFilter())
        is_late = taken == target
        is_trained = verdict == "qualified" and not is_late
        taken += is_trained
        picture.box(12, y, 616, 36, "mark" if is_trained else "panel")
        picture.text(62, y + 25, str(n + 1), at="end")
        for i, accuracy in enumerate(row):
            picture.box(110 + 30 * i, y + 6, 24, 24, "green" if accuracy == "1" else "red")
        picture.text(260, y + 25, verdict.replace("_", " "), "ink" if is_trained else "dim")
        fate = f"trained, {taken} of {target}" if is_trained else "no signal: out"
        if verdict == "qualified" and is_late:
            fate = "waits for the next step"
        picture.text(400, y + 25, fate, "blue" if is_trained else "dim")
        if is_trained and taken == target:
            picture.line([(12, y + 40), (628, y + 40)], "orange", 3)
    return picture


def _slopes(ratios: Tensor, advantage: float, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return what ppo_clip maximises for a token at each ratio, and its slope in log-prob."""
    logp = ratios.log().requires_grad_()
    n = len(ratios)
    tokens = LossTokens(torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.long), 1)
    terms = LossTerms(logp, torch.zeros(n), torch.full((n,), advantage), tokens)
    loss, _ = ppo_clip(terms, clip_low=low, clip_high=high, dual_clip=None)
    (slopes,) = torch.autograd.grad(-loss.sum(), logp)
    return -loss.detach(), slopes


def clip_higher() -> Picture:
    """The clipped objective over the ratio, for a good and a bad token."""
    picture = Picture(360, "Clip-higher")
    ratios = torch.linspace(0.5, 1.6, 221)
    for x0, advantage in ((40, 1.0), (345, -1.0)):
        objective, slopes = _slopes(ratios, advantage, 0.2, 0.28)
        middle = 155 if advantage > 0 else 185

        def at(
            r: float, value: float, x0: int = x0, a: float = advantage, m: int = middle
        ) -> tuple[float, float]:
            return x0 + (r - 0.5) / 1.1 * 270, m - (value - a) * 180

        still = ratios[slopes == 0]
        left, right = at(float(still.min()), 0)[0], at(float(still.max()), 0)[0]
        picture.box(left, 56, right - left, 236, "orange", share=0.16)
        old, _ = _slopes(ratios, advantage, 0.2, 0.2)
        for values, colour, width, dash in ((old, "dim", 2, "6 5"), (objective, "blue", 4, "")):
            points = [at(float(r), float(v)) for r, v in zip(ratios, values, strict=True)]
            picture.line(points, colour, width, dash)
        picture.line([(x0, 292), (x0 + 270, 292)], "dim")
        for r in (0.8, 1.0, 1.28):
            x = at(r, 0)[0]
            picture.line([(x, 286), (x, 298)], "dim")
            picture.text(x, 320, f"{r:g}", "dim", "middle")
        name = "A > 0: more of it" if advantage > 0 else "A < 0: less of it"
        picture.text(x0 + 135, 36, name, at="middle")
        for y, words in ((258, "no"), (278, "gradient")):
            picture.text((left + right) / 2, y, words, "orange", "middle", 17)
    picture.text(320, 347, "ratio r; dashed: clip of 0.2 on both sides", "dim", "middle", 17)
    return picture


def token_mean() -> Picture:
    """The weight of each token in the loss, by two aggregations, for three answers."""
    lengths = torch.tensor([12, 4, 2])
    index = torch.repeat_interleave(torch.arange(3), lengths)
    picture, total = Picture(386, "Token mean and sample mean"), int(lengths.sum())
    names = {"token-mean": "token-mean (DAPO)", "seq-mean-token-mean": "seq-mean-token-mean (GRPO)"}
    for block, (name, words) in enumerate(names.items()):
        values = torch.ones(total, requires_grad=True)
        mask = torch.ones(total, dtype=torch.bool)
        loss = aggregate(
            values,
            mask,
            index,
            name,
            group_tokens=torch.full((3,), total),
            counts=UpdateCounts(total, 3, 1),
        )
        (weights,) = torch.autograd.grad(loss, values)
        top = 190 * block
        picture.text(20, top + 36, words)
        picture.text(620, top + 36, "weight of a token", "dim", "end", 17)
        for answer in range(3):
            y, own = top + 52 + 42 * answer, weights[index == answer].tolist()
            for t, weight in enumerate(own):
                picture.box(20 + 37 * t, y, 33, 32, "blue", share=0.1 + weight / 0.19)
            picture.text(620, y + 23, f"{100 * own[0]:.1f} %", at="end")
    return picture


def overlong() -> Picture:
    """The soft overlong penalty over the length of an answer, with the published limits."""
    config = parse_recipe("dapo_qwen2.5_32b", [])
    limit, buffer = config.rollout.max_response_tokens, config.reward.overlong.buffer_tokens
    picture = Picture(330, "Soft overlong penalty")

    def at(length: int) -> tuple[float, float]:
        return 70 + length / limit * 530, 60 - overlong_penalty(length, limit, buffer) * 190

    start, end = at(limit - buffer), at(limit)
    picture.box(start[0], 40, end[0] - start[0], 230, "orange", share=0.16)
    for value in (0, -0.5, -1):
        y = 60 - value * 190
        picture.line([(70, y), (600, y)])
        picture.text(60, y + 6, f"{value:g}".replace("-", "\u2212"), "dim", "end")
    picture.line([at(length) for length in range(0, limit + 1, 512)], "blue", 4)
    for length, where in ((0, "middle"), (limit - buffer, "middle"), (limit, "end")):
        picture.text(at(length)[0] + 12 * (where == "end"), 300, f"{length:,}", "dim", where)
    picture.text(300, 300, "tokens of an answer", "dim", "middle")
    picture.text(start[0] - 12, 190, "added to the reward", "blue", "end")
    picture.text((start[0] + end[0]) / 2, 32, "buffer", "orange", "middle")
    return picture


def modes() -> Picture:
    """Time lines of the three modes, where sampling takes 3, training 2 and publishing 0.3."""
    sample, learn, publish, scale = 3.0, 2.0, 0.3, 39.0
    picture = Picture(420, "Modes")

    def row(y: float, name: str, colour: str, spans: Points, numbers: Sequence[int]) -> None:
        picture.text(20, y + 23, name, "dim", size=17)
        for (start, stop), n in zip(spans, numbers, strict=True):
            stop = min(stop, 13.2)
            if start < 13.2:
                words = str(n) if stop - start > 0.5 else ""
                picture.box(108 + start * scale, y, (stop - start) * scale - 2, 34, colour, words)

    def lines(top: float, name: str, engine: Points, trainer: Points, at: Sequence[float]) -> None:
        picture.text(20, top + 20, name)
        row(top + 30, "sample", "blue", engine, range(1, len(engine) + 1))
        row(top + 70, "train", "green", trainer, range(1, len(trainer) + 1))
        for start in at:
            picture.box(108 + start * scale, top + 26, publish * scale - 2, 82, "orange")

    step = sample + learn + publish
    starts = [step * k for k in range(3)]
    lines(
        10,
        "sync",
        [(t, t + sample) for t in starts],
        [(t + sample, t + sample + learn) for t in starts],
        [t + sample + learn for t in starts[:2]],
    )
    step = max(sample, learn) + publish
    barriers = [sample + step * k for k in range(4)]
    lines(
        140,
        "one_step_off",
        [(0, sample), *((t, t + sample) for t in barriers)],
        [(t, t + learn) for t in barriers],
        [t + step - publish for t in barriers[:3]],
    )
    ready = list(accumulate([sample] * 5))
    lines(270, "async", [(t - sample, t) for t in ready], [(t, t + learn) for t in ready[:4]], [])
    for t in ready[:4]:
        if t + learn < 13:
            picture.box(108 + (t + learn) * scale, 340, publish * scale - 2, 34, "orange")
    picture.arrow(108, 394, 620, 394)
    picture.text(20, 400, "time", "dim", size=17)
    picture.box(430, 12, 14, 20, "orange")
    picture.text(452, 29, "weights published", "dim", size=17)
    return picture


def packing() -> Picture:
    """The same eight answers as padded rows, and as micro-batches of packed sequences."""
    lengths, most = (9, 5, 12, 4, 7, 3, 10, 6), 20
    batch = pack_sequences([np.arange(length) for length in lengths], last=3)
    packed = [micro.lengths for micro in all_micro_batches(batch, most)]
    longest, real = max(lengths), sum(lengths)
    picture, cell = Picture(520, "Packing"), 22.0

    def sequence(x: float, y: float, length: int) -> None:
        picture.box(x, y, length * cell - 3, 26, "blue", str(length))

    computed = longest * len(lengths)
    picture.text(
        20, 36, f"padded: {computed} tokens computed, {100 * (1 - real / computed):.0f} % padding"
    )
    for n, length in enumerate(lengths):
        y = 50 + 32 * n
        picture.box(20, y, longest * cell - 3, 26, "line", share=0.6)
        sequence(20, y, length)
    top = 350
    picture.text(20, top, f"packed, at most {most} tokens: {sum(map(sum, packed))} computed")
    for n, micro in enumerate(packed):
        y, x = top + 14 + 38 * n, 20.0
        for length in micro:
            sequence(x, y, length)
            x += length * cell
        picture.line([(20 + most * cell, y - 3), (20 + most * cell, y + 30)], "orange", 2)
        picture.text(478, y + 20, f"micro-batch {n + 1}", "dim", size=17)
    return picture


def publication() -> Picture:
    """The way of weights from two ranks to two engines."""
    picture = Picture(402, "Publication of weights")
    for n in range(2):
        x = 30 + 310 * n
        picture.box(x, 20, 270, 58, "green", f"rank {n}: gathers each tensor")
        picture.arrow(x + 135, 80, x + 135, 116)
        for k in range(3):
            picture.box(x + 92 * k, 120, 86, 40, "mark", f"bucket {2 * k + n + 1}")
    picture.text(320, 192, "shared memory, or the nodes' object stores", "dim", "middle", 18)
    for n in range(2):
        x = 30 + 310 * n
        picture.arrow(x + 135, 204, x + 135, 240)
        picture.box(x, 244, 270, 58, "blue", f"engine {n}: fetches 1 to 6")
        picture.text(x + 135, 326, "checksum of what it holds", "dim", "middle", 17)
    picture.box(30, 344, 580, 42, "orange", "canary: both sides score the same tokens, and agree")
    return picture


def conversation() -> Picture:
    """A conversation of the quickstart of tools as ids, and which of them are trained."""
    parts = (
        ("<|user|>98*67<|assistant|>", "prompt"),
        ("<call>98*67</call><eos>", "model"),
        ("<|tool|>6566<|assistant|>", "environment"),
        ("=6566<eos>", "model"),
    )
    ids = [encode(text) for text, _ in parts]
    segments = tuple(
        Segment(
            some, np.zeros(len(some), np.float32), (), "model" if who == "model" else "environment"
        )
        for some, (_, who) in zip(ids[1:], parts[1:], strict=True)
    )
    answer = Answer(Trajectory(segments, "stop"), Score(1.0, 1.0))
    batch = pack([Group(0, Prompt("0", ids[0], "", "", None), (answer,))])
    mask = batch.loss_mask.tolist()
    picture, place = Picture(96 * len(parts) + 50, "A conversation as ids"), 0
    for n, (some, (_, who)) in enumerate(zip(ids, parts, strict=True)):
        x, y = 20.0, 14 + 96.0 * n
        picture.text(x, y + 20, who, "blue" if who == "model" else "dim")
        for token in some.tolist():
            shown = VOCABULARY[token]
            width = 30.0 + 9.2 * (len(shown) - 1)
            colour = "blue" if mask[place] else "line"
            picture.box(x, y + 30, width, 32, colour, shown, 1 if mask[place] else 0.6)
            picture.text(x + width / 2, y + 80, str(token), "dim", "middle", 16)
            x, place = x + width + 4, place + 1
    trained = f"{sum(mask)} of {len(mask)} ids are trained (blue)"
    picture.text(20, 96 * len(parts) + 34, trained)
    return picture


PICTURES: Mapping[str, Callable[[], Picture]] = {
    each.__name__: each
    for each in (
        *(dynamic_sampling, clip_higher, token_mean, overlong),
        *(modes, packing, publication, conversation),
    )
}
"""The pictures by the names of their files."""


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), "utf-8")
