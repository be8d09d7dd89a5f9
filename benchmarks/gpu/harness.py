"""Device, sizes, timers and models that the checks share, and the lines that they report."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).parents[2]
TINY = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
"""Changes to Qwen3-0.6B's shape on a CPU."""
ON_CPU = "CPU at tiny sizes: says nothing about GPUs"
GIB = 2**30
T = TypeVar("T")


@dataclass
class Bench:
    """A check under way: its device and sizes, and where its figures go."""

    check: str
    device: torch.device
    out: Path
    failures: int = 0

    @property
    def on_gpu(self) -> bool:
        """True on a GPU, and at real sizes."""
        return self.device.type == "cuda"

    @property
    def ids(self) -> int:
        """Ids of the tokenizer: an odd number of logits a row, as the head is cut there."""
        return self.pick(151_669, 4_091)

    def pick(self, gpu: T, cpu: T) -> T:
        """Choose a real size on a GPU, and a tiny one on a CPU."""
        return gpu if self.on_gpu else cpu

    def report(self, figure: str, **values: Any) -> None:
        """Print a JSON line, and append it to `figures.jsonl`; floats have five digits."""
        name = torch.cuda.get_device_name() if self.on_gpu else ON_CPU
        line = {"check": self.check, "figure": figure, **values, "device": name}
        line = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.5g}"))
        print(json.dumps(line), flush=True)
        with (self.out / "figures.jsonl").open("a") as file:
            print(json.dumps(line), file=file)

    @contextlib.contextmanager
    def guard(self, figure: str, **labels: Any) -> Iterator[None]:
        """Report an error in the place of a figure, and carry on behind the block."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failures += 1
            self.report(figure, **labels, error=f"{type(error).__name__}: {error}"[:300])

    def timed(self, work: Callable[[], object], repeats: int = 3, warmup: int = 1) -> float:
        """Return the median seconds of a call, behind some that do not count."""
        seconds = []
        for _ in range(warmup + repeats):
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[warmup:])

    def peak_gib(self) -> float | None:
        """Return the peak of the GPU's allocated memory since the last call."""
        if not self.on_gpu:
            return None
        peak = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return peak

    def model(self, dtype: torch.dtype = torch.bfloat16, layers: int = 28) -> Any:
        """Make a model of Qwen3-0.6B's shape with random weights, the same at each call."""
        from transformers import AutoModelForCausalLM, Qwen3Config

        from winnow.models.causal_lm import use_fp32_sums, use_layout_attention

        changes = {"max_position_embeddings": 131_072, "num_hidden_layers": layers}
        shape = ROOT / "src/winnow/plan/shapes/qwen3-0.6b"
        config = Qwen3Config.from_pretrained(shape, **changes | self.pick({}, TINY))
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        use_layout_attention(model)
        use_fp32_sums()
        return model.eval()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
