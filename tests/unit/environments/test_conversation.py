"""Conversations over real engines: ids, log-probs, limits, faults, interruptions."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.contract.test_engine import VOCAB, engine_group, model_of, torch_engine
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.environments import Step, Turn
from winnow.environments.conversation import ConversationEngine, ConversationLimits
from winnow.errors import EnvironmentFault
from winnow.rollout.embedded.slots import Slots
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import Engine, SamplingParams, group_request
from winnow.types import Prompt

SPECIAL = ["<pad>", "<eos>", "<unk>", "<u>", "<a>", "<t>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<a>{{ m.content }}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
EOS = 1


def tokenizer() -> PreTrainedTokenizerFast:
    letters = [chr(ord("a") + i) for i in range(26)] + list("01234567")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    assert len(vocabulary) == VOCAB
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:], chat_template=TEMPLATE,
    )  # fmt: skip


class Counting:
    """Environments that reply with the number of turns so far, and a letter of the last one."""

    def __init__(
        self, done_after: int = 3, fails: Sequence[int] = (), delay_s: float = 0.0
    ) -> None:
        self.done_after, self.fails, self.delay_s = done_after, [*fails], delay_s
        self.alive: dict[int, int] = {}
        self.calls = 0

    async def step(
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: bytes = b""
    ) -> list[Step]:
        self.calls += 1
        await asyncio.sleep(self.delay_s * (conversation % 3))
        if self.calls in self.fails:
            self.alive.pop(conversation, None)
            raise EnvironmentFault("it crashed")
        first = self.alive.get(conversation, 0)
        self.alive[conversation] = len(turns)
        return [
            Step(f"{place}{turn.text[:1]}<eos>", 0.5, done=place == self.done_after)
            for place, turn in enumerate(turns[first:], first + 1)
        ]

    def close_conversation(self, conversation: int) -> None:
        self.alive.pop(conversation, None)


def make(
    engine: Engine,
    environments: Counting,
    deterministic: bool = True,
    turns: int = 4,
    most: int = 12,
    lag_ticks: int = 0,
) -> ConversationEngine:
    own = tokenizer()
    chat = TurnTokenizer(ChatTemplate(own, DataConfig()), own, [EOS])
    limits = ConversationLimits(turns, most)
    return ConversationEngine(
        *(engine, chat, Turn, own.decode, environments, limits),
        deterministic=deterministic,
        lag_ticks=lag_ticks,
    )


def requests(n: int = 3, groups: int = 4, tokens: int = 60):
    sampling = SamplingParams(tokens, 1.0, stop_token_ids=(EOS, 9, 14, 19, 24, 29))
    prompts = [Prompt(str(i), np.array([3, 6 + i, 4]), "", "", None) for i in range(groups)]
    return [
        group_request(i, p, dict.fromkeys(range(n)), sampling, 7) for i, p in enumerate(prompts)
    ]


async def run(engine: ConversationEngine, asked, abort_after: int | None = None):
    """Finished events by key, aborting everything once if told so."""
    done, by_id = {}, {group.group_id: group for group in asked}
    await engine.submit(asked)
    seen = 0
    while True:
        events = await engine.events()
        again = []
        for event in events:
            seen += 1
            if event.kind == "finished":
                done[event.key] = event
                continue
            group = by_id[event.group_id]
            (answer,) = (a for a in group.answers if a.index == event.answer)
            answer = replace(answer, prefix=event.segment, earlier=event.earlier)
            again.append(replace(group, answers=(answer,)))
        if again:
            await engine.submit(again)
        if not events:
            return done
        if abort_after is not None and seen >= abort_after:
            abort_after = None
            await engine.abort(list(by_id))


def transcript(event) -> list[tuple[str, list[int]]]:
    return [(s.source, s.token_ids.tolist()) for s in (*event.earlier, event.segment)]


def test_a_conversation_grows_by_ids_whose_log_probs_are_the_models():
    model = model_of()
    engine = make(torch_engine(copy.deepcopy(model), slots=5), Counting())
    done = asyncio.run(run(engine, requests()))
    assert len(done) == 12
    several = 0
    for event in done.values():
        segments = [*event.earlier, event.segment]
        several += len(segments) > 1
        ids = np.concatenate([[3, 6 + event.group_id, 4], *(s.token_ids for s in segments)])
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None]).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(ids)[1:, None])
        at = 3
        for segment in segments:
            expected = logprobs[at - 1 : at - 1 + len(segment), 0].numpy()
            if segment.source == "model":
                np.testing.assert_allclose(segment.logprobs, expected, atol=1e-5)
                assert [span.stop for span in segment.spans] == [len(segment)]
            else:
                # The special token that it spells is text: unknown characters, and letters.
                assert segment.token_ids[0] == 3
                assert EOS not in segment.token_ids
                assert not segment.spans
            at += len(segment)
    assert several > 4


@pytest.mark.parametrize("abort_after", [None, 1, 3, 6])
@pytest.mark.parametrize("count", [1, 2])
def test_interrupted_conversations_continue_with_the_same_tokens(abort_after, count):
    model = model_of()
    plain = asyncio.run(run(make(torch_engine(model, slots=5), Counting()), requests()))
    environments = Counting()
    engine = make(engine_group(count)(model, slots=4), environments)
    done = asyncio.run(run(engine, requests(), abort_after))
    assert {k: transcript(e) for k, e in done.items()} == {
        k: transcript(e) for k, e in plain.items()
    }
    assert not environments.alive


@pytest.mark.parametrize("name", ["qwen3", "qwen2-window"])
@pytest.mark.parametrize(("slots", "prefill_tokens"), [(12, 64), (12, 9), (7, 64), (3, 64)])
def test_rows_retained_between_turns_change_no_token_and_no_tick(
    name, slots, prefill_tokens, monkeypatch
):
    def written():
        tokens, run_model = [], TorchEngine._run

        def count(engine, ids, *others):
            tokens.append(len(ids))
            return run_model(engine, ids, *others)

        with monkeypatch.context() as patch:
            patch.setattr(TorchEngine, "_run", count)
            below = torch_engine(model_of(name), slots=slots, prefill_tokens=prefill_tokens)
            engine = make(below, Counting(4), turns=4, lag_ticks=6)
            done = asyncio.run(run(engine, requests()))
        ends = {key: (transcript(e), e.tick) for key, e in done.items()}
        logprobs = [s.logprobs for k in sorted(done) for s in (*done[k].earlier, done[k].segment)]
        return ends, np.concatenate(logprobs), sum(tokens)

    ends, logprobs, tokens = written()
    monkeypatch.setattr(Slots, "retained_row", lambda slots, answer: None)
    anew, others, most = written()
    assert ends == anew
    np.testing.assert_allclose(logprobs, others, atol=1e-6)
    once = 4 * 2 + len(logprobs)
    assert tokens == once if slots == 12 else once < tokens < most


def test_free_mode_gives_the_same_conversations():
    model = model_of()
    plain = asyncio.run(run(make(torch_engine(model, slots=5), Counting()), requests()))
    engine = make(torch_engine(model, slots=5), Counting(delay_s=0.01), deterministic=False)
    done = asyncio.run(run(engine, requests()))
    assert {k: transcript(e) for k, e in done.items()} == {
        k: transcript(e) for k, e in plain.items()
    }


class SlowToSubmit:
    """An engine to which requests take a while, as to one in another process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    async def submit(self, groups) -> None:
        await asyncio.sleep(0.003)
        await self.engine.submit(groups)


