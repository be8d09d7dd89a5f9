"""The gradient of an update depends on what is learnt, not on how the work is cut up.

Recorded answers go through the real learner: passes, correction, advantages, updates. In place of
the optimizer's step each update's gradient is kept, and the weights move by a fixed amount, so
that the second update has ratios other than 1. Then the same again with other micro-batches, and
with groups and answers in another order. What ranks make of it is in `test_fsdp2` and
`test_own_rows`.

`selection: microbatch` is exempt: it depends on the split on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from tests.devices import DEVICE
from tests.examples import examples
from tests.objectives import advantage_stage, legal_aggregation, policy_objective
from tests.recorded import VOCABULARY, quickstart_model, recorded_groups
from torch import Tensor, nn

from winnow.algorithms.aggregation import AGGREGATIONS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.load import load_recipe
from winnow.learning.batch import MicroBatch
from winnow.learning.critic import Critic, ValueObjective
from winnow.learning.learner import Learner, LearnerSettings
from winnow.learning.policy import KlTerm, Policy, PolicyObjective
from winnow.learning.runner import Output
from winnow.learning.strategy import LossFn, Stats, Strategy
from winnow.models.value import load_value_model
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.ranks.learner import make_objective
from winnow.types import Group

BUDGETS = [137, 1, 250, 350]
"""Tokens of a micro-batch: less than all."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
Gradient = dict[str, Tensor]


small_model = partial(quickstart_model, num_hidden_layers=1, hidden_size=32)


class Recorder(Strategy):
    """Keeps each update's gradient, and moves the weights by fixed noise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.to(DEVICE), vocab_size=VOCABULARY)
        self.gradients: list[Gradient] = []

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        total = super().forward_backward(microbatches, outputs, loss_fn)
        named = self.model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def optimizer_step(self, lr: float) -> Stats:
        torch.manual_seed(len(self.gradients))
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, dtype=torch.float64)
                parameter += 0.02 * noise.to(DEVICE)
        return {"grad_norm": 1.0, "skipped": 0.0}


@dataclass(frozen=True)
class Case:
    """A recipe's learning side, as far as an update can tell."""

    objective: PolicyObjective
    epochs: int = 2
    overlong_filtering: bool = False
    correction: Mapping[str, Any] | None = None
    advantage: str = "grpo"
    options: Mapping[str, Any] = field(default_factory=dict)
    value: ValueObjective | None = None
    answers_move: bool = True
    """Whether answers may change places in their group, which renames them."""


def rest(step: int) -> float:
    """The learning rate of a model that stays as it is."""
    return 0.0


def gradients(
    case: Case,
    dtype: torch.dtype,
    folder: Path,
    budget: int = 10**6,
    order: random.Random | None = None,
) -> list[Gradient]:
    """Of all updates of one step, of the policy first.

    Args:
        budget: tokens of a micro-batch.
        order: shuffles groups and answers; None leaves them.
    """
    policy = Recorder(small_model(dtype))
    reference = critic = None
    if case.objective.kl is not None:
        reference = Recorder(reference_model(dtype))
    if case.value is not None:
        critic = Critic(Recorder(value_model(dtype, folder)), case.value)
    learner = Learner(
        Policy(policy, case.objective),
        advantage_stage(case.advantage, case.options),
        LearnerSettings(100, case.epochs, budget, case.overlong_filtering, 5, 1, rest, rest),
        reference=reference,
        critic=critic,
        correction=case.correction,
    )
    learner.learn(ordered(recorded_groups(3, 3), case, order), 1, Metrics(), Stopwatch())
    found = policy.gradients
    if critic is not None:
        assert isinstance(critic.strategy, Recorder)
        found = found + critic.strategy.gradients
    return found


def ordered(groups: list[Group], case: Case, order: random.Random | None) -> list[Group]:
    if order is None:
        return groups
    order.shuffle(groups)
    if not case.answers_move:
        return groups
    return [replace(g, answers=tuple(order.sample(g.answers, len(g.answers)))) for g in groups]


def reference_model(dtype: torch.dtype) -> nn.Module:
    """The model, some way off."""
    strategy = Recorder(small_model(dtype))
    strategy.optimizer_step(0.0)
    return strategy.model


def value_model(dtype: torch.dtype, folder: Path) -> nn.Module:
    """With a head that is not zero, so that the backbone learns at once."""
    model = load_value_model(str(folder), dtype, torch.device("cpu")).double().to(dtype)
    torch.manual_seed(5)
    nn.init.normal_(model.score.weight)
    return model


WEIGHT: Mapping[str, Any] = {"name": "truncated", "level": "sequence", "cap": 2.0}
REJECTION: Mapping[str, Any] = {
    "name": "k1",
    "level": "token",
    "over": "mean",
    "low": 1e-3,
    "high": 1e3,
}
BOTH = {"weight": WEIGHT, "rejection": REJECTION}
MEAN_ONE = {**WEIGHT, "normalize": True}
SELECTION: Mapping[str, Mapping[str, Any]] = {
    "clip_cov": {"share": 0.02, "cov_low": 0.0, "cov_high": 50.0, "selection": "update"},
    "kl_cov": {"share": 0.02, "selection": "update"},
}


def _objective(loss: str, **changes: Any) -> PolicyObjective:
    return policy_objective(loss, changes.pop("options", SELECTION.get(loss)), **changes)


