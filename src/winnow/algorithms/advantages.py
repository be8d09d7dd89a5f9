"""Advantage estimators: rewards of a step to one number a sample or a token.

Every estimator is called as `estimator(inputs, **options)` and returns its numbers in float64, [B]
for samples or [T] for tokens; `estimate` checks the inputs and lays the numbers out. Options have
the names and meanings of the estimator's section in `config/algorithm.py`, which holds their
defaults. `ESTIMATORS` says what each needs beyond rewards, so that a step computes nothing else.

A group of one has mean 0, and rewards of a group that are equal but for float noise
(`FLAT_TOLERANCE`) give exactly 0, where plain arithmetic would divide noise by noise. Steps of time
are a sample's written tokens: the environment's tokens between them are jumped over. Values off
the masks are never read.

Shapes: `T` packed tokens, `B` samples of a whole step (whitening and group statistics see all), `P`
groups (prompts) among them, `S` written tokens (gen_mask true). Sample b is the tokens
[offsets[b], offsets[b+1]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STD_EPS = 1e-6
FLAT_TOLERANCE = 1e-6
"""Rewards of a group within this of each other (times the largest, if above 1) are equal; a
standard deviation up to this times the mean is float noise."""
BASELINE_EPS = 1e-8
VAR_EPS = 1e-8
LEAST_MEAN = 1e-4
"""A mean nearer to 0 counts as this: up to 1e-10 is noise around 0."""


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The samples of a step; an estimator takes of them what it needs. Numbers are float64.

    Example: prompts of 2 tokens with answers of 2 and 1, right and wrong: `offsets` [0, 4, 7],
    `groups` [0, 0], `gen_mask` [F F T T  F F T], `rewards` [1, -1], `token_rewards`
    [0 0 0 1  0 0 -1].
    """

    rewards: Tensor
    """[B], R: the sum of a sample's rewards, a KL term in the reward included."""
    groups: Tensor
    """[B] int64: equal numbers are answers to one prompt, in any order."""
    offsets: Tensor
    """[B+1] int64: sample b is [offsets[b], offsets[b+1])."""
    gen_mask: Tensor
    """[T] bool: the policy wrote this token."""
    loss_mask: Tensor
    """[T] bool: the tokens of gen_mask that learn."""
    token_rewards: Tensor
    """[T], r_t: an environment's reward of a turn on its last token and all other reward on the
    sample's last written token, minus beta * kl_t."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] each: the parts of the reward by name (a need)."""
    greedy_rewards: Tensor | None = None
    """[B]: reward of a greedy answer to the sample's prompt (a need)."""
    values: Tensor | None = None
    """[T]: the critic's V before each written token (a need)."""
    prob: Tensor | None = None
    """[T]: probability of each written token (a need)."""
    prob_square_sum: Tensor | None = None
    """[T]: sum over the vocabulary of squared probabilities there (a need)."""
    weights: Tensor | None = None
    """[T]: importance weight of each token's loss; None where the loss is not weighed."""
    all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums
    """Brings sums over tokens together where other processes have the tokens of other samples,
    which are empty here. Where `Estimator.takes_all`, none has."""

    @property
    def total(self) -> Callable[[Tensor], Tensor]:
        """The old name of `all_reduce`, which goes with the next version."""
        return self.all_reduce

    @property
    def sample_index(self) -> Tensor:
        """[T] int64: each token's sample."""
        lengths = self.offsets.diff()
        return torch.arange(len(lengths), device=self.offsets.device).repeat_interleave(lengths)

    def token_counts(self, mask: Tensor) -> Tensor:
        """[B] int64: tokens of each sample in `mask` [T]."""
        return self.all_reduce(
            torch.bincount(self.sample_index[mask], minlength=len(self.offsets) - 1)
        )


def grpo(inputs: AdvantageInputs, *, std_normalization: str) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6), GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Standard deviations take Bessel's correction. A group of one has mean 0 and std 1.
    "batch" divides by the std of all rewards (Lite PPO, arXiv 2508.08221), "none" by nothing
    (Dr. GRPO, arXiv 2503.20783).
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    if std_normalization == "group":
        return grouped.normalized()
    if std_normalization == "batch":
        R_B = inputs.rewards
        std = R_B.std() if len(R_B) > 1 else R_B.new_ones(())
        return grouped.centred() / (std + STD_EPS)
    return grouped.centred()


