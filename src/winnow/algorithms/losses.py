"""Policy losses and the value loss: functions from log-probs or values to one loss a token.

A policy loss is called as `loss(terms, **options)` and returns `(loss_T, figures)`: the loss of
each token, which `aggregation` turns into a number, and sums over the counted tokens without
gradient, such as `clip_share`, which add up over micro-batches. A sum called `NAME` shows up in the
metrics as the mean `actor/NAME`. Options have the names and meanings of the loss's section in
`config/algorithm.py`, which holds their defaults and ranges.

Its caller, `PolicyLoss`, has set logp, old and advantage to 0 on the tokens that do not count,
where they may be infinite or NaN: masking the result instead would leave NaN in its gradient. A
log-prob of a counted token that is NaN is a fault of the model and shows as NaN.

GSPO and GMPO have one ratio a sample: aggregate them with seq-mean-token-mean, no other way.
Clip-Cov and KL-Cov treat a few tokens apart, which `winnow.algorithms.covariance` selects.

Shapes: `T` packed tokens and `B` samples of one micro-batch. logp is the current policy, old the
one before the first update of the step, both in nats; r = exp(clamp(logp - old, +-20)); sg(x) is
x without gradient; A is the advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.algorithms.covariance import (
    bounded_covariance,
    clip_cov_select,
    kl_cov_select,
    selection_size,
    smallest_draws,
)
from winnow.algorithms.kl import LOG_RATIO_BOUND

LOG_SEQUENCE_RATIO_MAX = 10.0
"""GSPO's log-ratio is clamped below 10 nats; beyond it the gradient is 0."""
KL_COV_NOISE = 1e-4
"""Nats. A log-prob that is no further from `old` has not moved: it is the rounding of two passes,
and in a step's first update its sign, which is the penalty's gradient, would be the split's."""
FLAT_TOLERANCE = 1e-12
"""A variance below this share of the mean square is float noise: values equal to 1e-6."""
DISTANCE_FIGURES = frozenset({"approx_kl", "clip_share", "clip_high_share", "dual_clip_share"})
"""Figures of the distance from `old` to the policy."""

Loss = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token [T], and figures: scalars, sums over the counted tokens."""


@dataclass(frozen=True, eq=False)
class LossTokens:
    """The tokens of a micro-batch: which of them count, and whose they are. Samples are whole.

    Example: two samples of 3 and 2 tokens, each behind a prompt of one, have `mask`
    [F T T F T], `sample_index` [0 0 0 1 1] and `n_samples` 2.
    """

    mask: Tensor
    """[T] bool: the counted tokens."""
    sample_index: Tensor
    """[T] int64, each token's sample in [0, n_samples)."""
    n_samples: int
    """B."""
    selected: Tensor | None = None
    """[T] bool, what the loss's `select` chose for the update; None for a loss without one."""
    draws: Tensor | None = None
    """[T] float64 in [0, 1), of `keyed_draws`: for `selection: microbatch` alone."""


