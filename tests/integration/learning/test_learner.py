"""A step of learning on recorded answers, with real models in the shape of the quickstart's."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.objectives import advantage_stage, advantages, policy_objective
from tests.recorded import VOCABULARY, quickstart_model, recorded_groups
from torch import Tensor, nn

from winnow.algorithms.advantages import AdvantageInputs
from winnow.errors import TrainingError
from winnow.learning.advantage import AdvantageStage, KlPenalty, token_rewards
from winnow.learning.batch import Batch, MicroBatch, all_micro_batches, gather_tokens, pack
from winnow.learning.critic import Critic, ValueObjective
from winnow.learning.learner import Learned, Learner, LearnerSettings
from winnow.learning.policy import Policy, PolicyObjective
from winnow.learning.runner import Output
from winnow.learning.strategy import LossFn, Stats, Strategy
from winnow.models.value import load_value_model
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.types import Answer, Group, Score, VersionSpan

SETTINGS = LearnerSettings(
    groups_per_update=2,
    epochs=1,
    microbatch_tokens=1000,
    overlong_filtering=False,
    max_skipped_updates=3,
    seed=1,
    lr=lambda step: 1e-3,
    critic_lr=lambda step: 3e-3,
)
GAE = advantage_stage("gae", {"gamma": 1.0, "lam": 0.95})


class Listening(Strategy):
    """Notes which outputs its passes were asked for, and what it learnt from."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.passes: list[frozenset[Output]] = []
        self.learnt: list[MicroBatch] = []

    def forward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output]
    ) -> list[dict[Output, Tensor]]:
        self.passes.append(outputs)
        return super().forward(microbatches, outputs)

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        self.learnt += microbatches
        return super().forward_backward(microbatches, outputs, loss_fn)


@dataclass
class Bench:
    """A learner with its strategies."""

    learner: Learner
    policy: Listening
    reference: Listening | None
    critic: Listening | None

    def step(self, groups: list[Group], number: int = 1) -> tuple[Learned, dict[str, Any]]:
        metrics, watch = Metrics(), Stopwatch()
        learned = self.learner.learn(groups, number, metrics, watch)
        return learned, metrics.record() | watch.lap()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where critics start."""
    path = tmp_path_factory.mktemp("start")
    quickstart_model().save_pretrained(path)
    return path


def bench(
    start: Path | None = None,
    *,
    objective: PolicyObjective | None = None,
    advantage: AdvantageStage | None = None,
    settings: LearnerSettings = SETTINGS,
    has_reference: bool = False,
    correction: Mapping[str, Any] | None = None,
) -> Bench:
    policy = Listening(quickstart_model(), vocab_size=VOCABULARY)
    reference = critic = None
    if has_reference:
        reference = Listening(moved(quickstart_model()).requires_grad_(False))
    if start is not None:
        critic = Listening(load_value_model(str(start), torch.float32, torch.device("cpu")))
    learner = Learner(
        Policy(policy, objective or policy_objective("ppo_clip")),
        advantage or advantage_stage("grpo", {}),
        settings,
        reference=reference,
        critic=None if critic is None else Critic(critic, ValueObjective(0.5, "token-mean")),
        correction=correction,
    )
    return Bench(learner, policy, reference, critic)


def moved(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    return model


def bits(strategy: Strategy) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in strategy.model.parameters())


def rewarded(groups: list[Group], reward: float) -> list[Group]:
    """The groups with their first answers' rewards replaced."""

    def first(group: Group) -> Group:
        score = Score(reward, 0.0, {"task": reward})
        return replace(group, answers=(replace(group.answers[0], score=score), *group.answers[1:]))

    return [first(group) for group in groups]


def test_one_update_a_step_takes_no_pass_for_the_old_policy_and_says_so() -> None:
    one = bench(objective=policy_objective("ppo_clip", old="current"))
    before = bits(one.policy)
    _, record = one.step(recorded_groups(2))
    assert one.policy.passes == []
    assert record["actor/old_pass"] == 0
    assert record["actor/updates"] == 1
    assert record["mismatch/abs_delta"] > 0, "the update tells how far the sampler was"
    assert not {"time/reference_s", "time/values_s", "critic/updates"} & record.keys()
    assert bits(one.policy) != before


def test_the_updates_that_are_left_count_down_while_a_step_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, seen = bench(), list[tuple[int, int]]()
    usual = made.policy.forward_backward

    def counted(*given: Any) -> Any:
        seen.append(made.learner.updates_left)
        return usual(*given)

    monkeypatch.setattr(made.policy, "forward_backward", counted)
    made.step(recorded_groups(6))
    assert (seen, made.learner.updates_left) == ([(3, 3), (2, 3), (1, 3)], (0, 3))


