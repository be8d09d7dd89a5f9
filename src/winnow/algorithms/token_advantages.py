"""Advantages of single tokens: rewards-to-go, baselines for each token, whitening.

What the environment wrote between the policy's tokens is jumped over: after a written token comes
the sample's next written token, and only these count as steps of time. Values off the masks are
never read. Sums are float64; results have the dtype of the rewards given.

Shapes: `T` packed tokens, `B` samples, `S` written tokens (gen_mask true), `P` groups. Sample b
is the tokens [offsets[b], offsets[b+1]).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from winnow.algorithms.advantages import centred, float_dtype, gdpo, require_company
from winnow.algorithms.whitening import whiten

BASELINE_EPS = 1e-8


def reward_to_go(
    token_rewards: Tensor, offsets: Tensor, gen_mask: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """G_t = r_t + gamma * G_(t+1) over a sample's written tokens.

    Args:
        token_rewards: [T], finite on written tokens.
        offsets: [B+1] int64.
        gen_mask: [T] bool.
        gamma: discount in [0, 1] for each written token.

    Returns:
        [T] in the rewards' dtype, 0 off gen_mask.

    Raises:
        ValueError: shapes that do not fit, a reward that is not finite, or gamma out of range.
    """
    dtype = float_dtype("token_rewards", token_rewards)
    written = _Written(offsets, gen_mask)
    G_S = written.discounted(written.of(token_rewards, "token_rewards"), _rate("gamma", gamma))
    return written.to_tokens(G_S, dtype)


def reinforce_plus_plus(
    token_rewards: Tensor,
    offsets: Tensor,
    gen_mask: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """whiten(G) over loss_mask (REINFORCE++, arXiv 2501.03262).

    Args:
        token_rewards, offsets, gen_mask, gamma: as for `reward_to_go`.
        loss_mask: [T] bool, within gen_mask.

    Returns:
        [T] in the rewards' dtype, 0 off loss_mask.

    Raises:
        ValueError: as `reward_to_go`.
    """
    dtype = float_dtype("token_rewards", token_rewards)
    G_T = reward_to_go(token_rewards.double(), offsets, gen_mask, gamma=gamma)
    return whiten(G_T, loss_mask).to(dtype)


def reinforce_plus_plus_baseline(
    rewards: Tensor, groups: Tensor, offsets: Tensor, loss_mask: Tensor
) -> Tensor:
    """R - mean_g, spread over the sample's tokens and whitened over loss_mask (arXiv 2501.03262).

    Args:
        rewards: [B], finite.
        groups: [B] int64; equal numbers are one group, a group of one has mean 0.
        offsets: [B+1] int64.
        loss_mask: [T] bool.

    Returns:
        [T] in the rewards' dtype, 0 off loss_mask.

    Raises:
        ValueError: shapes that do not fit, or a reward that is not finite.
    """
    dtype = float_dtype("rewards", rewards)
    centred_T = spread(centred(rewards.double(), groups), offsets, loss_mask)
    return whiten(centred_T, loss_mask).to(dtype)


def gdpo_whitened(
    components: Mapping[str, Tensor],
    groups: Tensor,
    offsets: Tensor,
    loss_mask: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
) -> Tensor:
    """`gdpo`, spread over the sample's tokens and whitened over loss_mask (arXiv 2601.05242).

    Args:
        components, groups, weights: as for `gdpo`.
        offsets: [B+1] int64.
        loss_mask: [T] bool.

    Returns:
        [T] in the components' dtype, 0 off loss_mask.

    Raises:
        ValueError: as `gdpo`, or offsets and mask that do not fit.
    """
    exact = {name: component.double() for name, component in components.items()}
    blend_T = spread(gdpo(exact, groups, weights=weights), offsets, loss_mask)
    return whiten(blend_T, loss_mask).to(float_dtype("components", next(iter(components.values()))))


def remax(
    token_rewards: Tensor,
    offsets: Tensor,
    gen_mask: Tensor,
    greedy_rewards: Tensor,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """G_t minus the reward of a greedy answer (ReMax, arXiv 2310.10505).

    Args:
        token_rewards, offsets, gen_mask, gamma: as for `reward_to_go`.
        greedy_rewards: [B], finite: R of a greedy answer to the sample's prompt.

    Returns:
        [T] in the token rewards' dtype, 0 off gen_mask.

    Raises:
        ValueError: as `reward_to_go`, or a greedy reward that is not finite.
    """
    dtype = float_dtype("token_rewards", token_rewards)
    if not bool(torch.isfinite(greedy_rewards).all()):
        raise ValueError("greedy_rewards must be finite, got NaN or infinity; check the scorer")
    baseline_T = spread(greedy_rewards.double(), offsets, gen_mask)
    G_T = reward_to_go(token_rewards.double(), offsets, gen_mask, gamma=gamma)
    return (G_T - baseline_T).to(dtype)


def optimal_token_baseline(
    token_rewards: Tensor,
    offsets: Tensor,
    gen_mask: Tensor,
    groups: Tensor,
    prob: Tensor,
    prob_square_sum: Tensor,
) -> Tensor:
    """G - B with a baseline for each place (Li et al., "The Optimal Token Baseline", 2026).

    w_t = 1 - 2 pi_t + sum(pi^2) is the squared gradient of logp_t in the logits, W its running
    sum, and B_t = sum(G_t W_t) / (sum(W_t) + 1e-8) over those samples of the group that wrote a
    t-th token. Where only one did, its baseline is its own G and it learns nothing; hence no
    groups of one.

    Args:
        token_rewards, offsets, gen_mask: as for `reward_to_go`.
        groups: [B] int64; equal numbers are one group, in any order.
        prob: [T] probability of each written token.
        prob_square_sum: [T] sum over the vocabulary of squared probabilities there.

    Returns:
        [T] in the rewards' dtype, 0 off gen_mask.

    Raises:
        ValueError: a group of one, shapes that do not fit, or a number that is not finite.
    """
    dtype = float_dtype("token_rewards", token_rewards)
    written = _Written(offsets, gen_mask)
    if groups.shape != (len(offsets) - 1,):
        raise ValueError(f"groups must be [{len(offsets) - 1}], got {list(groups.shape)}")
    require_company(groups, "optimal_token_baseline")
    G_S = written.discounted(written.of(token_rewards, "token_rewards"), 1.0)
    w_S = 1 - 2 * written.of(prob, "prob") + written.of(prob_square_sum, "prob_square_sum")
    W_S = written.running_sum(w_S)
    _, group_B = torch.unique(groups, return_inverse=True)
    place_S = group_B[written.sample_S] * max(written.longest, 1) + written.ordinal_S
    _, place_S = torch.unique(place_S, return_inverse=True)
    n_places = int(place_S.max()) + 1 if len(place_S) else 0
    zeros = torch.zeros(n_places, dtype=torch.float64, device=G_S.device)
    weighted = zeros.index_add(0, place_S, G_S * W_S)
    baseline = weighted / (zeros.index_add(0, place_S, W_S) + BASELINE_EPS)
    return written.to_tokens(G_S - baseline[place_S], dtype)


def gae(
    token_rewards: Tensor,
    offsets: Tensor,
    gen_mask: Tensor,
    values: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) and returns, not whitened.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1) over a sample's
    written tokens, V = A = 0 after the last; returns = A + V.

    Args:
        token_rewards, offsets, gen_mask, gamma: as for `reward_to_go`.
        values: [T], finite on written tokens: V of the text before the token.
        lam: in [0, 1].

    Returns:
        Advantages and returns, [T] each in the rewards' dtype, 0 off gen_mask.

    Raises:
        ValueError: as `reward_to_go`, a value that is not finite, or lam out of range.
    """
    dtype = float_dtype("token_rewards", token_rewards)
    written = _Written(offsets, gen_mask)
    gamma, lam = _rate("gamma", gamma), _rate("lam", lam)
    V_S = written.of(values, "values")
    delta_S = written.of(token_rewards, "token_rewards") + gamma * written.after(V_S, 1) - V_S
    A_S = written.discounted(delta_S, gamma * lam)
    return written.to_tokens(A_S, dtype), written.to_tokens(A_S + V_S, dtype)


