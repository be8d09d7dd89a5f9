"""Policy losses against loops over plain numbers, in value and in gradient.

The reference splits what carries a gradient from what does not: it takes the current log-probs
twice, once moving and once held, and what a loss puts under sg() reads the held ones. So the
central differences of the reference are the gradient that the loss must have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.objectives import loss_options

from winnow.algorithms.losses import POLICY_LOSSES, LossTokens


@dataclass(frozen=True)
class Rows:
    """Tokens as plain numbers; `owner` is a token's sample, -1 where it does not count."""

    held: list[float]
    old: list[float]
    advantage: list[float]
    owner: list[int]
    selected: list[bool]

    def of(self, sample: int) -> list[int]:
        """The counted tokens of a sample."""
        return [t for t, owner in enumerate(self.owner) if owner == sample]


def exp_held(d: float) -> float:
    return math.exp(min(max(d, -20.0), 20.0))


def bounded(r: float, low: float, high: float) -> float:
    return min(max(r, low), high)


def surrogate(r: float, a: float, low: float, high: float) -> float:
    """PPO's clipped loss by cases."""
    if a >= 0:
        return -a * min(r, 1 + high)
    return -a * max(r, 1 - low)


def ppo_clip(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    a, r = rows.advantage[t], exp_held(x[t] - rows.old[t])
    loss = surrogate(r, a, o["clip_low"], o["clip_high"])
    return min(loss, -a * o["dual_clip"]) if a < 0 and o["dual_clip"] else loss


def gspo(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    mine = rows.of(rows.owner[t])
    mean = math.fsum(rows.held[u] - rows.old[u] for u in mine) / len(mine)
    s = math.exp(min(x[t] - rows.held[t] + mean, 10.0))
    return surrogate(s, rows.advantage[t], o["clip_low"], o["clip_high"])


def cispo(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    r = exp_held(rows.held[t] - rows.old[t])
    if o["two_sided"]:
        low, high = o["two_sided"]
        return -bounded(r, 1 - low, 1 + high) * rows.advantage[t] * x[t]
    return -min(r, o["r_max"]) * rows.advantage[t] * x[t]


def sapo(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    a, r = rows.advantage[t], exp_held(x[t] - rows.old[t])
    tau = o["tau_positive"] if a > 0 else o["tau_negative"]
    z = tau * (r - 1)
    return -a * 4 / tau * (1 / (1 + math.exp(-z)) if z > -700 else 0.0)


def gmpo(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    mine = rows.of(rows.owner[t])
    a = math.fsum(rows.advantage[u] for u in mine) / len(mine)
    total = 0.0
    for u in mine:
        d = x[u] - rows.old[u]
        total += min(d, o["clip_high"]) if a > 0 else max(d, -o["clip_low"])
    return -a * exp_held(total / len(mine))


def clip_cov(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    return 0.0 if rows.selected[t] else ppo_clip(x, t, rows, {**o, "dual_clip": None})


def kl_cov(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    d = x[t] - rows.old[t]
    is_penalised = rows.selected[t] and abs(d) > 1e-4  # less is the rounding of two passes
    return -rows.advantage[t] * exp_held(d) + (o["coef"] * abs(d) if is_penalised else 0.0)


def weighed(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    r = exp_held(rows.held[t] - rows.old[t])
    return -rows.advantage[t] * min(r, o["r_max"]) * x[t]


def dppo_tv(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    moved = math.exp(min(rows.held[t], 0.0)) - math.exp(min(rows.old[t], 0.0))
    rising = rows.advantage[t] > 0
    stops = moved > o["divergence_high"] if rising else moved < -o["divergence_low"]
    return 0.0 if stops else weighed(x, t, rows, o)


def dppo_kl(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    p = math.exp(min(rows.held[t], 0.0))
    q = math.exp(min(rows.old[t], 0.0))
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    if rows.advantage[t] > 0:
        stops = kl > o["divergence_high"] and p > q
    else:
        stops = kl > o["divergence_low"] and p < q
    return 0.0 if stops else weighed(x, t, rows, o)


def dro(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    return -(rows.advantage[t] * x[t] - o["beta"] / 2 * (x[t] - rows.old[t]) ** 2)


def plain(x: list[float], t: int, rows: Rows, o: dict[str, Any]) -> float:
    return -rows.advantage[t] * x[t]


REFERENCES: dict[str, Callable[[list[float], int, Rows, dict[str, Any]], float]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "gpg": plain,
    "reinforce": plain,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": None}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    ("cispo", {"r_max": 2.0, "two_sided": None}),
    ("cispo", {"r_max": 5.0, "two_sided": (0.2, 0.28)}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 0.5}),
    ("gmpo", {"clip_low": 0.4, "clip_high": 0.3}),
    ("clip_cov", {"clip_low": 0.2, "clip_high": 0.28}),
    ("kl_cov", {"coef": 0.7}),
    ("dppo_tv", {"divergence_low": 0.1, "divergence_high": 0.05, "r_max": 3.0}),
    ("dppo_kl", {"divergence_low": 0.02, "divergence_high": 0.05, "r_max": 3.0}),
    ("dro", {"beta": 0.3}),
    ("gpg", {}),
    ("reinforce", {}),
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]


def rows_of(seed: int, lengths: list[int], scale: float) -> Rows:
    """Ragged samples; about one token in four does not count, one advantage in six is 0."""
    made = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def uniform(low: float, high: float) -> list[float]:
        draws = torch.rand(n, generator=made, dtype=torch.float64)
        return (low + (high - low) * draws).tolist()

    old = uniform(-4.0, -0.05)
    held = [x + d for x, d in zip(old, uniform(-scale, scale), strict=True)]
    advantage = [
        a if z > 1 / 6 else 0.0 for a, z in zip(uniform(-3, 3), uniform(0, 1), strict=True)
    ]
    owners = [b for b, length in enumerate(lengths) for _ in range(length)]
    owner = [b if z > 0.25 else -1 for b, z in zip(owners, uniform(0, 1), strict=True)]
    return Rows(held, old, advantage, owner, [z < 0.3 for z in uniform(0, 1)])


def tokens_of(rows: Rows, lengths: list[int]) -> LossTokens:
    return LossTokens(
        torch.tensor([owner >= 0 for owner in rows.owner]),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        len(lengths),
        torch.tensor(rows.selected),
    )


RAGGED = {
    "seed": st.integers(0, 2**31),
    "lengths": st.lists(st.integers(1, 6), min_size=1, max_size=5),
    "scale": st.sampled_from([1e-3, 0.3, 3.0, 40.0]),
}


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@given(**RAGGED)
def test_values_equal_the_loop(
    name: str, options: dict[str, Any], seed: int, lengths: list[int], scale: float
) -> None:
    rows = rows_of(seed, lengths, scale)
    columns = [torch.tensor(c, dtype=torch.float64) for c in (rows.held, rows.old, rows.advantage)]
    loss, _ = POLICY_LOSSES[name](*columns, tokens_of(rows, lengths), loss_options(name, options))
    expected = [
        REFERENCES[name](rows.held, t, rows, options) if owner >= 0 else 0.0
        for t, owner in enumerate(rows.owner)
    ]
    assert loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@examples(12)
@given(**{**RAGGED, "scale": st.sampled_from([0.3, 3.0])})
def test_gradients_equal_central_differences_of_the_loop(
    name: str, options: dict[str, Any], seed: int, lengths: list[int], scale: float
) -> None:
    rows = rows_of(seed, lengths, scale)
    weights = [math.cos(t + seed % 7) for t in range(len(rows.old))]
    counted = [t for t, owner in enumerate(rows.owner) if owner >= 0]

    def objective(x: list[float]) -> float:
        return math.fsum(weights[t] * REFERENCES[name](x, t, rows, options) for t in counted)

    logp = torch.tensor(rows.held, dtype=torch.float64, requires_grad=True)
    columns = [torch.tensor(c, dtype=torch.float64) for c in (rows.old, rows.advantage)]
    tokens = tokens_of(rows, lengths)
    loss, _ = POLICY_LOSSES[name](logp, *columns, tokens, loss_options(name, options))
    (gradient,) = torch.autograd.grad((loss * torch.tensor(weights)).sum(), logp)
    h = 1e-5
    for t in range(len(rows.old)):
        moved = [[*rows.held[:t], rows.held[t] + s * h, *rows.held[t + 1 :]] for s in (1, -1)]
        difference = (objective(moved[0]) - objective(moved[1])) / (2 * h)
        assert float(gradient[t]) == pytest.approx(difference, rel=1e-6, abs=1e-7)


def test_every_loss_has_a_reference() -> None:
    assert {name for name, _ in CASES} == REFERENCES.keys() == POLICY_LOSSES.keys()
