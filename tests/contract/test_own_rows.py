"""Each rank holds its own samples of a step, and the step comes to what it comes to in one process.

A real `Learner` takes steps of made-up answers over tables of numbers in the place of models, in
float64: on ranks its figures, what it learns and what it records are those of one process. Answers
are references to arrays, of which a rank fetches those of its own samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.ranks import Ranks
from tests.written import environment, written
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from winnow.algorithms.advantages import ESTIMATORS, AdvantageInputs, Estimator
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.learning.advantage import AdvantageStage, KlPenalty
from winnow.learning.batch import MicroBatch, MicroBatchSharder
from winnow.learning.critic import Critic, ValueObjective
from winnow.learning.imitation import Imitator
from winnow.learning.learner import Learned, Learner, LearnerSettings
from winnow.learning.policy import KlTerm, Policy, PolicyObjective
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.ranks.remote import joined
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan
from winnow.workers.array_refs import ArrayBlock, ArrayRef

VOCABULARY, BUDGET, CRITIC_BUDGET = 7, 24, 15
LAYOUTS = {"1": (1, 1, 1), "2": (1, 2, 1), "4": (1, 4, 1), "2 x 2": (2, 2, 1), "2 of 2": (1, 4, 2)}
"""Replicas, shards, ranks that have a share together."""
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
COV = {"selection": "update", "share": 0.2, "clip_low": 0.2, "clip_high": 0.2}
PPO = ("ppo_clip", {**CLIP, "dual_clip": None})
WEIGHT = {"name": "truncated", "normalize": True, "cap": 1.1}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": ("grpo", {"std_normalization": "group"}), "reference": True},
    "opo, kl in the reward": {"advantage": ("opo", {}), "reference": True, "penalty": True},
    "reinforce++, weights": {
        "advantage": ("reinforce_plus_plus", {"gamma": 0.9}),
        "correction": {"weight": {**WEIGHT, "level": "token"}},
    },
    "gdpo, rejection": {
        "advantage": ("gdpo", {"weights": {}}),
        "correction": {
            "weight": {**WEIGHT, "level": "sequence"},
            "rejection": {"name": "k2", "level": "sample", "over": "max", "bound": 0.1},
        },
    },
    "remax": {"advantage": ("remax", {"gamma": 0.8})},
    "gae": {"advantage": ("gae", {"gamma": 0.9, "lam": 0.8})},
    "token baseline": {"advantage": ("optimal_token_baseline", {})},
    "a user's own": {"advantage": ("custom", {})},
    "clip_cov": {
        "advantage": ("reinforce_plus_plus_baseline", {}),
        "loss": ("clip_cov", {**COV, "cov_low": -10.0, "cov_high": 10.0}),
    },
    "demonstrations": {},
}
fetched: list[int] = []


class Elsewhere:
    """A handle of one sample's arrays that notes who reads them."""

    def __init__(self, sample: int, arrays: Any) -> None:
        self.sample, self.arrays = sample, arrays

    def prefetch(self) -> None: ...

    def get(self) -> Any:
        fetched.append(self.sample)
        return self.arrays