def test_a_caller_that_is_cancelled_loses_no_conversation():
    model = model_of()
    plain = asyncio.run(run(make(torch_engine(model, slots=5), Counting()), requests()))

    async def play():
        slow = SlowToSubmit(torch_engine(model, slots=5))
        engine = make(slow, Counting(delay_s=0.002), deterministic=False)
        await engine.submit(requests())
        done = {}
        while len(done) < 12:
            waiting = asyncio.ensure_future(engine.events())
            await asyncio.wait([waiting], timeout=0.001)
            waiting.cancel()
            (events,) = await asyncio.gather(waiting, return_exceptions=True)
            if not isinstance(events, asyncio.CancelledError):
                done |= {event.key: event for event in events}
                assert all(event.kind == "finished" for event in events)
            assert len(done) == 12 or engine.status().running + engine.status().queued
        return done

    done = asyncio.run(asyncio.wait_for(play(), 60))
    assert {k: transcript(e) for k, e in done.items()} == {
        k: transcript(e) for k, e in plain.items()
    }


def test_faults_are_failed_events_and_a_retry_goes_on_where_it_stopped():
    model = model_of()
    plain = asyncio.run(run(make(torch_engine(model, slots=5), Counting()), requests()))
    engine = make(torch_engine(model, slots=5), Counting(fails=[2, 5]))
    done = asyncio.run(run(engine, requests()))
    assert {k: transcript(e) for k, e in done.items()} == {
        k: transcript(e) for k, e in plain.items()
    }