def _cases() -> dict[str, Case]:
    cases = {
        loss: Case(_objective(loss), answers_move=loss != "clip_cov") for loss in POLICY_LOSSES
    }
    for name in AGGREGATIONS:
        cases[f"ppo_clip {name}"] = Case(
            _objective("ppo_clip", aggregation=name, norm_tokens=128), overlong_filtering=True
        )
    for estimator in ("k2", "k3+"):
        term = KlTerm(0.1, estimator, importance_weight=estimator == "k2")
        cases[f"kl {estimator}"] = Case(_objective("ppo_clip", kl=term))
    cases |= {
        "weights": Case(_objective("ppo_clip"), correction={"weight": MEAN_ONE}),
        "rejection": Case(_objective("sapo"), correction=BOTH),
        "fused": Case(_objective("ppo_clip", old="current", correction=BOTH), epochs=1),
        "bypass": Case(_objective("ppo_clip", old="behav", correction={"rejection": REJECTION})),
        "critic": Case(
            _objective("ppo_clip"),
            advantage="gae",
            options={"gamma": 0.99, "lam": 0.9},
            value=ValueObjective(0.05, "token-mean"),
        ),
        "token baseline": Case(_objective("ppo_clip"), advantage="optimal_token_baseline"),
        "all terms": Case(
            _objective(
                "ppo_clip",
                aggregation="seq-mean-token-mean",
                kl=KlTerm(0.1, "k3+", importance_weight=True),
                entropy_coef=0.05,
            ),
            overlong_filtering=True,
            correction={**BOTH, "weight": MEAN_ONE},
            advantage="reinforce_plus_plus_baseline",
        ),
    }
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the critic starts."""
    path = tmp_path_factory.mktemp("critic")
    small_model().save_pretrained(path)
    return path


@cache
def undivided(case: str, dtype: torch.dtype, folder: Path) -> list[Gradient]:
    """The gradients with all samples in one micro-batch."""
    found = gradients(CASES[case], dtype, folder)
    assert len(found) == CASES[case].epochs * (1 if CASES[case].value is None else 2)
    for gradient in found:
        assert all(bool(g.isfinite().all()) for g in gradient.values())
        assert all(float(g.norm()) > 0 for g in gradient.values())
    return found


def assert_same(found: list[Gradient], wanted: list[Gradient], tolerance: float) -> None:
    assert len(found) == len(wanted)
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True), start=1):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            away = float((ours[name].double() - gradient.double()).norm())
            assert away <= tolerance * float(gradient.double().norm()), (
                f"update {number}, {name}: {away / float(gradient.double().norm()):.1e}"
            )


@pytest.mark.parametrize(
    ("case", "dtype"), [("all terms", torch.float32), *((case, torch.float64) for case in CASES)]
)
def test_split_packing_and_order_change_no_gradient(
    case: str, dtype: torch.dtype, folder: Path
) -> None:
    number = list(CASES).index(case)
    first = number % len(BUDGETS)

    # Not shrunk: an example is a whole step of learning, and the first that fails says enough.
    @examples(1, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(budget=st.sampled_from(BUDGETS[first:] + BUDGETS[:first]), seed=st.integers(0, 2**16))
    def check(budget: int, seed: int) -> None:
        # Hypothesis' first example is the least one: the same of each case, but for this.
        found = gradients(CASES[case], dtype, folder, budget, random.Random(seed + number))
        assert_same(found, undivided(case, dtype, folder), TOLERANCE[dtype])

    check()


def of_one_update(
    objective: PolicyObjective,
    groups: list[Group] | None = None,
    correction: Mapping[str, Any] | None = None,
) -> Gradient:
    """Of a step with one update, in fp32."""
    policy = Recorder(small_model())
    learner = Learner(
        Policy(policy, objective),
        advantage_stage("grpo", {}),
        LearnerSettings(100, 1, 400, False, 5, 1, rest),
        correction=correction,
    )
    learner.learn(groups or recorded_groups(3), 1, Metrics(), Stopwatch())
    (gradient,) = policy.gradients
    return gradient


@pytest.mark.parametrize(("loss", "level"), [("ppo_clip", "sequence"), ("gspo", "token")])
def test_fused_mode_learns_what_recompute_mode_does_in_one_update(loss: str, level: str) -> None:
    options = {"weight": {**WEIGHT, "level": level}}
    fused = of_one_update(_objective(loss, old="current", correction=options))
    recomputed = of_one_update(_objective(loss), correction=options)
    assert_same([fused], [recomputed], 1e-6)
    plain = of_one_update(_objective(loss))
    assert not any(torch.allclose(plain[name], fused[name], rtol=0.01) for name in plain)


@pytest.mark.parametrize("loss", ["ppo_clip", "gmpo", "dppo_kl"])
def test_without_a_pass_of_its_own_one_update_has_the_same_gradient(loss: str) -> None:
    aggregation = f"algorithm.aggregation={legal_aggregation(loss)}"
    changes = [f"algorithm/policy_loss={loss}", aggregation]
    config = load_recipe("quickstart", [*changes, "trainer.mini_batch_groups=null"])
    objective = make_objective(config)
    assert objective.old == "current"
    with_pass = of_one_update(replace(objective, old="pass"))
    assert_same([of_one_update(objective)], [with_pass], 1e-6)
