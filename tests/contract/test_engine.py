"""What every rollout engine promises, run against each implementation with a real tiny model."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.devices import DEVICE
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from winnow.errors import ModelError, TrainingError
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.embedded.merged_forward import MergedForward
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    Engine,
    GroupRequest,
    MemoryPart,
    SamplingParams,
    load_custom_engine,
)
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import EngineWorker, RemoteEngine, Reply
from winnow.rollout.weights import WeightUpdate
from winnow.types import Segment

VOCAB = 40
STOP = 2
STOPS = (STOP, 5, 8, 11, 14)
FIELDS = "token_ids", "logprobs"
HAS_VLLM = getattr(find_spec("vllm"), "origin", None) is not None  # `tests/vllm` has no origin
"""True in `.venv-vllm`."""
HEAD = 32 if HAS_VLLM else 8
"""Elements of a head; 32 is the least that vLLM has kernels for on a CPU."""
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 4 * HEAD,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=HEAD, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2-window": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "llama": LlamaConfig(**SHAPE),
    "qwen3-experts": Qwen3MoeConfig(
        **SHAPE,
        head_dim=HEAD,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",  # torch's grouped products know no float64
    ),
}


def model_of(name: str = "qwen3", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model; float64 unless told, so that equality means equality of the maths."""
    torch.manual_seed(0)
    # A wide init makes the distribution peaked, so that a wrong mask cannot pass.
    config = copy.deepcopy(CONFIGS[name])
    config.initializer_range = 0.3 * (8 / HEAD) ** 0.5
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


def torch_engine(model: PreTrainedModel, **options: object) -> TorchEngine:
    model.to(DEVICE)
    use_layout_attention(model)
    settings: dict[str, object] = {"slots": 8, "prefill_tokens": 64} | options
    return TorchEngine(model, **settings)  # type: ignore[arg-type]


def fp32_engine(model: PreTrainedModel, **options: object) -> TorchEngine:
    """On a CPU it decodes from merged weights."""
    return torch_engine(model.float(), **options)


def engine_group(count: int) -> Callable[..., Engine]:
    """Several engines that share the slots, at least one each, and the model."""

    def make(model: PreTrainedModel, slots: int = 8, **options: object) -> Engine:
        engines = min(count, slots)
        shares = [slots // engines + (i < slots % engines) for i in range(engines)]
        return EngineGroup([torch_engine(model, slots=s, **options) for s in shares], True)

    return make


class Wire:
    """A worker as another process would have it: what goes there and comes back is pickled."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        assert rank == 0
        args = pickle.loads(pickle.dumps(args))
        result = await getattr(self._worker, method)(*args)
        await asyncio.sleep(0)
        return pickle.loads(pickle.dumps(result))


def remote_engine(model: PreTrainedModel, **options: object) -> Engine:
    engine = torch_engine(model, **options)
    return RemoteEngine(Wire(EngineWorker(engine)), Reply(None, [], engine.status()))


@dataclass(frozen=True, eq=False)
class Kind:
    """How an engine is made, and how far its promises go."""

    make: Callable[..., Engine]
    dtype: torch.dtype = torch.float64
    """Dtype of its weights. A model's values are those of float32 in any case."""
    tolerance: float = 1e-5
    """Nats by which a log-prob may differ from the reference in float64."""
    rounding: float = 1e-6
    """Nats by which a log-prob may differ from that of the same answer in another batch."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Models that it refuses to run, with a part of what it says."""

    def __call__(self, model: PreTrainedModel | None = None, **options: Any) -> Engine:
        return self.make(model_of() if model is None else model, **options)


ENGINES = {
    "torch": Kind(torch_engine),
    "torch-fp32": Kind(fp32_engine, torch.float32, 3e-5, 1e-5),
    "group-of-3": Kind(engine_group(3)),
    "remote": Kind(remote_engine),
}


if HAS_VLLM:
    from tests.vllm_engines import vllm_engine

    def remote_vllm_engine(model: PreTrainedModel, **options: Any) -> Engine:
        engine = vllm_engine(model, **options)
        return RemoteEngine(Wire(EngineWorker(engine)), Reply(None, [], engine.status()))

    limits: Any = {
        "dtype": torch.float32,
        "tolerance": 3e-5,  # peaked distributions cost a few rounding errors
        "refused": {"qwen2-window": "Sliding window for some but all layers"},
    }
    ENGINES |= {
        "vllm": Kind(vllm_engine, **limits),
        "remote-vllm": Kind(remote_vllm_engine, **limits),
    }


if place := os.environ.get("WINNOW_ENGINE"):  # a user's own

    def users_engine(
        model: PreTrainedModel,
        vocab_size: int = VOCAB,
        decode: Callable[[Sequence[int]], str] = repr,
        live_updates: bool = False,
        **options: Any,
    ) -> Engine:
        """Slots and other options of our own engine go along, for those that have them."""
        use_layout_attention(model.to(DEVICE))
        given = {"vocab_size": vocab_size, "decode": decode, "live_updates": live_updates}
        assert place
        return load_custom_engine(place, {"slots": 8, **options}, model=model, **given)

    ENGINES = {"custom": Kind(users_engine)}


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest) -> Kind:
    return ENGINES[request.param]


