"""Policy losses against loops over plain numbers, in value and gradient, and what two select.

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
from tests.objectives import loss_options
from torch import Tensor

from winnow.algorithms import covariance as covariance_losses
from winnow.algorithms.covariance import keyed_draws
from winnow.algorithms.losses import POLICY_LOSSES, LossTokens
from winnow.rollout.draw import uniform


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
SMOOTH = 0.3, 3.0
"""Scales of log-ratios at which a difference of two values hits no bound."""


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@given(**RAGGED)
def test_values_and_gradients_are_those_of_the_loop(
    name: str, options: dict[str, Any], seed: int, lengths: list[int], scale: float
) -> None:
    rows = rows_of(seed, lengths, scale)
    weights = [math.cos(t + seed % 7) for t in range(len(rows.old))]
    counted = [t for t, owner in enumerate(rows.owner) if owner >= 0]
    logp = torch.tensor(rows.held, dtype=torch.float64, requires_grad=True)
    columns = [torch.tensor(c, dtype=torch.float64) for c in (rows.old, rows.advantage)]
    tokens = tokens_of(rows, lengths)
    loss, _ = POLICY_LOSSES[name](logp, *columns, tokens, loss_options(name, options))
    expected = [0.0] * len(rows.old)
    for t in counted:
        expected[t] = REFERENCES[name](rows.held, t, rows, options)
    assert loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if scale not in SMOOTH:
        return

    def objective(x: list[float]) -> float:
        return math.fsum(weights[t] * REFERENCES[name](x, t, rows, options) for t in counted)

    (gradient,) = torch.autograd.grad((loss * torch.tensor(weights)).sum(), logp)
    h = 1e-5
    for t in range(len(rows.old)):
        moved = [[*rows.held[:t], rows.held[t] + s * h, *rows.held[t + 1 :]] for s in (1, -1)]
        difference = (objective(moved[0]) - objective(moved[1])) / (2 * h)
        assert float(gradient[t]) == pytest.approx(difference, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@given(junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -3.0]), **RAGGED)
def test_tokens_that_do_not_count_change_nothing(
    name: str, options: dict[str, Any], junk: float, seed: int, lengths: list[int], scale: float
) -> None:
    rows = rows_of(seed, lengths, scale)
    tokens, found = tokens_of(rows, lengths), []
    for other in (None, junk):
        columns = [
            torch.tensor(each, dtype=torch.float64)
            for each in (rows.held, rows.old, rows.advantage)
        ]
        if other is not None:
            columns = [torch.where(tokens.mask, each, other) for each in columns]
        logp = columns[0].requires_grad_()
        terms = (logp, *columns[1:], tokens)
        loss, sums = POLICY_LOSSES[name](*terms, loss_options(name, options))
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        for each in (loss, gradient):
            assert not each[~tokens.mask].any()
            assert each.isfinite().all()
        found.append((loss.tolist(), gradient.tolist(), {n: float(v) for n, v in sums.items()}))
    assert found[0] == found[1]


def test_every_loss_has_a_reference() -> None:
    assert {name for name, _ in CASES} == REFERENCES.keys() == POLICY_LOSSES.keys()


def clip_cov_select(*columns: Tensor, **options: Any) -> Tensor:
    return covariance_losses.clip_cov_select(*columns, **loss_options("clip_cov", options))


def kl_cov_select(*columns: Tensor, **options: Any) -> Tensor:
    return covariance_losses.kl_cov_select(*columns, **loss_options("kl_cov", options))


def columns(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old, advantage, mask and draws [n]."""
    made = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(n, generator=made, dtype=torch.float64)
    advantage = torch.randn(n, generator=made, dtype=torch.float64)
    mask = torch.rand(n, generator=made) > 0.2
    return old, advantage, mask, keyed_draws(seed, torch.zeros(n).long(), torch.arange(n))


def covariances(old: Tensor, advantage: Tensor, mask: Tensor) -> dict[int, float]:
    """Of the counted tokens, over plain numbers."""
    at = [t for t in range(len(old)) if mask[t]]
    x, a = [float(old[t]) for t in at], [float(advantage[t]) for t in at]
    mean_x, mean_a = math.fsum(x) / len(at), math.fsum(a) / len(at)
    return {t: (a[i] - mean_a) * (x[i] - mean_x) for i, t in enumerate(at)}


def chosen(selected: Tensor) -> set[int]:
    return set(selected.nonzero().flatten().tolist())


