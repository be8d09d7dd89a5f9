"""The gradient of an update depends on what is learnt, not on how the work is cut up.

Recorded answers go through the real learner: passes, correction, advantages, updates. In place of
the optimizer's step each update's gradient is kept, and the weights move by a fixed amount, so
that the second update has ratios other than 1. Then the same again with other micro-batches for
the passes, any samples packed together in any order for the updates, groups and answers in
another order, and the packs dealt to several ranks whose gradients are added up.

`selection: microbatch` is exempt: it depends on the split on purpose.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.objectives import advantage_stage, legal_aggregation, policy_objective
from tests.recorded import VOCABULARY, quickstart_model, recorded_groups
from torch import Tensor, nn

from winnow.algorithms.aggregation import AGGREGATIONS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.load import load_recipe
from winnow.learning.batch import MicroBatch, pack
from winnow.learning.critic import Critic, ValueObjective
from winnow.learning.learner import Learner, LearnerSettings
from winnow.learning.policy import KlTerm, Policy, PolicyObjective
from winnow.learning.runner import Output
from winnow.learning.strategy import LossFn, Stats, Strategy
from winnow.models.value import load_value_model
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.runs.build_learner import make_objective
from winnow.types import Answer, Group

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
Gradient = dict[str, Tensor]
Deal = Callable[[Sequence[MicroBatch]], list[list[MicroBatch]]]
"""The micro-batches of an update to those of each rank."""


GLOO_CASES = ("kl_cov", "critic by prompt", "all terms")
ROOT = Path(__file__).parents[2]


def as_they_are(microbatches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    return [list(microbatches)]


class Recorder(Strategy):
    """Keeps each update's gradient, added up over ranks, and moves the weights by fixed noise."""

    def __init__(self, model: nn.Module, deal: Deal = as_they_are) -> None:
        super().__init__(model, vocab_size=VOCABULARY)
        self._deal = deal
        self.gradients: list[Gradient] = []

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        total: Stats = {}
        gradient: Gradient = {}
        for part in self._deal(microbatches):
            for name, number in super().forward_backward(part, outputs, loss_fn).items():
                total[name] = total.get(name, 0.0) + number
            for name, own in self._taken().items():
                gradient[name] = gradient[name] + own if name in gradient else own
        if dist.is_initialized():
            for name, parameter in self.model.named_parameters():
                dist.all_reduce(gradient.setdefault(name, torch.zeros_like(parameter)))
        self.gradients.append(gradient)
        return total

    def optimizer_step(self, lr: float) -> Stats:
        torch.manual_seed(len(self.gradients))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, dtype=torch.float64)
        return {"grad_norm": 1.0, "skipped": 0.0}

    def _taken(self) -> Gradient:
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self._optimizer.zero_grad(set_to_none=True)
        return {name: gradient.clone() for name, gradient in found.items()}


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


@dataclass(frozen=True)
class Cut:
    """How the work is cut up."""

    budget: int = 10**6
    """Tokens of a micro-batch, in the passes and, without a deal, in the updates."""
    deal: Deal = as_they_are
    order: random.Random | None = None
    """Shuffles groups and answers; None leaves them."""


def rest(step: int) -> float:
    """The learning rate of a model that stays as it is."""
    return 0.0


def gradients(case: Case, cut: Cut, dtype: torch.dtype, folder: Path) -> list[Gradient]:
    """Of all updates of one step, of the policy first."""
    policy = Recorder(quickstart_model(dtype), cut.deal)
    reference = critic = None
    if case.objective.kl is not None:
        reference = Recorder(reference_model(dtype))
    if case.value is not None:
        critic = Critic(Recorder(value_model(dtype, folder), cut.deal), case.value)
    learner = Learner(
        Policy(policy, case.objective),
        advantage_stage(case.advantage, case.options),
        LearnerSettings(100, case.epochs, cut.budget, case.overlong_filtering, 5, 1, rest, rest),
        reference=reference,
        critic=critic,
        correction=case.correction,
    )
    learner.learn(ordered(recorded_groups(3, 4), case, cut.order), 1, Metrics(), Stopwatch())
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
    strategy = Recorder(quickstart_model(dtype))
    strategy.optimizer_step(0.0)
    return strategy.model


def value_model(dtype: torch.dtype, folder: Path) -> nn.Module:
    """With a head that is not zero, so that the backbone learns at once."""
    model = load_value_model(str(folder), dtype, torch.device("cpu")).double().to(dtype)
    torch.manual_seed(5)
    nn.init.normal_(model.score.weight)
    return model


