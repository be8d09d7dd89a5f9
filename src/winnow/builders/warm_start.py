"""Warm starts: a tiny model that imitates demonstrations of a generated task, made on the spot.

Finished starts are cached under a hash of everything that decides their bits: configuration,
seed, threads, versions, and the source code that makes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from filelock import FileLock
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

import winnow
from winnow.checkpoints.opening import pin_microbatch_tokens
from winnow.config.data import CalcTask, ShapesTask, SortDigitsTask
from winnow.config.model import SftWarmStart
from winnow.config.root import Config
from winnow.data import calc, shapes, sort_digits
from winnow.data.demonstrations import segments_of
from winnow.data.sort_digits import EOS_ID, PAD_ID, Demonstration
from winnow.errors import WinnowError
from winnow.learning.imitation import Imitator
from winnow.learning.learner import lr_at
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import save_model, use_layout_attention
from winnow.observe.console import ConsoleSink
from winnow.observe.files import atomic_folder
from winnow.observe.metrics import SFT_LOSS, Metrics, Stopwatch
from winnow.observe.sinks import RunInfo
from winnow.types import Answer, Group, Prompt, Score, Trajectory

_CODE = ("algorithms", "data", "learning", "models", "builders/warm_start.py")
_SEED_STREAM = 0x5F7
_TASKS = {"sort_digits": sort_digits, "calc": calc, "shapes": shapes}


def warm_start_folder(config: Config) -> Path:
    """Return the place of this configuration's start in the cache."""
    warm = config.warm_start
    assert isinstance(warm, SftWarmStart)
    root = warm.cache_dir or os.environ.get("WINNOW_CACHE") or Path.home() / ".cache" / "winnow"
    decides = {
        "warm_start": warm.model_dump(exclude={"cache_dir", "seed"}),
        "task": config.data.task.model_dump(exclude={"eval_problems"}),
        "limit": config.rollout.max_response_tokens,
        "seed": config.run.seed if warm.seed is None else warm.seed,
        "threads": torch.get_num_threads(),
        "microbatch_tokens": pin_microbatch_tokens(config).trainer.token_budget,  # orders sums
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "code": _code_hash(),
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    return Path(root) / "warm-starts" / digest


def make_warm_start(
    config: Config, fresh: bool, sink: ConsoleSink, on_progress: Callable[[], None] = lambda: None
) -> Path:
    """Find the folder of a warm start in the cache, or train it now and show that.

    Args:
        fresh: train even if the cache has it.
        on_progress: called after each step.

    Raises:
        WinnowError: the cache cannot be written to.
    """
    config = pin_microbatch_tokens(config)
    target, warm, task = warm_start_folder(config), config.warm_start, config.data.task
    assert isinstance(warm, SftWarmStart)
    assert isinstance(task, SortDigitsTask | CalcTask | ShapesTask)

    def log(step: int, loss: float) -> None:
        sink.log(step, {SFT_LOSS: loss})
        on_progress()

    seed = config.run.seed if warm.seed is None else warm.seed
    is_cached = not fresh and _is_complete(target)
    try:
        if not is_cached:  # else without a lock: a shared cache may be read-only
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_name(f".{target.name}.partial.lock")):
                # Another process may have trained it while this one waited.
                is_cached = not fresh and _is_complete(target)
                if not is_cached:
                    size = config.rollout.max_response_tokens, config.trainer.token_budget
                    # A disk that refuses does so before the minute of training, not after it.
                    with atomic_folder(target) as draft, contextlib.closing(sink):
                        sink.start(RunInfo("warm-up", warm.steps, kind="warm_up"))
                        save_model(*_train(warm, task, seed, *size, log), draft)
    except OSError as error:
        raise WinnowError(
            f"cannot write the warm start to {target.parent}: {error.strerror or error}; "
            "choose another folder in warm_start.cache_dir or WINNOW_CACHE"
        ) from error
    if is_cached:
        sink.print_line(f"Warm start: cached in {target} (--fresh trains it again)")
    return target


def _is_complete(target: Path) -> bool:
    return (target / "config.json").is_file()


