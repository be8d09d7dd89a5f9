"""Starts engines that vLLM refuses, one after the other, and prints the line of each.

A process of its own: vLLM would change the one that tests run in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from winnow.errors import WinnowError
from winnow.rollout.vllm.worker import make_vllm_worker
from winnow.workers.host import RankInfo

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
}
PLAIN = Qwen3Config(**SHAPE, head_dim=32, architectures=["Qwen3ForCausalLM"])
WINDOWS = Qwen2Config(
    **SHAPE,
    use_sliding_window=True,
    sliding_window=64,
    max_window_layers=2,
    architectures=["Qwen2ForCausalLM"],
)
EXPERTS = Qwen3MoeConfig(**SHAPE, head_dim=32, architectures=["Qwen3MoeForCausalLM"])
CASES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "option": (PLAIN, {"extra": {"enforce_eagr": True}}),
    "value": (PLAIN, {"extra": {"block_size": "x"}}),
    "architecture": (Qwen3Config(**SHAPE, head_dim=32, architectures=["MineForCausalLM"]), {}),
    "windows": (WINDOWS, {}),
    "heads": (
        Qwen3Config(
            **{**SHAPE, "num_attention_heads": 3, "num_key_value_heads": 3},
            head_dim=32,
            architectures=["Qwen3ForCausalLM"],
        ),
        {"tensor_parallel": 2},
    ),
    "too little memory": (PLAIN, {"cache_gib": 0.001, "longest": 4096}),
    "too much memory": (PLAIN, {"cache_gib": 1e4}),
    "head size": (Qwen3Config(**SHAPE, head_dim=16, architectures=["Qwen3ForCausalLM"]), {}),
    # The last: it asks for the second model runner, in the whole process.
    "routes": (EXPERTS, {"routes": True}),
}


def main() -> None:
    """Print, by name, what is told of each case."""
    home, told = Path(sys.argv[1]), {}
    for name, (config, arguments) in CASES.items():
        folder = home / name.replace(" ", "-")
        config.save_pretrained(folder)
        settings = {"cache_gib": 0.1, "longest": 512, "extra": {}} | arguments
        settings["extra"] = {"load_format": "dummy"} | settings["extra"]
        try:
            make_vllm_worker(
                RankInfo(0, 1, "127.0.0.1", 1, None),
                model=str(folder),
                dtype="float32",
                slots=4,
                prefill_tokens=512,
                vocab_size=64,
                **settings,
            )
            told[name] = "taken"
        except WinnowError as error:
            told[name] = str(error)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
