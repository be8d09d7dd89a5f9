"""Scorers and judges as weighted parts of the reward, and what length adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tests.faulty_http import Step, reply, serving
from tests.judges import judging, says
from tests.scoring import LIMIT, UserRewards, ask, rewards_of

from winnow.config.judge import OpenAiJudge
from winnow.config.reward import (
    CosineConfig,
    DapoManager,
    OverlongConfig,
    PartConfig,
    PartWeights,
    RewardConfig,
)
from winnow.config.rollout import VarianceFilter
from winnow.errors import RewardError
from winnow.observe.metrics import Metrics
from winnow.rewards.judge import Judge
from winnow.rewards.rewards import Rewards
from winnow.rewards.scorers import SCORERS
from winnow.run.step_metrics import _record_parts
from winnow.sampling.filters import apply_filter

TAGGED = "<think>so</think><answer>#1359</answer>"
FORMAT = {"format": PartConfig(scorer="think_answer", weight=0.2)}


def service(**config: Any) -> Rewards:
    return rewards_of(RewardConfig(**config), LIMIT)


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
    assert apply_filter(scores, VarianceFilter()) == "all_wrong"
    assert apply_filter(scores, VarianceFilter(metric="format")) == "qualified"
    assert "format" not in (service().supported_metrics(["sort_digits"]) or ())


def test_held_out_answers_have_the_parts_that_ask_for_it() -> None:
    held_out = PartConfig(scorer="think_answer", in_evaluation=True)
    one = service(parts={"seen": held_out, "unseen": PartConfig(scorer="gsm8k")},
                  cosine=CosineConfig(enabled=True))  # fmt: skip
    (score,) = ask(one, ["#1359"], training=False)
    assert (score.parts, score.accuracy) == ({"task": 1.0, "seen": 0.0}, 1.0)
    (score,) = ask(one, ["#1359"])
    assert list(score.parts) == ["task", "seen", "unseen", "cosine"]


def test_a_part_that_wants_a_process_apart_gets_one_beside_quick_rules() -> None:
    quick = service(parts=FORMAT)
    assert not quick.takes_time(["sort_digits"])
    one = service(parts={"value": PartConfig(scorer="math_verify")})
    try:
        assert one.takes_time(["sort_digits"])
        ask(one, [r"\boxed{1359}"])
        assert one.count_offloaded() == 1
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


def test_parts_stand_beside_a_users_function(user_service: UserRewards) -> None:
    own = user_service("return {'score': 3, 'acc': 0.25}", parts=FORMAT, workers=0)
    (score,) = ask(own, [TAGGED])
    assert (score.reward, score.accuracy) == (pytest.approx(3.2), 0.25)


def test_a_rule_that_fails_leaves_parts_no_say(user_service: UserRewards) -> None:
    (score,) = ask(user_service("1/0", parts=FORMAT, workers=0), [TAGGED])
    assert score.error.startswith("ZeroDivisionError")
    assert (score.reward, score.parts) == (-1.0, {"task": -1.0, "format": 0.0})


def test_the_cosine_takes_the_place_of_the_task_by_its_weight() -> None:
    cosine = CosineConfig(enabled=True, limit_tokens=100)
    one = service(cosine=cosine, weights=PartWeights(task=0))
    one.require_metric("cosine", ["sort_digits"])
    right, wrong = ask(one, ["#1359", "#1395"], length=50)
    assert (right.reward, wrong.reward) == (pytest.approx(1.5), pytest.approx(-5.0))
    assert right.parts == {"task": 1.0, "cosine": pytest.approx(1.5)}
    assert ask(one, ["#1359"], length=100)[0].reward == -10.0


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
    (held_out,) = ask(one, ["#1359"], length=104, training=False)
    assert (held_out.reward, held_out.parts) == (1.0, {"task": 1.0})
    assert "overlong" not in held_out.extra
    assert "overlong" not in ask(service(overlong=overlong), ["#1359"], length=104)[0].extra

    metrics = Metrics()
    _record_parts(metrics, [long, short])
    record = metrics.record()
    assert (record["score/overlong"], record["score/overlong_reward/mean"]) == (0.5, -0.25)
    assert record["score/parts/overlong/min"] == -0.5


RIGHT, WRONG = "1|539;3|59;5|9;9|#1359", "#1395"
SEES_NOTHING = says("Judgement: INCORRECT")
Make = Callable[..., Rewards]


@pytest.fixture
def make() -> Iterator[Make]:
    """Services with a judge behind a server; keys of `reward.judge` begin with `judge_`."""
    with ExitStack() as open_things:

        def made(step: Step, **config: Any) -> Rewards:
            names = [key for key in config if key.startswith("judge_")]
            own = {key.removeprefix("judge_"): config.pop(key) for key in names}
            served = open_things.enter_context(serving([step]))
            section = OpenAiJudge(base_url=f"{served.url}/v1", model="m", cache="none", **own)
            judge = Judge(section, backoff_s=0.01)
            service = rewards_of(RewardConfig(judge=section, **config), LIMIT, judge=judge)
            return open_things.enter_context(closing(service))

        yield made


def test_the_judge_may_decide_on_the_accuracy(make: Make) -> None:
    (score,) = ask(make(SEES_NOTHING), [RIGHT])
    assert score.accuracy == 1.0  # the rule's
    deciding = make(SEES_NOTHING, judge_as_accuracy=True, cosine=CosineConfig(enabled=True))
    (score,) = ask(deciding, [RIGHT])
    assert (score.accuracy, score.parts["task"]) == (0.0, 1.0)
    assert score.parts["cosine"] < 0  # which asks the accuracy, too
    (score,) = ask(deciding, [RIGHT], training=False)
    assert score.accuracy == 1.0  # it was not asked


@pytest.mark.parametrize(("threshold", "accuracy"), [(0.4, 1.0), (4 / 9, 1.0), (0.5, 0.0)])
def test_scores_from_the_threshold_on_are_right(
    threshold: float, accuracy: float, make: Make
) -> None:
    service = make(says("Score: 5"), judge_template="quality", judge_as_accuracy=True,
                   judge_threshold=threshold)  # fmt: skip
    (score,) = ask(service, [WRONG])
    assert (score.accuracy, score.parts["judge"]) == (accuracy, 4 / 9)


def test_a_source_of_the_judges_alone_can_be_evaluated_by_its_verdict(make: Make) -> None:
    service = make(judging(), scorers={"sort_digits": "none"}, judge_as_accuracy=True,
                   judge_in_evaluation=True)  # fmt: skip
    service.check_sources({"sort_digits"}, held_out=True)
    service.require_metric("accuracy", {"sort_digits"})
    right, wrong = ask(service, [RIGHT, WRONG], training=False)
    assert (right.accuracy, wrong.accuracy) == (1.0, 0.0)


def test_a_judge_that_fails_fails_the_answer_and_the_share_ends_the_run(make: Make) -> None:
    service = make(reply(500), judge_retries=0, judge_wrong_score=-3.0, judge_as_accuracy=True)
    scores = ask(service, [RIGHT, WRONG])
    for score in scores:
        assert score.parts == {"task": -1.0, "judge": -3.0}
        assert (score.reward, score.accuracy) == (-4.0, 0.0)
        assert score.error.startswith("the judge: http://127.0.0.1:")
    with pytest.raises(RewardError, match=r"failed for 2 of 2 .* the judge: .* answered 500"):
        service.end_step()


def test_figures_are_of_all_twins_and_start_anew(make: Make) -> None:
    service = make(judging())
    ask(service, [RIGHT])
    ask(service.copy(), [WRONG])
    assert service.figures()["judge/requests"] == 2
    assert set(service.figures().values()) == {0}
    assert rewards_of(RewardConfig(), LIMIT).figures() == {
        "scoring/answers": 0,
        "scoring/failed": 0,
    }


PARTS = """
import os