def groups_of(
    count: int = 5,
    n: int = 3,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    vocabulary: int = VOCAB,
) -> list[GroupRequest]:
    rng = np.random.default_rng(seed)
    sampling = sampling or SamplingParams(max_tokens=24, stop_token_ids=STOPS)
    return [
        GroupRequest(
            group_id=g,
            prompt_ids=rng.integers(3, vocabulary, rng.integers(1, 9)),
            answers=tuple(AnswerRequest(i, seed=2**63 + 1000 * g + i) for i in range(n)),
            sampling=sampling,
            priority=g,
        )
        for g in range(count)
    ]


def drain(engine: Engine, groups: Sequence[GroupRequest]) -> dict[tuple[int, int], CompletionEvent]:
    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        return await to_the_end(engine)

    events = asyncio.run(run())
    by_answer = {(e.group_id, e.answer): e for e in events}
    assert len(by_answer) == len(events), "an answer came back twice"
    return by_answer


@cache
def undisturbed(kind: Kind, **asked: Any) -> dict[tuple[int, int], CompletionEvent]:
    """What an engine of a kind writes when nothing comes between; no test has it for itself.

    Args:
        asked: as for `groups_of`.
    """
    return drain(kind(), groups_of(**asked))


async def to_the_end(engine: Engine) -> list[CompletionEvent]:
    out: list[CompletionEvent] = []
    while events := await engine.events():
        out += events
    return out


def resumed(
    groups: Sequence[GroupRequest], events: Sequence[CompletionEvent]
) -> list[GroupRequest]:
    """Requests for what was aborted, behind what had been written of it."""
    begun = {event.key: event.segment for event in events if event.kind == "aborted"}
    asked = []
    for group in groups:
        keys = {answer.index: (group.group_id, answer.index) for answer in group.answers}
        answers = tuple(
            replace(answer, prefix=begun[keys[answer.index]])
            for answer in group.answers
            if keys[answer.index] in begun
        )
        asked += [replace(group, answers=answers)] if answers else []
    return asked


def assert_begins(got: Segment, want: Segment) -> None:
    """The tokens of one are the first of the other."""
    np.testing.assert_array_equal(got.token_ids, want.token_ids[: len(got)])


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: np.ndarray, answer: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of the answer by Hugging Face's own eager attention, one sequence, no cache."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


WRAPPED = {"group-of-3", "remote"}
"""Around an engine that runs the model, which is no concern of theirs."""


