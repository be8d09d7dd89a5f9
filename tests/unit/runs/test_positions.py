"""Models with learned positions: what must fit is the longest prompt there is, not the limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.small_models import save
from transformers import GPT2Config, GPT2LMHeadModel

from winnow.config.load import load_recipe
from winnow.data.loader import training_prompts
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import ModelError
from winnow.runs.loading import check_positions, load_policy, longest_prompt

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
    config = load_recipe("quickstart", settings)
    policy = load_policy(config, path, torch.device("cpu"))
    longest = longest_prompt(config, training_prompts(config.data, policy.tokenizer, 0))
    if fits:
        check_positions(config, path, policy.model, longest)
        return
    with pytest.raises(ModelError) as caught:
        check_positions(config, path, policy.model, longest)
    assert str(caught.value) == (
        f"rollout.max_response_tokens 40 after the longest prompt's {longest} tokens does not fit "
        f"the model's 64 positions ({path}); lower it, or data.max_prompt_tokens, or use a model "
        "with a longer context"
    )
