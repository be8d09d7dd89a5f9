"""The judge's section: what is refused in one line, and what is never shown."""

from __future__ import annotations

import pytest

from winnow.config.judge import LabelsParse, NumberParse, OpenAiJudge
from winnow.config.load import load_recipe
from winnow.errors import ConfigError

ASKED = ["reward/judge=openai", "reward.judge.base_url=http://h:8/v1", "reward.judge.model=M"]
SECRET = "gsk_4f5e6d7c8b9a"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "reward.judge.base_url has no default; add reward.judge.base_url=VALUE"),
        (["reward.judge.base_url=h:8"], "base_url must begin with http:// or https:// and name a"),
        (["reward.judge.base_url=http://a..b/v1"], "base_url must begin with http:// or https://"),
        (["reward.judge.base_url='http://h/v1?a=b'"], "must end with its path: no ? and no #"),
        (["reward.judge.template=accuracy"], "must be correctness, quality, or the text of a J"),
        (["reward.judge.template='{{ x }'"], "must be a Jinja template (unexpected '}', line 1)"),
        (["reward.judge.template='{{ y }}'"], "extra, data_source only, and uses y, got '{{ y }}'"),
        (["reward.judge.template='{{ question }}'"], "must show the judge the answer: {{ ans"),
        (["reward.judge.system='{% if %}'"], "reward.judge.system must be a Jinja template (Ex"),
        (["reward.judge.part=task"], "reward.judge.part must be none of accuracy, reward, task_r"),
        (["+reward.judge.options={stream: true}"], "reward.judge.options must leave stream alone"),
        (["reward/judge/parse=number", "reward.judge.parse.pattern='(a'"],
         "reward.judge.parse.pattern must be a regular expression (missing ), unterminated sub"),
        (["reward/judge/parse=number", "reward.judge.parse.pattern='a'"],
         "reward.judge.parse.pattern must have one group, the number, and has 0, got 'a'"),
        (["reward/judge/parse=number", "reward.judge.parse.pattern='(a)(b)'"], "and has 2"),
        (["reward/judge/parse=labels"], "reward.judge.parse.labels must name one word or more"),
        (["reward.judge.requests_per_minute=0"], "must be a whole number of at least 1 or null"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_in_one_line(overrides: list[str], line: str) -> None:
    known = ASKED if overrides else [ASKED[0], ASKED[2]]
    with pytest.raises(ConfigError) as told:
        load_recipe("quickstart", [*known, *overrides])
    said = str(told.value)
    assert line in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "reward.judge.path has no default; add reward.judge.path=VALUE"),
        (["reward.judge.path=J", "reward.judge.engine.processes=0"], "must be a whole number of"),
        (["reward.judge.path=J", "reward.judge.model=m"], "is no key of reward/judge=engine"),
        (["reward.judge.path=J", "reward/judge/engine=http"], "must be one of torch, vllm"),
        (["reward.judge.path=J", "reward/judge/engine=vllm", "reward.judge.engine.sleep=true"],
         "reward.judge.engine.sleep=true leaves a judge no time to be asked"),
        (["reward.judge.path=J", "reward/judge/engine=vllm",
          "+reward.judge.engine.extra={model: x}"],
         "reward.judge.engine.extra.model has a key of its own: set reward.judge.path"),
        (["reward.judge.path=J", "reward/judge/engine=vllm",
          "+reward.judge.engine.extra={max_model_len: 9}"],
         "set reward.judge.max_prompt_tokens and reward.judge.max_tokens"),
    ],
)  # fmt: skip
def test_a_judge_on_engines_is_refused_in_the_words_of_its_own_section(
    overrides: list[str], line: str
) -> None:
    with pytest.raises(ConfigError) as told:
        load_recipe("quickstart", ["reward/judge=engine", *overrides])
    assert line in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "override",
    [
        f"reward.judge.api_key_env={SECRET}",
        f"reward.judge.api_key_env=sk-{SECRET}",
        f"reward.judge.base_url=http://me:{SECRET}@h/v1",
    ],
)
def test_a_key_in_the_recipe_is_refused_and_not_shown(override: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_recipe("quickstart", [*ASKED, override])
    assert SECRET not in str(told.value)
    assert "reward.judge." in str(told.value)


def test_a_template_of_ones_own_may_use_all_that_a_row_has() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ answer }}{{ extra.a.b }}"
    section = OpenAiJudge(base_url="https://h", model="m", template=template, parse=NumberParse())
    assert section.template == template


@pytest.mark.parametrize("labels", [{}, {" ": 1.0}])
def test_labels_are_words(labels: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must name one word or more, none of them empty"):
        LabelsParse(labels=labels)


def test_labels_are_those_of_the_recipe_alone() -> None:
    config = load_recipe(
        "quickstart",
        [*ASKED, "reward/judge/parse=labels", "reward.judge.parse.labels={A: 1, B: 0}"],
    )
    judge = config.reward.judge
    assert isinstance(judge, OpenAiJudge)
    assert isinstance(judge.parse, LabelsParse)
    assert judge.parse.labels == {"A": 1.0, "B": 0.0}
