"""A reward model from its section of the recipe: weights, tokenizer, and what runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from winnow.config.judge import SequenceClassifier
from winnow.config.model import ModelConfig
from winnow.data.tokenizer import load_tokenizer
from winnow.errors import ModelError
from winnow.learning.strategy import Strategy, score_sequences
from winnow.models.causal_lm import torch_dtype
from winnow.models.value import load_reward_model
from winnow.rewards.model import Conversation, ModelScorer
from winnow.types import IntArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def make_model_scorer(
    config: SequenceClassifier,
    policy: ModelConfig,
    device: torch.device,
    microbatch_tokens: int,
    deterministic: bool,
) -> ModelScorer:
    """Load the model and all it takes to ask it.

    Args:
        policy: gives what `config` leaves open.
        microbatch_tokens: packed tokens run at once.
        deterministic: run each answer alone.

    Raises:
        ModelError: it is no sequence classifier with one label, is damaged, has no tokenizer or
            template, or does not fit them.
    """
    field = "reward.model.tokenizer" if config.tokenizer else "reward.model.path"
    tokenizer = load_tokenizer(
        config.tokenizer or config.path, policy.trust_remote_code, field, ends_answers=False
    )
    dtype = torch_dtype(config.dtype or policy.dtype)
    model = load_reward_model(config.path, dtype, device, policy.trust_remote_code)
    _check(config.path, model, tokenizer)
    own: Any = model.config
    positions = getattr(own, "max_position_embeddings", None)
    pad = cast("int | None", own.get_text_config().pad_token_id)
    conversation = Conversation(
        config, tokenizer, pad, positions if isinstance(positions, int) else None
    )
    strategy = Strategy(model)

    def forward(sequences: Sequence[IntArray]) -> list[float]:
        return cast("list[float]", score_sequences(strategy, sequences, microbatch_tokens).tolist())

    return ModelScorer(config, conversation, forward, one_by_one=deterministic)


def _check(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(
                f"reward.model.path {path}: {name} holds NaN or infinity; use another model"
            )
    tokens = max(tokenizer.get_vocab().values()) + 1
    embedded = cast(int, cast(Any, model.config).get_text_config().vocab_size)
    if tokens > embedded:
        raise ModelError(
            f"reward.model.path {path}: the tokenizer has {tokens} tokens, the model only "
            f"{embedded}; give the tokenizer that belongs to the model in reward.model.tokenizer"
        )