@pytest.mark.parametrize(
    ("make_engine", "name"),
    [(kind, name) for kind in ENGINES for name in (CONFIGS if kind not in WRAPPED else ["qwen3"])],
    indirect=["make_engine"],
)
def test_logprobs_equal_an_eager_forward_pass(make_engine: Kind, name: str) -> None:
    groups = groups_of(
        sampling=SamplingParams(max_tokens=24, temperature=0.7, stop_token_ids=(STOP,))
    )
    if name in make_engine.refused:
        with pytest.raises(ModelError, match=make_engine.refused[name]):
            make_engine(model_of(name))
        return
    done = drain(make_engine(model_of(name)), groups)
    assert len(done) == 15
    reference = model_of(name)
    for (group, _), event in done.items():
        want = reference_logprobs(
            reference, groups[group].prompt_ids, event.segment.token_ids, temperature=0.7
        )
        np.testing.assert_allclose(event.segment.logprobs, want, atol=make_engine.tolerance)


def test_the_ends_of_fixed_sequences_are_scored_while_answers_run(make_engine: Kind) -> None:
    engine = make_engine(vocab_size=30, live_updates=True)
    each: Any = engine.engines.values() if isinstance(engine, EngineGroup) else [engine]
    if not all(hasattr(one, "logprobs_of") for one in each):
        pytest.skip("needed only of an engine with weights of its own")
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 30, length) for length in (2, 5, 1, 6, 7, 120)]
    groups = groups_of(sampling=SamplingParams(max_tokens=24))

    async def run() -> tuple[list[CompletionEvent], list[list[np.ndarray]]]:
        await engine.submit(groups)
        out = list(await engine.events(until=9))
        found = [await one.logprobs_of(sequences, 0.7, 5) for one in each]
        return out + await to_the_end(engine), found

    events, found = asyncio.run(run())
    reference = model_of()
    ids = [torch.from_numpy(sequence)[None] for sequence in sequences]
    with torch.no_grad():
        logits = [reference(input_ids=row, use_cache=False).logits[0, :-1, :30] for row in ids]
    for scored in found:
        for row, values, got in zip(ids, logits, scored, strict=True):
            want = torch.log_softmax(values / 0.7, -1).gather(1, row[0, 1:, None])[-5:, 0]
            np.testing.assert_allclose(got, want.numpy(), atol=make_engine.tolerance)
    # Answers under way wrote what they would have written, and nothing else was counted.
    whole = drain(make_engine(vocab_size=30), groups)
    for event in events:
        assert_begins(whole[event.key].segment, event.segment)
    assert len(events) == len(whole)
    assert engine.status().generated_tokens == sum(len(e.segment) for e in events)


def test_greedy_answers_equal_hugging_face_generate(make_engine: Kind) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(STOP,))
    groups = groups_of(sampling=sampling, n=1)
    done = drain(make_engine(), groups)
    reference = model_of()
    for group in groups:
        ids = torch.from_numpy(group.prompt_ids)[None]
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=STOP,
            pad_token_id=0,
        )
        answer = done[group.group_id, 0].segment.token_ids
        np.testing.assert_array_equal(answer, out[0, ids.shape[1] :].numpy())