class Table:
    """A number for each token id, in the place of a model, stepped by plain descent."""

    has_adapter = False
    replayed = None

    def __init__(self, sharder: MicroBatchSharder, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.numbers = torch.randn(VOCABULARY, generator=made, dtype=torch.float64)
        self.numbers.requires_grad_()
        self.sharder = sharder

    def read(self, micro: MicroBatch, outputs: Any) -> dict[Any, Tensor]:
        states = self.numbers[micro.token_ids] / (1 + 0.1 * micro.positions)
        logprob = torch.nn.functional.logsigmoid(states)
        found = {"logprob": logprob, "entropy": states.square(), "value": states}
        found["prob_square_sum"] = (2 * logprob.detach()).exp()
        return {name: torch.where(micro.gen_mask, found[name], 0.0) for name in outputs}

    def forward(self, micros: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        with torch.no_grad():
            return [self.read(micro, outputs) for micro in micros]

    def forward_backward(
        self, micros: Sequence[MicroBatch], outputs: Any, loss_fn: Any
    ) -> dict[str, float]:
        sums: dict[str, float] = {}
        largest: dict[str, float] = {}
        for micro in micros:
            if micro.lengths:
                result = loss_fn(micro, self.read(micro, outputs))
                result.loss.backward()
                for name, value in {"loss": result.loss, **result.sums}.items():
                    sums[name] = sums.get(name, 0.0) + float(value.detach())
                for name, value in result.maxima.items():
                    largest[name] = max(largest.get(name, 0.0), float(value))
        found: dict[str, float] = {}
        for own, most in self.sharder.dp.all_gather((sums, largest)):
            for name, total in own.items():
                found[name] = found.get(name, 0.0) + total
            found |= {name: max(found.get(name, 0.0), value) for name, value in most.items()}
        return found

    def expert_load(self) -> None:
        return None

    def optimizer_step(self, lr: float) -> dict[str, float]:
        own = self.numbers.grad
        gradient = self.sharder.dp.all_reduce(
            torch.zeros(VOCABULARY).double() if own is None else own
        )
        self.numbers.grad = None
        with torch.no_grad():
            self.numbers -= lr * gradient
        return {"grad_norm": float(gradient.norm()), "skipped": 0.0}

    def weights_are_finite(self) -> bool:
        return True


def users_own(inputs: AdvantageInputs) -> Tensor:
    """Reads the tokens of all samples: a token's share of all rewards, less the one before it."""
    return inputs.token_rewards.cumsum(0) / (1 + inputs.loss_mask.cumsum(0)) * inputs.gen_mask


def learner_of(recipe: str, sharder: MicroBatchSharder) -> tuple[Any, list[Table]]:
    options = RECIPES[recipe]
    policy, critic, reference = (Table(sharder, seed) for seed in range(3))
    if not options:
        return Imitator(cast(Any, policy), BUDGET, lambda step: 0.1, 1), [policy]
    name, given_ = options["advantage"]
    estimator = ESTIMATORS.get(name) or Estimator("custom", users_own, takes_all=True)
    loss, loss_options = options.get("loss", PPO)
    has_reference, has_critic = "reference" in options, name == "gae"
    objective = PolicyObjective(
        POLICY_LOSSES[loss],
        loss_options,
        "prompt-mean-token-mean",
        entropy_coef=0.01,
        kl=KlTerm(0.1, "k3") if has_reference else None,
    )
    penalty = KlPenalty(0.1, "k1", 0.01, 100) if "penalty" in options else None
    settings = LearnerSettings(2, 2, BUDGET, True, 1, 5, lambda step: 0.5, lambda step: 0.5)
    if has_critic:
        settings = replace(settings, critic_microbatch_tokens=CRITIC_BUDGET)
    values = ValueObjective(None, "token-mean")
    learner = Learner(
        Policy(cast(Any, policy), objective),
        AdvantageStage(estimator, given_, penalty),
        settings,
        reference=cast(Any, reference) if has_reference else None,
        critic=Critic(cast(Any, critic), values) if has_critic else None,
        correction=options.get("correction"),
    )
    return learner, [policy, critic]


def groups_of(lengths: Sequence[Sequence[int]], seed: int) -> list[Group]:
    rng, sample, groups = np.random.default_rng(seed), 0, []
    for place, sizes in enumerate(lengths):
        answers = []
        for size in sizes:
            block = ArrayBlock(
                None,
                Elsewhere(
                    sample,
                    (
                        rng.integers(0, VOCABULARY, size, np.int32),
                        -rng.random(size, np.float32),
                    ),
                ),
            )
            ids, behav = (
                cast(Any, ArrayRef(block, i, 0, size, kind))
                for i, kind in enumerate((np.int64, np.float32))
            )
            spans = (VersionSpan(0, size // 2), VersionSpan(1, size)) if size > 1 else ()
            spans = spans or (VersionSpan(1, size),)
            segments = [Segment(ids, behav, spans)]
            if size % 3 == 0:
                segments += [environment([1, 2], restarts=True), written([3], -0.5)]
            said = Trajectory((*segments,), "length" if size % 5 == 0 else "stop")
            reward = float(rng.integers(0, 3))
            score = Score(reward, reward, {"task": reward, "style": float(rng.random())})
            answers.append(Answer(said, score))
            sample += 1
        prompt = Prompt(str(place), rng.integers(0, VOCABULARY, 1 + place % 3), "", "", None)
        groups.append(Group(10 + place, prompt, tuple(answers), answers[0]))
    return groups


Found = tuple[dict[str, float], list[list[float]], Learned, Any]


def learnt(recipe: str, groups: list[Group], sharder: MicroBatchSharder) -> Found:
    fetched.clear()
    learner, tables = learner_of(recipe, sharder)
    metrics = Metrics()
    learned = learner.learn(groups, 2, metrics, Stopwatch())
    if recipe == "demonstrations":
        metrics.last("held out", learner.held_out(groups))
    figures = {n: float(v) for n, v in metrics.record().items() if not n.startswith("ranks/")}
    return figures, [table.numbers.tolist() for table in tables], learned, sorted(set(fetched))


@cache
def mesh_of(layout: str) -> DeviceMesh:
    replicas, shards, _ = LAYOUTS[layout]
    if replicas > 1:
        return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    mesh = init_device_mesh("cpu", (4 // shards, shards), mesh_dim_names=("sets", "shard"))
    return mesh["shard"]


def on_rank(recipe: str, groups: list[Group], layout: str) -> Found:
    return learnt(recipe, groups, MicroBatchSharder(mesh_of(layout), 16, LAYOUTS[layout][2]))


@pytest.mark.parametrize("recipe", RECIPES)
@examples(2)
@given(
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=2, max_size=4), min_size=1, max_size=5),
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 99),
)
def test_a_step_does_not_depend_on_who_holds_what(
    ranks: Ranks, recipe: str, lengths: list[list[int]], layout: str, seed: int
) -> None:
    groups = groups_of(lengths, seed)
    figures, tables, learned, _ = learnt(recipe, groups, MicroBatchSharder())
    found = ranks.run(on_rank, recipe, groups, layout)
    for own, numbers, record, _ in found:
        assert own.keys() == figures.keys()
        for name, value in figures.items():
            assert own[name] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), name
        assert all(repr(own[name]) == repr(found[0][0][name]) for name in own)
        for one, two in zip(numbers, tables, strict=True):
            assert one == pytest.approx(two, rel=1e-10, abs=1e-12)
        assert record.advantages == pytest.approx(learned.advantages, rel=1e-6, abs=1e-9)
        assert record.packed_tokens == learned.packed_tokens
        assert record.prompt_lengths.tolist() == learned.prompt_lengths.tolist()
        if learned.mismatch is not None:
            assert record.mismatch == pytest.approx(learned.mismatch, rel=1e-6)
    replicas, shards, together = LAYOUTS[layout]
    shares = found[: replicas * shards : together]
    # Each sample was fetched where it is held, and nowhere else.
    samples = [sample for _, _, _, samples in shares for sample in samples]
    assert sorted(samples) == list(range(sum(map(len, lengths))))
    for place, each in enumerate(found):
        assert each[3] == found[place // together * together][3]
    if learned.old_logprobs is not None:
        holders = shares[0][2].holders
        assert holders is not None
        assert [np.flatnonzero(holders == i).tolist() for i in range(len(shares))] == [
            samples for _, _, _, samples in shares
        ]
        names = "old_logprobs", "entropies"
        parts = [{name: getattr(each[2], name) for name in names} for each in shares]
        whole = joined(groups, shares[0][2], parts)
        for name in names:
            wanted = getattr(learned, name).astype(np.float32)
            assert getattr(whole, name).tolist() == wanted.tolist()
