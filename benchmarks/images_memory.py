"""Memory of images: the peak of a learner's pass and of the embedded engine.

    python -m benchmarks.images_memory

A tiny model with random weights (fp32, no gradient checkpointing) reads images of 256 tokens; an
answer has 64. The peak counts the tensors that torch operations allocate, to the byte, by a
dispatch mode; weights are not in it, and neither is what an operation frees within itself. A pass
of the learner leaves gradients of all weights, which the first table's peaks contain.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any
from unittest.mock import patch

import torch
from tests import vision_models as vm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from winnow.learning.batch import MicroBatch, micro_batches, pack
from winnow.learning.images import EncodedImages
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams

MIB = 2**20
EDGE, ANSWER = 16, 64
"""Tokens of an image's side and of an answer."""
PASSES = (
    *((1, 1, "a sample"), (1, 8, "a sample"), (1, 8, "all"), (8, 8, "a sample")),
    *((8, 1, "a sample"), (32, 1, "a sample")),
)
"""Images, answers to each, and samples of a micro-batch."""


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operations allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._live = dict[int, Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in filter(is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._live:
                self._live[storage._cdata] = weakref.finalize(
                    storage, self._free, storage._cdata, storage.nbytes()
                )
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int, size: int) -> None:
        del self._live[key]
        self.now -= size


class OneChunk(EncodedImages):
    """The images of a pass, whose activations are all kept."""

    def __init__(self, shown: Any, chunk_tokens: int, *others: Any) -> None:
        super().__init__(shown, 10**9, *others)


def is_tensor(value: object) -> bool:
    """Return whether a leaf of an operation's arguments is a tensor."""
    return isinstance(value, torch.Tensor)


def made() -> Any:
    """A model whose tower has four layers."""
    return vm.vision_model("qwen2_5_vl", torch.float32, depth=4, head=16)


def pass_mib(images: int, answers: int, part: str, kind: type[EncodedImages]) -> tuple[int, float]:
    """Micro-batches of a learner's pass, and its peak."""
    model = made()
    texts = [[10 + place % 8] * (ANSWER - 1) + [vm.STOP] for place in range(answers)]
    prompts = [vm.prompt(i, [7], vm.image(EDGE, EDGE, i)) for i in range(images)]
    groups = [vm.group(i, prompt, *texts) for i, prompt in enumerate(prompts)]
    sample = len(prompts[0].token_ids) + ANSWER
    parts = micro_batches(pack(groups), range(images), sample if part == "a sample" else 10**6)

    def loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
        return LossResult((outputs["logprob"] * micro.gen_mask).sum(), {})

    strategy = Strategy(model, vocab_size=vm.VOCAB)
    with patch("winnow.learning.strategy.EncodedImages", kind), Allocations() as counted:
        strategy.forward_backward(parts, frozenset({"logprob"}), loss)
    return len(parts), int(counted.peak) / MIB


def engine_mib(images: int, answers: int) -> float:
    """The peak of an engine with eight slots that writes answers to images."""
    engine = TorchEngine(made(), 8, 1024, vocab_size=vm.VOCAB)
    asked, sampling = tuple(AnswerRequest(i, i) for i in range(answers)), SamplingParams(ANSWER)

    async def run() -> None:
        prompts = [vm.prompt(i, [7], vm.image(EDGE, EDGE, i)) for i in range(images)]
        requests = [
            GroupRequest(i, prompt.token_ids, asked, sampling, i, images=prompt.images)
            for i, prompt in enumerate(prompts)
        ]
        await engine.submit(requests)
        done = 0
        while done < images * answers:
            done += len(await engine.events())

    with Allocations() as counted:
        asyncio.run(run())
    return int(counted.peak) / MIB


def main() -> None:
    """Print the tables."""
    print("| images | answers to each | a micro-batch | micro-batches | peak MiB | in one chunk |")
    print("|" + "---|" * 6)
    for images, answers, part in PASSES:
        (count, peak), (_, whole) = (
            pass_mib(images, answers, part, kind) for kind in (EncodedImages, OneChunk)
        )
        print(f"| {images} | {answers} | {part} | {count} | {peak:.2f} | {whole:.2f} |", flush=True)
    print("\n| images | answers to each | peak MiB of the engine |\n|---|---|---|")
    for images, answers in ((1, 1), (1, 8), (8, 1)):
        print(f"| {images} | {answers} | {engine_mib(images, answers):.2f} |", flush=True)


if __name__ == "__main__":
    main()
