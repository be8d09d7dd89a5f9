"""A user's own loss and estimator: loaded, tried on made-up samples, and checked at each call."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.algorithms.advantages import AdvantageInputs, estimate
from winnow.algorithms.losses import LossTokens
from winnow.config.algorithm import CustomAdvantage, CustomPolicyLoss
from winnow.errors import ConfigError, TrainingError
from winnow.learning.custom import load_estimator, load_policy_loss

HEAD = """
import torch
from winnow.algorithms.losses import ratio, sample_means

"""
TOPR = """
def topr(logp, old, advantage, tokens, *, high=1.0):
    r = ratio(logp, old).clamp(max=high).detach()
    weight = torch.where(advantage > 0, torch.ones_like(r), r)
    return -weight * advantage * logp, {"cut_share": (r >= high).sum()}
"""


def place_of(folder: Path, body: str) -> str:
    file = folder / "mine.py"
    file.write_text(HEAD + body)
    return f"{file}:{body.split('def ')[1].split('(')[0]}"


def loss_of(folder: Path, body: str, **options: Any) -> Any:
    return load_policy_loss(CustomPolicyLoss(path=place_of(folder, body), options=options))


def estimator_of(folder: Path, body: str, **options: Any) -> Any:
    return load_estimator(CustomAdvantage(path=place_of(folder, body), options=options))


def tokens_of(*lengths: int) -> LossTokens:
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return LossTokens(torch.ones(len(index), dtype=torch.bool), index, len(lengths))


def test_a_loss_of_a_file_is_called_as_the_built_in_ones_are(tmp_path: Path) -> None:
    loss = loss_of(tmp_path, TOPR, high=0.9)
    logp = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    old, a = torch.tensor([-1.5, -1.0, 0.0]), torch.tensor([2.0, -1.0, math.inf])
    tokens = LossTokens(torch.tensor([True, True, False]), torch.tensor([0, 1, 1]), 2)
    found, figures = loss(logp, old, a, tokens, {"high": 0.9})
    assert found.tolist() == pytest.approx([2.0, -math.exp(-1) * 2.0, 0.0])
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    assert gradient.tolist() == pytest.approx([-2.0, math.exp(-1), 0.0])
    assert float(figures["cut_share"]) == 2, "the token outside the mask has the ratio 1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(logp, old, **o):\n    return logp", "takes 2 positional arguments but 4 were"),
        (TOPR.replace("topr", "f").replace("high", "bound"), "unexpected keyword argument 'high'"),
        ("return -logp", r"must return \(loss, figures\).*float32 \["),
        ("return -logp.sum(), {}", r"loss of each token.*float32 \[\]"),
        ("return logp > 0, {}", r"loss of each token.*got bool \["),
        ("return -logp.detach(), {}", "no gradient in logp"),
        ("return logp.detach().clone().requires_grad_(), {}", "no gradient in logp"),
        ("return logp / 0, {}", "is NaN or infinite for finite log"),
        ("return -logp, {'lr': 1}", "name 'lr'; use one without"),
        ("return -logp, {'x': logp}", "figure x must be one number"),
        ("return -logp, {'x': logp.mean()}", "x must be a sum over the counted tokens, which adds"),
        ("return -(a[1] - a[1].mean()) * logp, {}", "the loss of a token changes by .* when samp"),
        (
            "return logp - 0 * logp + (logp - logp.detach()).mean(), {}",
            "the gradient of a token changes by .* when samples are split",
        ),
        ("raise KeyError('beta')", "mine.py:f, line 6: calling it fails"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_in_one_line_before_the_start(
    tmp_path: Path, body: str, message: str
) -> None:
    code = body if "def " in body else f"def f(logp, *a, **o):\n    {body}"
    with pytest.raises(ConfigError, match=message) as caught:
        loss_of(tmp_path, code, high=1.0)
    said = str(caught.value)
    assert said.startswith("algorithm.policy_loss.path ")
    assert "\n" not in said
    assert ";" in said or "must" in said, "it says what to do"


def test_a_file_that_is_missing_and_a_name_it_has_not_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.path .*no such file"):
        load_policy_loss(CustomPolicyLoss(path=f"{tmp_path}/none.py:f"))
    (tmp_path / "mine.py").write_text("def estimate(inputs):\n    return inputs.rewards\n")
    with pytest.raises(
        ConfigError, match=r"advantage\.path .*no callable mine; give one of estimate"
    ):
        load_estimator(CustomAdvantage(path=f"{tmp_path}/mine.py:mine"))


def test_a_loss_that_turns_nan_while_training_stops_the_run_unless_the_model_did(
    tmp_path: Path,
) -> None:
    body = "def f(logp, old, a, tokens):\n    return -(logp - old + 2).sqrt() * a, {}"
    loss = loss_of(tmp_path, body)
    logp = torch.tensor([-1.0, -9.0], requires_grad=True)
    columns = (torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]), tokens_of(2))
    with pytest.raises(TrainingError, match=r"mine\.py:f: the loss is NaN or infinite"):
        loss(logp, *columns, {})
    broken = torch.tensor([-1.0, math.nan], requires_grad=True)
    found, _ = loss(broken, *columns, {})
    assert found.isnan().any(), "a NaN of the model's is skipped as with any loss"


LEAD = """
def lead(inputs, *, scale=1.0):
    R, result = inputs.rewards, inputs.rewards.clone()
    for group in inputs.groups.unique():
        own = inputs.groups == group
        result[own] = scale * (R[own] - R[own].median())
    return result
