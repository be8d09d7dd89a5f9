"""Rules about a language model that judges; `winnow.config.checks` applies them."""

from __future__ import annotations

from winnow.config.judge import BUILT_IN, BuiltInParse, LabelsParse, NumberParse, OpenAiJudge
from winnow.config.reward_model import SequenceClassifier
from winnow.config.root import Config


def _own_template(c: Config) -> str | None:
    judge = c.reward.judge
    if not isinstance(judge, OpenAiJudge) or judge.template in BUILT_IN:
        return None
    if not isinstance(judge.parse, BuiltInParse):
        return None
    return (
        "reward.judge.template is one of your own and reward/judge/parse=built_in only knows "
        f"{' and '.join(BUILT_IN)}; set reward/judge/parse to number or labels"
    )


def _nothing_between(c: Config) -> str | None:
    judge = c.reward.judge
    if not isinstance(judge, OpenAiJudge) or not isinstance(judge.parse, NumberParse):
        return None
    lowest, highest = judge.parse.lowest, judge.parse.highest
    if lowest < highest:
        return None
    return (
        f"reward.judge.parse.lowest={lowest:g} is not below reward.judge.parse.highest="
        f"{highest:g}; exchange them, or widen the range"
    )


def _never_right(c: Config) -> str | None:
    judge = c.reward.judge
    if not isinstance(judge, OpenAiJudge) or not judge.as_accuracy:
        return None
    parse = judge.parse
    values = [*parse.labels.values()] if isinstance(parse, LabelsParse) else [0.0, 1.0]
    if min(values) < judge.threshold <= max(values):
        return None
    what = "right" if judge.threshold <= min(values) else "wrong"
    return (
        f"reward.judge.threshold={judge.threshold:g} makes every answer {what}: its scores go from "
        f"{min(values):g} to {max(values):g}; choose a threshold above the one and not above the "
        "other"
    )


def _same_part(c: Config) -> str | None:
    judge, model = c.reward.judge, c.reward.model
    if not isinstance(judge, OpenAiJudge) or not isinstance(model, SequenceClassifier):
        return None
    if judge.part != model.part:
        return None
    return (
        f"reward.judge.part={judge.part} and reward.model.part={model.part} have the same name; "
        "rename one of them"
    )


JUDGE_RULES = (_own_template, _nothing_between, _never_right, _same_part)