def grpo_passk(inputs: AdvantageInputs, *, std_normalization: str) -> Tensor:
    """Return the best answer's lead over the second best, for others 0 (arXiv 2503.19595).

    Optimises the reward of the best of a prompt's answers. Two best answers have no lead.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    R_B = inputs.rewards
    ascending = torch.argsort(R_B)
    by_group = ascending[torch.argsort(grouped.index_B[ascending], stable=True)]
    last_P = grouped.size_P.cumsum(0) - 1
    best_P, second_P = by_group[last_P], by_group[last_P - 1]
    lead_P = (R_B[best_P] - R_B[second_P]).masked_fill(_equal(R_B[second_P], R_B[best_P]), 0.0)
    advantage_B = torch.zeros_like(R_B).index_put_((best_P,), lead_P)
    return advantage_B / (grouped.std() + STD_EPS) if std_normalization == "group" else advantage_B


def rloo(inputs: AdvantageInputs) -> Tensor:
    """R minus the mean of the group's other rewards (RLOO, arXiv 2402.14740).

    As n / (n - 1) * (R - mean_g) for a group of n. A group of one keeps its R.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    size_B = grouped.size_P[grouped.index_B].double()
    return size_B / (size_B - 1).clamp(min=1) * grouped.centred()


def opo(inputs: AdvantageInputs) -> Tensor:
    """R - sum(length * R) / sum(length) over the group (OPO, arXiv 2505.23585).

    Lengths count written tokens. A group of one has baseline 0; a group without a written token
    takes the plain mean.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    weight_B = inputs.token_counts(inputs.gen_mask).double()
    no_token_B = (grouped.sum(weight_B) == 0)[grouped.index_B]
    return grouped.centred(weight_B.masked_fill(no_token_B, 1.0))


def gpg(inputs: AdvantageInputs, *, alpha: str) -> Tensor:
    """alpha * (R - mean_g), GPG (arXiv 2504.02546).

    alpha = B / max(B - M, 1) makes up for the M samples in groups whose rewards are all equal,
    which teach nothing. A group of one keeps its R, teaches, and so does not count in M.
    "nonzero_reward" takes B / max(number of R != 0, 1), as verl does.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    active_B = (~grouped.flat_P | (grouped.size_P == 1))[grouped.index_B]
    if alpha == "nonzero_reward":
        active_B = inputs.rewards != 0
    return len(inputs.rewards) / max(int(active_B.sum()), 1) * grouped.centred()


def weighted_grpo(inputs: AdvantageInputs, weights: Mapping[str, float]) -> Tensor:
    """sum_k w_k * GRPO(R_k), GDPO before its whitening (arXiv 2601.05242).

    Each component is normalised on its own, so that one of small range keeps its say.

    Args:
        weights: by name; components without one are left out. Empty: 1 for each.

    Raises:
        ValueError: a weight of an unknown component.
    """
    components = inputs.components
    weights = weights or dict.fromkeys(components, 1.0)
    unknown = [name for name in weights if name not in components]
    if unknown:
        raise ValueError(
            f"gdpo weights name {', '.join(unknown)}, but the reward components are "
            f"{', '.join(components)}"
        )
    parts = [
        weight * _Grouped(components[name], inputs.groups).normalized()
        for name, weight in weights.items()
    ]
    return torch.stack(parts).sum(0)


def centred(inputs: AdvantageInputs) -> Tensor:
    """R - mean_g [B]; a group of one keeps its R."""
    return _Grouped(inputs.rewards, inputs.groups).centred()