def dealt(seed: int, ranks: int, packs: int) -> Deal:
    """Any samples run together in any order, on any rank; some ranks may have nothing."""

    def deal(microbatches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        rng = random.Random(seed)
        samples = [(m, b) for m in microbatches for b in range(len(m.lengths))]
        rng.shuffle(samples)
        found: list[list[MicroBatch]] = [[] for _ in range(ranks)]
        places = [rng.randrange(packs) for _ in samples]
        for number in range(packs):
            members = [s for s, place in zip(samples, places, strict=True) if place == number]
            if members:
                found[rng.randrange(ranks)].append(packed(members))
        return found

    return deal


def packed(members: Sequence[tuple[MicroBatch, int]]) -> MicroBatch:
    """A micro-batch of samples of others, in this order."""
    spans = [(m, slice(int(m.offsets[b]), int(m.offsets[b + 1]))) for m, b in members]

    def tokens(column: Callable[[MicroBatch], Tensor]) -> Tensor:
        return torch.cat([column(micro)[span] for micro, span in spans])

    def rows(column: Callable[[MicroBatch], Tensor]) -> Tensor:
        return torch.stack([column(micro)[b] for micro, b in members])

    lengths = tuple(micro.lengths[b] for micro, b in members)
    gen_mask = tokens(lambda m: m.gen_mask)
    one = members[0][0]
    return MicroBatch(
        token_ids=tokens(lambda m: m.token_ids),
        positions=tokens(lambda m: m.positions),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        sample_index=torch.arange(len(members)).repeat_interleave(torch.tensor(lengths)),
        gen_mask=gen_mask,
        loss_mask=tokens(lambda m: m.loss_mask),
        scored_positions=gen_mask.nonzero().squeeze(1),
        behav=tokens(lambda m: m.behav),
        columns={name: tokens(lambda m, n=name: m.columns[n]) for name in one.columns},
        group_tokens=rows(lambda m: m.group_tokens),
        samples=rows(lambda m: m.samples),
        source=tokens(lambda m: m.source),
        lengths=lengths,
        counts=one.counts,
    )


WEIGHT: Mapping[str, Any] = {
    "weight": "truncated",
    "weight_options": {"level": "sequence", "cap": 2.0},
}
REJECTION: Mapping[str, Any] = {
    "rejection": "k1",
    "rejection_options": {"level": "token", "over": "mean", "low": 1e-3, "high": 1e3},
}
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
    for estimator in ("k1", "abs", "k2", "k3", "k3+"):
        term = KlTerm(0.1, estimator, importance_weight=estimator in ("k1", "k2", "k3"))
        cases[f"kl {estimator}"] = Case(_objective("ppo_clip", kl=term))
    for name in ("gspo", "gmpo"):
        cases[f"{name} filtered"] = Case(_objective(name), overlong_filtering=True)
    cases |= {
        "entropy": Case(_objective("reinforce", entropy_coef=0.05)),
        "weights": Case(_objective("ppo_clip"), correction={**WEIGHT, "normalize": True}),
        "rejection": Case(_objective("sapo"), correction={**WEIGHT, **REJECTION}),
        "fused": Case(
            _objective("ppo_clip", old="current", correction={**WEIGHT, **REJECTION}), epochs=1
        ),
        "bypass": Case(_objective("ppo_clip", old="behav", correction=REJECTION)),
        "bypass weighted": Case(_objective("gpg", old="behav", correction={**WEIGHT, **REJECTION})),
        "critic": Case(
            _objective("ppo_clip"),
            advantage="gae",
            options={"gamma": 0.99, "lam": 0.9},
            value=ValueObjective(0.05, "token-mean"),
        ),
        "critic by prompt": Case(
            _objective("ppo_clip", aggregation="prompt-mean-token-mean"),
            advantage="gae",
            value=ValueObjective(0.05, "prompt-mean-token-mean"),
            overlong_filtering=True,
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
            correction={**WEIGHT, **REJECTION, "normalize": True},
            advantage="reinforce_plus_plus_baseline",
        ),
    }
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the critic starts."""
    path = tmp_path_factory.mktemp("critic")
    quickstart_model().save_pretrained(path)
    return path


@cache
def undivided(case: str, dtype: torch.dtype, folder: Path) -> list[Gradient]:
    """The gradients with all samples in one micro-batch."""
    found = gradients(CASES[case], Cut(), dtype, folder)
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


@pytest.mark.parametrize("case", CASES)
def test_split_packing_order_and_ranks_change_no_gradient(case: str, folder: Path) -> None:
    # Not shrunk: an example is a whole step of learning, and the first that fails says enough.
    @examples(2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(
        budget=st.sampled_from([1, 137, 500, 10**6]),
        ranks=st.integers(1, 4),
        packs=st.integers(1, 9),
        seed=st.integers(0, 2**16),
    )
    def check(budget: int, ranks: int, packs: int, seed: int) -> None:
        cut = Cut(budget, dealt(seed, ranks, packs), random.Random(seed))
        for dtype, tolerance in TOLERANCE.items():
            wanted = undivided(case, dtype, folder)
            assert_same(gradients(CASES[case], cut, dtype, folder), wanted, tolerance)

    check()


def test_one_sample_at_a_time_is_a_split_as_well(folder: Path) -> None:
    for dtype, tolerance in TOLERANCE.items():
        found = gradients(CASES["all terms"], Cut(budget=1), dtype, folder)
        assert_same(found, undivided("all terms", dtype, folder), tolerance)


@pytest.mark.slow
def test_two_processes_that_add_their_gradients_have_those_of_one(
    folder: Path, tmp_path: Path
) -> None:
    code = "import sys; from tests.contract.test_gradients import rank; rank(*sys.argv[1:])"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(i), str(tmp_path), str(folder)], cwd=ROOT)
        for i in range(2)
    ]
    assert [process.wait(240) for process in ranks] == [0, 0]
    for i in range(2):
        found = torch.load(tmp_path / f"rank-{i}.pt")
        for case in GLOO_CASES:
            for dtype, tolerance in TOLERANCE.items():
                wanted = undivided(case, dtype, folder)
                assert_same(found[case, dtype], wanted, tolerance)


def rank(number: str, shared: str, folder: str) -> None:
    """One of two processes; it has every other micro-batch, and notes the summed gradients."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{shared}/store", rank=int(number), world_size=2
    )

    def own(microbatches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        assert len(microbatches) > 2
        return [list(microbatches[int(number) :: 2])]

    found = {
        (case, dtype): gradients(CASES[case], Cut(200, own), dtype, Path(folder))
        for case in GLOO_CASES
        for dtype in TOLERANCE
    }
    torch.save(found, Path(shared) / f"rank-{number}.pt")
    dist.destroy_process_group()


def of_one_update(
    objective: PolicyObjective,
    groups: list[Group] | None = None,
    correction: Mapping[str, Any] | None = None,
) -> Gradient:
    """Of a step with one update, in fp32."""
    policy = Recorder(quickstart_model())
    learner = Learner(
        Policy(policy, objective),
        advantage_stage("grpo", {}),
        LearnerSettings(100, 1, 400, False, 5, 1, rest),
        correction=correction,
    )
    learner.learn(groups or recorded_groups(3), 1, Metrics(), Stopwatch())
    (gradient,) = policy.gradients
    return gradient


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "reinforce"])
def test_fused_mode_learns_what_recompute_mode_does_in_one_update(loss: str, level: str) -> None:
    options = {"weight": "truncated", "weight_options": {"level": level, "cap": 2.0}}
    fused = of_one_update(_objective(loss, old="current", correction=options))
    recomputed = of_one_update(_objective(loss), correction=options)
    assert_same([fused], [recomputed], 1e-6)
    plain = of_one_update(_objective(loss))
    assert not any(torch.allclose(plain[name], fused[name], rtol=0.01) for name in plain)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_bypass_mode_is_recompute_mode_where_the_sampler_was_the_old_policy(loss: str) -> None:
    groups = sampled_by(quickstart_model(), recorded_groups(3))
    bypass = of_one_update(_objective(loss, old="behav"), groups)
    recomputed = of_one_update(_objective(loss), groups)
    assert_same([bypass], [recomputed], 1e-6)


