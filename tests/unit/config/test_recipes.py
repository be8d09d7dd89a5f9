"""The recipes that ship: each validates, says what it is for, and holds what was published."""

from __future__ import annotations

import pytest
from tests.recipes import recipe

from winnow.config.files import RECIPES, available_recipes
from winnow.config.load import load_recipe
from winnow.config.model import SftWarmStart
from winnow.config.root import Config
from winnow.config.rules import notices
from winnow.config.trainer import Megatron
from winnow.errors import ConfigError

TO_COMPLETE = ["model.path=FOLDER", "data.train_files=[train.parquet]"]
DAPO_INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
    '\n\n{prompt}\n\nRemember to put your answer on its own line after "Answer:".'
)


def load(name: str) -> Config:
    to_complete = TO_COMPLETE if name in ("dapo-math", "gsm8k", "sft") else ()
    return recipe(name, *to_complete, *(["sft.train_files=[x.jsonl]"] if name == "sft" else []))


def test_these_recipes_ship() -> None:
    assert available_recipes() == [
        "cispo",
        "cispo_qwen2.5_32b",
        "dapo",
        "dapo-math",
        "dapo_async",
        "dapo_async_qwen2.5_math_7b",
        "dapo_megatron_qwen2.5_32b",
        "dapo_megatron_qwen3_30b_a3b",
        "dapo_one_step_off",
        "dapo_one_step_off_qwen2.5_math_7b",
        "dapo_qwen2.5_32b",
        "drgrpo",
        "drgrpo_qwen2.5_math_7b",
        "grpo",
        "grpo_deepseekmath_7b",
        "gsm8k",
        "gspo",
        "gspo_qwen3_32b",
        "ppo",
        "ppo_orz_qwen2.5_7b",
        "quickstart",
        "reinforce_pp",
        "reinforce_pp_qwen2_7b",
        "remax",
        "remax_qwen2.5_7b",
        "rloo",
        "rloo_qwen2_7b",
        "sft",
    ]


@pytest.mark.parametrize("name", available_recipes())
def test_a_shipped_recipe_validates_and_says_what_it_is_for(name: str) -> None:
    assert load(name)
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"winnow {'sft' if name == 'sft' else 'train'} {name}" in text


@pytest.mark.parametrize("name", ["dapo-math", "gsm8k"])
def test_a_recipe_to_be_completed_says_what_it_lacks(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name)
    data, model = str(caught.value).splitlines()
    assert "set data.train_files=[FILE.parquet]" in data
    assert "set model.path=FOLDER" in model


def test_the_quickstart_is_as_specified() -> None:
    config = load("quickstart")
    task, start, loss = config.data.task, config.warm_start, config.algorithm.policy_loss
    assert (task.name, task.min_digits, task.max_digits) == ("sort_digits", 4, 8)
    assert isinstance(start, SftWarmStart)
    assert (start.steps, start.batch_size, start.lr, start.warmup_steps) == (1000, 32, 5e-3, 50)
    assert (start.betas, start.grad_clip) == ((0.9, 0.98), 1)
    mix = start.demonstrations
    assert (mix.guess_share, mix.guess_noise, mix.working_share) == (0.5, 3, 0.25)
    assert (mix.step_error, mix.repeat) == (0.01, 0.75)
    assert (loss.name, loss.clip_low, loss.clip_high, loss.dual_clip) == ("ppo_clip", 0.2, 0.28, 10)
    assert config.algorithm.aggregation == "token-mean"
    assert (config.sampling.groups_per_step, config.rollout.n) == (64, 8)
    assert config.trainer.mini_batch_groups == 16
    assert (config.rollout.max_response_tokens, config.rollout.engine.slots) == (128, 512)
    assert (config.reward.overlong.enabled, config.reward.overlong.buffer_tokens) == (True, 48)
    assert (config.sampling.filter.name, config.sampling.filter.metric) == ("variance", "accuracy")
    assert (config.sampling.max_staleness, config.trainer.steps) == (1, 80)
    optim = config.optim
    assert (optim.lr, optim.schedule, optim.final_lr_ratio) == (4e-4, "linear", 0)
    assert (optim.warmup_steps, optim.weight_decay) == (5, 0)