@pytest.mark.bits
def test_slots_and_neighbours_do_not_change_an_answer(make_engine: Kind) -> None:
    groups = groups_of()
    wide = drain(make_engine(slots=32), groups)
    narrow = drain(make_engine(slots=2, prefill_tokens=1), groups)
    alone = drain(make_engine(), groups[3:4])
    for key, event in wide.items():
        assert_begins(narrow[key].segment, event.segment)
    for key, event in alone.items():
        assert_begins(wide[key].segment, event.segment)


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_aborted_answer_resumes_exactly_and_keeps_its_versions(
    make_engine: Kind, sleeps: bool
) -> None:
    """With one greedy answer to each prompt."""
    groups = with_greedy_last(groups_of())
    whole = drain(make_engine(), groups)
    engine: Any = make_engine()
    if sleeps and not hasattr(engine, "sleep"):
        pytest.skip("it cannot sleep")

    async def interrupted() -> list[CompletionEvent]:
        await engine.submit(groups)
        out = list(await engine.events())
        if sleeps:
            with pytest.raises(ValueError, match="abort what runs before the engine sleeps"):
                await engine.sleep()
        await engine.abort([g.group_id for g in groups])
        out += await engine.events()
        assert await engine.events() == []
        assert engine.status().running == engine.status().queued == 0
        return out

    async def publish() -> None:
        if sleeps:
            await engine.sleep()
            await engine.wake("weights")
        await engine.load_weights(WeightUpdate(version=1))
        if sleeps:
            await engine.wake("cache")

    events = asyncio.run(interrupted())
    assert len(events) == 15
    aborted = [e for e in events if e.kind == "aborted"]
    assert any(len(e.segment) for e in aborted)
    assert any(not len(e.segment) for e in aborted), "no answer was still queued"
    asyncio.run(publish())
    done = drain(engine, resumed(groups, aborted))
    for event in aborted:
        got, want = done[event.key].segment, whole[event.key].segment
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=make_engine.rounding)
        spans = [(s.version, s.stop) for s in got.spans]
        begun = [(0, len(event.segment))] if len(event.segment) else []
        assert spans == [*begun, (1, len(got))]
    fresh = sum(len(e.segment) for e in [*done.values()])
    finished_before = sum(len(e.segment) for e in events if e.kind == "finished")
    assert engine.status().generated_tokens == fresh + finished_before


def test_the_limit_truncates_and_counts_the_prefix(make_engine: Kind) -> None:
    prefix = Segment(np.array([5, 6, 7]), np.zeros(3, np.float32), ())
    request = GroupRequest(
        0, np.array([4]), (AnswerRequest(0, 1, prefix),), SamplingParams(max_tokens=5), 0
    )
    event = drain(make_engine(), [request])[0, 0]
    assert event.finish_reason == "length"
    assert len(event.segment) == 5
    np.testing.assert_array_equal(event.segment.token_ids[:3], [5, 6, 7])


def test_a_stop_token_ends_an_answer_and_stays_in_it(make_engine: Kind) -> None:
    done = undisturbed(make_engine)
    stopped = [e for e in done.values() if e.finish_reason == "stop"]
    assert stopped
    for event in done.values():
        ids = event.segment.token_ids
        if event.finish_reason == "stop":
            assert ids[-1] in STOPS
            assert not set(STOPS) & set(ids[:-1].tolist())
        else:
            assert len(ids) == 24
            assert not set(STOPS) & set(ids.tolist())


def test_a_stop_string_ends_an_answer(make_engine: Kind) -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)

    free = undisturbed(make_engine, sampling=SamplingParams(24))
    text = decode(free[0, 0].segment.token_ids)
    stop = text[3:5]
    asked = groups_of(sampling=SamplingParams(24, stop=(stop,)))
    stopped = drain(make_engine(decode=decode), asked)
    got = decode(stopped[0, 0].segment.token_ids)
    assert got == text[: text.index(stop) + len(stop)]
    assert stopped[0, 0].finish_reason == "stop"


def test_ids_beyond_the_tokenizer_are_never_drawn(make_engine: Kind) -> None:
    engine = make_engine(vocab_size=20)
    groups = groups_of(sampling=SamplingParams(max_tokens=24))
    for group in groups:
        group.prompt_ids[:] %= 20
    done = drain(engine, groups)
    assert max(e.segment.token_ids.max() for e in done.values()) < 20
    assert all((e.segment.logprobs <= 0).all() for e in done.values())


NARROW: tuple[dict[str, Any], ...] = ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999})


@pytest.mark.parametrize(
    ("make_engine", "narrow"),
    [(kind, each) for kind in ENGINES for each in NARROW[: 1 if kind in WRAPPED else 3]],
    indirect=["make_engine"],
)
def test_a_support_of_one_token_is_greedy(make_engine: Kind, narrow: dict[str, Any]) -> None:
    greedy = undisturbed(make_engine, sampling=SamplingParams(16, 0.0))
    sampled = drain(make_engine(), groups_of(sampling=SamplingParams(16, **narrow)))
    for key, event in greedy.items():
        assert_begins(sampled[key].segment, event.segment)