"""
PER_TOKEN = """
def by_place(inputs):
    place = torch.arange(len(inputs.gen_mask), dtype=torch.float64) - inputs.offsets[
        inputs.sample_index]
    return inputs.rewards[inputs.sample_index] / place
"""


def two_answers() -> AdvantageInputs:
    gen_mask = torch.tensor([False, True, True, False, True])
    return AdvantageInputs(
        rewards=torch.tensor([1.0, -1.0], dtype=torch.float64),
        groups=torch.tensor([3, 3]),
        offsets=torch.tensor([0, 3, 5]),
        gen_mask=gen_mask,
        loss_mask=gen_mask,
        token_rewards=torch.zeros(5, dtype=torch.float64),
    )


def test_an_estimator_of_a_file_gives_samples_or_tokens(tmp_path: Path) -> None:
    estimator = estimator_of(tmp_path, LEAD, scale=2.0)
    found = estimate(estimator, two_answers(), {"scale": 2.0})
    # torch's median is the lower of the two.
    assert found.samples.tolist() == [4.0, 0.0]
    assert found.tokens.tolist() == [0.0, 4.0, 4.0, 0.0, 0.0]
    (tmp_path / "two").mkdir()
    found = estimate(estimator_of(tmp_path / "two", PER_TOKEN), two_answers(), {})
    # A prompt's place is 0, and what stands there is not read.
    assert found.tokens.tolist() == [0.0, 1.0, 0.5, 0.0, -1.0]
    assert found.samples.tolist() == [0.75, -1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(rewards, groups):\n    return rewards", "missing 1 required positional argument"),
        ("def f(inputs):\n    return inputs.rewards[:2]", r"must return one number.*\[2\]"),
        ("def f(inputs):\n    return inputs.groups", r"must return one number.*int64 \[4\]"),
        ("def f(inputs):\n    return [1.0]", "must return one number.*got list"),
        ("def f(inputs):\n    return inputs.rewards / 0 ** 0 / 0.0 * 0", "is NaN or infinite"),
        (
            "def f(inputs):\n    inputs.rewards.sub_(1)\n    return inputs.rewards",
            "changes its inputs in place: rewards; make new tensors",
        ),
    ],
)
def test_an_estimator_that_cannot_train_is_refused_before_the_start(
    tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        estimator_of(tmp_path, body)
    assert str(caught.value).startswith("algorithm.advantage.path ")
    assert "\n" not in str(caught.value)


def test_an_estimator_that_turns_nan_while_training_stops_the_run(tmp_path: Path) -> None:
    body = "def f(inputs):\n    return inputs.rewards / (inputs.rewards + 1.5)"
    estimator = estimator_of(tmp_path, body)
    inputs = two_answers()
    inputs.rewards[0] = -1.5
    with pytest.raises(TrainingError, match=r"algorithm\.advantage\.path .*NaN or infinite"):
        estimate(estimator, inputs, {})


def test_the_parts_of_the_reward_reach_an_estimator_of_a_file(tmp_path: Path) -> None:
    body = "def f(inputs):\n    return inputs.components.get('task', inputs.rewards)"
    assert estimator_of(tmp_path, body).takes_components
