"""Policy losses by hand, at the ends of the number line, and against their sections of a recipe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.objectives import LOSS_SECTIONS, loss_options
from torch import Tensor

from winnow.algorithms.aggregation import AGGREGATIONS
from winnow.algorithms.losses import POLICY_LOSSES, LossTokens

COVARIANCE = ("clip_cov", "kl_cov")
LOSSES = pytest.mark.parametrize("name", POLICY_LOSSES)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def all_counted(lengths: list[int], selected: list[int] | None = None) -> LossTokens:
    """Samples of these lengths, every token counted, some selected."""
    n = sum(lengths)
    index = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[selected or []] = True
    return LossTokens(torch.ones(n, dtype=torch.bool), index, len(lengths), chosen)


def called(
    name: str, logp: Tensor, old: Tensor, a: Tensor, tokens: LossTokens, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its figures, where a recipe says nothing but `options`."""
    return POLICY_LOSSES[name](logp, old, a, tokens, loss_options(name, options))


def found(
    name: str, d: Tensor, old: Tensor, a: Tensor, tokens: LossTokens, **options: Any
) -> list[float]:
    """The loss of log-ratios d."""
    loss: list[float] = called(name, old + d, old, a, tokens, **options)[0].tolist()
    return loss


def figures(
    name: str, d: Tensor, old: Tensor, a: Tensor, tokens: LossTokens, **options: Any
) -> dict[str, float]:
    _, sums = called(name, old + d, old, a, tokens, **options)
    return {key: float(value) for key, value in sums.items()}


def test_ppo_clip_in_its_cases() -> None:
    r = f64(0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 5.0)
    a = f64(2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0)
    terms = (r.log(), torch.zeros(7), a, all_counted([7]))
    options = {"clip_low": 0.2, "clip_high": 0.28}
    loss = found("ppo_clip", *terms, **options, dual_clip=3.0)
    assert loss == pytest.approx([-1.0, -2.0, -2.56, 1.6, 2.0, 4.0, 6.0])
    loss = found("ppo_clip", *terms, **options, dual_clip=None)
    assert loss == pytest.approx([-1.0, -2.0, -2.56, 1.6, 2.0, 4.0, 10.0])
    drift = {"approx_kl": -math.log(0.5 * 2 * 0.5 * 2 * 5)}
    shares = {"clip_share": 2.0, "clip_high_share": 1.0}
    assert figures("ppo_clip", *terms, **options) == pytest.approx(
        {**shares, "dual_clip_share": 1.0, **drift}
    )
    assert figures("ppo_clip", *terms, **options, dual_clip=None) == pytest.approx(
        {**shares, **drift}
    )


def test_gspo_clips_a_sample_by_its_mean_log_ratio() -> None:
    d = f64(1e-3, -5e-4, 1e-2, -1e-2)
    terms = (d, f64(-1, -2, -3, -4), f64(2, 2, 1, -1), all_counted([2, 1, 1]))
    kept = -2 * math.exp(2.5e-4)
    assert found("gspo", *terms) == pytest.approx([kept, kept, -1.0004, 0.9997], rel=1e-12)
    assert figures("gspo", *terms) == pytest.approx(
        {"clip_share": 2, "clip_high_share": 1, "approx_kl": -5e-4}
    )


def test_gspo_carries_the_samples_ratio_on_each_token_s_own_gradient() -> None:
    logp = f64(-1.0, -2.0).requires_grad_()
    old, a = logp.detach() - f64(3e-4, -1e-4), f64(2.0, 2.0)
    loss, _ = called("gspo", logp, old, a, all_counted([2]))
    (gradient,) = torch.autograd.grad(loss, logp, f64(1.0, 0.0))
    assert gradient.tolist() == pytest.approx([-2 * math.exp(1e-4), 0.0], rel=1e-12)


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    terms = (f64(8.0, 0.5).log(), f64(-1 - math.log(8), -2 + math.log(2)), f64(2.0, -1.0))
    tokens = all_counted([2])
    assert found("cispo", *terms, tokens) == pytest.approx([10.0, -1.0])
    assert found("cispo", *terms, tokens, two_sided=(0.2, 0.28)) == pytest.approx([2.56, -1.6])
    drift = {"approx_kl": pytest.approx(-math.log(4))}
    assert figures("cispo", *terms, tokens) == {"clip_share": 1, "clip_high_share": 1, **drift}
    assert figures("cispo", *terms, tokens, two_sided=(0.2, 0.28)) == {
        "clip_share": 2,
        "clip_high_share": 1,
        **drift,
    }
    logp = (terms[0] + terms[1]).requires_grad_()
    loss, _ = called("cispo", logp, terms[1], terms[2], tokens)
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == pytest.approx([-10.0, 0.5])