def make_tiny_model(
    warm: SftWarmStart, vocabulary: int, positions: int, seed: int, vision: bool = False
) -> PreTrainedModel:
    """Make a model with random weights of a seed, and Winnow's attention.

    Args:
        vision: True for the architecture of Qwen2.5-VL, for `shapes`; False for that of Qwen3.
    """
    shape = warm.model
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp_size,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
    }
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = _make_vision_model(sizes) if vision else Qwen3ForCausalLM(Qwen3Config(**sizes))
    torch.random.set_rng_state(state)
    use_layout_attention(model)
    return model.eval()


def _make_vision_model(sizes: dict[str, Any]) -> PreTrainedModel:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )

    width, half = sizes["hidden_size"], sizes["head_dim"] // 2
    height = half * 3 // 8
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {"mrope_section": [half - 2 * height, height, height]}
    # With smaller weights a tower's features drown, and counting is not learned in minutes.
    scale = {"initializer_range": 0.1}
    vision = {
        "depth": 2,
        "hidden_size": width * 3 // 4,
        "num_heads": 4,
        "intermediate_size": width * 3 // 2,
        "patch_size": shapes.PATCH,
        "spatial_merge_size": shapes.MERGE,
        "window_size": 2 * shapes.CELL,
        "fullatt_block_indexes": [1],
        "out_hidden_size": width,
    }
    names = ("vision_start", "image", "vision_end", "video")
    config = Qwen2_5_VLConfig(
        text_config=sizes | scale | {"rope_parameters": rope},
        vision_config=vision | scale,
        tie_word_embeddings=True,
        **{f"{n}_token_id": shapes.IDS[t] for n, t in zip(names, shapes.SPECIAL, strict=True)},
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    model.image_processor = Qwen2VLImageProcessorPil(
        patch_size=shapes.PATCH,
        merge_size=shapes.MERGE,
        min_pixels=shapes.CELL**2,
        max_pixels=(9 * shapes.CELL) ** 2,
    )
    return cast(PreTrainedModel, model)


def _train(
    warm: SftWarmStart,
    task: SortDigitsTask | CalcTask | ShapesTask,
    seed: int,
    max_response_tokens: int,
    microbatch_tokens: int,
    log: Callable[[int, float], None],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Train a new model; `log` receives each step and its loss."""
    module: Any = _TASKS[task.name]
    tokenizer = module.build_tokenizer()
    positions = 1 << (max_response_tokens + module.longest_prompt(task)).bit_length()
    model = make_tiny_model(warm, len(tokenizer), positions, seed, vision=module is shapes)
    strategy = Strategy(
        model, betas=warm.betas, weight_decay=0.0, grad_clip=warm.grad_clip, temperature=1.0
    )
    warmup = min(warm.warmup_steps, warm.steps)
    rate = partial(
        lr_at, total_steps=warm.steps, lr=warm.lr, warmup_steps=warmup, schedule="cosine"
    )
    imitator = Imitator(strategy, microbatch_tokens, rate, max_skipped_updates=warm.steps + 1)
    rng = np.random.default_rng([seed, _SEED_STREAM])
    count = warm.steps * warm.batch_size
    shown = module.demonstrations(count, warm.demonstrations, task, max_response_tokens, rng)
    groups = [_as_group(number, each) for number, each in enumerate(shown)]
    for step in range(1, warm.steps + 1):
        metrics, first = Metrics(), (step - 1) * warm.batch_size
        imitator.learn(groups[first : first + warm.batch_size], step, metrics, Stopwatch())
        log(step, metrics.record().get(SFT_LOSS, math.nan))
    return model, tokenizer


def _as_group(number: int, demo: Demonstration) -> Group:
    """Return a demonstration as a group of one answer without a score."""
    trajectory = Trajectory(tuple(segments_of(demo.turns)), "stop")
    prompt = Prompt(str(number), demo.prompt_ids, "", "", None, images=demo.images)
    return Group(number, prompt, (Answer(trajectory, Score(0.0, 0.0)),))


def _code_hash() -> str:
    root = Path(winnow.__file__).parent
    digest = hashlib.sha256()
    for name in _CODE:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
