"""Groups that were recorded from the quickstart's warm start, and models of its shape.

`tests/fixtures/record.py` made the file: 8 answers a prompt, of 1 to 128 tokens, some truncated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.small_models import digits_model
from transformers import PreTrainedModel

from winnow.config.model import SftWarmStart
from winnow.models.causal_lm import use_layout_attention
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan

FILE = Path(__file__).parent / "fixtures" / "rollouts.npz"
VOCABULARY = 29
_SCORE = ("task", "overlong", "accuracy", "truncated")


def recorded_groups(count: int | None = None, answers: int | None = None) -> list[Group]:
    """The first `count` groups, with the first `answers` of each."""
    with np.load(FILE) as file:
        return groups_of({name: file[name] for name in file.files}, count, answers)


def groups_of(
    rows: Mapping[str, Any], count: int | None = None, answers: int | None = None
) -> list[Group]:
    """Groups from the arrays that `tests.fixtures.record` makes."""
    ends = {name: np.cumsum(rows[f"{name}_tokens"])[:-1] for name in ("prompt", "response")}
    prompts = np.split(rows["prompt_ids"], ends["prompt"])
    responses = np.split(rows["token_ids"], ends["response"])
    logprobs = np.split(rows["logprobs"], ends["response"])
    groups = []
    for number in np.unique(rows["group"])[:count]:
        members = np.flatnonzero(rows["group"] == number)
        first = members[0]
        made = tuple(
            _answer(responses[i], logprobs[i], {name: rows[name][i] for name in _SCORE})
            for i in members[:answers]
        )
        prompt = Prompt(str(number), prompts[first].astype(np.int64), "", "sort_digits", "")
        groups.append(Group(int(number), prompt, made))
    return groups


def quickstart_model(
    dtype: torch.dtype = torch.float32, initializer_range: float = 0.3, **changes: Any
) -> PreTrainedModel:
    """Random weights in the shape of the quickstart's model, ready for a strategy.

    They are larger than a new model's, so that each token has a probability of its own.
    """
    shape = SftWarmStart().model
    model = digits_model(
        **{
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.mlp_size,
            "initializer_range": initializer_range,
            **changes,
        }
    )
    use_layout_attention(model)
    return model.to(dtype).eval()


def _answer(token_ids: Any, logprobs: Any, row: dict[str, Any]) -> Answer:
    segment = Segment(token_ids.astype(np.int64), logprobs, (VersionSpan(0, len(token_ids)),))
    parts = {"task": float(row["task"]), "overlong": float(row["overlong"])}
    score = Score(sum(parts.values()), float(row["accuracy"]), parts)
    return Answer(Trajectory((segment,), "length" if row["truncated"] else "stop"), score)
