"""Out of memory: told in one line with what took it, whoever says so."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tests.ranks import fake_ranks
from tests.recipes import recipe
from tests.recorded import quickstart_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.errors import ConfigError, TrainingError, WorkerError
from winnow.runs.build_learner import make_learner
from winnow.runs.loading import check_attention, is_out_of_memory, memory_told


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


SHORT = ("data.max_prompt_tokens=96", "rollout.max_response_tokens=4000")
LONG = ("data.max_prompt_tokens=2048", "rollout.max_response_tokens=20480")


def model_of(shared: int, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """40 heads on so many of keys and values, without weights."""
    heads = {"num_attention_heads": 40, "num_key_value_heads": shared, "head_dim": 8}
    with torch.device("meta"):
        config = Qwen3Config(vocab_size=29, hidden_size=32, num_hidden_layers=1, **heads)
        return Qwen3ForCausalLM(config).to(dtype)


def test_long_answers_in_float32_with_shared_heads_are_refused_on_a_gpu() -> None:
    config = recipe("quickstart", *LONG)
    refused = pytest.raises(ConfigError)
    with refused as told:
        check_attention(config, model_of(8), "critic.dtype", "cuda")
    assert str(told.value) == (
        "critic.dtype=float32 on CUDA keeps the scores of 40 heads on 8 key/value heads over "
        "22,528 tokens, the longest prompt and answer: 75.6 GiB a layer; set critic.dtype=bfloat16 "
        "(it is stepped on float32 masters), or lower data.max_prompt_tokens and "
        "rollout.max_response_tokens to 4,096 in all"
    )
    # So are those of a policy on ranks, before a weight is read.
    with fake_ranks(4), refused as told:
        make_learner(config, model_of(8), 29, None, init_device_mesh("cuda", (4,)))
    assert str(told.value).startswith("model.dtype=float32 on CUDA")


@pytest.mark.parametrize(
    ("shared", "dtype", "lengths", "device"),
    [
        (8, torch.float32, LONG, "cpu"),
        (8, torch.bfloat16, LONG, "cuda"),
        (40, torch.float32, LONG, "cuda"),
        (
            8,
            torch.float32,
            ("data.max_prompt_tokens=96", "rollout.max_response_tokens=4000"),
            "cuda",
        ),
    ],
)
def test_other_attention_is_not(
    shared: int, dtype: torch.dtype, lengths: tuple[str, str], device: str
) -> None:
    check_attention(recipe("quickstart", *lengths), model_of(shared, dtype), "model.dtype", device)