def test_each_pass_is_made_once_and_timed(start: Path) -> None:
    full = bench(
        start,
        has_reference=True,
        advantage=advantage_stage("gae", {"gamma": 1.0, "lam": 1.0}, KlPenalty(0.1, "k1")),
        settings=replace(SETTINGS, epochs=2),
    )
    _, record = full.step(recorded_groups(4))
    assert full.reference is not None
    assert full.critic is not None
    passes = [full.policy.passes, full.reference.passes, full.critic.passes]
    assert passes == [[{"logprob", "entropy"}], [{"logprob"}], [{"value"}]]
    assert record["actor/old_pass"] == 1
    assert record["actor/updates"] == record["critic/updates"] == 4
    phases = ("batch", "old_logprobs", "reference", "values", "update")
    assert all(record[f"time/{phase}_s"] > 0 for phase in phases)
    assert full.learner.progress == 3 + 2 * 4, "with each pass, and each update of either model"


def test_the_reference_may_be_the_policy_with_its_adapter_off() -> None:
    class Adapted(Listening):
        is_off = False

        @contextlib.contextmanager
        def adapter_off(self) -> Iterator[None]:
            self.is_off = True
            yield
            self.is_off = False

        def forward(self, *args: Any) -> list[dict[Output, Tensor]]:
            found = super().forward(*args)
            return [{n: x - float(self.is_off) for n, x in each.items()} for each in found]

    policy = Adapted(quickstart_model(), vocab_size=VOCABULARY)
    stage = advantage_stage("rloo", {}, KlPenalty(0.1, "k1"))
    own = Policy(policy, policy_objective("ppo_clip"))
    metrics = Metrics()
    learner = Learner(own, stage, SETTINGS, reference=policy)
    learner.learn(recorded_groups(2), 1, metrics, Stopwatch())
    assert metrics.record()["reward/kl"] == pytest.approx(1.0)
    assert not policy.is_off


def test_a_pass_tells_the_entropy_at_each_token_that_was_written() -> None:
    groups = recorded_groups(2)
    learned, _ = bench().step(groups)
    model: Any = quickstart_model().double()
    model.set_attn_implementation("eager")
    expected = []
    for group in groups:
        for answer in group.answers:
            ids = torch.tensor([*group.prompt.token_ids, *answer.trajectory.token_ids])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :, :VOCABULARY]
            whole = torch.distributions.Categorical(logits=logits).entropy().roll(1)
            whole[: len(group.prompt.token_ids)] = 0.0
            expected.append(whole)
    assert learned.entropies is not None
    np.testing.assert_allclose(learned.entropies, torch.cat(expected), atol=1e-5)
    without, _ = bench(objective=policy_objective("ppo_clip", old="current")).step(groups)
    assert without.entropies is None


def test_only_the_first_update_tells_how_far_the_sampler_was() -> None:
    groups = recorded_groups(4)
    found = {}
    for size in (4, 2):
        settings = replace(SETTINGS, groups_per_update=size, epochs=2)
        many = bench(objective=policy_objective("reinforce", old="current"), settings=settings)
        found[size] = many.step(groups)[1]
        assert found[size]["actor/updates"] == 2 * 4 // size
    with_pass = bench(objective=policy_objective("reinforce")).step(groups)[1]
    # All groups are in the first update of the first; half of them in that of the second.
    assert found[4]["mismatch/abs_delta"] == pytest.approx(
        with_pass["mismatch/abs_delta"], rel=1e-5
    )
    assert found[2]["mismatch/abs_delta"] == pytest.approx(with_pass["mismatch/abs_delta"], rel=0.5)


def begun_at(group: Group, first: int, then: int, after: int) -> Group:
    """The group as if another weight version had written all that follows so many tokens."""
    answers = []
    for answer in group.answers:
        segment = answer.trajectory.segments[0]
        length, cut = len(segment), min(after, len(segment))
        spans = (VersionSpan(first, cut), VersionSpan(then, length))
        segment = replace(segment, spans=spans[: 1 + (cut < length)])
        trajectory = replace(answer.trajectory, segments=(segment,))
        answers.append(replace(answer, trajectory=trajectory))
    return replace(group, answers=tuple(answers))


