"""Images: learner, engine and transformers agree, and each image is encoded once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests import vision_models as vm
from tests.devices import DEVICE
from tests.ranks import Ranks

from winnow.data.images import VisionInput
from winnow.learning.batch import Batch, MicroBatch, pack, split_update
from winnow.learning.canary import Canary
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, make_mesh, whole
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.fused_layers import fuse_layers
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.types import Group, Segment

LOGPROB = frozenset({"logprob"})
SIZES = ((1, 1), (2, 3), (4, 1))


def exact(kind: vm.Kind) -> Any:
    """A tower that computes all in the model's type."""
    module = f"transformers.models.{kind}.modeling_{kind}"
    return patch(f"{module}.apply_rotary_pos_emb_vision", vm.rotate)


@pytest.fixture(params=get_args(vm.Kind))
def kind(request: pytest.FixtureRequest) -> Any:
    with exact(request.param):
        yield request.param


def model_of(kind: vm.Kind, dtype: torch.dtype = torch.float64) -> Any:
    model = vm.vision_model(kind, dtype)
    if dtype == torch.float64:
        fuse_layers(model)  # transformers' norms compute in fp32
    return model.to(DEVICE)


def groups() -> list[Group]:
    """Groups with one image, two, none, and one image that others have, too."""
    first, second, third = (vm.image(*size) for size in SIZES)
    return [
        vm.group(0, vm.prompt(0, [7], first, [8, 9]), [10, 11, 1], [12, 1], [9, 9, 9, 1]),
        vm.group(1, vm.prompt(1, second, [13], third, [14]), [15, 1], [16, 17, 18, 1]),
        vm.group(2, vm.prompt(2, [19, 20]), [21, 1], [22, 23, 1]),
        vm.group(3, vm.prompt(3, [24], second), [25, 26, 1], [4, 27, 1]),  # 4: as text
    ]


def loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """Sum of log-probs, each token with a weight of its own."""
    weights = torch.cos(micro.token_ids.double() + micro.positions.double())
    return LossResult((outputs["logprob"] * weights * micro.gen_mask).sum(), {})


