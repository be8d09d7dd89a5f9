"""Out of memory: told in one line with what took it, whoever says so."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tests.recipes import recipe
from tests.recorded import quickstart_model

from winnow.errors import TrainingError, WorkerError
from winnow.runs.loading import is_out_of_memory, memory_told


def test_the_line_names_rows_tokens_bytes_and_the_settings_that_take_less() -> None:
    config = recipe("quickstart", "rollout.engine.slots=64", "trainer.microbatch_tokens=5000")
    model = quickstart_model()
    with pytest.raises(TrainingError) as told, memory_told(config, model):
        torch.empty(2**60)
    line = str(told.value)
    assert "\n" not in line
    assert line.startswith("out of memory: ")
    longest = config.data.max_prompt_tokens + 128
    shape = model.config
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 4
    held = min(longest, shape.max_position_embeddings)
    gib = 64 * -(-held // 64) * 64 * token / 2**30
    assert f"64 answers of {longest:,} tokens at once (keys and values of {gib:.3g} GiB)" in line
    assert "5,000 tokens of 512 answers" in line
    for key in ("engine.slots", "engine.cache_gib", "microbatch_tokens", "gradient_checkpointing"):
        assert re.search(rf"\b(rollout|trainer|model)\.{re.escape(key)}\b", line), key
    held = pytest.raises(
        TrainingError, match=r"^out of memory while models are loaded: .*cache_gib$"
    )
    with held, memory_told(config):
        np.empty(2**50)


def test_ranks_that_cannot_save_any_more_do_not_hide_what_took_the_memory() -> None:
    gone = WorkerError("learner[1] failed in learn: OutOfMemoryError", "learner", 1)

    def save() -> None:
        raise gone

    told = pytest.raises(TrainingError, match=r"^out of memory: learner\[1\] failed in learn")
    with told, memory_told(recipe("quickstart"), quickstart_model(), save):
        raise gone


@pytest.mark.parametrize(
    ("error", "says_so"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (WorkerError("policy 1: OutOfMemoryError: CUDA out of memory", "policy", 1), True),
        (RuntimeError("a view of a tensor was changed"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_what_refuses_memory_is_told_so(error: Exception, says_so: bool) -> None:
    assert is_out_of_memory(error) == says_so
    kind = TrainingError if says_so else type(error)
    with pytest.raises(kind), memory_told(recipe("quickstart")):
        raise error