@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 300), share=st.sampled_from([2e-4, 0.01, 0.1, 1.0])
)
def test_the_right_number_is_selected_by_the_right_rule(seed: int, n: int, share: float) -> None:
    old, advantage, mask, draws = columns(seed, n)
    mask[0] = True
    cov = covariances(old, advantage, mask)
    wanted = max(int(share * len(cov)), 1)

    largest = chosen(kl_cov_select(old, advantage, mask, draws, share=share))
    assert len(largest) == wanted
    assert largest <= cov.keys()
    # Two tokens alone have one covariance, but for its last bit.
    others = [cov[t] for t in cov.keys() - largest]
    assert min(cov[t] for t in largest) >= max(others, default=-math.inf) - 1e-12

    bounds = {"cov_low": 0.3, "cov_high": 1.2}
    within = sorted((t for t in cov if 0.3 < cov[t] < 1.2), key=lambda t: float(draws[t]))
    found = clip_cov_select(old, advantage, mask, draws, share=share, **bounds)
    assert chosen(found) == set(within[:wanted])


@given(seed=st.integers(0, 2**31), n=st.integers(1, 60), precision=st.sampled_from([1, 12]))
def test_the_order_of_the_tokens_does_not_matter(seed: int, n: int, precision: int) -> None:
    old, advantage, mask, draws = columns(seed, n)
    old, advantage = old.round(decimals=precision), advantage.round(decimals=precision)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for select, options in (
        (kl_cov_select, {"share": 0.2}),
        (clip_cov_select, {"share": 0.2, "cov_low": 0.1}),
    ):
        found = select(old, advantage, mask, draws, **options)
        there = select(old[order], advantage[order], mask[order], draws[order], **options)
        assert torch.equal(found[order], there)


@pytest.mark.parametrize("select", [clip_cov_select, kl_cov_select])
@pytest.mark.parametrize("n", [0, 3])
def test_nothing_counted_selects_nothing(select: object, n: int) -> None:
    x, mask = torch.full((n,), math.nan), torch.zeros(n, dtype=torch.bool)
    assert callable(select)
    assert not select(x, x, mask, torch.zeros(n, dtype=torch.float64)).any()


def test_one_token_and_equal_ones_are_defined() -> None:
    for n in (1, 3):
        x, mask = torch.ones(n), torch.ones(n, dtype=torch.bool)
        draws = torch.arange(n, dtype=torch.float64) / n
        assert not clip_cov_select(x, x, mask, draws).any()
        assert chosen(kl_cov_select(x, x, mask, draws)) == {0}


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selection_in_a_micro_batch_reads_the_current_policy(name: str) -> None:
    old, advantage, mask, draws = columns(11, 200)
    logp = old + 0.5 * torch.sin(torch.arange(200, dtype=torch.float64))
    tokens = LossTokens(mask, torch.zeros(200).long(), 1, None, draws)
    options = {"share": 0.05, "selection": "microbatch"}
    if name == "clip_cov":
        options |= {"cov_low": 0.2}
    terms = (logp, old, advantage, tokens)
    loss, sums = POLICY_LOSSES[name](*terms, loss_options(name, options))
    assert int(sums["selected_share"]) == int(0.05 * int(mask.sum()))

    cov = covariances(logp, advantage, mask)
    by_cov = sorted(cov, key=lambda t: -cov[t])
    r = (logp - old).exp()
    if name == "kl_cov":
        moved = (loss + advantage * r).abs() > 1e-9
        assert chosen(moved & mask) == set(by_cov[: int(sums["selected_share"])])
        return
    clipped = ((advantage > 0) & (r > 1.2)) | ((advantage < 0) & (r < 0.8))
    free = [t for t in by_cov if 0.2 < cov[t] < 5 and not clipped[t]]
    free.sort(key=lambda t: float(draws[t]))
    assert chosen(mask & (loss == 0)) == set(free[: int(sums["selected_share"])])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, -(2**63)])
def test_draws_follow_splitmix64(seed: int) -> None:
    """By Python's integers, and in the last round by the sampler's own function."""
    mask = (1 << 64) - 1

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    keys, positions = [0, 5, 2**40], [0, 7, 123]
    state = [mixed(mixed(seed & mask) + (key + 1) * golden & mask) for key in keys]
    bits = [mixed(z + (p + 1) * golden & mask) for z, p in zip(state, positions, strict=True)]
    draws = keyed_draws(seed, torch.tensor(keys), torch.tensor(positions))
    assert draws.tolist() == [(z >> 11) * 2.0**-53 for z in bits]
    signed = torch.tensor([z - (1 << 64) if z >> 63 else z for z in state])
    assert torch.equal(draws, uniform(signed, torch.tensor(positions)))
