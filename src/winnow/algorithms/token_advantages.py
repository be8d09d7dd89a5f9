"""Estimators that tell the tokens of an answer apart, or that whiten: [T] each.

Steps of time are the sample's written tokens: the environment's tokens between them are jumped
over. Values off the masks are never read. `advantages` has the form of an estimator.

Shapes: `T` packed tokens, `B` samples, `S` written tokens (gen_mask true), `P` groups. Sample b
is the tokens [offsets[b], offsets[b+1]).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from winnow.algorithms.advantages import AdvantageInputs, blend, centred, spread

BASELINE_EPS = 1e-8
VAR_EPS = 1e-8
FLAT_TOLERANCE = 1e-6
"""A standard deviation up to this times the mean is float noise."""
LEAST_MEAN = 1e-4
"""A mean nearer to 0 counts as this: up to 1e-10 is noise around 0."""


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> Tensor:
    """whiten(G) over loss_mask (REINFORCE++, arXiv 2501.03262)."""
    return whiten(reward_to_go(inputs, gamma), inputs.loss_mask)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """R - mean_g, spread over tokens and whitened over loss_mask (arXiv 2501.03262)."""
    return whiten(spread(centred(inputs), inputs, inputs.loss_mask), inputs.loss_mask)


def gdpo(inputs: AdvantageInputs, *, weights: Mapping[str, float]) -> Tensor:
    """The blend of the components, spread over tokens and whitened (GDPO, arXiv 2601.05242)."""
    return whiten(spread(blend(inputs, weights), inputs, inputs.loss_mask), inputs.loss_mask)


def remax(inputs: AdvantageInputs, *, gamma: float) -> Tensor:
    """G_t minus the reward of a greedy answer (ReMax, arXiv 2310.10505)."""
    assert inputs.greedy_rewards is not None
    return reward_to_go(inputs, gamma) - spread(inputs.greedy_rewards, inputs, inputs.gen_mask)


def optimal_token_baseline(inputs: AdvantageInputs) -> Tensor:
    """G - B with a baseline for each place (Li et al., "The Optimal Token Baseline", 2026).

    w_t = 1 - 2 pi_t + sum(pi^2) is the squared gradient of logp_t in the logits; a token whose
    loss is weighed by rho_t has rho_t^2 times that. W is the running sum of these energies, and
    B_t = sum(G_t W_t) / (sum(W_t) + 1e-8) over those samples of the group that wrote a t-th token.
    Where only one did, B_t is 0, as the mean of a group of one is: its own G as its baseline would
    leave the tail of the longest answer without a gradient.
    """
    assert inputs.prob is not None
    assert inputs.prob_square_sum is not None
    written = _Written(inputs)
    G_S = written.discounted(inputs.token_rewards[inputs.gen_mask], 1.0)
    prob_S, square_S = (
        column[inputs.gen_mask].double() for column in (inputs.prob, inputs.prob_square_sum)
    )
    w_S = 1 - 2 * prob_S + square_S
    if inputs.weights is not None:
        w_S = w_S * inputs.weights[inputs.gen_mask].double().square()
    W_S = written.running_sum(w_S)
    _, group_B = torch.unique(inputs.groups, return_inverse=True)
    place_S = group_B[written.sample_S] * max(written.longest, 1) + written.ordinal_S
    _, place_S, size = torch.unique(place_S, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(size), dtype=torch.float64, device=G_S.device)
    weighted = zeros.index_add(0, place_S, G_S * W_S)
    baseline = weighted / (zeros.index_add(0, place_S, W_S) + BASELINE_EPS)
    return written.to_tokens(G_S - baseline.masked_fill(size == 1, 0.0)[place_S])


def gae(inputs: AdvantageInputs, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16), whitened over loss_mask.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1) over a sample's
    written tokens, V = A = 0 after the last.

    Returns:
        Advantages, 0 off loss_mask, and returns, A + V before the whitening, 0 off gen_mask.
    """
    assert inputs.values is not None
    written = _Written(inputs)
    V_S = inputs.values[inputs.gen_mask].double()
    r_S = inputs.token_rewards[inputs.gen_mask]
    A_S = written.discounted(r_S + gamma * written.after(V_S, 1) - V_S, gamma * lam)
    return whiten(written.to_tokens(A_S), inputs.loss_mask), written.to_tokens(A_S + V_S)


def reward_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_(t+1) over a sample's written tokens [T], 0 off gen_mask."""
    written = _Written(inputs)
    return written.to_tokens(written.discounted(inputs.token_rewards[inputs.gen_mask], gamma))


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) in the mask [T], 0 outside it.

    The variance takes Bessel's correction. Numbers that are equal but for float noise
    (`FLAT_TOLERANCE`) become exactly 0, one alone too. What stands outside the mask is not read.
    """
    chosen = x[mask]
    if len(chosen) < 2:
        return torch.zeros_like(x)
    mean = float(chosen.mean())
    variance = float((chosen - chosen.mean()).square().sum()) / (len(chosen) - 1)
    if variance <= (FLAT_TOLERANCE * max(abs(mean), LEAST_MEAN)) ** 2:
        return torch.zeros_like(x)
    return torch.where(mask, (x - mean) / (variance + VAR_EPS) ** 0.5, 0.0)


class _Written:
    """The written tokens of a step, end to end, and scans along each sample's."""

    def __init__(self, inputs: AdvantageInputs) -> None:
        self._gen_mask = inputs.gen_mask
        self.sample_S = inputs.sample_index[inputs.gen_mask]
        """[S] int64: each one's sample."""
        lengths_B = torch.bincount(self.sample_S, minlength=len(inputs.offsets) - 1)
        start_B = lengths_B.cumsum(0) - lengths_B
        ordinal = torch.arange(len(self.sample_S), device=self.sample_S.device)
        self.ordinal_S = ordinal - start_B[self.sample_S]
        """[S] int64: how many written tokens of the sample stand before it."""
        self.longest = int(lengths_B.max()) if len(lengths_B) else 0
        """Written tokens of the longest sample."""

    def to_tokens(self, values_S: Tensor) -> Tensor:
        """[T]: `values_S` where the policy wrote, 0 elsewhere."""
        values_T = values_S.new_zeros(self._gen_mask.shape)
        values_T[self._gen_mask] = values_S
        return values_T

    def after(self, values_S: Tensor, distance: int) -> Tensor:
        """[S]: the number `distance` tokens on in the same sample; 0 past its end."""
        ahead_S = torch.zeros_like(values_S)
        same = self.sample_S[distance:] == self.sample_S[:-distance]
        ahead_S[:-distance] = values_S[distance:].masked_fill(~same, 0.0)
        return ahead_S

    def discounted(self, values_S: Tensor, rate: float) -> Tensor:
        """[S] y_t = x_t + rate * y_(t+1), by doubling: log2(longest) passes over all tokens."""
        distance = 1
        while distance < self.longest:
            values_S = values_S + rate * self.after(values_S, distance)
            rate, distance = rate * rate, 2 * distance
        return values_S

    def running_sum(self, values_S: Tensor) -> Tensor:
        """[S] y_t = x_t + y_(t-1), by doubling."""
        distance = 1
        while distance < self.longest:
            behind_S = torch.zeros_like(values_S)
            same = self.sample_S[distance:] == self.sample_S[:-distance]
            behind_S[distance:] = values_S[:-distance].masked_fill(~same, 0.0)
            values_S, distance = values_S + behind_S, 2 * distance
        return values_S
