"""A user's own policy loss or advantage estimator, loaded and checked as the built-in ones are.

A loss is called as `loss(logp, old, advantage, tokens, **options)`, an estimator as
`estimator(inputs, **options)`, with the types of `winnow.algorithms.losses` and
`winnow.algorithms.advantages`. They are tried once on made-up samples before
anything is trained, so that a mistake costs no step, and what they return is checked at each call.

Shapes: `T` packed tokens, `B` samples.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from winnow.algorithms.advantages import AdvantageInputs, Estimator, estimate
from winnow.algorithms.losses import Loss, LossTerms, LossTokens, PolicyLoss
from winnow.config.algorithm import CustomAdvantage, CustomPolicyLoss
from winnow.errors import ConfigError, TrainingError
from winnow.user_code import load_user_object

RESERVED = frozenset({"loss", "policy_loss", "kl_loss", "entropy", "mean_prob", "updates", "lr"})
"""Names of figures that an update of the policy has anyway."""
SPLIT_TOLERANCE = 1e-4


def load_policy_loss(section: CustomPolicyLoss) -> PolicyLoss:
    """Load a user's policy loss and try it on made-up samples.

    Raises:
        ConfigError: the file or function is missing, or it does not do what a loss must: take the
            arguments, return a differentiable, finite loss of each token and sums, and give a
            token the same loss however samples are split into micro-batches.
    """
    field = "algorithm.policy_loss.path"
    function, where = load_user_object(section.path, field, ConfigError), f"{field} {section.path}"
    loss = PolicyLoss(partial(_call_loss, function, where), distances=frozenset())
    with _as_config_error():
        _try_loss(loss, where, section.options)
    return loss


def load_estimator(section: CustomAdvantage) -> Estimator:
    """Load a user's advantage estimator and try it on made-up samples.

    Raises:
        ConfigError: the file or function is missing, or it does not do what an estimator must:
            take the arguments, leave them as they are, and return finite numbers [B] or [T].
    """
    field = "algorithm.advantage.path"
    function, where = load_user_object(section.path, field, ConfigError), f"{field} {section.path}"
    estimator = Estimator("custom", partial(_call_estimator, function, where), takes_all=True)
    with _as_config_error():
        _try_estimator(estimator, where, section.options)
    return estimator


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    """Raise what is wrong with a trial as a fault of the recipe."""
    try:
        yield
    except TrainingError as fault:
        raise ConfigError(str(fault)) from fault


def _call_loss(function: Callable[..., Any], where: str, x: LossTerms, **options: Any) -> Loss:
    output, logp = _call(function, where, x.logp, x.old, x.advantage, x.tokens, **options), x.logp
    match output:
        case Tensor() as loss, Mapping() as figures:
            pass
        case _:
            raise TrainingError(
                f"{where} must return (loss, figures), a tensor [T] and a dict of sums, got "
                f"{_describe(output)}"
            )
    if loss.shape != logp.shape or not loss.is_floating_point():
        raise TrainingError(
            f"{where} must return the loss of each token, {_describe(logp)}, got {_describe(loss)}"
        )
    if logp.requires_grad and not loss.requires_grad:
        raise TrainingError(
            f"{where}: the loss has no gradient in logp; compute it from logp without detach() "
            "or no_grad()"
        )
    # A NaN among the log-probs is the model's: such an update is skipped, as with any loss.
    if not bool(loss[x.tokens.mask].isfinite().all()) and bool(logp.isfinite().all()):
        raise TrainingError(
            f"{where}: the loss is NaN or infinite for finite log-probs; bound its ratio, as "
            "winnow.algorithms.losses.ratio does"
        )
    sums = {str(name): _checked_figure(where, name, value) for name, value in figures.items()}
    return torch.where(x.tokens.mask, loss, 0.0), sums


def _checked_figure(where: str, name: Any, value: Any) -> Tensor:
    if not isinstance(name, str) or "/" in name or name in RESERVED:
        raise TrainingError(
            f"{where}: invalid figure name {name!r}; use one without / and other than "
            f"{', '.join(sorted(RESERVED))}"
        )
    if not isinstance(value, Tensor | float | int) or torch.as_tensor(value).numel() != 1:
        raise TrainingError(
            f"{where}: figure {name} must be one number, the sum over the counted tokens, got "
            f"{_describe(value)}"
        )
    return torch.as_tensor(value).detach().reshape(())


def _call_estimator(
    function: Callable[..., Any], where: str, inputs: AdvantageInputs, **options: Any
) -> Tensor:
    value = _call(function, where, inputs, **options)
    shapes = (inputs.rewards.shape, inputs.gen_mask.shape)
    if not isinstance(value, Tensor) or value.shape not in shapes or not value.is_floating_point():
        raise TrainingError(
            f"{where} must return one number for each sample, [B] = {list(shapes[0])}, or for "
            f"each token, [T] = {list(shapes[1])}, got {_describe(value)}"
        )
    if value.shape == inputs.gen_mask.shape:
        value = torch.where(inputs.gen_mask, value, 0.0)
    if not bool(value.isfinite().all()):
        raise TrainingError(
            f"{where}: an advantage is NaN or infinite; look for a division by a group's spread "
            "of 0, or by its number of answers less 1"
        )
    return value.detach().double()


def _call(function: Callable[..., Any], where: str, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except Exception as fault:
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        frames = traceback.extract_tb(fault.__traceback__)
        line = next((f", line {f.lineno}" for f in reversed(frames) if f.filename == file), "")
        reason = " ".join(str(fault).split())
        raise TrainingError(
            f"{where}{line}: calling it fails with {type(fault).__name__}: {reason}; "
            "docs/algorithms.md shows its signature"
        ) from fault


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    return type(value).__name__


def _try_loss(loss: PolicyLoss, where: str, options: Mapping[str, Any]) -> None:
    """Run the loss on four made-up samples, whole and in two halves: nothing may differ."""
    rng = torch.Generator().manual_seed(0)
    lengths = [5, 3, 4, 6]
    index = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    old = -0.1 - 3 * torch.rand(len(index), generator=rng)
    logp = old + 0.6 * torch.rand(len(index), generator=rng) - 0.3
    advantage = torch.tensor([1.5, -0.5, 0.7, -1.2])[index]
    mask = index.diff(prepend=torch.tensor([-1])) == 0  # all but the first, which is the prompt

    def run(samples: slice) -> tuple[Tensor, Tensor, dict[str, float]]:
        at = torch.isin(index, torch.arange(4)[samples])
        sample_index = index[at] - index[at][0]
        leaf = logp[at].requires_grad_()
        tokens = LossTokens(mask[at], sample_index, int(sample_index[-1]) + 1)
        loss_T, figures = loss(leaf, old[at], advantage[at], tokens, options)
        (gradient,) = torch.autograd.grad(loss_T.sum(), leaf, allow_unused=True)
        if gradient is None:
            raise TrainingError(f"{where}: the loss has no gradient in logp; compute it from logp")
        return loss_T.detach(), gradient, {name: float(x) for name, x in figures.items()}

    whole, halves = run(slice(None)), (run(slice(0, 2)), run(slice(2, 4)))
    for part, name in enumerate(("loss", "gradient")):
        joined = torch.cat([half[part] for half in halves])  # type: ignore[misc]
        far = float((joined - whole[part]).abs().max())  # type: ignore[operator]
        if not far <= SPLIT_TOLERANCE:
            raise TrainingError(
                f"{where}: the {name} of a token changes by {far:.2g} when samples are split into "
                "micro-batches; use nothing but the token's own sample, as "
                "winnow.algorithms.losses.sample_means does, and leave means to the aggregation"
            )
    for name, total in whole[2].items():
        parts = [half[2].get(name, 0.0) for half in halves]
        if not abs(sum(parts) - total) <= SPLIT_TOLERANCE * max(abs(total), 1.0):
            raise TrainingError(
                f"{where}: figure {name} must be a sum over the counted tokens, which adds up "
                f"over micro-batches, got {total:g} for all samples and "
                f"{' and '.join(f'{part:g}' for part in parts)} for its halves"
            )


def _try_estimator(estimator: Estimator, where: str, options: Mapping[str, Any]) -> None:
    """Run the estimator on two made-up groups: one that differs, one of equal rewards."""
    rewards = torch.tensor([1.0, -1.0, 0.5, 0.5], dtype=torch.float64)
    offsets = torch.tensor([0, 4, 6, 9, 12])
    gen_mask = torch.ones(12, dtype=torch.bool)
    gen_mask[offsets[:-1]] = False
    token_rewards = torch.zeros(12, dtype=torch.float64)
    token_rewards[offsets[1:] - 1] = rewards
    groups = torch.tensor([0, 0, 1, 1])
    inputs = AdvantageInputs(rewards, groups, offsets, gen_mask, gen_mask.clone(), token_rewards)
    original = vars(copy.deepcopy(inputs))
    estimate(estimator, inputs, options)
    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    changed = [name for name, value in tensors.items() if not torch.equal(original[name], value)]
    if changed:
        raise TrainingError(
            f"{where} changes its inputs in place: {', '.join(changed)}; make new tensors"
        )
