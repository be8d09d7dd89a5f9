"""Images in vLLM and its server: log-probs of transformers' own forward pass.

In vLLM the tower runs once on an image.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests import vision_models as vm
from tests.contract.test_engine import drain, to_the_end
from tests.small_models import save
from tests.vllm import test_http_server
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget

from winnow.config.model import LoraAdapter
from winnow.http.client import RemoteError
from winnow.models.lora import adapter_weights, add_lora
from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams
from winnow.rollout.http.engine import HttpEngine, make_http_engine
from winnow.rollout.tick_engine import PendingAnswer
from winnow.rollout.vllm.engine import VllmEngine, lora_options, meta_model, start_vllm
from winnow.rollout.vllm.worker import VllmOptions
from winnow.rollout.weights import WeightUpdate
from winnow.types import Image, Segment

RUNNING: list[Any] = []
"""vLLMs of this process: one that is collected destroys the groups that all of them use."""


def request(number: int, *parts: Image | list[int]) -> GroupRequest:
    ids, images = vm.shown([3], *parts, [*range(6, 20)])
    answers = tuple(AnswerRequest(i, 100 * number + i) for i in range(4))
    return GroupRequest(number, ids, answers, SamplingParams(8), number, images=images)


def groups() -> list[GroupRequest]:
    """Groups with one image, two, others of the same ids, and a later turn with an image."""
    small, large, other = vm.image(2, 3), vm.image(6, 4), vm.image(2, 3, seed=1)
    ids, images = vm.shown([8, 9], other, [10])
    turns = Segment(ids, np.zeros(len(ids), np.float32), (), images=images)
    later = request(4, small)
    return [
        *(request(0, small), request(1, large), request(2, large, [7], small), request(3, other)),
        replace(
            later,
            answers=(replace(later.answers[0], prefix=turns),),
            sampling=SamplingParams(len(ids) + 8),
        ),
    ]


def start(folder: Path, model: Any, adapter: LoraAdapter | None = None) -> VllmEngine:
    save(model, None, folder)
    model.image_processor.save_pretrained(folder)
    shapes = meta_model(str(folder), torch.float32, adapter=adapter)
    lora = None if adapter is None else lora_options(shapes, adapter.rank)
    options = VllmOptions(
        dtype="float32", slots=16, prefill_tokens=512, cache_gib=1 / 32, lora=lora
    )
    llm = start_vllm(str(folder), options)
    RUNNING.append(llm)
    return VllmEngine(llm, shapes, 16, vm.VOCAB)


def assert_theirs(model: Any, events: dict[Any, CompletionEvent]) -> None:
    for (number, place), event in events.items():
        group, ids = groups()[number], torch.from_numpy(event.segment.token_ids)
        asked = PendingAnswer(group, group.answers[place])
        with torch.no_grad():
            logits = vm.their_logits(model, [*group.prompt_ids, *ids], asked.images)
        scores = logits[-len(ids) - 1 : -1].log_softmax(-1).gather(1, ids[:, None])[:, 0]
        start = len(asked.prefix)
        np.testing.assert_allclose(event.segment.logprobs[start:], scores[start:], atol=3e-5)


@pytest.mark.parametrize("kind", get_args(vm.Kind))
def test_answers_see_their_images_and_the_published_tower(kind: vm.Kind, tmp_path: Path) -> None:
    model = vm.vision_model(kind, torch.float32, head=32)
    engine = start(tmp_path, model)
    runs: list[int] = []
    runner = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    runner.model.visual.register_forward_pre_hook(lambda _, inputs: runs.append(len(inputs[0])))

    got = drain(engine, groups())
    assert_theirs(model, got)
    assert sum(runs) == vm.MERGE**2 * (6 + 24 + 6)

    resumed = []
    for group in groups()[:4]:
        whole = got[group.group_id, 1].segment
        prefix = Segment(whole.token_ids[:5], whole.logprobs[:5], whole.spans)
        resumed.append(replace(group, answers=(replace(group.answers[1], prefix=prefix),)))
    for key, event in drain(engine, resumed).items():
        np.testing.assert_array_equal(event.segment.token_ids, got[key].segment.token_ids)
        np.testing.assert_allclose(event.segment.logprobs, got[key].segment.logprobs, atol=3e-5)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    tensors = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    asyncio.run(engine.load_weights(WeightUpdate(1, tensors)))
    assert_theirs(model, drain(engine, groups()))

    group, ids = groups()[2], got[2, 0].segment.token_ids
    sequence = np.concatenate([group.prompt_ids, ids])
    (scores,) = asyncio.run(engine.logprobs_of([sequence], 1.0, 8, [group.images]))
    event = replace(got[2, 0], segment=Segment(ids, scores, ()))
    assert_theirs(model, {(2, 0): event})

    # What vLLM measures a GPU's memory with, which a CPU does not ask for.
    budget = MultiModalBudget(engine._llm.vllm_config, MULTIMODAL_REGISTRY)
    _, largest = budget.get_dummy_encoder_profile_inputs()[0]
    data = {name: element.data for name, element in largest.items()}
    data["image_grid_thw"] = data["image_grid_thw"][None]
    assert len(runner.model.embed_multimodal(**data)[0]) == 256


def test_an_adapter_published_alone_is_applied_to_the_text_tower(tmp_path: Path) -> None:
    model = vm.vision_model("qwen2_5_vl", torch.float32, head=32)
    adapter = LoraAdapter(rank=4, publish="adapter", target_modules=("q_proj", "o_proj"))
    engine = start(tmp_path, model, adapter)
    add_lora(model, adapter, seed=0)
    tensors = [(name, tensor.detach().normal_(0, 0.1)) for name, tensor in adapter_weights(model)]
    asyncio.run(engine.load_weights(WeightUpdate(1, iter(tensors))))
    assert_theirs(model, drain(engine, groups()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_shows_images_and_takes_a_new_tower(tmp_path: Path) -> None:
    model = vm.vision_model("qwen2_5_vl", torch.float32, head=32, tied=False)
    words = {f"t{i}": i for i in range(vm.VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "t0")))
    folder = save(model, tokenizer, tmp_path / "model")
    model.image_processor.save_pretrained(folder)
    options = folder, tmp_path, "--logprobs-mode=processed_logprobs"
    server = test_http_server.start(*options, module="tests.vllm.image_server")

    async def answer_all(engine: HttpEngine) -> dict[Any, CompletionEvent]:
        await engine.submit(groups())
        return {event.key: event for event in await to_the_end(engine)}

    async def run() -> None:
        ids, images = vm.shown(vm.image(2, 3))
        address = [server.url], None, 60.0, vm.VOCAB, vm.VOCAB, 200
        prompt = ids.tolist(), images
        engine = make_http_engine(*address, prompt=prompt, slots=16, live_updates=True)
        assert_theirs(model, await answer_all(engine))

        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        tensors = ((name, tensor.detach()) for name, tensor in model.named_parameters())
        await engine.load_weights(WeightUpdate(1, tensors))
        got = await answer_all(engine)
        assert_theirs(model, got)

        group, segment = groups()[2], got[2, 0].segment
        sequence = np.concatenate([group.prompt_ids, segment.token_ids])
        client = engine.servers[server.url]
        (scores,) = await client.logprobs_of([sequence], 1.0, 8, [group.images])
        np.testing.assert_allclose(scores, segment.logprobs, atol=3e-5)

        for parts, message in (
            (([vm.IMAGE_TOKEN], vm.image(2, 3)), "took a generated image token for an image"),
            ((vm.image(9, 8),), r"resizes images: 74 tokens of a prompt become 5\d; start"),
        ):
            ids, images = vm.shown(*parts)
            with pytest.raises(RemoteError, match=message):
                await client.stream_answer(ids.tolist(), {"max_tokens": 1}, print, images)
        await engine.close()

    try:
        server.wait()
        asyncio.run(run())
    finally:
        server.kill()
