"""An update and a pass of the production strategy on fake CUDA tensors, without a GPU.

    PYTHONPATH=src python -m benchmarks.gpu.fake_cuda [--device cpu]

Fake tensors have a device, a type and a shape, and no numbers. What an operation refuses of these
is an error here: tensors of the host beside some of the GPU, a type that it does not take. Each
read of a number makes the host wait for a GPU; its place in the source is reported. Needs PyTorch's
CUDA build and a C compiler; `--device cpu` tries the script with any build.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.gpu.harness import ROOT, TINY
from benchmarks.gpu.learner import CLIP, OUTPUTS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from winnow.algorithms.losses import POLICY_LOSSES
from winnow.learning.batch import MicroBatch, all_micro_batches, pack_sequences
from winnow.learning.policy import PolicyObjective
from winnow.learning.runner import Output
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.models.sharded_loading import replace_parameters
from winnow.rollout.embedded import slots
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams

STUB = """
signed char fake_devices = 0;
signed char device_count(void) __asm__("_ZN3c104cuda12device_countEv");
signed char device_count(void) { return fake_devices; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 0;
    return 0;
}
"""
"""A driver with devices that nobody has used: autograd asks for its contexts, fake or not."""
ATEN = torch.ops.aten
NUMBERS = (
    *(ATEN._local_scalar_dense.default, ATEN.item.default, ATEN.is_nonzero.default),
    ATEN.allclose.default,
)
"""Operations that return a number."""
SHAPE = {"num_hidden_layers": 2}
"""Changes to Qwen3-0.6B's shape: what one block does the others repeat."""
UNUSED = 267
"""Rows of the head behind the tokenizer's ids: an odd number of logits is left."""
LENGTHS = (4000, 3000, 4000, 2000)


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers reads of a fake number with 1, and notes their places in Winnow."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (*NUMBERS, ATEN.nonzero.default):
            return func(*args, **(kwargs or {}))
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(f"{ROOT}/src/")]
        place = f"{Path(frames[-1].filename).name}: {frames[-1].line}"
        self.places += [place] if place not in self.places else []
        # Nothing is finished where the engine asks which rows are.
        return 1.0 if func in NUMBERS else args[0].new_empty(0, 1).long()


