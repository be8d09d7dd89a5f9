"""Agreement on prompts with images: embedded engine, trainer and transformers.

    python -m benchmarks.images [--depth 2] [--head 8]

Tiny models with random weights read images of three sizes, one or two a prompt. The engine writes
three answers to each prompt with its cache; the trainer scores them packed, and transformers each
sequence alone, by its own forward pass, attention and vision tower. The last row of a model has all
prompts at once, in shuffled micro-batches. E is the engine, T the trainer, H transformers.

Columns are the largest differences of a log-prob, in nats, and of gradients in float64: the largest
over all tensors of ||g - g_ref|| / ||g_ref||, vision tower included, of a sum over all answers'
tokens with weights of either sign. What transformers computes in fp32 in any type (norms, the
tower's rotary embedding) is computed in float64 there, by both. `H, itself` is transformers in this
type against float64, with the same weights and tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import torch
from tests import vision_models as vm
from torch import Tensor

from winnow.learning.batch import MicroBatch, micro_batches, pack
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.fused_layers import fuse_layers
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.types import Group, Prompt

SIZES = ((1, 2), (5, 4), (9, 7))
"""Rows and columns of tokens of an image; a token is a square of 8 x 8 pixels."""
ANSWERS, TOKENS = 3, 24


def prompts() -> Iterator[tuple[str, list[Prompt]]]:
    """Prompts by what they show."""
    shown = [(size,) for size in SIZES] + list(pairwise(SIZES))
    made = []
    for number, sizes in enumerate(shown):
        parts = [part for size in sizes for part in ([7 + number], vm.image(*size))]
        made.append(vm.prompt(number, *parts, [8, 9]))
        yield " and ".join(f"{rows} x {columns}" for rows, columns in sizes), made[-1:]
    yield "all of these", made


def answered(model: Any, shown: Sequence[Prompt]) -> tuple[list[Group], Tensor]:
    """Groups that the engine writes, and its log-probs of all answers' tokens."""
    engine, done = TorchEngine(model, 8, 512, vocab_size=vm.VOCAB), dict[Any, Any]()
    sampling, answers = SamplingParams(TOKENS), tuple(AnswerRequest(i, i) for i in range(ANSWERS))

    async def run() -> None:
        await engine.submit(
            [
                GroupRequest(i, prompt.token_ids, answers, sampling, i, images=prompt.images)
                for i, prompt in enumerate(shown)
            ]
        )
        while len(done) < len(shown) * ANSWERS:
            done.update({event.key: event.segment for event in await engine.events()})

    asyncio.run(run())
    written = [[done[i, answer] for answer in range(ANSWERS)] for i in range(len(shown))]
    groups = [
        vm.group(i, prompt, *(segment.token_ids.tolist() for segment in written[i]))
        for i, prompt in enumerate(shown)
    ]
    logprobs = np.concatenate([segment.logprobs for row in written for segment in row])
    return groups, torch.tensor(logprobs).double()


def by_transformers(model: Any, groups: Sequence[Group]) -> Tensor:
    """Log-probs of all answers' tokens, one sequence at a time."""
    parts = []
    for prompt, answer in ((group.prompt, each) for group in groups for each in group.answers):
        ids = np.concatenate([prompt.token_ids, answer.trajectory.token_ids])
        logits = vm.their_logits(model, ids, prompt.images)[len(prompt.token_ids) - 1 : -1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = torch.tensor(answer.trajectory.token_ids)[:, None]
        parts.append(wide.log_softmax(-1).gather(1, targets)[:, 0])
    return torch.cat(parts)


def by_trainer(model: Any, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Log-probs of all answers' tokens, and their weights in the sum whose gradients are left."""
    strategy, batch = Strategy(model, vocab_size=vm.VOCAB), pack(groups)
    order = np.random.default_rng(0).permutation(len(groups)).tolist()
    parts, found = micro_batches(batch, order, 256), torch.zeros(len(batch.token_ids)).double()

    def loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
        found[micro.source] = outputs["logprob"].detach().double()
        weights = torch.cos(micro.source.double()) * micro.gen_mask
        return LossResult((outputs["logprob"] * weights).sum(), {})

    strategy.forward_backward(parts, frozenset({"logprob"}), loss)
    places = batch.gen_mask.nonzero()[:, 0]
    return found[places], torch.cos(places.double())


def differences(
    made: Callable[[torch.dtype], Any], shown: Sequence[Prompt], dtype: torch.dtype
) -> list[float]:
    """Engine and trainer against transformers and each other, and transformers against float64."""
    ours = made(dtype)
    groups, engine = answered(ours, shown)
    trainer, _ = by_trainer(ours, groups)
    theirs = by_transformers(made(dtype), groups)
    with exact(exactly := made(torch.float64)):
        right = by_transformers(exactly, groups)
    pairs = (engine, theirs), (trainer, theirs), (engine, trainer), (theirs, right)
    return [float((a - b).detach().abs().max()) for a, b in pairs]


def gradients(made: Callable[[torch.dtype], Any], shown: Sequence[Prompt]) -> float:
    """Trainer against transformers in float64: the largest difference of all tensors."""
    ours, theirs = made(torch.float64), made(torch.float64)
    with exact(theirs):
        groups, _ = answered(ours, shown)
        _, weights = by_trainer(ours, groups)
        torch.autograd.backward((by_transformers(theirs, groups) * weights).sum())
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return float(torch.stack([(a.grad - b.grad).norm() / b.grad.norm() for a, b in pairs]).max())


@contextmanager
def exact(model: Any) -> Iterator[None]:
    """Have transformers compute everything in float64."""
    kind = model.config.model_type
    modeling: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    usual = modeling.apply_rotary_pos_emb_vision
    modeling.apply_rotary_pos_emb_vision = vm.rotate
    fuse_layers(model)
    yield
    modeling.apply_rotary_pos_emb_vision = usual


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=2, help="Layers of the vision tower.")
    parser.add_argument("--head", type=int, default=8, help="Width of a head; the model has 4.")
    args = parser.parse_args()
    pairs = "E - H", "T - H", "E - T", "H, itself"
    names = [f"{kind} {pair}" for kind in ("fp32", "bf16") for pair in pairs]
    print(f"| model | images of a prompt, in tokens | float64 gradients | {' | '.join(names)} |")
    print("|---" * (len(names) + 3) + "|")
    for kind in get_args(vm.Kind):
        made = partial(vm.vision_model, kind, depth=args.depth, head=args.head)
        for images, shown in prompts():
            found = [gradients(made, shown)]
            for dtype in (torch.float32, torch.bfloat16):
                found += differences(made, shown, dtype)
            print(f"| {kind} | {images} | {' | '.join(f'{x:.1e}' for x in found)} |", flush=True)


if __name__ == "__main__":
    main()
