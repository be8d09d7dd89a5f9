"""A language model that judges answers over HTTP, beside the rules or in their place."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from winnow.config.base import Section, environment_name, web_address
from winnow.config.reward_model import free_part

BUILT_IN = ("correctness", "quality")
"""Templates by name; their texts are in `winnow.rewards.judge_prompt`."""
VARIABLES = ("question", "messages", "answer", "ground_truth", "extra", "data_source")
"""What a template may use."""


class BuiltInParse(Section):
    """The rule of a built-in template."""

    name: Literal["built_in"] = "built_in"


class NumberParse(Section):
    """The last match of a pattern is a number, which is mapped to 0..1."""

    name: Literal["number"] = "number"
    pattern: str = r"Score:[\s*]*(-?\d+(?:\.\d+)?)"
    """A regular expression of Python's with one group, the number."""
    lowest: float = 1.0
    """The number that becomes 0; what lies below is not understood."""
    highest: float = 10.0
    """The number that becomes 1; what lies above is not understood."""

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"must be a regular expression ({error})") from None
        if groups != 1:
            raise ValueError(f"must have one group, the number, and has {groups}")
        return value


class LabelsParse(Section):
    """The last of these words, as whole words in the same case, stands for a number."""

    name: Literal["labels"] = "labels"
    labels: dict[str, float] = Field(default_factory=dict)
    """Words, and the number that each stands for, such as {GOOD: 1, BAD: 0}."""

    @field_validator("labels")
    @classmethod
    def _are_words(cls, value: dict[str, float]) -> dict[str, float]:
        if not value or not all(label.strip() for label in value):
            raise ValueError("must name one word or more, none of them empty")
        return value


Parse = Annotated[BuiltInParse | NumberParse | LabelsParse, Field(discriminator="name")]


class NoJudge(Section):
    """No language model is asked."""

    name: Literal["none"] = "none"


class OpenAiJudge(Section):
    """A model behind an OpenAI-compatible endpoint; each answer is a chat completion there."""

    name: Literal["openai"] = "openai"
    base_url: str
    """Address up to the version, such as http://127.0.0.1:8000/v1; /chat/completions is put behind
    it."""
    model: str
    """The name that the endpoint knows the model by."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; null sends none."""
    template: str = "correctness"
    """correctness asks whether the answer means the same as ground_truth, quality for 1 to 10;
    anything else is the user's message itself, in Jinja: question, messages, answer, ground_truth,
    extra, data_source."""
    system: str | None = None
    """A message before it, in Jinja, too; null sends none."""
    parse: Parse = BuiltInParse()
    """How a number is read from the reply."""
    temperature: float = Field(0.0, ge=0)
    """Of the judge's sampling."""
    max_tokens: int = Field(1024, ge=1)
    """Longest reply."""
    seed: int | None = 0
    """Of the judge's sampling, where the endpoint has it; null sends none."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, over those above; null takes a field out."""
    requests_per_minute: int | None = Field(None, ge=1)
    """At most so many in any minute, tries after failures included; null is no limit."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """At most so many in any minute, of prompt and reply; null is no limit."""
    max_concurrent: int = Field(32, ge=1)
    """Requests under way at once."""
    retries: int = Field(5, ge=0)
    """Further tries after 429, 5xx and broken connections."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds that a reply may take."""
    cache: str = "auto"
    """File of replies that need not be asked for again: auto is judge.sqlite in WINNOW_CACHE or
    ~/.cache/winnow, none keeps no replies, anything else is a path."""
    part: str = "judge"
    """Name of its score in metrics, rollouts and filters."""
    weight: float = 1.0
    """Of its score in the reward; 0 only measures and filters."""
    wrong_score: float = 0.0
    """Its score of an answer whose scoring failed (reward.on_failure=wrong)."""
    in_evaluation: bool = False
    """Judge held-out answers, too."""
    as_accuracy: bool = False
    """The judge decides on the accuracy of what it scores, in place of the rule."""
    threshold: float = 0.5
    """With as_accuracy: scores from here on are right."""

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        url = web_address(value, "reward.judge.api_key_env is for keys")
        if url.query or url.fragment:
            raise ValueError("must end with its path: no ? and no #")
        return value

    @field_validator("api_key_env")
    @classmethod
    def _is_variable(cls, value: str | None) -> str | None:
        return environment_name(value, "key")

    @field_validator("template", "system")
    @classmethod
    def _is_template(cls, value: str | None, info: Any) -> str | None:
        is_system = info.field_name == "system"
        if value is None or (value in BUILT_IN and not is_system):
            return value
        if not is_system and "{" not in value:
            raise ValueError(f"must be {', '.join(BUILT_IN)}, or the text of a Jinja template")
        used = template_variables(value)
        if unknown := sorted(used - {*VARIABLES}):
            raise ValueError(f"must use {', '.join(VARIABLES)} only, and uses {', '.join(unknown)}")
        if not is_system and not used & {"answer"}:
            raise ValueError("must show the judge the answer: {{ answer }}")
        return value

    @field_validator("options")
    @classmethod
    def _are_further(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(value.keys() & {"model", "messages", "stream", "n"}):
            raise ValueError(f"must leave {', '.join(taken)} alone")
        return value

    @field_validator("part")
    @classmethod
    def _is_free(cls, value: str) -> str:
        return free_part(value)


def template_variables(text: str) -> set[str]:
    """The variables that a Jinja template uses.

    Raises:
        ValueError: it is none.
    """
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return meta.find_undeclared_variables(ImmutableSandboxedEnvironment().parse(text))
    except TemplateSyntaxError as error:
        reason = " ".join(str(error.message).split())
        raise ValueError(f"must be a Jinja template ({reason}, line {error.lineno})") from None


Judge = Annotated[NoJudge | OpenAiJudge, Field(discriminator="name")]