def length(solution_str):
    return len(solution_str)

async def odd(completions, **columns):
    if completions == ["#die"]:
        os._exit(3)
    return [None if text == "#1359" else -2 for text in completions]
"""


def test_functions_of_ones_own_are_parts_each_in_its_workers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PARTS)
    file = str(tmp_path / "mine.py")
    parts = {
        "length": PartConfig(path=file, name="length", weight=0.5, in_evaluation=True),
        "odd": PartConfig(path=file, name="odd", weight=10),
    }
    with closing(service(parts=parts, workers=1)) as one:
        assert one.takes_time(["sort_digits"])
        right, wrong, dead = ask(one, ["#1359", "#1", "#die"])
        assert (right.parts, right.reward) == ({"task": 1.0, "length": 5.0}, 1.0 + 2.5)
        assert wrong.parts == {"task": -1.0, "length": 2.0, "odd": -2.0}
        assert wrong.reward == -1.0 + 1.0 - 20.0
        assert dead.parts == {"task": -1.0, "length": -1.0, "odd": -1.0}
        assert dead.error == "the part odd: the scorer's process ended with exit code 3"
        (held_out,) = ask(one, ["#1359"], training=False)
        assert list(held_out.parts) == ["task", "length"]
    with pytest.raises(RewardError, match=r"reward\.parts\.odd\.path .*mine\.py has no callable"):
        service(parts={**parts, "odd": PartConfig(path=file, name="even")})
