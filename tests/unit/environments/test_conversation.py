"""Conversations over real engines: ids, log-probs, limits, faults, interruptions."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.contract.test_engine import VOCAB, engine_group, model_of, torch_engine
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.checkpoints.state_file import read_state, write_state
from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.data.tokenizer import make_decoder
from winnow.environments import Step, Turn
from winnow.environments.calls import plain_message
from winnow.environments.conversation import (
    ConversationEngine,
    ConversationLimits,
    ReplySchedule,
    TurnFormat,
)
from winnow.errors import EnvironmentFault
from winnow.rollout.embedded.slots import Slots
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import Engine, SamplingParams, group_request
from winnow.rollout.weights import WeightUpdate
from winnow.types import Prompt, Segment, VersionSpan

SPECIAL = ["<pad>", "<eos>", "<unk>", "<u>", "<a>", "<t>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<a>{{ m.content }}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
DROPS = TEMPLATE.replace("<a>{{ m.content }}", "<a>{{ m.content.split('</think>')[-1] }}")
"""Without what earlier turns have up to this token."""
EOS = 1


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    letters = [chr(ord("a") + i) for i in range(26)] + list("01234567")
    letters[-5] = "</think>"
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    assert len(vocabulary) == VOCAB
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    model.decoder = decoders.Fuse()
    model.add_tokens(["</think>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:], chat_template=template,
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
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: str = ""
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
    template: str = TEMPLATE,
) -> ConversationEngine:
    """Conversations of the first template, or rendered anew by another."""
    own, decode = tokenizer(template), make_decoder(tokenizer())
    chat = TurnTokenizer(ChatTemplate(own, DataConfig()), own, [EOS])
    turn_format = TurnFormat(chat, decode, Turn, None if template == TEMPLATE else plain_message)
    limits, schedule = ConversationLimits(turns, most), ReplySchedule(deterministic, lag_ticks)
    return ConversationEngine(engine, turn_format, environments, limits, schedule)


def requests(n: int = 3, groups: int = 4, tokens: int = 60):
    sampling = SamplingParams(tokens, 1.0, stop_token_ids=(EOS, 9, 14, 19, 24, 29))
    asked = [({"role": "user", "content": chr(ord("a") + i)},) for i in range(groups)]
    prompts = [
        Prompt(str(i), np.array([3, 6 + i, 4]), "", "", None, messages=each)
        for i, each in enumerate(asked)
    ]
    return [
        group_request(i, p, dict.fromkeys(range(n)), sampling, 7) for i, p in enumerate(prompts)
    ]


async def run(
    engine: ConversationEngine,
    asked,
    abort_after: int | None = None,
    later=lambda *it: it,
    publishes: bool = False,
):
    """Finished events by key, aborting everything once if told so.

    Args:
        later: of the engine and the segments of an aborted answer, those that go on.
        publishes: new weights are loaded behind the abort.
    """
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
            engine, (*earlier, prefix) = later(engine, [*event.earlier, event.segment])
            prefix = prefix if len(prefix) else None
            answer = replace(answer, prefix=prefix, earlier=tuple(earlier))
            again.append(replace(group, answers=(answer,)))
        if again:
            await engine.submit(again)
        if not events:
            return done
        if abort_after is not None and seen >= abort_after:
            abort_after = None
            await engine.abort(list(by_id))
            if publishes:
                await engine.load_weights(WeightUpdate(1))


def transcript(event) -> list[tuple[str, bool, list[int]]]:
    segments = (*event.earlier, event.segment)
    return [(s.source, s.restarts, s.token_ids.tolist()) for s in segments]


def transcripts(done):
    return {key: transcript(event) for key, event in done.items()}


@pytest.fixture(scope="module")
def plain():
    """Transcripts of conversations that nothing interrupts."""
    engine = make(torch_engine(model_of(), slots=5), Counting())
    return transcripts(asyncio.run(run(engine, requests())))


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
def test_interrupted_conversations_continue_with_the_same_tokens(plain, abort_after, count):
    environments = Counting()
    engine = make(engine_group(count)(model_of(), slots=4), environments)
    done = asyncio.run(run(engine, requests(), abort_after))
    assert transcripts(done) == plain
    assert not environments.alive


@pytest.mark.parametrize(
    ("name", "slots", "prefill_tokens"),
    [("qwen3", 12, 9), ("qwen2-window", 12, 64), ("qwen3", 7, 64), ("qwen3", 3, 64)],
)
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
    monkeypatch.setattr(Slots, "can_continue", lambda slots, answer: False)
    anew, others, most = written()
    assert ends == anew
    np.testing.assert_allclose(logprobs, others, atol=1e-6)
    once = 4 * 2 + len(logprobs)
    assert tokens == once if slots == 12 else once < tokens < most


@pytest.mark.parametrize(
    ("template", "expected"), [(TEMPLATE, "exact"), (DROPS, "without reasoning")]
)
def test_a_template_is_asked_for_what_it_makes_of_the_past(template, expected):
    own = tokenizer(template)
    chat = TurnTokenizer(ChatTemplate(own, DataConfig()), own, [EOS])
    assert chat.history([{"role": "user", "content": "r"}]) == expected


def test_rendered_anew_each_turn_is_sampled_behind_what_the_template_renders():
    model, own = model_of(), tokenizer(DROPS)
    inner = torch_engine(copy.deepcopy(model), slots=5)
    done = asyncio.run(run(make(inner, Counting(), template=DROPS), requests()))
    assert len(done) == 12
    continued = restarted = sampled = 0
    for event in done.values():
        context = np.array([3, 6 + event.group_id, 4])
        messages = [{"role": "user", "content": chr(ord("a") + event.group_id)}]
        for place, segment in enumerate([*event.earlier, event.segment]):
            if segment.source == "environment":
                rendered = own.apply_chat_template(messages, tokenize=False)
                text = f"{rendered}<a>"
                expected = own(text, add_special_tokens=False)["input_ids"]
                context = np.concatenate([[] if segment.restarts else context, segment.token_ids])
                assert context.tolist() == expected
                restarted += segment.restarts
                continued += not segment.restarts
                continue
            ids = np.concatenate([context, segment.token_ids]).astype(np.int64)
            logits = model(torch.from_numpy(ids)[None]).logits[0].double().detach()
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
            np.testing.assert_allclose(segment.logprobs, logprobs[len(context) - 1 :], atol=1e-5)
            context, sampled = ids, sampled + len(segment)
            turn = own.decode(segment.token_ids[:-1], skip_special_tokens=True)
            reply = f"{place // 2 + 1}{turn[:1]}?eos?"  # a special token that it spells is text
            messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": reply}]
        assert len(context) <= 3 + 60
    assert restarted
    assert continued
    assert sampled == inner.status().generated_tokens


@pytest.mark.parametrize("abort_after", [1, 3, 6])
def test_resumed_from_a_state_branches_have_the_same_bits(abort_after, tmp_path):
    model = model_of()
    made = partial(make, template=DROPS)
    plain = asyncio.run(run(made(torch_engine(model, slots=5), Counting()), requests()))
    environments = Counting()
    fresh = made(torch_engine(model, slots=4), environments)

    def later(engine, segments):
        write_state(tmp_path, {"segments": segments})
        return fresh, read_state(tmp_path, [Segment, VersionSpan])["segments"]

    begun = made(torch_engine(model, slots=4), Counting())
    done = asyncio.run(run(begun, requests(), abort_after, later))
    assert transcripts(done) == transcripts(plain)
    assert any(each.restarts for event in plain.values() for each in event.earlier)
    assert not environments.alive


class Ahead:
    """An engine that has written its answers before it is asked for events, as servers may."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.done = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def submit(self, groups):
        await self.inner.submit(groups)
        while events := await self.inner.events():
            self.done += events

    async def events(self, until=None):
        done, self.done = self.done, []
        return done