def with_greedy_last(groups: Sequence[GroupRequest]) -> list[GroupRequest]:
    """The same requests, but the last answer of each is greedy."""
    return [
        replace(group, answers=(*group.answers[:-1], replace(group.answers[-1], greedy=True)))
        for group in groups
    ]


@pytest.mark.parametrize(
    ("make_engine", "slots", "narrow"),
    [
        *((kind, 4, {"top_p": 0.8, "top_k": 9}) for kind in ENGINES),
        *((kind, 32, {}) for kind in ENGINES if kind not in WRAPPED),
    ],
    indirect=["make_engine"],
)
def test_a_greedy_answer_beside_sampled_ones_is_that_of_a_greedy_request(
    make_engine: Kind, slots: int, narrow: dict[str, float]
) -> None:
    sampling = SamplingParams(24, 0.7, stop_token_ids=STOPS, **narrow)  # type: ignore[arg-type]
    groups = groups_of(n=4, sampling=sampling)
    greedy = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=STOPS)
    want = undisturbed(make_engine, n=4, sampling=sampling)
    likeliest = undisturbed(make_engine, n=1, sampling=greedy)
    engine = make_engine(slots=slots)
    got = drain(engine, with_greedy_last(groups))
    assert engine.status().generated_tokens == sum(len(e.segment) for e in got.values())
    for (group, answer), event in got.items():
        same = likeliest[group, 0] if answer == 3 else want[group, answer]
        np.testing.assert_array_equal(event.segment.token_ids, same.segment.token_ids)
        assert event.finish_reason == same.finish_reason
        # A greedy answer's log-probs are under softmax(logits), whatever its neighbours' are.
        prompt, ids = groups[group].prompt_ids, event.segment.token_ids
        temperature = 1.0 if answer == 3 else 0.7
        logprobs = reference_logprobs(model_of(), prompt, ids, temperature)
        np.testing.assert_allclose(event.segment.logprobs, logprobs, atol=make_engine.tolerance)
    sampled = [want[group, 3].segment.token_ids.tolist() for group in range(len(groups))]
    assert sampled != [got[group, 3].segment.token_ids.tolist() for group in range(len(groups))]


def test_new_weights_are_refused_while_answers_run(make_engine: Kind) -> None:
    engine = make_engine()

    async def run() -> None:
        await engine.submit(groups_of())
        await engine.load_weights(WeightUpdate(version=1))

    with pytest.raises(ValueError, match="abort running answers"):
        asyncio.run(run())


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_answers_of_a_model_that_is_not_finite_are_no_answers(
    make_engine: Kind, temperature: float
) -> None:
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    engine = make_engine(model)
    says = r"^(engine 0: )?the engine gave nan as the log-prob of token 0 of answer 0 of group 0: "
    with pytest.raises(TrainingError, match=says):
        drain(engine, groups_of(1, 1, SamplingParams(4, temperature)))


def test_an_event_without_a_log_prob_for_each_token_is_refused() -> None:
    segment = Segment(np.arange(3), np.zeros(2, np.float32), ())
    with pytest.raises(TrainingError, match="gave nothing as the log-prob of token 2 of answer 1"):
        CompletionEvent(5, 1, "finished", segment, "stop", 0)


def other_weights(kind: Kind) -> tuple[PreTrainedModel, list[tuple[str, torch.Tensor]]]:
    """A model that writes other things, and its tensors as they are published."""
    other = model_of()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.3)
    return other, [(n, p.detach().to(kind.dtype)) for n, p in other.named_parameters()]