class _Grouped:
    """Rewards [B] by their groups [B]: `index_B`, the ordinal of a sample's group; `size_P`, its
    samples; `flat_P`, True if all its rewards are equal."""

    def __init__(self, R_B: Tensor, groups_B: Tensor) -> None:
        self._R_B = R_B
        self.index_B: Tensor
        self.size_P: Tensor
        _, self.index_B, self.size_P = torch.unique(
            groups_B, return_inverse=True, return_counts=True
        )
        low_P = R_B.new_full(self.size_P.shape, torch.inf)
        high_P = R_B.new_full(self.size_P.shape, -torch.inf)
        low_P.scatter_reduce_(0, self.index_B, R_B, "amin")
        high_P.scatter_reduce_(0, self.index_B, R_B, "amax")
        self.flat_P = _equal(low_P, high_P)

    def sum(self, values_B: Tensor) -> Tensor:
        """[P] float64 sum over each group."""
        zeros_P = torch.zeros_like(self.size_P, dtype=torch.float64)
        return zeros_P.index_add_(0, self.index_B, values_B)

    def centred(self, weight_B: Tensor | None = None) -> Tensor:
        """[B] R minus the group's (weighted) mean; R in a group of one, exactly 0 in a flat one."""
        if weight_B is None:
            weight_B = torch.ones_like(self._R_B)
        mean_P = self.sum(weight_B * self._R_B) / self.sum(weight_B)
        away_B = (self._R_B - mean_P[self.index_B]).masked_fill(self.flat_P[self.index_B], 0.0)
        return torch.where((self.size_P == 1)[self.index_B], self._R_B, away_B)

    def std(self) -> Tensor:
        """[B] the group's standard deviation with Bessel's correction; 1 for a group of one."""
        square_P = self.sum(self.centred() ** 2)
        std_P = (square_P / (self.size_P - 1).clamp(min=1)).sqrt()
        return std_P.masked_fill(self.size_P == 1, 1.0)[self.index_B]

    def normalized(self) -> Tensor:
        """[B] (R - mean) / (std + 1e-6) of each group."""
        return self.centred() / (self.std() + STD_EPS)


def _equal(low: Tensor, high: Tensor) -> Tensor:
    """True where low <= high differ by no more than float noise."""
    scale = torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return high - low <= FLAT_TOLERANCE * scale


def spread(values: Tensor, inputs: AdvantageInputs, mask: Tensor) -> Tensor:
    """Return each sample's number [B] on its tokens in `mask` [T], 0 on the others."""
    return torch.where(mask, values[inputs.sample_index], 0.0)


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> Tensor:
    """whiten(G) over loss_mask (REINFORCE++, arXiv 2501.03262)."""
    return whiten(reward_to_go(inputs, gamma), inputs.loss_mask, inputs.all_reduce)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """R - mean_g, spread over tokens and whitened over loss_mask (arXiv 2501.03262)."""
    values = spread(centred(inputs), inputs, inputs.loss_mask)
    return whiten(values, inputs.loss_mask, inputs.all_reduce)


def gdpo(inputs: AdvantageInputs, *, weights: Mapping[str, float]) -> Tensor:
    """The blend of the components, spread over tokens and whitened (GDPO, arXiv 2601.05242)."""
    values = spread(weighted_grpo(inputs, weights), inputs, inputs.loss_mask)
    return whiten(values, inputs.loss_mask, inputs.all_reduce)


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
    written = _WrittenTokens(inputs)
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
    written tokens, V = A = 0 after the last. Behind a turn of a conversation comes the first token
    of the next: what an environment wrote between them is no action.

    Returns:
        Advantages, 0 off loss_mask, and returns, A + V before the whitening, 0 off gen_mask.
    """
    assert inputs.values is not None
    written = _WrittenTokens(inputs)
    V_S = inputs.values[inputs.gen_mask].double()
    r_S = inputs.token_rewards[inputs.gen_mask]
    A_S = written.discounted(r_S + gamma * written.after(V_S, 1) - V_S, gamma * lam)
    advantages = whiten(written.to_tokens(A_S), inputs.loss_mask, inputs.all_reduce)
    return advantages, written.to_tokens(A_S + V_S)


def reward_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_(t+1) over a sample's written tokens [T], 0 off gen_mask."""
    written = _WrittenTokens(inputs)
    return written.to_tokens(written.discounted(inputs.token_rewards[inputs.gen_mask], gamma))


def whiten(
    x: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) in the mask [T], 0 outside it.

    The variance takes Bessel's correction. Numbers that are equal but for float noise
    (`FLAT_TOLERANCE`) become exactly 0, one alone too. What stands outside the mask is not read.

    Args:
        all_reduce: brings sums together where other processes have the rest of the tokens.
    """
    chosen = x[mask]
    count = int(all_reduce(mask.sum()))
    if count < 2:
        return torch.zeros_like(x)
    mean = float(all_reduce(chosen.sum())) / count
    variance = float(all_reduce((chosen - mean).square().sum())) / (count - 1)
    if variance <= (FLAT_TOLERANCE * max(abs(mean), LEAST_MEAN)) ** 2:
        return torch.zeros_like(x)
    return torch.where(mask, (x - mean) / (variance + VAR_EPS) ** 0.5, 0.0)


class _WrittenTokens:
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


@dataclass(frozen=True)
class Estimator:
    """An estimator, what it needs, and over which tokens a sample's mean is taken."""

    name: str
    """Its name in a recipe."""
    function: Callable[..., Tensor | tuple[Tensor, Tensor]]
    """(inputs, **options) -> advantages [B] or [T], or these and returns [T] for a critic."""
    needs: frozenset[str] = frozenset()
    """Fields of `AdvantageInputs` beyond rewards: a step computes these and no others."""
    min_group: int = 1
    """Fewest answers a prompt may have."""
    whitens: bool = False
    """True if advantages are over loss_mask, not gen_mask."""
    takes_all: bool = False
    """True if it reads tokens of other samples, other than by `all_reduce`."""
    per_sample: bool = True
    """False if it always returns [T]."""

    @property
    def takes_components(self) -> bool:
        """True if it reads the parts of the reward; one of a user's own may, at no cost."""
        return "components" in self.needs or self.name == "custom"


