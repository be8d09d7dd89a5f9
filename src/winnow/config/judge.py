"""Models that score answers beside the rules or in their place: a classifier, a judge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from winnow.config.base import ADDRESS, PLACE, Change, Dtype, EnvironmentName, Section, http_url
from winnow.config.rollout import TorchEngineConfig, VllmEngineConfig
from winnow.config.trainer import Sharded, WholeModels

TEMPLATES = ("correctness", "quality")
"""Templates by name; their texts are in `winnow.rewards.judge_prompt`."""
VARIABLES = ("question", "messages", "answer", "ground_truth", "extra", "data_source")
"""Variables that a template may use."""
RESERVED_PARTS = (
    *("accuracy", "reward", "task_reward", "task", "pred"),
    *("acc", "score", "seq_reward", "seq_final_reward"),
    *("overlong", "overlong_reward", "cosine", "environment"),
)


def _check_part_name(value: str) -> str:
    if not value.isidentifier():
        raise ValueError("must be a name of letters, digits and _")
    if value in RESERVED_PARTS:
        raise ValueError(f"must be none of {', '.join(RESERVED_PARTS)}, which are taken")
    return value


PartName = Annotated[str, AfterValidator(_check_part_name)]
"""Name of a part of the reward, as metrics, rollouts and filters call it."""


class NoRewardModel(Section):
    """No reward model; rules or your function score."""

    name: Literal["none"] = "none"


class ShardedScorer(Sharded):
    """The model sharded over processes that only score (PyTorch's `fully_shard`); see
    docs/ranks.md."""

    section_key: ClassVar[str] = "reward.model.strategy"


Scorer = Annotated[WholeModels | ShardedScorer, Field(discriminator="name")]


def _check_chat_template(value: str) -> str:
    if value not in ("auto", "none") and "{" not in value:
        raise ValueError("must be auto, none, or the text of a Jinja template")
    return value


class SequenceClassifier(Section):
    """A Hugging Face sequence classifier with one label; reads prompt and answer as text."""

    name: Literal["sequence_classifier"] = "sequence_classifier"
    path: str
    """Folder (or hub name) of the model."""
    tokenizer: str | None = None
    """Folder of its tokenizer; null takes the model's own."""
    dtype: Dtype | None = None
    """Type of weights and activations; null is model.dtype. The head is always float32."""
    chat_template: Annotated[str, AfterValidator(_check_chat_template)] = "auto"
    """auto applies its tokenizer's chat template, none joins the messages' contents and puts the
    answer behind them; anything else is a template itself, in Jinja."""
    part: PartName = "model"
    """Name of the model's score in metrics, rollouts and filters."""
    weight: float = 1.0
    """Weight of the model's score in the reward; 0 only measures and filters."""
    wrong_score: float = 0.0
    """Score of an answer whose scoring failed (reward.on_failure=wrong)."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum length of a conversation in tokens; null is the model's number of positions."""
    overlong: Literal["error", "left"] = "error"
    """A longer one fails (error) or is truncated from the left (left)."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Packed tokens run at once; null is trainer.microbatch_tokens. Deterministic runs score one
    answer at a time, because the last bits depend on what is packed together."""
    in_evaluation: bool = False
    """Score held-out answers, too; their accuracy remains the rule's."""
    strategy: Annotated[Scorer, Change.ON_RESUME, {"compile": Change.IN_FORK}] = WholeModels()
    """Placement of the model's weights."""


RewardModel = Annotated[NoRewardModel | SequenceClassifier, Field(discriminator="name")]


def scorer_sharding(model: RewardModel) -> ShardedScorer | None:
    """Return the strategy of a sharded reward model; None if it is not sharded or there is none."""
    chosen = model.strategy if isinstance(model, SequenceClassifier) else None
    return chosen if isinstance(chosen, ShardedScorer) else None


class BuiltInParse(Section):
    """The rule of a built-in template."""

    name: Literal["built_in"] = "built_in"


def _check_pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    if groups != 1:
        raise ValueError(f"must have one group, the number, and has {groups}")
    return value


class NumberParse(Section):
    """The last match of a pattern is a number, which is mapped to 0..1."""

    name: Literal["number"] = "number"
    pattern: Annotated[str, AfterValidator(_check_pattern)] = r"Score:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression of Python with one group, the number."""
    lowest: float = 1.0
    """Number that becomes 0; a reply with a lower one is not understood."""
    highest: float = 10.0
    """Number that becomes 1; a reply with a higher one is not understood."""

    def conflicts(self) -> Iterator[str]:
        yield from self.order_conflicts("reward.judge.parse", "lowest", "highest")


def _check_labels(value: dict[str, float]) -> dict[str, float]:
    if not value or not all(label.strip() for label in value):
        raise ValueError("must name one word or more, none of them empty")
    return value


class LabelsParse(Section):
    """The last of these words in the reply (whole word, same case) stands for a number."""

    name: Literal["labels"] = "labels"
    labels: Annotated[dict[str, float], AfterValidator(_check_labels)] = Field({})
    """Words, and the number that each stands for, such as {GOOD: 1, BAD: 0}."""


Parse = Annotated[BuiltInParse | NumberParse | LabelsParse, Field(discriminator="name")]


class NoJudge(Section):
    """No language-model judge."""

    name: Literal["none"] = "none"


class LanguageModelJudge(Section):
    """The question to a judge, the rule that reads its reply, and the part that its number is."""

    name: str
    template: str = "correctness"
    """correctness asks whether the answer means the same as ground_truth, quality for 1 to 10;
    anything else is the user's message itself, in Jinja: question, messages, answer, ground_truth,
    extra, data_source."""
    system: str | None = None
    """System message, in Jinja, too; null sends none."""
    parse: Parse = BuiltInParse()
    """Rule that reads a number from the reply."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(1024, ge=1)
    """Longest reply, in tokens."""
    cache: Annotated[str, PLACE, Change.ON_RESUME] = "auto"
    """File that caches replies: auto is judge.sqlite in WINNOW_CACHE or ~/.cache/winnow, none
    disables the cache, anything else is a path."""
    part: PartName = "judge"
    """Name of the judge's score in metrics, rollouts and filters."""
    weight: float = 1.0
    """Weight of the judge's score in the reward; 0 only measures and filters."""
    wrong_score: float = 0.0
    """Score of an answer whose scoring failed (reward.on_failure=wrong)."""
    in_evaluation: bool = False
    """Judge held-out answers, too."""
    as_accuracy: bool = False
    """The judge decides on the accuracy of the answers that it scores, in place of the rule."""
    threshold: float = 0.5
    """Lowest score that is right, with as_accuracy."""

    @field_validator("template", "system")
    @classmethod
    def _check_template(cls, value: str | None, info: Any) -> str | None:
        is_system = info.field_name == "system"
        if value is None or (value in TEMPLATES and not is_system):
            return value
        if not is_system and "{" not in value:
            raise ValueError(f"must be {', '.join(TEMPLATES)}, or the text of a Jinja template")
        used = template_variables(value)
        if unknown := sorted(used - {*VARIABLES}):
            raise ValueError(f"must use {', '.join(VARIABLES)} only, and uses {', '.join(unknown)}")
        if not is_system and not used & {"answer"}:
            raise ValueError("must show the judge the answer: {{ answer }}")
        return value

    def conflicts(self) -> Iterator[str]:
        if self.template not in TEMPLATES and isinstance(self.parse, BuiltInParse):
            yield (
                "reward/judge/parse=built_in does not support a custom reward.judge.template; set "
                "reward/judge/parse to number or labels"
            )
        labels = self.parse.labels if isinstance(self.parse, LabelsParse) else {}
        least, most = min(labels.values(), default=0.0), max(labels.values(), default=1.0)
        if self.as_accuracy and not least < self.threshold <= most:
            what = "right" if self.threshold <= least else "wrong"
            yield (
                f"reward.judge.threshold={self.threshold:g} makes every answer {what}; set it "
                f"above {least:g} and to at most {most:g}"
            )


def _check_options(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := sorted(value.keys() & {"model", "messages", "stream", "n"}):
        raise ValueError(f"must not set {', '.join(reserved)}")
    return value


class OpenAiJudge(LanguageModelJudge):
    """A model behind an OpenAI-compatible endpoint; each answer is a chat completion there."""

    name: Literal["openai"] = "openai"
    base_url: Annotated[str, http_url("use reward.judge.api_key_env"), ADDRESS, Change.ON_RESUME]
    """Base URL up to the version, such as http://127.0.0.1:8000/v1; /chat/completions is
    appended."""
    model: str
    """Name that the endpoint knows the model by."""
    api_key_env: Annotated[EnvironmentName, Change.ON_RESUME] = None
    """Name of the environment variable that holds the key; null sends none."""
    seed: int | None = 0
    """Sampling seed of the judge, where the endpoint takes one; null sends none."""
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = Field({})
    """Further fields of the request, over those above; null takes a field out."""
    requests_per_minute: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=1)
    """Most requests in any minute, tries after failures included; null is no limit."""
    tokens_per_minute: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=1)
    """Most tokens of prompts and replies in any minute; null is no limit."""
    max_concurrent: Annotated[int, Change.ON_RESUME] = Field(32, ge=1)
    """Maximum number of concurrent requests."""
    retries: Annotated[int, Change.ON_RESUME] = Field(5, ge=0)
    """Further tries after 429, 5xx and broken connections."""
    timeout_s: Annotated[float, Change.ON_RESUME] = Field(120.0, gt=0)
    """Seconds that a reply may take."""