def test_fresh_answers_follow_priority_and_prefixes_go_first(make_engine: Kind) -> None:
    sampling = SamplingParams(max_tokens=6)
    prefix = Segment(np.array([5, 6]), np.zeros(2, np.float32), ())
    requests = [
        GroupRequest(10, np.array([3, 4]), (AnswerRequest(0, 1),), sampling, 5),
        GroupRequest(11, np.array([3, 5]), (AnswerRequest(0, 2),), sampling, 1),
        GroupRequest(12, np.array([3, 6]), (AnswerRequest(0, 3, prefix),), sampling, 9),
    ]
    done = drain(make_engine(slots=1), requests)
    assert sorted(done, key=lambda key: done[key].tick) == [(12, 0), (11, 0), (10, 0)]


def test_events_end_at_the_tick_asked_for(make_engine: Kind) -> None:
    engine = make_engine()

    async def run() -> None:
        await engine.submit(groups_of(sampling=SamplingParams(max_tokens=24)))
        assert await engine.events(until=3) == []
        assert engine.status().tick == 3
        assert await engine.events(until=3) == []
        assert engine.status().tick == 3
        assert len(await engine.events(until=100)) == 8
        assert engine.status().tick == 24

    asyncio.run(run())


def test_a_cancelled_wait_for_events_loses_none(make_engine: Kind) -> None:
    groups, whole = groups_of(), undisturbed(make_engine)
    engine = make_engine()

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        out: list[CompletionEvent] = []
        cancelled = 0
        while len(out) < len(whole):
            waiting = asyncio.ensure_future(engine.events())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            cancelled += waiting.cancelled()
            out += [] if waiting.cancelled() else waiting.result()
        assert cancelled > 5
        return out

    events = asyncio.run(run())
    assert {(e.group_id, e.answer) for e in events} == set(whole)


def test_progress_interrupts_nothing_and_tells_every_token(make_engine: Kind) -> None:
    groups, whole = groups_of(count=10), undisturbed(make_engine, count=10)
    engine = make_engine()

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        out: list[CompletionEvent] = []
        seen = 0
        while events := await engine.events():
            told = await engine.progress()
            seen += len(told)
            out += events
            assert all(e.kind == "running" for e in told)
            assert len(told) == engine.status().running
            tokens = sum(len(e.segment) for e in [*out, *told])
            assert tokens == engine.status().generated_tokens
            for event in told:
                assert_begins(event.segment, whole[event.key].segment)
        assert seen > 10
        return out

    events = asyncio.run(run())
    assert len(events) == len(whole)
    for event in events:
        assert_begins(whole[event.key].segment, event.segment)


def test_progress_reports_first_what_a_cancelled_wait_left(make_engine: Kind) -> None:
    engine = make_engine()

    async def run() -> None:
        await engine.submit(groups_of(sampling=SamplingParams(max_tokens=1)))
        waiting = asyncio.ensure_future(engine.events())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        told: list[CompletionEvent] = []
        for _ in range(100):  # where the wait ended before the first tick, that goes on elsewhere
            told += [e for e in await engine.progress() if e.kind != "running"]
            if told:
                break
            await asyncio.sleep(0)
        assert {e.kind for e in told} == {"finished"}
        told += await to_the_end(engine)
        assert len({(e.group_id, e.answer) for e in told}) == len(told) == 15

    asyncio.run(run())


def test_answers_go_on_across_new_weights_and_say_which_wrote_what(make_engine: Kind) -> None:
    groups = groups_of(sampling=SamplingParams(max_tokens=24))
    engine = make_engine(live_updates=True)
    assert engine.status().live_updates
    other, tensors = other_weights(make_engine)

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        assert await engine.events(until=9) == []
        await engine.load_weights(WeightUpdate(version=3))
        assert await engine.events(until=14) == []
        await engine.load_weights(WeightUpdate(version=4, tensors=tensors))
        return await to_the_end(engine)

    done = {e.key: e for e in asyncio.run(run())}
    whole = undisturbed(make_engine, sampling=SamplingParams(24))
    assert set(done) == set(whole)
    begun = sorted(done)[:8]
    for key, event in done.items():
        got, want = event.segment, whole[key].segment
        prompt = groups[key[0]].prompt_ids
        if key in begun:
            assert [(s.version, s.stop) for s in got.spans] == [(0, 9), (3, 14), (4, 24)]
            # Weights that did not change leave the answer as it would have been.
            np.testing.assert_array_equal(got.token_ids[:14], want.token_ids[:14])
            assert not np.array_equal(got.token_ids[14:], want.token_ids[14:])
        else:
            # Prefilled before the weights changed or not, it begins with the new ones.
            assert [(s.version, s.stop) for s in got.spans] == [(4, 24)]
            want_logprobs = reference_logprobs(other, prompt, got.token_ids)
            np.testing.assert_allclose(got.logprobs, want_logprobs, atol=make_engine.tolerance)


