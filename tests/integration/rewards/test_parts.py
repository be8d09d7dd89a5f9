"""Further scorers as weighted parts of the reward, and what length adds: counted, kept, named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.scoring import LIMIT, PROMPT, UserRewards, answer, rewards_of

from winnow.config.reward import (
    CosineConfig,
    DapoManager,
    NaiveManager,
    OverlongConfig,
    ParallelManager,
    PartConfig,
    PartWeights,
    RewardConfig,
)
from winnow.config.rollout import VarianceFilter
from winnow.errors import RewardError
from winnow.observe.metrics import Metrics
from winnow.rewards.pipeline import Rewards
from winnow.rewards.scorers import SCORERS
from winnow.runs.metrics import _record_parts
from winnow.sampling.filters import judge
from winnow.types import Prompt, Score

TAGGED = "<think>so</think><answer>#1359</answer>"
FORMAT = {"format": PartConfig(scorer="think_answer", weight=0.2)}


def service(**config: Any) -> Rewards:
    return rewards_of(RewardConfig(**config), LIMIT)


def ask(
    one: Rewards, texts: Sequence[str], *, length: int = 10, training: bool = True,
    prompt: Prompt = PROMPT,
) -> list[Score]:  # fmt: skip
    async def together() -> list[Score]:
        asked = (one.score(prompt, answer(length), text, training) for text in texts)
        return list(await asyncio.gather(*asked))

    return asyncio.run(together())


def test_parts_are_kept_as_they_are_and_count_by_their_weights() -> None:
    one = service(parts=FORMAT | {"strict": PartConfig(scorer="gsm8k", weight=-1.0)},
                  weights=PartWeights(task=0.5))  # fmt: skip
    plain, tagged = ask(one, ["#1359", "<think>so</think><answer>1</answer>"])
    assert plain.parts == {"task": 1.0, "format": 0.0, "strict": 0.0}
    assert tagged.parts == {"task": -1.0, "format": 1.0, "strict": 0.0}
    assert (plain.reward, tagged.reward) == (0.5, pytest.approx(-0.5 + 0.2))
    assert (plain.accuracy, tagged.accuracy) == (1.0, 0.0)
    assert plain.extra == {"pred": "1359"}
    (marked,) = ask(one, ["#### 1359"])
    assert marked.parts["strict"] == 1.0
    assert marked.reward == pytest.approx(0.5 * marked.parts["task"] - 1.0)


def test_a_part_can_be_filtered_on_and_one_without_weight_only_measures() -> None:
    one = service(parts={"format": PartConfig(scorer="think_answer", weight=0)})
    one.require_metric("format", ["sort_digits", "gsm8k"])
    scores = ask(one, ["#1", TAGGED.replace("1359", "1")])
    assert [score.metric("format") for score in scores] == [0.0, 1.0]
    assert {score.reward for score in scores} == {-1.0}
    assert judge(scores, VarianceFilter()) == "all_wrong"
    assert judge(scores, VarianceFilter(metric="format")) == "qualified"
    assert "format" not in (service().known_metrics(["sort_digits"]) or ())


def test_held_out_answers_have_the_parts_that_ask_for_it() -> None:
    held_out = PartConfig(scorer="think_answer", in_evaluation=True)
    one = service(parts={"seen": held_out, "unseen": PartConfig(scorer="gsm8k")},
                  cosine=CosineConfig(enabled=True))  # fmt: skip
    (score,) = ask(one, ["#1359"], training=False)
    assert (score.parts, score.accuracy) == ({"task": 1.0, "seen": 0.0}, 1.0)
    (score,) = ask(one, ["#1359"])
    assert list(score.parts) == ["task", "seen", "unseen", "cosine"]


def test_a_users_function_has_parts_beside_it(user_service: UserRewards) -> None:
    one = user_service("return {'score': 3, 'acc': 0.25}", parts=FORMAT, workers=1)
    plain, tagged = ask(one, ["#1359", TAGGED])
    assert plain.parts == {"task": 3.0, "format": 0.0}
    assert (tagged.reward, tagged.accuracy) == (pytest.approx(3.2), 0.25)
    assert one.takes_time(["x"])


@pytest.mark.parametrize("manager", [NaiveManager(), ParallelManager()])
def test_where_parts_are_scored_changes_no_number(manager: Any) -> None:
    parts = FORMAT | {"value": PartConfig(scorer="math_verify")}
    one = service(parts=parts, manager=manager)
    one.check_sources(["sort_digits"])
    try:
        (score,) = ask(one, [r"<think>so</think><answer>\boxed{1359}</answer>"])
        # In workers: the source's rule, which is quick, and both parts.
        assert one.scored_apart() == (3 if isinstance(manager, ParallelManager) else 0)
    finally:
        one.close()
    assert (score.parts["format"], score.parts["value"], score.error) == (1.0, 1.0, "")


def test_a_part_that_wants_a_process_apart_gets_one_beside_quick_rules() -> None:
    quick = service(parts=FORMAT)
    assert not quick.takes_time(["sort_digits"])
    one = service(parts={"value": PartConfig(scorer="math_verify")})
    try:
        assert one.takes_time(["sort_digits"])
        ask(one, [r"\boxed{1359}"])
        assert one.scored_apart() == 1
    finally:
        one.close()


def test_a_part_that_fails_makes_the_scoring_fail() -> None:
    assert SCORERS["countdown"].wrong_reward == 0.0
    one = service(parts={"game": PartConfig(scorer="countdown")} | FORMAT)
    (score,) = ask(one, [TAGGED])
    assert score.error.startswith("the part game: ")
    assert "\n" not in score.error
    assert (score.reward, score.parts) == (-1.0, {"task": -1.0, "game": 0.0, "format": 0.0})
    assert (score.accuracy, one.failure_report.count) == (0.0, 1)


def test_a_rule_that_fails_leaves_parts_no_say(user_service: UserRewards) -> None:
    (score,) = ask(user_service("1/0", parts=FORMAT, workers=0), [TAGGED])
    assert score.error.startswith("ZeroDivisionError")
    assert (score.reward, score.parts) == (-1.0, {"task": -1.0, "format": 0.0})


@pytest.mark.parametrize(
    ("scorer", "says"),
    [
        ("no_such", "reward.parts.format.scorer is no_such, which is no scorer; there are "),
        ("none", "reward.parts.format.scorer is none, which is no scorer; there are "),
    ],
)
def test_a_part_without_a_scorer_is_refused(scorer: str, says: str) -> None:
    with pytest.raises(RewardError) as caught:
        service(parts={"format": PartConfig(scorer=scorer)})
    assert str(caught.value).startswith(says)
    assert "think_answer" in str(caught.value)


def test_a_part_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = service(parts={"gym": PartConfig(scorer="reasoning_gym")})
    monkeypatch.setattr("winnow.rewards.routing.find_spec", lambda name: None)
    with pytest.raises(RewardError) as caught:
        one.check_sources(["sort_digits"])
    assert str(caught.value) == (
        "reward.parts.gym is scored by reasoning_gym, whose package is not installed; "
        "pip install 'winnow-rl[reasoning-gym]', or name another in reward.parts.gym.scorer"
    )


def test_the_cosine_takes_the_place_of_the_task_by_its_weight() -> None:
    cosine = CosineConfig(enabled=True, limit_tokens=100)
    one = service(cosine=cosine, weights=PartWeights(task=0))
    one.require_metric("cosine", ["sort_digits"])
    right, wrong = ask(one, ["#1359", "#1395"], length=50)
    assert (right.reward, wrong.reward) == (pytest.approx(1.5), pytest.approx(-5.0))
    assert right.parts == {"task": 1.0, "cosine": pytest.approx(1.5)}
    assert ask(one, ["#1359"], length=100)[0].reward == -10.0


def test_the_limit_of_the_cosine_is_the_answers_own_unless_it_is_given() -> None:
    one = service(cosine=CosineConfig(enabled=True, weight=2.0))
    (score,) = ask(one, ["#1359"], length=LIMIT // 2)
    assert score.reward == pytest.approx(1.0 + 2 * 1.5)


@pytest.mark.parametrize(("accuracy", "cosine"), [(1.0, 1.5), (0.99, -5.0), (0.0, -5.0)])
def test_an_answer_is_right_for_the_cosine_where_all_of_it_is(
    accuracy: float, cosine: float, user_service: UserRewards
) -> None:
    body = f"return {{'score': 0.5, 'acc': {accuracy}}}"
    one = user_service(body, cosine=CosineConfig(enabled=True), workers=0)
    (score,) = ask(one, ["x"], length=LIMIT // 2)
    assert score.parts == {"task": 0.5, "cosine": pytest.approx(cosine)}


def test_dapo_notes_the_penalty_as_verl_does() -> None:
    overlong = OverlongConfig(enabled=True, buffer_tokens=48)
    one = service(manager=DapoManager(), overlong=overlong)
    one.require_metric("overlong_reward", ["sort_digits"])
    (long,), (short,) = ask(one, ["#1359"], length=104), ask(one, ["#1359"], length=80)
    assert long.parts == {"task": 1.0, "overlong": -0.5}
    assert (long.extra["overlong"], long.extra["overlong_reward"]) == (1.0, -0.5)
    assert (short.extra["overlong"], short.extra["overlong_reward"]) == (0.0, 0.0)
    assert (long.reward, long.metric("overlong"), long.metric("overlong_reward")) == (
        *(0.5, -0.5, -0.5),
    )
    assert "overlong" not in ask(one, ["#1359"], length=104, training=False)[0].extra
    assert "overlong" not in ask(service(overlong=overlong), ["#1359"], length=104)[0].extra

    metrics = Metrics()
    _record_parts(metrics, [long, short])
    record = metrics.record()
    assert (record["score/overlong"], record["score/overlong_reward/mean"]) == (0.5, -0.25)
    assert record["score/parts/overlong/min"] == -0.5


def test_every_part_has_its_figures() -> None:
    one = service(parts=FORMAT, cosine=CosineConfig(enabled=True))
    metrics = Metrics()
    _record_parts(metrics, ask(one, ["#1359", TAGGED], length=64))
    record = metrics.record()
    assert record["score/parts/format/mean"] == 0.5
    assert record["score/parts/cosine/max"] == pytest.approx(1.5)
    assert "score/overlong" not in record