_JUDGE_KEYS = {
    "rollout.engine": "reward.judge.engine",
    "rollout/engine": "reward/judge/engine",
    "model.path": "reward.judge.path",
    "model.dtype": "reward.judge.dtype",
    "data.max_prompt_tokens": "reward.judge.max_prompt_tokens",
    "rollout.max_response_tokens": "reward.judge.max_tokens",
    " (or evaluation's)": "",
}


def to_judge_keys(line: str) -> str:
    """Return a message about the policy's engine with the keys of a judge's engine."""
    pattern = "|".join(map(re.escape, _JUDGE_KEYS))
    return re.sub(pattern, lambda match: _JUDGE_KEYS[match[0]], line)


def _engine_conflicts(lines: Iterable[str], sleeps: bool | None) -> Iterator[str]:
    yield from map(to_judge_keys, lines)
    if sleeps:
        yield "reward.judge.engine.sleep=true is not supported; set it to false"


class JudgeTorchEngine(TorchEngineConfig):
    """The embedded engine, in separate processes."""

    processes: Annotated[int, Change.ON_RESUME] = Field(1, ge=1)
    """Number of engines, each with the full model, on one GPU each if there are GPUs."""

    def conflicts(self) -> Iterator[str]:
        return _engine_conflicts(super().conflicts(), self.sleep)