def test_the_mismatch_is_told_by_the_age_of_the_tokens_with_a_pass_and_without() -> None:
    groups = [begun_at(group, 0, 2, after=10) for group in recorded_groups(2)]
    lengths = [a.trajectory.generated_tokens for g in groups for a in g.answers]
    assert min(lengths) < 10 < max(lengths)
    records = [
        bench(objective=policy_objective("reinforce", old=old)).step(groups, 4)[1]
        for old in ("pass", "current")
    ]
    for record in records:
        ages = [1, 3]
        assert sorted(n for n in record if n.endswith("/share")) == [
            f"mismatch/age_{age}/share" for age in ages
        ]
        assert record["mismatch/age_3/share"] == sum(min(10, n) for n in lengths) / sum(lengths)
        for name in ("abs_delta", "k3"):
            parts = [
                record[f"mismatch/age_{a}/share"] * record[f"mismatch/age_{a}/{name}"] for a in ages
            ]
            assert record[f"mismatch/{name}"] == pytest.approx(sum(parts))
    same = [{n: v for n, v in r.items() if "/age_" in n} for r in records]
    assert same[0] == pytest.approx(same[1], rel=1e-4)


def test_where_log_probs_are_reused_no_record_claims_to_be_the_trainers() -> None:
    groups = [begun_at(g, min(i, 1), 2, after=10) for i, g in enumerate(recorded_groups(3), 2)]
    groups[1] = begun_at(groups[1], 2, 2, after=10)
    reusing = bench(objective=policy_objective("ppo_clip", old="reuse"))
    learned, record = reusing.step(groups, 3)
    tokens = [group.generated_tokens for group in groups]
    assert reusing.policy.passes == [{"logprob"}]
    assert record["actor/old_pass"] == (tokens[0] + tokens[2]) / sum(tokens)
    assert record["time/old_logprobs_s"] > 0
    assert record["mismatch/age_0/share"] > 0, "the first update tells how far the sampler was"
    assert (learned.old_logprobs, learned.entropies, learned.mismatch) == (None, None, None)


def test_an_adaptive_weight_of_the_kl_moves_by_the_samples_over_its_horizon() -> None:
    penalty, expected = KlPenalty(0.1, "k2", target=0.05, horizon=64), 0.1
    one = bench(has_reference=True, advantage=advantage_stage("rloo", {}, penalty))
    for step in (1, 2, 3):
        record = one.step(recorded_groups(2), step)[1]
        assert record["reward/kl_coef"] == pytest.approx(expected)
        expected *= 1 + min(max(record["reward/kl"] / 0.05 - 1, -0.2), 0.2) * 16 / 64
    assert expected != pytest.approx(0.1)


def test_a_critic_comes_to_explain_the_returns_of_the_same_answers(start: Path) -> None:
    critic = bench(start, advantage=GAE, settings=replace(SETTINGS, critic_warmup_steps=99))
    found = [critic.step(recorded_groups(2), step)[1] for step in range(1, 26)]
    explained = [record["critic/explained_variance"] for record in found]
    assert explained[0] == pytest.approx(0.0, abs=1e-6), "a new head gives 0 everywhere"
    assert explained[-1] > 0.4
    assert found[0]["critic/value/mean"] == 0
    assert found[-1]["critic/value/max"] > 0.1
    assert found[-1]["critic/value_loss"] < 0.7 * found[0]["critic/value_loss"]


def test_the_token_baseline_gets_probabilities_and_their_squared_sums() -> None:
    one = bench(advantage=advantage_stage("optimal_token_baseline", {}))
    one.step(recorded_groups(3))
    assert one.policy.passes == [{"logprob", "entropy", "prob_square_sum"}]
    batch = pack(recorded_groups(3))
    (fresh,) = Strategy(quickstart_model(), vocab_size=VOCABULARY).forward(
        [_whole(batch)], frozenset({"logprob", "prob_square_sum"})
    )
    zeros, source = torch.zeros(len(batch.token_ids)), _whole(batch).source
    inputs = AdvantageInputs(
        rewards=batch.rewards,
        groups=batch.groups,
        offsets=batch.offsets,
        gen_mask=batch.gen_mask,
        loss_mask=batch.loss_mask,
        token_rewards=token_rewards(recorded_groups(3), batch, 1.0),
        prob=zeros.index_copy(0, source, fresh["logprob"].exp()),
        prob_square_sum=zeros.index_copy(0, source, fresh["prob_square_sum"]),
    )
    given = [micro.columns["advantages"] for micro in one.policy.learnt]
    found = gather_tokens(batch, one.policy.learnt, given)
    wanted = advantages("optimal_token_baseline", inputs).tokens
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _whole(batch: Batch) -> MicroBatch:
    (micro,) = all_micro_batches(batch, 10**6)
    return micro