def test_sapo_gates_softly() -> None:
    terms = (f64(1.0, 1.0, 3.0).log(), torch.zeros(3), f64(1.0, -1.0, 1.0), all_counted([3]))
    gate = 4 / (1 + math.exp(-2.0))
    assert found("sapo", *terms) == pytest.approx([-2.0, 2 / 1.05, -gate])
    assert figures("sapo", *terms) == {"approx_kl": pytest.approx(-math.log(3))}


def test_gmpo_takes_one_clipped_geometric_mean_a_sample() -> None:
    d = f64(0.6, -0.1, 0.6, -0.1, -0.6)
    terms = (d, torch.zeros(5), f64(1, 1, -2, -2, -1), all_counted([2, 2, 1]))
    up, down = -math.exp(0.15), 2 * math.exp(0.25)
    assert found("gmpo", *terms) == pytest.approx([up, up, down, down, math.exp(-0.4)])
    assert figures("gmpo", *terms) == pytest.approx(
        {"clip_share": 2, "clip_high_share": 1, "approx_kl": -0.4}
    )


def test_gmpo_takes_the_mean_of_a_sample_s_advantages() -> None:
    loss = found("gmpo", f64(0.2, 0.6), torch.zeros(2), f64(-1.0, 3.0), all_counted([2]))
    assert loss == pytest.approx([-math.exp(0.3)] * 2)


def test_clip_cov_leaves_the_selected_out() -> None:
    terms = (f64(2.0, 2.0, 5.0).log(), torch.zeros(3), f64(1, 1, -1), all_counted([3], [1]))
    assert found("clip_cov", *terms) == pytest.approx([-1.2, 0.0, 5.0])
    assert figures("clip_cov", *terms) == pytest.approx(
        {
            "clip_share": 2,
            "clip_high_share": 2,
            "selected_share": 1,
            "approx_kl": -math.log(20),
        }
    )


def test_kl_cov_pulls_the_selected_back() -> None:
    terms = (f64(2.0, 2.0, 0.5).log(), torch.zeros(3), f64(1, 1, -1), all_counted([3], [1, 2]))
    pull = 0.5 * math.log(2)
    assert found("kl_cov", *terms, coef=0.5) == pytest.approx([-2.0, -2 + pull, 0.5 + pull])
    assert figures("kl_cov", *terms) == pytest.approx(
        {"selected_share": 2, "approx_kl": -math.log(2)}
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dppo_tv", [0.0, -1.2 * math.log(0.6), 0.0, -0.6 * math.log(0.3), 1.4 * math.log(0.7)]),
        ("dppo_kl", [0.0, -1.2 * math.log(0.6), 0.0, -0.6 * math.log(0.3), 1.4 * math.log(0.7)]),
    ],
)
def test_dppo_stops_what_has_moved_too_far_along_its_advantage(
    name: str, expected: list[float]
) -> None:
    logp, old = f64(0.7, 0.6, 0.3, 0.3, 0.7).log(), f64(0.5, 0.5, 0.5, 0.5, 0.5).log()
    terms = (logp - old, old, f64(1, 1, -1, 1, -1), all_counted([5]))
    assert found(name, *terms) == pytest.approx(expected)
    shares = figures(name, *terms)
    assert (shares["clip_share"], shares["clip_high_share"]) == (2, 1)


def test_the_two_measures_of_dppo_part_where_a_probability_is_small() -> None:
    # From 0.001 to 0.05: 0.049 in probability, and 0.045 nats; to 0.1: 0.099 and 0.100 nats.
    old, logp = f64(0.001, 0.001).log(), f64(0.05, 0.1).log()
    terms = (logp - old, old, f64(1.0, 1.0), all_counted([2]))
    cut = [-20 * math.log(0.05), -20 * math.log(0.1)]
    assert found("dppo_tv", *terms) == pytest.approx(cut)
    assert found("dppo_kl", *terms) == pytest.approx([cut[0], 0.0])
    kl = 0.001 * math.log(0.02) + 0.999 * math.log(0.999 / 0.95)
    for bound, expected in ((kl * 1.001, cut[0]), (kl * 0.999, 0.0)):
        assert found("dppo_kl", *terms, divergence_high=bound)[0] == pytest.approx(expected)


def test_dro_pulls_by_the_square() -> None:
    loss = found("dro", f64(0.5), f64(-1.5), f64(2.0), all_counted([1]), beta=0.5)
    assert loss == pytest.approx([2.0625])


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_the_plain_gradient_does_not_read_old(name: str) -> None:
    old = f64(math.nan, math.inf)
    loss, _ = called(name, f64(-1, -2), old, f64(2, -1), all_counted([2]))
    assert loss.tolist() == [2.0, -2.0]
    assert not POLICY_LOSSES[name].uses_old


@LOSSES
def test_only_losses_that_say_so_do_without_old(name: str) -> None:
    logp, a, tokens = f64(-1.0, -2.0), f64(1.0, -1.0), all_counted([1, 1], [0])
    losses = [called(name, logp, logp - shift, a, tokens)[0] for shift in (0.1, 0.11)]
    assert torch.equal(*losses) is not POLICY_LOSSES[name].uses_old