class Reads:
    """Reads of numbers by what was done."""

    def __init__(self) -> None:
        self.places: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def of(self, work: str) -> Iterator[None]:
        """Note the reads of a block, on fake tensors."""
        # Autograd has no thread for a device that is not there.
        with HostReads() as mode, torch.autograd.set_multithreading_enabled(False):
            yield
        self.places[work] = mode.places


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Call the kernel that attends in the place of PyTorch's function, which asks the device.

    Raises:
        AssertionError: no kernel takes them, so that PyTorch would keep all scores.
    """
    if query.dtype == torch.bfloat16 and attn_mask is None:
        return ATEN._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
    assert not enable_gqa, "the memory-efficient kernel takes equal numbers of heads"
    kernel = ATEN._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)[0]


def make_model(device: str, dtype: torch.dtype) -> Any:
    """Make a model of fake weights; call it under a `FakeTensorMode`."""
    path = ROOT / "src/winnow/plan/shapes/qwen3-0.6b"
    changes = SHAPE if device == "cuda" else TINY
    config = Qwen3Config.from_pretrained(path, **changes, max_position_embeddings=8192)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    replace_parameters(model, lambda name, weight: nn.Parameter(fake(weight)))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = fake(buffer)
    use_layout_attention(model)
    return model.eval()


def micro_batches() -> list[MicroBatch]:
    """Return micro-batches of random tokens, on the host as those of a run."""
    rng = np.random.default_rng(0)
    batch = pack_sequences([rng.integers(0, TINY["vocab_size"], n) for n in LENGTHS])
    columns = dict.fromkeys(("old", "advantages"), torch.ones(len(batch.token_ids)))
    batch.columns.update(columns)
    return all_micro_batches(batch, 8192)


def learn(micro: list[MicroBatch], device: str, dtype: torch.dtype, **options: Any) -> Reads:
    """Run a pass, an update, an export and a state's way back.

    Raises:
        AssertionError: something lies on another device.
    """
    reads = Reads()
    objective = PolicyObjective(POLICY_LOSSES["ppo_clip"], CLIP, "token-mean")
    outputs: frozenset[Output] = frozenset({"logprob", "entropy", "prob_square_sum"})
    model = make_model(device, dtype)
    ids = model.config.vocab_size - UNUSED
    with reads.of("Strategy"):
        strategy = Strategy(model, vocab_size=ids, **options)
    with reads.of("forward"):
        strategy.forward(micro, outputs)
    with reads.of("forward_backward"):
        strategy.forward_backward(micro, OUTPUTS, objective)
    with reads.of("optimizer_step"):
        strategy.optimizer_step(1e-6)
    with reads.of("export_weights"):
        weights = [tensor for _, tensor in strategy.export_weights(torch.bfloat16)]
    with reads.of("load_state_dict"):
        strategy.load_state_dict(strategy.state_dict())
    state = strategy.state_dict()
    moments = [tensor for each in state["optimizer"].values() for tensor in each.values()]
    devices = {t.device.type for t in [*weights, *state["weights"].values(), *moments]}
    assert devices == {device}, devices
    assert len(moments) == 3 * len(list(strategy.trained()))
    return reads


def decode(_: object, device: str, dtype: torch.dtype) -> Reads:
    """Prefill prompts, and draw two tokens of each answer."""
    reads, rng, model = Reads(), np.random.default_rng(0), make_model(device, dtype)
    engine = TorchEngine(model, 8, 4096, model.config.vocab_size - UNUSED)
    limits: dict[str, Any] = {"max_tokens": 64, "stop_token_ids": (2,), "top_k": 50}
    # Fake tensors of one number keep it, and would go to the device.
    settings = [SamplingParams(**limits, temperature=t, top_p=p) for t, p in ((1, 0.9), (0.5, 0.8))]
    answers = tuple(AnswerRequest(index, seed=index) for index in range(4))
    groups = [
        GroupRequest(number, rng.integers(0, TINY["vocab_size"], 60 + number), answers, sampling, 0)
        for number, sampling in enumerate(settings)
    ]

    async def ticks() -> None:
        await engine.submit(groups)
        for tick, work in enumerate(("prefill and tick", "tick"), start=1):
            with reads.of(work):
                await engine.events(until=tick)

    asyncio.run(ticks())
    return reads


CASES: tuple[tuple[Callable[..., Reads], dict[str, Any]], ...] = (
    (learn, {}),
    (learn, {"gradient_checkpointing": True}),
    (learn, {"gradient_checkpointing": True, "recompute_attention": False}),
    (learn, {"fp32_head": True}),
    (decode, {}),
)
"""Checks with the options of their strategies or engines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases in both types; returns 1 if one failed, 2 without a CUDA build."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.fake_cuda", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args(argv).device
    if device == "cuda" and torch.version.cuda is None:
        print(f"PyTorch {torch.__version__} is no CUDA build", file=sys.stderr)
        return 2
    if device == "cuda" and not hasattr(ctypes.CDLL(None), "fake_devices"):
        return run_with_stub()
    if device == "cuda":
        with FakeTensorMode():  # puts a guard without a device in the place of CUDA's own
            ctypes.c_byte.in_dll(ctypes.CDLL(None), "fake_devices").value = 127
        patch.object(torch.cuda, "is_available", lambda: False).start()
        for module in (functional, slots):
            patch.object(module, "scaled_dot_product_attention", efficient_attention).start()
    failures, micro = 0, micro_batches()
    # A CPU's draws choose rows by their numbers.
    cases = [case for case in CASES if device == "cuda" or case[0] is learn]
    for dtype in (torch.bfloat16, torch.float32):
        for check, options in cases:
            line = {"check": check.__name__, "dtype": str(dtype).removeprefix("torch."), **options}
            try:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    line["host_reads"] = check(micro, device, dtype, **options).places
            except Exception as error:
                traceback.print_exc()
                failures += 1
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(line | {"device": f"fake {device}", "torch": torch.__version__}))
    return int(failures > 0)


def run_with_stub() -> int:
    """Run this script in a process in which the stub stands for the driver."""
    with tempfile.TemporaryDirectory() as folder:
        library, command = Path(folder) / "libcuda.so.1", [sys.executable, "-m", __spec__.name]
        options = ("-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library))
        subprocess.run(["cc", "-x", "c", *options, "-"], input=STUB, text=True, check=True)
        environment = os.environ | {"LD_PRELOAD": str(library)}
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