def test_gradients_of_the_policy_that_are_not_finite_are_skipped_and_then_stop_the_run() -> None:
    broken = bench()
    with torch.no_grad():
        next(broken.policy.model.parameters())[5, 0] = math.nan
    before = bits(broken.policy)
    _, record = broken.step(recorded_groups(4))
    assert (record["actor/updates"], record["actor/skipped_updates"]) == (2, 2)
    assert bits(broken.policy) == before
    message = (
        "step 2: 3 updates in a row had a gradient that is not finite "
        "(optim.max_skipped_updates); lower optim.lr, or look for NaN weights in model.path"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}$"):
        broken.step(recorded_groups(4), 2)


def test_a_learning_rate_that_makes_weights_overflow_stops_the_run(start: Path) -> None:
    message = "step 1: the weights overflowed in its updates and are not saved; lower "
    absurd = bench(settings=replace(SETTINGS, lr=lambda step: 1e38))
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}optim.lr$"):
        absurd.step(recorded_groups(4))
    absurd = bench(start, advantage=GAE, settings=replace(SETTINGS, critic_lr=lambda step: 1e38))
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}critic.optim.lr$"):
        absurd.step(recorded_groups(4))


def test_rewards_whose_squares_overflow_stop_the_run_instead_of_teaching_nothing() -> None:
    with pytest.raises(TrainingError, match=r"^reward 1e\+300 is too large: .*weights\.task"):
        bench().step(rewarded(recorded_groups(4), 1e300))


def test_gradients_of_the_critic_are_counted_apart(start: Path) -> None:
    settings = replace(SETTINGS, critic_max_skipped_updates=4)
    # The squared error of such a return overflows; whitened, the advantage is an ordinary one.
    groups = rewarded(recorded_groups(4), 1e30)
    broken = bench(start, advantage=GAE, settings=settings)
    assert broken.critic is not None
    before = bits(broken.critic), bits(broken.policy)
    _, record = broken.step(groups)
    assert (record["critic/updates"], record["critic/skipped_updates"]) == (2, 2)
    assert (record["actor/updates"], record["actor/skipped_updates"]) == (2, 0)
    assert bits(broken.critic) == before[0]
    assert bits(broken.policy) != before[1]
    assert broken.learner.state_dict()["skipped_in_a_row"] == {"actor": 0, "critic": 2}
    message = (
        "step 2: 4 updates in a row had a gradient that is not finite "
        "(critic.optim.max_skipped_updates); lower critic.optim.lr, or look for NaN weights in "
        "critic.path"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}$"):
        broken.step(groups, 2)


def test_values_that_are_not_finite_stop_the_run_with_one_line(start: Path) -> None:
    broken = bench(start, advantage=GAE)
    assert broken.critic is not None
    with torch.no_grad():
        next(broken.critic.model.parameters())[5, 0] = math.inf
    message = (
        "step 4: the critic's values are not finite; lower critic.optim.lr, or look for NaN "
        "weights in critic.path"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}$"):
        broken.step(recorded_groups(2), 4)


def test_an_update_that_counts_no_token_neither_ends_nor_lengthens_such_a_row() -> None:
    idle = bench(settings=replace(SETTINGS, overlong_filtering=True))
    idle.learner.load_state_dict({"skipped_in_a_row": {"actor": 2, "critic": 0}, "advantage": {}})

    def cut(answer: Answer) -> Answer:
        return replace(answer, trajectory=replace(answer.trajectory, finish_reason="length"))

    truncated = [replace(g, answers=tuple(map(cut, g.answers))) for g in recorded_groups(2)]
    before = bits(idle.policy)
    _, record = idle.step(truncated)
    assert "actor/updates" not in record
    assert bits(idle.policy) == before
    assert idle.learner.state_dict()["skipped_in_a_row"]["actor"] == 2
    idle.step(recorded_groups(2), 2)
    assert idle.learner.state_dict()["skipped_in_a_row"]["actor"] == 0


@pytest.mark.bits
def test_the_same_step_learns_the_same_bits_and_another_step_cuts_otherwise() -> None:
    found = {}
    for name, step in (("one", 1), ("again", 1), ("other", 2)):
        learner = bench()
        learner.step(recorded_groups(6), step)
        found[name] = bits(learner.policy)
    assert found["one"] == found["again"] != found["other"]


def test_the_record_has_each_answers_advantage_in_the_order_of_the_groups() -> None:
    groups = recorded_groups(3)
    learned, record = bench().step(groups)
    rewards = np.array([[a.score.reward for a in g.answers] for g in groups])
    away = rewards - rewards.mean(1, keepdims=True)
    wanted = (away / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    np.testing.assert_allclose(learned.advantages, wanted, rtol=1e-5, atol=1e-6)
    assert record["score/advantage/max"] == pytest.approx(wanted.max())
