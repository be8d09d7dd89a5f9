"""A model that scores answers, beside the rules or in their place."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from winnow.config.base import Section
from winnow.config.model import Dtype

_TAKEN = (
    *("accuracy", "reward", "task_reward", "task", "pred"),
    *("overlong", "overlong_reward", "cosine"),
)


class NoRewardModel(Section):
    """Rules, or your own function, score alone."""

    name: Literal["none"] = "none"


class SequenceClassifier(Section):
    """A Hugging Face sequence classifier with one label; reads prompt and answer as text."""

    name: Literal["sequence_classifier"] = "sequence_classifier"
    path: str
    """Folder (or hub name) of the model."""
    tokenizer: str | None = None
    """Folder of its tokenizer; null takes the model's own."""
    dtype: Dtype | None = None
    """Type of weights and activations; null is model.dtype. The head is always float32."""
    chat_template: str = "auto"
    """auto applies its tokenizer's chat template, none joins the messages' contents and puts the
    answer behind them; anything else is a template itself, in Jinja."""
    part: str = "model"
    """Name of its score in metrics, rollouts and filters."""
    weight: float = 1.0
    """Of its score in the reward; 0 only measures and filters."""
    wrong_score: float = 0.0
    """Its score of an answer whose scoring failed (reward.on_failure=wrong)."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest conversation in its tokens; null is what its positions hold."""
    overlong: Literal["error", "left"] = "error"
    """A longer one fails to be scored, or loses its beginning."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Packed tokens run at once; null is trainer.microbatch_tokens. Deterministic runs score one
    answer at a time, because the last bits depend on what is packed together."""
    in_evaluation: bool = False
    """Score held-out answers, too; their accuracy remains the rule's."""

    @field_validator("chat_template")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in ("auto", "none") and "{" not in value:
            raise ValueError("must be auto, none, or the text of a Jinja template")
        return value

    @field_validator("part")
    @classmethod
    def _is_free(cls, value: str) -> str:
        return free_part(value)


def free_part(value: str) -> str:
    """The name, if a part of the reward may have it.

    Raises:
        ValueError: it may not.
    """
    if not value.isidentifier():
        raise ValueError("must be a name of letters, digits and _")
    if value in _TAKEN:
        raise ValueError(f"must be none of {', '.join(_TAKEN)}, which are taken")
    return value


RewardModel = Annotated[NoRewardModel | SequenceClassifier, Field(discriminator="name")]