@pytest.mark.parametrize("ahead", [False, True])
def test_free_mode_gives_the_same_conversations(plain, ahead):
    inner = torch_engine(model_of(), slots=5)
    inner = Ahead(inner) if ahead else inner
    engine = make(inner, Counting(delay_s=0.01), deterministic=False)
    done = asyncio.run(run(engine, requests()))
    assert transcripts(done) == plain


def test_a_turn_that_goes_on_behind_a_publication_has_a_span_of_each_version():
    model = model_of()
    engine = make(torch_engine(copy.deepcopy(model), slots=5), Counting())
    done = asyncio.run(run(engine, requests(), 3, publishes=True))
    versions = set()
    for event in done.values():
        for segment in (*event.earlier, event.segment):
            stops = [span.stop for span in segment.spans]
            assert stops == sorted(set(stops))
            assert stops[-1:] == ([len(segment)] if segment.source == "model" else [])
            versions.add(tuple(span.version for span in segment.spans))
    assert versions == {(), (0,), (1,), (0, 1)}


class SlowToSubmit:
    """An engine to which requests take a while, as to one in another process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    async def submit(self, groups) -> None:
        await asyncio.sleep(0.003)
        await self.engine.submit(groups)


def test_a_caller_that_is_cancelled_loses_no_conversation(plain):

    async def play():
        slow = SlowToSubmit(torch_engine(model_of(), slots=5))
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
    assert transcripts(done) == plain


def test_an_abort_while_a_reply_is_waited_for_repeats_nothing(plain):

    async def play():
        engine = make(torch_engine(model_of(), slots=5), Counting(delay_s=0.05))
        await engine.submit(requests())
        events, again, done = [], requests(), {}
        waiting = asyncio.ensure_future(engine.events())
        while not engine.status().is_waiting:
            await asyncio.wait([waiting], timeout=0.001)
            if waiting.done():
                events += waiting.result()
                waiting = asyncio.ensure_future(engine.events())
        await engine.abort(range(4))
        for event in [*events, *await waiting]:
            if event.kind == "finished":
                done[event.key] = event
            else:
                group = again[event.group_id]
                answers = [
                    replace(each, earlier=event.earlier, prefix=event.segment or None)
                    if each.index == event.answer
                    else each
                    for each in group.answers
                ]
                again[event.group_id] = replace(group, answers=tuple(answers))
        unfinished = [
            replace(g, answers=tuple(a for a in g.answers if (g.group_id, a.index) not in done))
            for g in again
        ]
        return done | await run(engine, [each for each in unfinished if each.answers])

    done = asyncio.run(asyncio.wait_for(play(), 60))
    assert transcripts(done) == plain


def test_faults_are_failed_events_and_a_retry_goes_on_where_it_stopped(plain):
    engine = make(torch_engine(model_of(), slots=5), Counting(fails=[2, 5]))
    done = asyncio.run(run(engine, requests()))
    assert transcripts(done) == plain


@pytest.mark.parametrize("deterministic", [True, False])
def test_progress_has_every_token_also_of_conversations_whose_next_turn_is_queued(deterministic):
    engine = make(torch_engine(model_of(), slots=2), Counting(), deterministic)

    async def play() -> None:
        await engine.submit(requests())
        tokens: dict[tuple[int, int], int] = {}
        events = [None]
        while events:
            events = await engine.events()
            for event in [*events, *await engine.progress()]:
                segments = (*event.earlier, event.segment)
                tokens[event.key] = sum(len(s) for s in segments if s.source == "model")
            assert sum(tokens.values()) == engine.status().generated_tokens

    asyncio.run(play())


def test_what_an_engine_reports_of_a_conversation_that_has_ended_is_passed_over():
    inner = torch_engine(model_of(), slots=5)
    engine = make(inner, Counting())
    event = next(iter(asyncio.run(run(engine, requests())).values()))

    async def late():
        return [replace(event, kind="running", finish_reason="aborted")]

    inner.progress = late
    assert asyncio.run(engine.progress()) == []