@pytest.mark.parametrize("loss", [n for n in POLICY_LOSSES if n not in SELECTION])
def test_without_a_pass_of_its_own_one_update_has_the_same_gradient(loss: str) -> None:
    aggregation = f"algorithm.aggregation={legal_aggregation(loss)}"
    changes = [f"algorithm/policy_loss={loss}", aggregation]
    config = load_recipe("quickstart", [*changes, "trainer.mini_batch_groups=null"])
    objective = make_objective(config)
    assert objective.old == "current"
    with_pass = of_one_update(replace(objective, old="pass"))
    assert_same([of_one_update(objective)], [with_pass], 1e-6)


def sampled_by(model: nn.Module, groups: list[Group]) -> list[Group]:
    """The groups with the model's own log-probs in the place of the sampler's."""
    batch = pack(groups)
    Policy(Recorder(model), policy_objective("ppo_clip")).old_logprobs(batch, 400)
    samples = iter(batch.columns["old"].split(batch.offsets.diff().tolist()))

    def own(answer: Answer) -> Answer:
        (segment,) = answer.trajectory.segments
        logprobs = next(samples)[-len(segment) :].numpy()
        trajectory = replace(answer.trajectory, segments=(replace(segment, logprobs=logprobs),))
        return replace(answer, trajectory=trajectory)

    return [replace(group, answers=tuple(map(own, group.answers))) for group in groups]