@pytest.mark.parametrize("between", ["nothing", "an abort", "new weights", "sleep"])
def test_a_turn_continues_where_its_keys_are_unless_a_resumed_run_has_none(
    make_engine: Kind, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [0]

    def count(owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def counted(self: Any, ids: torch.Tensor, *others: Any) -> Any:
            tokens[0] += len(ids)
            return run(self, ids, *others)

        monkeypatch.setattr(owner, name, counted)

    count(TorchEngine, "_run")
    count(MergedForward, "logits")
    first = groups_of(sampling=SamplingParams(60, stop_token_ids=STOPS))
    first = [
        replace(g, answers=tuple(replace(a, retain_cache=True) for a in g.answers)) for g in first
    ]
    reply = Segment(np.array([3, 4, 6]), np.zeros(3, np.float32), ())
    engine: Any = make_engine(slots=32)
    turns = drain(engine, first)
    following = []
    for group in first:
        written = [turns[group.group_id, answer.index].segment for answer in group.answers]
        prefixes = [
            Segment(*(np.concatenate([getattr(s, k), getattr(reply, k)]) for k in FIELDS), s.spans)
            for s in written
        ]
        answers = zip(group.answers, prefixes, strict=True)
        following.append(replace(group, answers=tuple(replace(a, prefix=p) for a, p in answers)))
    if between == "an abort":
        asyncio.run(engine.abort([group.group_id for group in first]))
    elif between == "new weights":
        asyncio.run(engine.load_weights(WeightUpdate(version=1)))
    elif between == "sleep":
        asyncio.run(engine.sleep())
        for part in get_args(MemoryPart):
            asyncio.run(engine.wake(part))
    tokens[0] = 0
    done = drain(engine, following)
    new = sum(len(done[key].segment) - len(turns[key].segment) for key in done)
    begun = sum(
        len(g.prompt_ids) + len(turns[g.group_id, i].segment) - 1 for g in first for i in range(3)
    )
    if tokens[0]:  # it is ours that runs the model
        assert tokens[0] == (new if between == "nothing" else new + begun)
    for key, event in drain(make_engine(slots=32), following).items():
        np.testing.assert_array_equal(done[key].segment.token_ids, event.segment.token_ids)
        want = event.segment.logprobs
        np.testing.assert_allclose(done[key].segment.logprobs, want, atol=make_engine.rounding)


def test_the_abort_of_one_group_leaves_what_the_others_write(make_engine: Kind) -> None:
    groups, whole = groups_of(), undisturbed(make_engine)
    engine = make_engine()

    async def interrupted() -> list[CompletionEvent]:
        await engine.submit(groups)
        out = list(await engine.events())
        await engine.abort([groups[0].group_id])
        while engine.status().running + engine.status().queued:
            out += await engine.events()
        return out

    events = asyncio.run(interrupted())
    assert sorted((e.group_id, e.answer) for e in events) == sorted(whole)
    aborted = [e for e in events if e.kind == "aborted"]
    assert any(len(e.segment) for e in aborted)
    assert {e.group_id for e in aborted} == {groups[0].group_id}
    for event in events:
        got, want = event.segment, whole[event.key].segment
        assert_begins(got, want)
        begun = want.logprobs[: len(got)]
        np.testing.assert_allclose(got.logprobs, begun, atol=make_engine.rounding)
