"""What a model has no room for, or an engine does not take: in one line, whoever says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.recipes import recipe
from tests.recorded import quickstart_model
from tests.small_models import save
from transformers import GPT2Config, GPT2LMHeadModel

from winnow.data.loader import training_prompts
from winnow.data.prompts import PromptSet
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import ModelError, TrainingError, WorkerError
from winnow.ranks.models import (
    check_positions,
    explain_oom,
    is_out_of_memory,
    load_policy,
)


def test_the_line_names_rows_tokens_bytes_and_the_settings_that_take_less() -> None:
    config = recipe("quickstart", "rollout.engine.slots=64", "trainer.microbatch_tokens=5000")
    model = quickstart_model()
    with pytest.raises(TrainingError) as told, explain_oom(config, model):
        torch.empty(2**60)
    line = str(told.value)
    assert "\n" not in line
    assert line.startswith("out of memory: ")
    longest = config.data.max_prompt_tokens + 64
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
    with held, explain_oom(config):
        np.empty(2**50)


def test_ranks_that_cannot_save_any_more_do_not_hide_what_took_the_memory() -> None:
    gone = WorkerError("learner[1] failed in learn: OutOfMemoryError", "learner", 1)

    def save() -> None:
        raise gone

    told = pytest.raises(TrainingError, match=r"^out of memory: learner\[1\] failed in learn")
    with told, explain_oom(recipe("quickstart"), quickstart_model(), save):
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
    with pytest.raises(kind), explain_oom(recipe("quickstart")):
        raise error


# Models with learned positions: what must fit is the longest prompt there is, not the limit


POSITIONS, ANSWER = 64, 40


@pytest.mark.parametrize(
    ("digits", "overlong", "fits"),
    [(22, "error", True), (23, "error", False), (1000, "filter", True), (1000, "left", False)],
)
def test_learned_positions_must_hold_the_longest_prompt_that_is_left(
    digits: int, overlong: str, fits: bool, tmp_path: Path
) -> None:
    shape = {"vocab_size": 29, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS}
    path = str(save(GPT2LMHeadModel(GPT2Config(**shape)), build_tokenizer(), tmp_path / "model"))
    rows = [
        {
            "data_source": "sort_digits",
            "prompt": [{"role": "user", "content": f"{'1' * count}:"}],
            "reward_model": {"ground_truth": "1" * count},
            "extra_info": {"index": count},
        }
        for count in (5, digits)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        *("warm_start=none", "data/task=none", f"model.path={path}", "data.max_prompt_tokens=500"),
        *(f"data.train_files=[{tmp_path}/rows.jsonl]", f"data.overlong_prompts={overlong}"),
        *(f"rollout.max_response_tokens={ANSWER}", "reward.overlong.enabled=false"),
    ]
    config = recipe("quickstart", *settings)
    policy = load_policy(config, path, torch.device("cpu"))
    prompts = training_prompts(config.data, policy.tokenizer, 0)
    given = config.data, config.sft, config.rollout, path, policy.model, prompts
    if fits:
        check_positions(*given)
        return
    with pytest.raises(ModelError) as caught:
        check_positions(*given)
    assert isinstance(prompts, PromptSet)
    longest = max(len(prompt.token_ids) for prompt in prompts.prompts)
    assert str(caught.value) == (
        f"rollout.max_response_tokens 40 after the longest prompt's {longest} tokens does not fit "
        f"the model's 64 positions ({path}); lower it, or data.max_prompt_tokens, or use a model "
        "with a longer context"
    )


def test_a_model_that_vllm_refuses_is_refused_before_the_run(tmp_path: Path) -> None:
    path = str(save(quickstart_model(), build_tokenizer(), tmp_path / "model"))
    config = recipe(
        *("quickstart", "warm_start=none", "rollout/engine=vllm", f"model.path={path}"),
        *("reward.overlong.enabled=false", "data.max_prompt_tokens=64"),
        "rollout.max_response_tokens=64",
    )
    line = r"\Amodel\.path .* heads of size \d+, but 32, 64, .*; choose rollout/engine=torch, .*\Z"
    with pytest.raises(ModelError, match=line):
        load_policy(config, path, torch.device("cpu"))