def gae_whitened(
    token_rewards: Tensor,
    offsets: Tensor,
    gen_mask: Tensor,
    loss_mask: Tensor,
    values: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`gae` as PPO trains with it: advantages whitened over loss_mask [T], returns as they are.

    Returns:
        Advantages [T], 0 off loss_mask, and returns [T], 0 off gen_mask.

    Raises:
        ValueError: as `gae`.
    """
    dtype = float_dtype("token_rewards", token_rewards)
    advantages, returns = gae(
        token_rewards.double(), offsets, gen_mask, values, gamma=gamma, lam=lam
    )
    return whiten(advantages, loss_mask).to(dtype), returns.to(dtype)


def spread(values: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """Each sample's number [B] on its tokens in `mask` [T], 0 on the others; dtype kept.

    Raises:
        ValueError: shapes that do not fit.
    """
    if values.shape != (len(offsets) - 1,):
        raise ValueError(
            f"offsets must be [B+1] for [B] numbers, got {list(offsets.shape)} for "
            f"{list(values.shape)}"
        )
    return torch.where(mask, values[sample_index(offsets, mask)], 0.0)


def sample_index(offsets: Tensor, mask: Tensor) -> Tensor:
    """[T] int64, each token's sample, for offsets [B+1] and any mask [T].

    Raises:
        ValueError: offsets that do not span the tokens.
    """
    spans = offsets.ndim == 1 and len(offsets) > 0 and mask.ndim == 1
    if not spans or int(offsets[0]) != 0 or int(offsets[-1]) != len(mask):
        raise ValueError(
            f"offsets must run from 0 to the {len(mask)} tokens of the mask, got {offsets.tolist()}"
        )
    lengths = offsets.diff()
    return torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths)


class _Written:
    """The written tokens of a batch, end to end, and scans along each sample's."""

    def __init__(self, offsets: Tensor, gen_mask: Tensor) -> None:
        self._gen_mask = gen_mask
        self.sample_S = sample_index(offsets, gen_mask)[gen_mask]
        """[S] int64: each one's sample."""
        lengths_B = torch.bincount(self.sample_S, minlength=len(offsets) - 1)
        start_B = lengths_B.cumsum(0) - lengths_B
        self.ordinal_S = (
            torch.arange(len(self.sample_S), device=gen_mask.device) - start_B[self.sample_S]
        )
        """[S] int64: how many written tokens of the sample stand before it."""
        self.longest = int(lengths_B.max()) if len(lengths_B) else 0
        """Written tokens of the longest sample."""

    def of(self, values: Tensor, name: str) -> Tensor:
        """[S] float64: `values` [T] of the written tokens, which must be finite."""
        if values.shape != self._gen_mask.shape:
            raise ValueError(
                f"{name} must be [{len(self._gen_mask)}] as gen_mask is, got {list(values.shape)}"
            )
        values_S = values[self._gen_mask].double()
        if not bool(torch.isfinite(values_S).all()):
            raise ValueError(f"{name} must be finite on written tokens, got NaN or infinity")
        return values_S

    def to_tokens(self, values_S: Tensor, dtype: torch.dtype) -> Tensor:
        """[T]: `values_S` where the policy wrote, 0 elsewhere."""
        values_T = torch.zeros(self._gen_mask.shape, dtype=dtype, device=values_S.device)
        values_T[self._gen_mask] = values_S.to(dtype)
        return values_T

    def after(self, values_S: Tensor, distance: int) -> Tensor:
        """[S]: the number `distance` tokens on in the same sample; 0 past its end."""
        ahead_S = torch.zeros_like(values_S)
        same = self.sample_S[distance:] == self.sample_S[:-distance]
        ahead_S[:-distance] = values_S[distance:].masked_fill(~same, 0.0)
        return ahead_S

    def before(self, values_S: Tensor, distance: int) -> Tensor:
        """[S]: the number `distance` tokens back in the same sample; 0 before its start."""
        behind_S = torch.zeros_like(values_S)
        same = self.sample_S[distance:] == self.sample_S[:-distance]
        behind_S[distance:] = values_S[:-distance].masked_fill(~same, 0.0)
        return behind_S

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
            values_S = values_S + self.before(values_S, distance)
            distance = 2 * distance
        return values_S


def _rate(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
    return value