class JudgeVllmEngine(VllmEngineConfig):
    """vLLM in separate processes (winnow-rl[vllm])."""

    processes: Annotated[int, Change.ON_RESUME] = Field(1, ge=1)
    """Number of engines, each with the full model, on tensor_parallel GPUs each if there are
    GPUs."""

    def conflicts(self) -> Iterator[str]:
        return _engine_conflicts(super().conflicts(), self.sleep)


class EngineJudge(LanguageModelJudge):
    """A judge model on dedicated engines of this run; each answer is rendered in its chat
    template."""

    name: Literal["engine"] = "engine"
    path: str
    """Folder, URL or hub name of the model; its tokenizer must have a chat template."""
    dtype: Dtype | None = None
    """Type of weights and activations; null is model.dtype."""
    engine: Annotated[JudgeTorchEngine | JudgeVllmEngine, Field(discriminator="name")] = (
        JudgeTorchEngine()
    )
    """Engine that writes the judgements, and its processes."""
    one_by_one: bool | None = None
    """Write one judgement at a time per engine, so that its bits depend on question, seed and
    settings alone; false batches them, which changes the order of sums. null is
    run.deterministic."""
    max_prompt_tokens: int = Field(8192, ge=1)
    """Longest question in its tokens, the answer included; a longer one fails to be scored."""
    seed: int = 0
    """Seed of the judge's draws, with the question."""


Judge = Annotated[NoJudge | OpenAiJudge | EngineJudge, Field(discriminator="name")]


def template_variables(text: str) -> set[str]:
    """Return the variables that a Jinja template uses.

    Raises:
        ValueError: the text is no template.
    """
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return meta.find_undeclared_variables(ImmutableSandboxedEnvironment().parse(text))
    except TemplateSyntaxError as error:
        reason = " ".join(str(error.message).split())
        raise ValueError(f"must be a Jinja template ({reason}, line {error.lineno})") from None