@LOSSES
def test_at_the_first_update_the_gradient_is_that_of_reinforce(name: str) -> None:
    a = f64(1.0, 1.0, -2.0, 0.0)
    logp = f64(-1.0, -2.0, -3.0, -0.5).requires_grad_()
    tokens = all_counted([2, 1, 1])
    loss, _ = called(name, logp, logp.detach(), a, tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(gradient, -a)


@LOSSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    ("logp", "old"),
    [
        (-1000.0, 0.0),
        (0.0, -1000.0),
        (1000.0, 0.0),
        (0.0, -math.inf),
        (-1.0, math.inf),
        (1e-7, 0.0),
        (0.0, 0.0),
    ],
)
def test_no_extreme_ratio_makes_a_nan(
    name: str, logp: float, old: float, advantage: float, dtype: torch.dtype
) -> None:
    tokens = all_counted([1, 1], [0])
    x = torch.tensor([logp, -1.0], dtype=dtype, requires_grad=True)
    terms = (x, torch.tensor([old, -1.0], dtype=dtype), torch.tensor([advantage, 1.0], dtype=dtype))
    loss, sums = called(name, *terms, tokens)
    assert loss.dtype == dtype
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    # A penalty without bound is infinite where old is; nothing else may be.
    unbounded = name in ("dro", "kl_cov") and math.isinf(old)
    assert not loss.isnan().any()
    assert not gradient.isnan().any()
    if not unbounded:
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
    assert not any(value.isnan() for value in sums.values())


@LOSSES
def test_infinities_within_the_mask_of_a_neighbour_change_nothing(name: str) -> None:
    a, tokens = f64(1.0, -1.0), all_counted([1, 1], [])
    alone, beside = (
        called(name, f64(-1.0, -2.0), f64(-1.1, other), a, tokens)[0] for other in (-2.1, -math.inf)
    )
    assert alone[0] == beside[0]


@LOSSES
@pytest.mark.parametrize("lengths", [[], [3], [1, 2]])
def test_nothing_counted_is_zero(name: str, lengths: list[int]) -> None:
    n = sum(lengths)
    tokens = all_counted(lengths)
    nothing = LossTokens(
        torch.zeros(n, dtype=torch.bool), tokens.sample_index, len(lengths), tokens.selected
    )
    x = torch.full((n,), math.nan, requires_grad=True)
    loss, sums = called(name, x, x.detach(), x.detach(), nothing)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert loss.tolist() == [0.0] * n
    assert gradient.tolist() == [0.0] * n
    assert all(float(value) == 0 for value in sums.values())


@LOSSES
def test_figures_are_numbers_without_gradient(name: str) -> None:
    logp = f64(-1.0, -2.0).requires_grad_()
    terms, tokens = (logp, f64(-1.5, -1.9), f64(1.0, -1.0)), all_counted([2], [1])
    _, sums = called(name, *terms, tokens)
    assert "approx_kl" in sums
    assert all(value.shape == () and not value.requires_grad for value in sums.values())


@LOSSES
def test_a_selection_takes_the_options_of_its_loss(name: str) -> None:
    select, x = POLICY_LOSSES[name].select, f64(-1.0, -2.0)
    assert (select is not None) is (name in COVARIANCE)
    if select is not None:
        chosen = select(x, x, all_counted([2]).mask, f64(0.1, 0.2), **loss_options(name))
        assert chosen.dtype == torch.bool


def test_the_recipe_knows_every_loss_and_its_legal_aggregations() -> None:
    assert {*POLICY_LOSSES, "custom"} == LOSS_SECTIONS.keys()
    bound = {name: s.aggregations for name, s in LOSS_SECTIONS.items() if s.aggregations}
    assert bound == dict.fromkeys(("gspo", "sapo", "gmpo"), ("seq-mean-token-mean",))
    assert "seq-mean-token-mean" in AGGREGATIONS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gspo", {"clip_low": 0.0}),
        ("cispo", {"r_max": 0.0}),
        ("cispo", {"two_sided": (0.2,)}),
        ("cispo", {"two_sided": (0.2, -0.1)}),
        ("sapo", {"tau_negative": 0.0}),
        ("gmpo", {"clip_high": -0.4}),
        ("clip_cov", {"share": 0.0}),
        ("clip_cov", {"cov_low": 5.0, "cov_high": 5.0}),
        ("clip_cov", {"selection": "batch"}),
        ("kl_cov", {"coef": -1.0}),
        ("dppo_tv", {"divergence_high": 1.0}),
        ("dppo_kl", {"divergence_low": 0.0}),
        ("dro", {"beta": 0.0}),
        ("gpg", {"clip_low": 0.2}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"1 validation error for {LOSS_SECTIONS[name].__name__}"):
        LOSS_SECTIONS[name](**options)
