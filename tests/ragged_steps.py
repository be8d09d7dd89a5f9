"""Steps of ragged samples as plain lists, at random, and the tensors that estimators take.

What a test expects is computed from the lists, in loops; only the code under test sees tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from winnow.algorithms.advantages import AdvantageInputs

SIXTEENTHS = st.integers(-64, 64).map(lambda n: n / 16)
"""Their sums, shifts and halves are exact, so only the function under test rounds."""
COMPONENTS = ("accuracy", "format")


@dataclass(frozen=True)
class Token:
    """One token; off `written` the numbers must not be read."""

    written: bool
    learns: bool = False
    reward: float = 0.0
    value: float = 0.0
    prob: float = 1.0
    square: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True)
class Sample:
    """One answer behind its prompt."""

    group: int
    tokens: tuple[Token, ...]
    greedy: float
    components: tuple[float, ...]

    @property
    def written(self) -> list[Token]:
        return [token for token in self.tokens if token.written]

    @property
    def reward(self) -> float:
        return sum(token.reward for token in self.written)


def inputs_of(samples: Sequence[Sample]) -> AdvantageInputs:
    """The samples packed end to end."""
    tokens = [token for sample in samples for token in sample.tokens]
    ends = [0]
    for sample in samples:
        ends.append(ends[-1] + len(sample.tokens))

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=torch.float64)

    def row(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return AdvantageInputs(
        rewards=row([sample.reward for sample in samples]),
        groups=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        offsets=torch.tensor(ends),
        gen_mask=torch.tensor([token.written for token in tokens], dtype=torch.bool),
        loss_mask=torch.tensor([token.learns for token in tokens], dtype=torch.bool),
        token_rewards=column("reward"),
        components={
            name: row([sample.components[k] for sample in samples])
            for k, name in enumerate(COMPONENTS)
        },
        greedy_rewards=row([sample.greedy for sample in samples]),
        values=column("value"),
        prob=column("prob"),
        prob_square_sum=column("square"),
        weights=column("weight"),
    )


@st.composite
def written_tokens(draw: st.DrawFn) -> Token:
    # A distribution over three: the token, and two that share the rest.
    prob, share = draw(st.integers(1, 16)) / 16, draw(st.integers(0, 8)) / 8
    rest = 1 - prob
    square = prob**2 + (rest * share) ** 2 + (rest * (1 - share)) ** 2
    reward = draw(st.sampled_from([0.0, 0.0, 0.125, -0.25]))
    weight = draw(st.sampled_from([1.0, 1.0, 0.5, 2.0, 0.0]))
    return Token(True, draw(st.booleans()), reward, draw(SIXTEENTHS), prob, square, weight)


@st.composite
def samples_of_group(draw: st.DrawFn, group: int) -> Sample:
    """An answer with the outcome on its last written token; now and then it has none."""
    noise = st.builds(Token, st.just(False), reward=SIXTEENTHS, value=SIXTEENTHS)
    tokens = draw(st.lists(st.one_of(written_tokens(), written_tokens(), noise), max_size=7))
    last = max((t for t, token in enumerate(tokens) if token.written), default=None)
    if last is not None:
        tokens[last] = replace(tokens[last], reward=draw(SIXTEENTHS))
    prompt = [Token(False)] * draw(st.integers(1, 2))
    parts = draw(st.tuples(SIXTEENTHS, SIXTEENTHS))
    return Sample(group, (*prompt, *tokens), draw(SIXTEENTHS), parts)


@st.composite
def steps(draw: st.DrawFn, min_group: int = 1) -> list[Sample]:
    """Groups of different sizes, their samples interleaved."""
    sizes = draw(st.lists(st.integers(min_group, 4), min_size=1, max_size=4))
    samples = [
        draw(samples_of_group(g * 7 - 3)) for g, size in enumerate(sizes) for _ in range(size)
    ]
    return draw(st.permutations(samples))
