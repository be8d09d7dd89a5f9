"""The start of a vLLM engine in its process: what must be installed, and what vLLM refuses.

It knows vLLM by its package's name and its messages alone, so that a vLLM that is absent or of
another version is told in one line, too.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from winnow.config.rollout import VLLM_CPU_CACHE_GIB
from winnow.errors import ConfigError
from winnow.rollout.vllm.refusals import INSTALL, TESTED_WORDS, check_installed, first_line

_OF_FREE = 0.92
"""vLLM's own share of a GPU that it has alone."""


_ASK_MEMORY = "import torch; print([torch.cuda.mem_get_info(i) for i in range({})])"


def read_gpu_memory_gib(gpus: int) -> tuple[float, float]:
    """Return the GiB that are free on each of the first GPUs of this process, and their size.

    Where vLLM has a process for each of several GPUs, another process asks: in this one a CUDA
    context would stay on them.
    """
    if gpus == 1:
        memory = [torch.cuda.mem_get_info(0)]
    else:
        program = [sys.executable, "-P", "-c", _ASK_MEMORY.format(gpus)]
        asked = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True)
        memory = ast.literal_eval(asked.stdout)
    free, total = zip(*memory, strict=True)
    return min(free) / 2**30, max(total) / 2**30


def memory_share(
    free_gib: float, total_gib: float, share: float | None, reserved_gib: float | None
) -> float:
    """Return the share of a GPU that vLLM takes, weights included: of the whole, as vLLM counts it.

    Args:
        share: of the recipe; None: 0.92 of what is free.
        reserved_gib: of `VllmOptions`.
    """
    if share is not None:
        return share
    return max(_OF_FREE * (free_gib - (reserved_gib or 0.0)) / total_gib, 0.01)


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """Options of a vLLM that `start_vllm` starts."""

    dtype: str
    slots: int
    prefill_tokens: int
    longest: int | None = None
    """Most tokens of a prompt and its answer; None is what the model has positions for."""
    cache_gib: float | None = None
    """GiB of keys and values; None is what `memory_share` leaves."""
    memory_share: float | None = None
    """Share of each GPU's memory; None is 0.92 of what is free, less `reserved_gib`."""
    reserved_gib: float | None = None
    """GiB of each GPU that learning has yet to take; None: nothing learns there."""
    fp32_head: bool = False
    tensor_parallel: int = 1
    prefix_caching: bool = True
    chunked_prefill: bool = True
    sleep: bool = False
    """Allocate memory so that `VllmEngine.sleep` gives it back."""
    trust_remote_code: bool = False
    lora: Mapping[str, Any] | None = None
    """`lora_options` of an adapter that is published alone."""
    routes: bool = False
    extra: Mapping[str, Any] | None = None
    """Further options of vLLM's `EngineArgs`."""


def make_vllm_worker(
    rank: Any, *, cache_gib: float | None = None, sleep: bool = False, **arguments: Any
) -> Any:
    """Make an engine's worker (`VllmEngineWorker`) where vLLM is installed.

    Args:
        rank: a `workers.RankInfo`.
        cache_gib: None is a fixed amount on a CPU, where vLLM would take half of the memory.
        sleep: be able to give GPU memory back; on a CPU there is none.
        arguments: of `VllmEngineWorker`.

    Raises:
        ConfigError: vLLM is absent or of another version, or refuses an option.
        ModelError: vLLM refuses the model.
    """
    version = check_installed()
    try:
        found = importlib.import_module("winnow.rollout.vllm.engine")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"rollout/engine=vllm: vLLM {version} cannot be used, as {first_line(error)}; "
            f"{TESTED_WORDS}: {INSTALL}"
        ) from error
    if rank.device_index is None:
        cache_gib, sleep = cache_gib or VLLM_CPU_CACHE_GIB, False
    return found.VllmEngineWorker(rank, cache_gib=cache_gib, sleep=sleep, **arguments)