def test_dapo_math_asks_with_the_published_instruction() -> None:
    assert load("dapo-math").data.prompt_template == {"*": DAPO_INSTRUCTION}


def test_gsm8k_asks_for_the_answer_after_hashes() -> None:
    config = load("gsm8k")
    assert "####" in config.data.prompt_template["*"]
    assert config.algorithm == load("dapo-math").algorithm


def test_the_published_configuration_is_complete() -> None:
    config = load("dapo_qwen2.5_32b")
    assert (config.sampling.groups_per_step, config.rollout.n) == (512, 16)
    assert config.trainer.mini_batch_groups == 32
    assert config.sampling.max_groups_per_step == 10 * 3 * 512
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 20480)
    assert config.reward.overlong.buffer_tokens == 4096
    optim, loss = config.optim, config.algorithm.policy_loss
    assert (optim.lr, optim.warmup_steps, optim.weight_decay) == (1e-6, 20, 0.1)
    assert (loss.name, loss.clip_low, loss.clip_high, loss.dual_clip) == ("ppo_clip", 0.2, 0.28, 10)
    assert (config.evaluation.temperature, config.evaluation.top_p) == (1.0, 0.7)
    cut = load("dapo_megatron_qwen2.5_32b")
    assert (cut.algorithm, cut.optim, cut.data) == (config.algorithm, config.optim, config.data)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dapo_megatron_qwen2.5_32b", (128, 8, 1, 1)),
        ("dapo_megatron_qwen3_30b_a3b", (32, 4, 4, 8)),
    ],
)
def test_megatron_recipes_have_the_published_layouts(
    name: str, layout: tuple[int, int, int, int]
) -> None:
    strategy = load(name).trainer.strategy
    assert isinstance(strategy, Megatron)
    assert (strategy.ranks, strategy.tensor, strategy.pipeline, strategy.expert) == layout


def test_the_paths_of_the_published_configuration_follow_the_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = load_recipe("dapo_qwen2.5_32b")
    assert config.model.path == "/home/ada/verl/models/Qwen2.5-32B"
    monkeypatch.delenv("HOME")
    files = load_recipe("dapo_qwen2.5_32b").data.train_files
    assert files == ("/root/verl/data/dapo-math-17k.parquet",)


def test_recipes_that_sample_beside_learning_correct_for_older_weights() -> None:
    beside = {name: load(name) for name in available_recipes() if "async" in name or "off" in name}
    assert {name: config.trainer.mode.name for name, config in beside.items()} == {
        "dapo_async": "async",
        "dapo_async_qwen2.5_math_7b": "async",
        "dapo_one_step_off": "one_step_off",
        "dapo_one_step_off_qwen2.5_math_7b": "one_step_off",
    }
    found = {
        name: config.algorithm.correction.model_dump(exclude={"mode"})
        for name, config in beside.items()
    }
    none = {"name": "none"}
    tis = {"name": "truncated", "level": "token", "cap": 2.0, "normalize": False}
    areal = {"name": "masked", "level": "token", "low": 0.0, "high": 5.0, "normalize": False}
    k1 = {"name": "k1", "level": "sample", "over": "mean", "low": 0.999, "high": 1.001}
    assert found == {
        "dapo_async": {"weight": areal, "rejection": none},
        "dapo_async_qwen2.5_math_7b": {"weight": tis, "rejection": none},
        "dapo_one_step_off": {"weight": tis, "rejection": none},
        "dapo_one_step_off_qwen2.5_math_7b": {"weight": none, "rejection": k1},
    }
    assert not any("correct nothing" in line for c in beside.values() for line in notices(c))


def test_older_weights_without_a_correction_are_told() -> None:
    (line,) = notices(recipe("dapo_one_step_off", "algorithm/correction/weight=none"))
    assert line.startswith("Warning: trainer/mode=one_step_off learns from tokens of older weights")
    assert notices(recipe("dapo_one_step_off", "algorithm/correction/rejection=k1")) == []
    bypass = ("algorithm/correction/weight=none", "algorithm.correction.mode=bypass")
    assert notices(recipe("dapo_one_step_off", *bypass)) == []