@dataclass(frozen=True, eq=False)
class LossTerms:
    """The arguments of a policy loss; of the numbers only `logp` carries a gradient."""

    logp: Tensor
    """[T]"""
    old: Tensor
    """[T]"""
    advantage: Tensor
    """[T]"""
    tokens: LossTokens

    @property
    def ratio(self) -> Tensor:
        """[T] r."""
        return ratio(self.logp, self.old)

    def clipped(self, r: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
        """Return -A r and -A clip(r, 1 - clip_low, 1 + clip_high), each [T]."""
        return -self.advantage * r, -self.advantage * r.clamp(1 - clip_low, 1 + clip_high)

    def kl_figure(self) -> dict[str, Tensor]:
        """Return the figure that every loss has, `approx_kl`: the sum of old - logp in nats."""
        return {"approx_kl": (self.old - self.logp.detach()).sum()}

    drift = kl_figure
    """The old name of `kl_figure`, which goes with the next version."""

    def clip_figures(self, binds: Tensor, above: Tensor) -> dict[str, Tensor]:
        """Return `clip_share` and `clip_high_share`, and the drift.

        Args:
            binds: [T] bool, tokens whose loss the clip decides.
            above: [T] bool, those of them that it holds from above where it binds.
        """
        shares = {"clip_share": binds.sum(), "clip_high_share": (binds & above).sum()}
        return {**shares, **self.kl_figure()}


def ratio(logp: Tensor, old: Tensor) -> Tensor:
    """Return exp(logp - old) [T], the log-ratio clamped to +-`LOG_RATIO_BOUND`."""
    return (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sample_means(values: Tensor, tokens: LossTokens) -> Tensor:
    """Return each sample's mean over its counted tokens [B], summed in float64; 0 for no token.

    Args:
        values: [T], 0 outside the mask.
    """
    sums = torch.zeros(tokens.n_samples, dtype=torch.float64, device=values.device)
    counts = torch.zeros_like(sums).index_add_(0, tokens.sample_index, tokens.mask.double())
    sums = sums.index_add(0, tokens.sample_index, values.double())
    return (sums / counts.clamp(min=1)).to(values.dtype)


def ppo_clip(x: LossTerms, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Loss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at most -A dual_clip.

    PPO (arXiv 1707.06347, eq. 7) with DAPO's clip-higher (arXiv 2503.14476, eq. 8: 0.28) and
    dual clip (arXiv 1912.09729, eq. 5).

    Returns:
        The loss, and `clip_share`, tokens whose loss the ratio's clip decides; `clip_high_share`,
        those of them above 1 + clip_high; `dual_clip_share`; `approx_kl`.
    """
    plain, clipped = x.clipped(x.ratio, clip_low, clip_high)
    single = torch.maximum(plain, clipped)
    figures = x.clip_figures(clipped > plain, x.advantage > 0)
    if dual_clip is None:
        return single, figures
    bound = -x.advantage * dual_clip
    figures["dual_clip_share"] = ((single > bound) & (x.advantage < 0)).sum()
    return torch.where(x.advantage < 0, torch.minimum(single, bound), single), figures


def gspo(x: LossTerms, *, clip_low: float, clip_high: float) -> Loss:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean of logp - old).

    GSPO-token (arXiv 2507.18071, section 4.3): each token carries its sample's s, and its
    gradient goes through its own logp, as exp(logp - sg(logp) + sg(mean)). The figures count the
    tokens of clipped samples.
    """
    now = x.logp.detach()
    mean = sample_means(now - x.old, x.tokens)[x.tokens.sample_index]
    s = (x.logp - now + mean).clamp(max=LOG_SEQUENCE_RATIO_MAX).exp()
    plain, clipped = x.clipped(s, clip_low, clip_high)
    return torch.maximum(plain, clipped), x.clip_figures(clipped > plain, x.advantage > 0)


def cispo(x: LossTerms, *, r_max: float, two_sided: tuple[float, float] | None) -> Loss:
    """-sg(min(r, r_max)) A logp: the weight is cut, no token loses its gradient.

    CISPO (arXiv 2506.13585, eq. 4 and 5, with only the upper bound in use). `two_sided` (low,
    high) holds r in [1 - low, 1 + high] in place of r_max, as verl does.
    """
    low, high = (0.0, r_max) if two_sided is None else (1 - two_sided[0], 1 + two_sided[1])
    r = x.ratio.detach()
    above, below = x.tokens.mask & (r > high), x.tokens.mask & (r < low)
    return -r.clamp(low, high) * x.advantage * x.logp, x.clip_figures(above | below, above)


def sapo(x: LossTerms, *, tau_positive: float, tau_negative: float) -> Loss:
    """-A (4/tau) sigmoid(tau (r - 1)): a soft gate, of slope 1 at r = 1, in place of a clip.

    SAPO (arXiv 2511.20347), a mean over samples of the mean over a sample's tokens.
    """
    tau = torch.full_like(x.logp, tau_negative).masked_fill(x.advantage > 0, tau_positive)
    return -x.advantage * (4 / tau) * torch.sigmoid(tau * (x.ratio - 1)), x.kl_figure()


def gmpo(x: LossTerms, *, clip_low: float, clip_high: float) -> Loss:
    """-A rho, rho = exp(mean over the sample of s min(s d, s clip(d, -clip_low, clip_high))).

    GMPO (arXiv 2507.20673), d = logp - old and s the sign of A: the geometric mean of ratios
    that are clipped in log space. A sample has one advantage as it has one ratio: the mean of its
    tokens', which an outcome advantage is anyway. The loss is the same on all counted tokens of
    a sample; the figures count the tokens whose log-ratio is bounded.
    """
    advantage_B = sample_means(x.advantage, x.tokens)
    sign = advantage_B.sign()[x.tokens.sample_index]
    d = x.logp - x.old
    clipped = d.clamp(-clip_low, clip_high)
    # Written as cases, since a sign of 0 times an infinite d is NaN.
    falling = torch.where(sign < 0, torch.maximum(d, clipped), 0.0)
    bounded = torch.where(sign > 0, torch.minimum(d, clipped), falling)
    log_rho_B = sample_means(bounded, x.tokens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    loss_B = -advantage_B * log_rho_B.exp()
    loss = torch.where(x.tokens.mask, loss_B[x.tokens.sample_index], 0.0)
    binds = ((sign > 0) & (clipped < d)) | ((sign < 0) & (clipped > d))
    return loss, x.clip_figures(binds, sign > 0)


def clip_cov(
    x: LossTerms,
    *,
    clip_low: float,
    clip_high: float,
    share: float,
    cov_low: float,
    cov_high: float,
    selection: str,
) -> Loss:
    """ppo_clip without dual clip, 0 on the tokens that were selected.

    Clip-Cov (arXiv 2505.22617, eq. 11 and 12). Its figures are ppo_clip's, whatever is selected,
    and `selected_share`.
    """
    plain, clipped = x.clipped(x.ratio, clip_low, clip_high)
    binds, mask, selected = clipped > plain, x.tokens.mask, x.tokens.selected
    if selection == "microbatch":
        assert x.tokens.draws is not None, "selection within a micro-batch needs draws"
        within = bounded_covariance(x.logp.detach(), x.advantage, mask, cov_low, cov_high) & ~binds
        selected = smallest_draws(within, x.tokens.draws, selection_size(mask, share))
    assert selected is not None, "the loss's `select` runs before the first backward pass"
    figures = x.clip_figures(binds, x.advantage > 0)
    figures["selected_share"] = (selected & mask).sum()
    return torch.where(selected, 0.0, torch.maximum(plain, clipped)), figures


def kl_cov(x: LossTerms, *, coef: float, share: float, selection: str) -> Loss:
    """-A r, plus coef |logp - old| on the tokens that were selected.

    KL-Cov (arXiv 2505.22617, eq. 13 and 14). Up to `KL_COV_NOISE` the distance counts as 0.
    """
    mask, draws, selected = x.tokens.mask, x.tokens.draws, x.tokens.selected
    if selection == "microbatch":
        assert draws is not None, "selection within a micro-batch needs draws"
        selected = kl_cov_select(x.logp.detach(), x.advantage, mask, draws, share=share)
    assert selected is not None, "the loss's `select` runs before the first backward pass"
    loss = -x.advantage * x.ratio
    distance = (x.logp - x.old).abs()
    loss = torch.where(selected & ~(distance <= KL_COV_NOISE), loss + coef * distance, loss)
    return loss, {"selected_share": (selected & mask).sum(), **x.kl_figure()}


def dppo_tv(x: LossTerms, *, divergence_low: float, divergence_high: float, r_max: float) -> Loss:
    """-A sg(min(r, r_max)) logp, 0 where the token's probability has moved too far along A.

    DPPO with the binary total variation (arXiv 2602.04879). Thresholds as in verl's script.
    """
    # Rounding may lift a log-prob over 0, and exp must stay finite.
    moved = x.logp.detach().clamp(max=0).exp() - x.old.clamp(max=0).exp()
    return _stopped_loss(x, moved > divergence_high, moved < -divergence_low, r_max)


def dppo_kl(x: LossTerms, *, divergence_low: float, divergence_high: float, r_max: float) -> Loss:
    """`dppo_tv` with the binary KL, in nats, in place of the difference of probabilities.

    A token is left out where KL(old || current), between "this token" and "any other", exceeds
    the bound and the probability has moved along A (arXiv 2602.04879).
    """
    far, moved = binary_kl(x.old, x.logp), x.logp.detach() - x.old
    rising, falling = (far > divergence_high) & (moved > 0), (far > divergence_low) & (moved < 0)
    return _stopped_loss(x, rising, falling, r_max)


def binary_kl(old: Tensor, logp: Tensor) -> Tensor:
    """KL(old || current) [T] in nats between "this token" and "any other", no gradient.

    1e-8 keeps a token of probability 1 finite, as verl does.
    """
    old, logp = old.detach().clamp(max=0), logp.detach().clamp(max=0)
    p_old, rest_old, rest = old.exp(), -old.expm1() + 1e-8, -logp.expm1() + 1e-8
    # An old log-prob of -inf has no weight, and 0 * inf is NaN.
    this = torch.where(p_old > 0, p_old * (old - logp), 0.0)
    return this + (1 - p_old) * (rest_old.log() - rest.log())


def _stopped_loss(x: LossTerms, rising: Tensor, falling: Tensor, r_max: float) -> Loss:
    """-A sg(min(r, r_max)) logp, 0 on tokens that rise with A > 0 or fall with another A."""
    stopped = torch.where(x.advantage > 0, rising, falling)
    weight = x.ratio.clamp(max=r_max).detach()
    loss = torch.where(stopped, 0.0, -x.advantage * weight) * x.logp
    return loss, x.clip_figures(stopped & (x.advantage != 0), x.advantage > 0)


def dro(x: LossTerms, *, beta: float) -> Loss:
    """-(A logp - beta/2 (logp - old)^2): a quadratic pull towards old in place of a ratio.

    DRO (arXiv 2405.19107); the log-ratio is not clamped, since its gradient is what pulls back.
    """
    return -(x.advantage * x.logp - 0.5 * beta * (x.logp - x.old).square()), x.kl_figure()


def reinforce(x: LossTerms) -> Loss:
    """-A logp: the plain policy gradient (Williams, 1992); `old` does not enter.

    It is the loss of GPG (arXiv 2504.02546, eq. 4) too, which differs in its advantage.
    """
    return -x.advantage * x.logp, x.kl_figure()


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and what it needs."""

    function: Callable[..., Loss]
    """(terms, **options) -> (loss [T], figures)."""
    select: Callable[..., Tensor] | None = None
    """(old, advantage, mask, draws, **options) -> [T] bool, over the whole mini-batch, once an
    update; for `LossTokens.selected` where the option `selection` is "update"."""
    uses_old: bool = True
    """False if `old` does not enter the loss; the figure `approx_kl` reads it in any case."""
    distances: frozenset[str] = DISTANCE_FIGURES
    """Its figures that say nothing where `old` is the current policy, and are left out there."""

    def __call__(
        self,
        logp: Tensor,
        old: Tensor,
        advantage: Tensor,
        tokens: LossTokens,
        options: Mapping[str, Any],
    ) -> Loss:
        """Return the loss [T], 0 on tokens that do not count, and its figures.

        Args:
            logp, old, advantage: [T]; only logp carries a gradient. Tokens that do not count are
                not read.
            tokens: of the micro-batch.
            options: of the loss's section of the recipe.
        """

        def counted(column: Tensor) -> Tensor:
            return torch.where(tokens.mask, column, 0.0)

        terms = LossTerms(counted(logp), counted(old), counted(advantage), tokens)
        return self.function(terms, **options)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(ppo_clip),
    "gspo": PolicyLoss(gspo),
    "cispo": PolicyLoss(cispo),
    "sapo": PolicyLoss(sapo),
    "gmpo": PolicyLoss(gmpo),
    "clip_cov": PolicyLoss(clip_cov, clip_cov_select),
    "kl_cov": PolicyLoss(kl_cov, kl_cov_select),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "dro": PolicyLoss(dro),
    "gpg": PolicyLoss(reinforce, uses_old=False),
    "reinforce": PolicyLoss(reinforce, uses_old=False),
}
"""The policy losses by their names in a recipe."""


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> Loss:
    """0.5 max((V - ret)^2, (clip(V, old - clip, old + clip) - ret)^2) [T].

    A value that has moved further than `clip` from `old`, towards the return, has no gradient;
    one that has moved away from it keeps its own. (Clipping as in the code of PPO, arXiv
    1707.06347; Huang et al., "The 37 implementation details of PPO", detail 9.)

    Args:
        values, old, returns: [T]; only `values` should carry a gradient.
        mask: [T] bool, the counted tokens.
        clip: above 0; None leaves the clipped term out.

    Returns:
        The loss, and `clip_share`, the tokens whose clipped term is the larger one.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, {"clip_share": mask.new_zeros(()).double()}
    near = torch.minimum(torch.maximum(values, old - clip), old + clip)
    clipped = (near - returns).square()
    clip_share = (mask & (clipped > plain)).sum().double()
    return 0.5 * torch.maximum(plain, clipped), {"clip_share": clip_share}


def explained_variance(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> float:
    """Return 1 - Var(ret - V) / Var(ret) over the tokens in `mask` [T], in float64.

    1 for perfect values, 0 for a constant, negative for worse than that. Where returns do not
    vary (`FLAT_TOLERANCE`) it is 1 if the errors do not vary either, else 0; 0 for no tokens.

    Args:
        all_reduce: brings sums together where other processes have the rest of the tokens.
    """
    tokens = int(all_reduce(mask.sum()))
    if tokens == 0:
        return 0.0
    # Masked before the difference: what stands outside the mask may be infinite.
    returns_T = torch.where(mask, returns, 0.0).double()
    errors_T = returns_T - torch.where(mask, values, 0.0).double()
    sums = [each.sum() for x in (returns_T, errors_T) for each in (x.square(), x)]
    square, plain, error_square, error = all_reduce(torch.stack(sums)).tolist()
    spread, residual = variance(square, plain, tokens), variance(error_square, error, tokens)
    if spread == 0.0:
        # A constant error is noise beside the returns that it was taken from.
        return float(residual <= FLAT_TOLERANCE * square / tokens)
    return 1 - residual / spread


def variance(square: float, plain: float, n: int) -> float:
    """The population's variance of n numbers by their sums; 0 where it is float noise."""
    mean_square = square / n
    variance = mean_square - (plain / n) ** 2
    return variance if variance > FLAT_TOLERANCE * mean_square else 0.0
