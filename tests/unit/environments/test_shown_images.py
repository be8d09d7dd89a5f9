"""Conversations whose environments show images: engine, learner and transformers agree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests import vision_models as vm
from tests.unit.environments.test_conversation import Counting, run, transcript
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.checkpoints.state_file import read_state, write_state
from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.data.images import VisionInput
from winnow.data.tokenizer import make_decoder
from winnow.environments import Step, Turn, messages_of
from winnow.environments.calls import plain_message
from winnow.environments.conversation import (
    ConversationEngine,
    ConversationLimits,
    ReplySchedule,
    TurnFormat,
)
from winnow.learning.batch import all_micro_batches, pack
from winnow.learning.strategy import Strategy
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import CompletionEvent, GroupRequest, SamplingParams, group_request
from winnow.types import (
    Answer,
    Group,
    Image,
    Prompt,
    Score,
    Segment,
    Trajectory,
    VersionSpan,
    join_images,
)

SPECIAL = ["<pad>", "<eos>", "<b>", "<e>", "<i>", "<v>", "<u>", "<a>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}<eos>{% else %}<u>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<b><i><e>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CUTS = TEMPLATE.replace("<a>{{ m.content }}", "<a>{{ m.content[:1] }}")
"""Shows of earlier turns one letter."""
LETTERS = "".join(chr(ord("a") + i) for i in range(vm.VOCAB - len(SPECIAL)))


class Shows(Counting):
    """Reply with an image, of another size each turn, between two letters."""

    async def step(
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: str = ""
    ) -> list[Step]:
        steps = await super().step(conversation, prompt, turns, state)
        first = len(turns) - len(steps) + 1
        shown = [vm.image(1, place, place).png for place in range(first, first + len(steps))]
        text = {"type": "text", "text": "b<i>"}
        contents = [[text, {"type": "image", "image": png}, text] for png in shown]
        return [
            Step([{"role": "user", "content": content}], done=step.done)
            for content, step in zip(contents, steps, strict=True)
        ]


def make(
    model: Any, template: str, environments: Shows, slots: int, config: DataConfig
) -> ConversationEngine:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    own = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[2:], chat_template=template,
    )  # fmt: skip
    vision = VisionInput(model.image_processor, model.config)
    chat = TurnTokenizer(ChatTemplate(own, config), own, [vm.STOP], vision)
    shown = None if template == TEMPLATE else plain_message
    return ConversationEngine(
        TorchEngine(model, slots, 160, vocab_size=vm.VOCAB),
        TurnFormat(chat, make_decoder(own), Turn, shown),
        environments,
        ConversationLimits(4, 8),
        ReplySchedule(True),
    )


def requests() -> list[GroupRequest]:
    sampling = SamplingParams(100, 1.0, stop_token_ids=(vm.STOP, 9, 14, 19, 24, 29))
    asked = []
    for number in range(2):
        ids, images = vm.shown([6], vm.image(2, 2, number), [10 + number, 7])
        messages = ({"role": "user", "content": f"<image>{LETTERS[2 + number]}"},)
        prompt = Prompt(str(number), ids, "", "", None, messages=messages, images=images)
        asked.append(group_request(number, prompt, dict.fromkeys(range(3)), sampling, 7))
    return asked


def behaviour(done: dict[Any, CompletionEvent]) -> Any:
    return {
        key: (transcript(e), [[i.digest for i in s.images] for s in e.earlier])
        for key, e in done.items()
    }


@pytest.mark.parametrize("template", [TEMPLATE, CUTS])
@pytest.mark.parametrize("kind", get_args(vm.Kind))
def test_later_turns_see_the_images_that_an_environment_showed(
    kind: vm.Kind, template: str, tmp_path: Any
) -> None:
    model, config = vm.vision_model(kind), DataConfig()
    done = asyncio.run(run(make(model, template, Shows(), 6, config), requests()))
    groups, restarted = [], 0
    for asked in requests():
        assert asked.prompt is not None
        answers = []
        for index in range(3):
            event = done[asked.group_id, index]
            segments = (*event.earlier, event.segment)
            answers.append(Answer(Trajectory(segments, "stop"), Score(0.0, 0.0)))
            context: list[Any] = [(asked.prompt_ids, asked.images)]
            for segment in segments:
                restarted += segment.restarts
                if segment.restarts:
                    context = []
                context.append((segment.token_ids, segment.images))
                if segment.source != "model":
                    continue
                ids = np.concatenate([each for each, _ in context])
                images = join_images((len(each), shown) for each, shown in context)
                with torch.no_grad():
                    logprobs = vm.their_logits(model, ids, images)[:-1].log_softmax(-1)
                wanted = logprobs.gather(1, torch.tensor(ids)[1:, None])[-len(segment) :, 0]
                np.testing.assert_allclose(segment.logprobs, wanted, atol=2e-6)
        groups.append(Group(asked.group_id, asked.prompt, tuple(answers)))
    batch = pack(groups)
    assert max(len(images) for images in batch.images) >= 3
    assert (restarted > 0) == (template == CUTS)
    parts, learner = all_micro_batches(batch, 2000), Strategy(model, vocab_size=vm.VOCAB)
    outputs = [each["logprob"] for each in learner.forward(parts, frozenset({"logprob"}))]
    ours = learner.sharder.gather(batch, parts, outputs)
    mask = batch.gen_mask
    torch.testing.assert_close(ours[mask].float(), batch.behav[mask], atol=2e-6, rtol=0)

    environments = Shows()

    def later(engine: Any, segments: list[Segment]) -> tuple[Any, list[Segment]]:
        for conversation in engine._aborted.values():  # as in a new process
            if conversation.reply is not None:
                conversation.reply.cancel()
        engine._aborted.clear()
        environments.alive.clear()
        write_state(tmp_path, {"segments": segments})
        return engine, read_state(tmp_path, [Segment, VersionSpan, Image])["segments"]

    begun = make(model, template, environments, 4, config)
    resumed = asyncio.run(run(begun, requests(), 3, later))
    assert behaviour(resumed) == behaviour(done)


def test_more_images_than_allowed_are_a_fault_of_the_conversation() -> None:
    model, environments = vm.vision_model("qwen3_vl"), Shows()
    engine = make(model, TEMPLATE, environments, 6, DataConfig(max_images=2))

    async def first() -> CompletionEvent:
        await engine.submit(requests())
        while True:
            for event in await engine.events():
                if event.kind == "failed":
                    return event

    failed = asyncio.run(asyncio.wait_for(first(), 60))
    assert failed.is_fault
    assert failed.error == (
        "the environment's images: 3 images, data.max_images is 2; raise it, or show fewer"
    )


@pytest.mark.parametrize("content", [None, ["a"], [{"type": "image", "image": 3}], [{"text": "a"}]])
def test_a_content_is_a_text_or_parts(content: Any) -> None:
    with pytest.raises(TypeError, match="neither a text nor a list of parts"):
        messages_of([{"role": "user", "content": content}])
