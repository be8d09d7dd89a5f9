"""Which tokens clip_cov and kl_cov select, and the random numbers that they draw with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.objectives import loss_options
from torch import Tensor

from winnow.algorithms import covariance as covariance_losses
from winnow.algorithms.covariance import covariance, keyed_draws
from winnow.algorithms.losses import POLICY_LOSSES, LossTokens
from winnow.rollout.draw import uniform


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


def test_two_in_ten_thousand_are_selected_by_default() -> None:
    old, advantage, _, draws = columns(1, 15_000)
    mask = torch.ones(15_000, dtype=torch.bool)
    assert int(kl_cov_select(old, advantage, mask, draws).sum()) == 3
    cov = covariances(old, advantage, mask)
    found = chosen(clip_cov_select(old, advantage, mask, draws))
    assert len(found) == 3
    assert all(1 < cov[t] < 5 for t in found)


def test_other_draws_select_other_tokens_and_each_alike_often() -> None:
    n, rounds = 40, 2000
    old, advantage, _, _ = columns(5, n)
    mask = torch.ones(n, dtype=torch.bool)
    within = [t for t, cov in covariances(old, advantage, mask).items() if cov > 0.2]
    times = torch.zeros(n)
    for seed in range(rounds):
        draws = keyed_draws(seed, torch.zeros(n).long(), torch.arange(n))
        times += clip_cov_select(old, advantage, mask, draws, share=0.1, cov_low=0.2, cov_high=1e9)
    expected = rounds * 4 / len(within)
    # Five standard deviations of a binomial count; the draws are fixed.
    spread = 5 * math.sqrt(expected * (1 - 4 / len(within)))
    assert len(within) > 8
    assert {t for t in range(n) if times[t]} == set(within)
    assert all(abs(float(times[t]) - expected) < spread for t in within)


def test_ties_of_covariance_are_settled_by_the_draws() -> None:
    advantage = torch.tensor([1.0] * 6 + [-1.0] * 6)
    old = torch.tensor(([0.0] * 3 + [-2.0] * 3) * 2)
    mask = torch.ones(12, dtype=torch.bool)
    # Tokens 0-2 (likely, praised) and 9-11 (unlikely, blamed) share the highest cov.
    draws = torch.linspace(0.9, 0.1, 12, dtype=torch.float64)
    assert chosen(kl_cov_select(old, advantage, mask, draws, share=0.25)) == {9, 10, 11}
    assert chosen(kl_cov_select(old, advantage, mask, 1 - draws, share=0.25)) == {0, 1, 2}


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


def test_the_order_of_the_tokens_does_not_touch_a_bit_of_their_covariance() -> None:
    old, advantage, mask, _ = columns(17, 500)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    there = covariance(old[order], advantage[order], mask[order])
    assert torch.equal(covariance(old, advantage, mask)[order], there)


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


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("selection", ["update", "microbatch"])
def test_a_loss_without_its_selection_stops(name: str, selection: str) -> None:
    x, tokens = torch.ones(1), LossTokens(torch.tensor([True]), torch.tensor([0]), 1)
    with pytest.raises(AssertionError, match=r"draws|select"):
        POLICY_LOSSES[name](x, x, x, tokens, loss_options(name, {"selection": selection}))


def test_draws_depend_on_their_keys_alone() -> None:
    samples = torch.arange(50).repeat_interleave(20)
    positions = torch.arange(20).repeat(50)
    draws = keyed_draws(3, samples, positions)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draws[order], keyed_draws(3, samples[order], positions[order]))
    for t in (0, 1, 999):
        assert keyed_draws(3, samples[t : t + 1], positions[t : t + 1]) == draws[t]
    assert len(set(draws.tolist())) == 1000
    assert not set(draws.tolist()) & set(keyed_draws(4, samples, positions).tolist())
    # Neither is a sample's row the next one's, shifted.
    assert not set(keyed_draws(3, samples + 50, positions).tolist()) & set(draws.tolist())


def test_draws_are_uniform() -> None:
    draws = keyed_draws(2**70 + 1, torch.arange(200).repeat_interleave(100), torch.arange(20_000))
    assert draws.dtype == torch.float64
    assert 0 <= float(draws.min()) <= float(draws.max()) < 1
    shares = torch.histc(draws, 10, 0, 1) / len(draws)
    # 0.1 +- five standard errors of 0.0021.
    assert float((shares - 0.1).abs().max()) < 0.0106
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.0103)
    neighbours = torch.corrcoef(torch.stack([draws[1:], draws[:-1]]))[0, 1]
    assert abs(float(neighbours)) < 0.036


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