@dataclass(frozen=True, eq=False)
class Advantages:
    """The advantages of a step."""

    tokens: Tensor
    """[T] fp32: 0 off gen_mask, and off loss_mask where the estimator whitens."""
    samples: Tensor
    """[B] float64, for the records: the sample's one number, or the mean over its tokens."""
    returns: Tensor | None = None
    """[T] fp32: what a critic learns, 0 off gen_mask; None without values."""


_ALL = (
    Estimator("grpo", grpo),
    Estimator("grpo_passk", grpo_passk, min_group=2),
    Estimator("rloo", rloo),
    Estimator("opo", opo),
    Estimator("reinforce_plus_plus", reinforce_plus_plus, whitens=True),
    Estimator("reinforce_plus_plus_baseline", reinforce_plus_plus_baseline, whitens=True),
    Estimator("remax", remax, frozenset({"greedy_rewards"}), per_sample=False),
    Estimator("gpg", gpg),
    Estimator("gdpo", gdpo, frozenset({"components"}), whitens=True),
    Estimator(
        "optimal_token_baseline",
        optimal_token_baseline,
        frozenset({"prob", "prob_square_sum"}),
        min_group=2,
        takes_all=True,
    ),
    Estimator("gae", gae, frozenset({"values"}), whitens=True),
)
ESTIMATORS: Mapping[str, Estimator] = {estimator.name: estimator for estimator in _ALL}


def estimate(
    estimator: Estimator, inputs: AdvantageInputs, options: Mapping[str, Any]
) -> Advantages:
    """Check the inputs of a step, call an estimator, and lay out what it returns.

    Args:
        options: of its section of the recipe.

    Raises:
        ValueError: an input that is missing or not finite, a group that is too small, or options
            that do not fit the inputs.
    """
    _check(estimator, inputs)
    output = estimator.function(inputs, **options)
    values, returns = output if isinstance(output, tuple) else (output, None)
    # Tokens at hand may be as many as samples.
    gives_samples = estimator.per_sample and not estimator.whitens
    if gives_samples and values.shape == inputs.rewards.shape:
        return Advantages(spread(values, inputs, inputs.gen_mask).float(), values.double())
    mask = inputs.loss_mask if estimator.whitens else inputs.gen_mask
    sums_B = torch.zeros(len(inputs.rewards), dtype=torch.float64, device=values.device)
    sums_B.index_add_(0, inputs.sample_index[mask], values[mask].double())
    mean_B = inputs.all_reduce(sums_B) / inputs.token_counts(mask).clamp(min=1)
    return Advantages(values.float(), mean_B, None if returns is None else returns.float())


def _check(estimator: Estimator, inputs: AdvantageInputs) -> None:
    for name in ("rewards", "token_rewards", *sorted(estimator.needs)):
        value = getattr(inputs, name)
        if value is None or (name == "components" and not value):
            raise ValueError(f"algorithm/advantage={estimator.name} needs {name}, got none")
        for values in value.values() if name == "components" else (value,):
            if values.shape == inputs.gen_mask.shape:
                values = values[inputs.gen_mask]
            if not bool(torch.isfinite(values).all()):
                raise ValueError(
                    f"{name} must be finite, got NaN or infinity; check the scorer and the models"
                )
    numbers, sizes = torch.unique(inputs.groups, return_counts=True)
    if bool((sizes < estimator.min_group).any()):
        small = int((sizes < estimator.min_group).nonzero()[0])
        raise ValueError(
            f"{estimator.name} needs at least {estimator.min_group} answers to a prompt, group "
            f"{int(numbers[small])} has {int(sizes[small])}; raise rollout.n or choose another "
            "advantage"
        )