def gradients(strategy: Strategy, parts: list[MicroBatch]) -> dict[str, torch.Tensor]:
    strategy.model.zero_grad(set_to_none=True)
    strategy.forward_backward(parts, LOGPROB, loss)
    named = strategy.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Tokens of the images of each call of the vision tower."""
    calls: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(int(kwargs["grid_thw"].prod(-1).sum()) // vm.MERGE**2)

    handle = model.base_model.visual.register_forward_pre_hook(count, with_kwargs=True)
    yield calls
    handle.remove()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-10)])
def test_outputs_and_gradients_are_those_of_transformers_for_each_sequence_alone(
    kind: vm.Kind, dtype: torch.dtype, bound: float
) -> None:
    strategy, theirs = Strategy(model_of(kind, dtype), vocab_size=vm.VOCAB), model_of(kind, dtype)
    total = torch.zeros((), dtype=torch.float64)
    batch = pack(groups())
    parts = strategy.sharder.all_micro_batches(batch, 1000)
    ours = strategy.sharder.gather(
        batch, parts, [o["logprob"] for o in strategy.forward(parts, LOGPROB)]
    )
    samples = [(g.prompt, answer) for g in groups() for answer in g.answers]
    for place, (prompt, answer) in enumerate(samples):
        ids = np.concatenate([prompt.token_ids, answer.trajectory.token_ids])
        logits = vm.their_logits(theirs, ids, prompt.images).cpu()
        targets, first = torch.tensor(ids), len(prompt.token_ids)
        logprobs = logits[:-1].log_softmax(-1).gather(1, targets[1:, None])[first - 1 :, 0]
        start, stop = batch.offsets[place] + first, batch.offsets[place + 1]
        found = ours[start:stop].cpu()
        torch.testing.assert_close(found, logprobs.detach().to(found), atol=bound, rtol=0)
        positions = torch.arange(len(ids))[first:]
        total = total + (logprobs * torch.cos((targets[first:] + positions).double())).sum()
    total.backward()
    grads = gradients(strategy, parts)
    for name, parameter in theirs.named_parameters():
        wanted = parameter.grad
        assert wanted is not None, name
        assert wanted.any(), name
        scale = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(grads[name], wanted, atol=bound * 10 * scale, rtol=0, msg=name)


def test_split_and_order_change_no_gradient_and_each_image_is_encoded_once(kind: vm.Kind) -> None:
    strategy = Strategy(model_of(kind), vocab_size=vm.VOCAB, gradient_checkpointing=True)
    batch = pack(groups())
    wanted = gradients(strategy, strategy.sharder.all_micro_batches(batch, 1000))
    with counted(strategy.model) as calls:
        parts = strategy.sharder.cut_update(batch, [3, 0, 2, 1], 12)
        assert len(parts) > 3
        found = gradients(strategy, parts)
    assert calls == [sum(a * b for a, b in SIZES)]
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, atol=1e-10, rtol=0, msg=name)


def test_the_tower_runs_in_chunks_of_a_micro_batch_and_again_for_its_gradients(
    kind: vm.Kind,
) -> None:
    shown = [vm.image(*size) for size in ((3, 4), (4, 3), (2, 2))]
    prompts = [vm.prompt(i, [7 + i], image) for i, image in enumerate(shown)]
    batch = pack([vm.group(i, each, [10, 1], [11 + i, 1]) for i, each in enumerate(prompts)])
    strategy = Strategy(vm.vision_model(kind), vocab_size=vm.VOCAB, gradient_checkpointing=True)
    wanted = gradients(strategy, strategy.sharder.all_micro_batches(batch, 1000))
    parts = strategy.sharder.cut_update(batch, range(3), 17)
    with counted(strategy.model) as calls:
        found = gradients(strategy, parts)
        again = gradients(strategy, parts)
        strategy.forward(parts, LOGPROB)
    assert calls == [12, 16] * 5
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=1e-10, msg=name)
        assert torch.equal(found[name], again[name])
    strategy.model.base_model.visual.requires_grad_(False)
    with counted(strategy.model) as calls:
        found = gradients(strategy, parts)
    assert calls == [12, 16]
    assert found.keys() == {name for name in wanted if ".visual." not in name}


def batch_of_ranks() -> Batch:
    """Three groups for each of four ranks, which have none, one, three and two images."""
    seeds = {3: 0, 6: 1, 7: 2, 8: 0, 9: 3, 10: 4}
    parts = [vm.image(3, 4, seeds[i]) if i in seeds else [20] * 14 for i in range(12)]
    prompts = [vm.prompt(i, [7 + i], part) for i, part in enumerate(parts)]
    return pack([vm.group(i, each, [10 + i, 1]) for i, each in enumerate(prompts)])


def learn_on_rank(kind: vm.Kind, replicas: int) -> tuple[list[int], dict[str, Any]]:
    options: dict[str, Any] = {"vocab_size": vm.VOCAB, "gradient_checkpointing": True}
    mesh, sharding = make_mesh("cpu", 4, replicas), Sharding(replicas == 1, replicas == 2)
    strategy = FSDP2Strategy(vm.vision_model(kind), mesh, sharding, **options)
    first = 3 * dist.get_rank()
    cut = split_update(batch_of_ranks(), range(first, first + 3), 17, shares_prompts=True)
    parts = cut.micro_batches(0)
    with counted(strategy.model) as calls, exact(kind):
        found = gradients(strategy, parts)
    return calls, {name: whole(each, strategy.device).numpy() for name, each in found.items()}


@pytest.mark.host
def test_ranks_of_different_numbers_of_images_run_as_many_chunks(
    kind: vm.Kind, ranks: Ranks
) -> None:
    replicas = 2 if kind == "qwen3_vl" else 1
    strategy = Strategy(vm.vision_model(kind), vocab_size=vm.VOCAB)
    wanted = gradients(strategy, strategy.sharder.all_micro_batches(batch_of_ranks(), 1000))
    # A rank that has no more images runs the tower on a token.
    chunks = [[1, 1, 1], [12, 1, 1], [12, 12, 12], [12, 12, 1]]
    for (calls, found), each in zip(ranks.run(learn_on_rank, kind, replicas), chunks, strict=True):
        assert calls == each * 2
        for name, expected in wanted.items():
            away = float(np.linalg.norm(found[name] - expected.numpy()))
            assert away <= 1e-10 * float(expected.norm()), name


def requests(count: int = 3) -> list[GroupRequest]:
    sampling = SamplingParams(12, stop_token_ids=(vm.STOP,))
    made = []
    for g in groups():
        answers = tuple(AnswerRequest(i, seed=1000 * g.id + i) for i in range(count))
        made.append(
            GroupRequest(g.id, g.prompt.token_ids, answers, sampling, g.id, images=g.prompt.images)
        )
    return made


def written(engine: Any, asked: list[GroupRequest], ticks: int | None = None) -> dict[Any, Segment]:
    """Answers; with `ticks`, each is interrupted after so many, again and again."""

    async def run() -> dict[Any, Segment]:
        await engine.submit(asked)
        done: dict[Any, Segment] = {}
        by_id = {g.group_id: g for g in asked}
        while len(done) < sum(len(g.answers) for g in asked):
            until = None if ticks is None else engine.status().tick + ticks
            events = [*await engine.events(until)]
            if ticks is not None:
                await engine.abort([*by_id])
                events += await engine.events()
            for e in events:
                if e.kind == "finished":
                    done[e.key] = e.segment
                    continue
                group = by_id[e.group_id]
                answer = next(a for a in group.answers if a.index == e.answer)
                again = replace(answer, prefix=e.segment if len(e.segment) else None)
                await engine.submit([replace(group, answers=(again,))])
        return done

    return asyncio.run(run())


def test_the_engine_agrees_with_transformers_however_often_it_is_interrupted(
    kind: vm.Kind,
) -> None:
    model = model_of(kind)
    engine = TorchEngine(model, 8, 64, vocab_size=vm.VOCAB)
    with counted(model) as calls:
        answers = written(engine, requests())
    assert sum(calls) <= 2 * sum(a * b for a, b in SIZES)
    for asked in requests():
        for index in range(3):
            segment = answers[asked.group_id, index]
            ids = np.concatenate([asked.prompt_ids, segment.token_ids])
            with torch.no_grad():
                logits = vm.their_logits(model, ids, asked.images).cpu()
            targets = torch.tensor(segment.token_ids)[:, None]
            first = len(asked.prompt_ids) - 1
            wanted = logits[first:-1].log_softmax(-1).gather(1, targets)[:, 0]
            np.testing.assert_allclose(segment.logprobs, wanted, atol=2e-6)
    for ticks in (1, 3):
        again = written(TorchEngine(model, 4, 40, vocab_size=vm.VOCAB), requests(), ticks)
        for key, segment in answers.items():
            np.testing.assert_array_equal(again[key].token_ids, segment.token_ids)
            np.testing.assert_allclose(again[key].logprobs, segment.logprobs, atol=1e-6)


def test_a_canary_with_an_image_sees_a_stale_vision_tower(kind: vm.Kind) -> None:
    from winnow.errors import PublicationError

    model, stale = (model_of(kind, torch.float32) for _ in range(2))
    vision = VisionInput(model.image_processor, model.config)
    canary = Canary.random(vm.VOCAB, 256, torch.float32, vision=vision)
    expected = canary.score(Strategy(model, vocab_size=vm.VOCAB))
    fresh = {"engine 0": TorchEngine(model, 4, 64, vocab_size=vm.VOCAB)}
    asyncio.run(canary.check(expected, 1, fresh))
    with torch.no_grad():
        next(stale.base_model.visual.parameters()).mul_(1.05)
    engines = {"engine 0": TorchEngine(stale, 4, 64, vocab_size=vm.VOCAB)}
    with pytest.raises(PublicationError, match="engine 0 disagrees"):
        asyncio.run(canary.check(expected, 1, engines))
