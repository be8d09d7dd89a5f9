"""A judge's score as a part of the reward: weights, accuracy, filters, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from tests.faulty_http import Step, reply, serving
from tests.judges import judging, says
from tests.scoring import LIMIT, answer, rewards_of

from winnow.config.judge import OpenAiJudge
from winnow.config.reward import CosineConfig, OverlongConfig, PartWeights, RewardConfig
from winnow.errors import RewardError
from winnow.rewards.judge import Judge
from winnow.rewards.pipeline import Rewards
from winnow.types import Prompt, Score

MESSAGES = ({"role": "user", "content": "5391:"},)
PROMPT = Prompt("sort_digits:5391", np.array([8]), "5391:", "sort_digits", "1359", {}, MESSAGES)
RIGHT, WRONG = "1|539;3|59;5|9;9|#1359", "#1395"
SEES_NOTHING = says("Judgement: INCORRECT")
ALONE = {"scorers": {"sort_digits": "none"}}
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


def ask(service: Rewards, texts: Sequence[str], training: bool = True) -> list[Score]:
    async def together() -> list[Score]:
        scores = (service.score(PROMPT, answer(120), text, training) for text in texts)
        return list(await asyncio.gather(*scores))

    return asyncio.run(together())


def test_the_reward_is_the_weighted_sum_and_the_parts_are_kept(make: Make) -> None:
    overlong = OverlongConfig(enabled=True, buffer_tokens=16)
    service = make(
        judging(),
        weights=PartWeights(task=0.5),
        judge_weight=0.25,
        judge_part="llm",
        overlong=overlong,
    )
    right, wrong = ask(service, [RIGHT, WRONG])
    assert right.parts == {"task": 1.0, "llm": 1.0, "overlong": -0.5}
    assert right.reward == 0.5 * 1.0 + 0.25 * 1.0 - 0.5
    assert wrong.parts == {"task": -1.0, "llm": 0.0, "overlong": -0.5}
    assert wrong.reward == -0.5 - 0.5
    assert service.takes_time({"sort_digits"})
    assert {"llm", "task", "accuracy"} <= (service.known_metrics({"sort_digits"}) or set())
    assert service.scored_apart() == 2


def test_held_out_answers_are_judged_where_the_recipe_asks(make: Make) -> None:
    (score,) = ask(make(judging()), [RIGHT], training=False)
    assert score.parts == {"task": 1.0}
    (score,) = ask(make(judging(), judge_in_evaluation=True), [RIGHT], training=False)
    assert score.parts == {"task": 1.0, "judge": 1.0}


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


def test_a_source_may_be_left_to_the_judge_alone(make: Make) -> None:
    service = make(judging(), **ALONE)
    right, wrong = ask(service, [RIGHT, WRONG])
    assert (right.parts, right.reward) == ({"judge": 1.0}, 1.0)
    assert (wrong.parts, wrong.reward) == ({"judge": 0.0}, 0.0)
    service.check_sources({"sort_digits"})
    with pytest.raises(RewardError, match=r"metric is accuracy, .* judge, reward"):
        service.require_metric("accuracy", {"sort_digits"})
    with pytest.raises(RewardError, match=r"set reward\.judge\.in_evaluation and reward\."):
        service.check_sources({"sort_digits"}, held_out=True)
    service.require_metric("judge", {"sort_digits"})


def test_a_source_of_the_judges_alone_can_be_evaluated_by_its_verdict(make: Make) -> None:
    service = make(judging(), **ALONE, judge_as_accuracy=True, judge_in_evaluation=True)
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
    ask(service.twin(), [WRONG])
    assert service.figures()["judge/requests"] == 2
    assert set(service.figures().values()) == {0}
    assert rewards_of(RewardConfig(), LIMIT).figures() == {
        "scoring/answers": 0,
        "scoring/failed": 0,
    }
