"""What every rollout engine promises, run against each implementation with a real tiny model."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from winnow.errors import ModelError
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    Engine,
    GroupRequest,
    SamplingParams,
    WeightUpdate,
    load_custom_engine,
)
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import EngineWorker, RemoteEngine, Reply
from winnow.rollout.torch_engine import TorchEngine
from winnow.types import Segment

VOCAB = 40
STOP = 2
STOPS = (STOP, 5, 8, 11, 14)
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


def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model; float64 unless told, so that equality means equality of the maths."""
    torch.manual_seed(0)
    # A wide init makes the distribution peaked, so that a wrong mask cannot pass.
    config = copy.deepcopy(CONFIGS[name])
    config.initializer_range = 0.3 * (8 / HEAD) ** 0.5
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


def torch_engine(model: PreTrainedModel, **options: object) -> TorchEngine:
    use_layout_attention(model)
    settings: dict[str, object] = {"slots": 8, "prefill_tokens": 64} | options
    return TorchEngine(model, **settings)  # type: ignore[arg-type]


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


@dataclass(frozen=True)
class Kind:
    """How an engine is made, and how far its promises go."""

    make: Callable[..., Engine]
    dtype: torch.dtype = torch.float64
    """Dtype of its weights. A model's values are those of float32 in any case."""
    tolerance: float = 1e-5
    """Nats by which a log-prob may differ from the reference in float64."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Models that it refuses to run, with a part of what it says."""

    def __call__(self, model: PreTrainedModel, **options: Any) -> Engine:
        return self.make(model, **options)


ENGINES = {
    "torch": Kind(torch_engine),
    "group-of-1": Kind(engine_group(1)),
    "group-of-2": Kind(engine_group(2)),
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
        use_layout_attention(model)
        given = {"vocab_size": vocab_size, "decode": decode, "live_updates": live_updates}
        assert place
        return load_custom_engine(place, {"slots": 8, **options}, model=model, **given)

    ENGINES = {"custom": Kind(users_engine)}


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest) -> Kind:
    return ENGINES[request.param]


def groups_of(
    count: int = 5, n: int = 3, sampling: SamplingParams | None = None, seed: int = 0
) -> list[GroupRequest]:
    rng = np.random.default_rng(seed)
    sampling = sampling or SamplingParams(max_tokens=24, stop_token_ids=STOPS)
    return [
        GroupRequest(
            group_id=g,
            prompt_ids=rng.integers(3, VOCAB, rng.integers(1, 9)),
            answers=tuple(AnswerRequest(i, seed=2**63 + 1000 * g + i) for i in range(n)),
            sampling=sampling,
            priority=g,
        )
        for g in range(count)
    ]


def drain(engine: Engine, groups: Sequence[GroupRequest]) -> dict[tuple[int, int], CompletionEvent]:
    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        out: list[CompletionEvent] = []
        while events := await engine.events():
            out += events
        return out

    events = asyncio.run(run())
    by_answer = {(e.group_id, e.answer): e for e in events}
    assert len(by_answer) == len(events), "an answer came back twice"
    return by_answer


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: np.ndarray, answer: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of the answer by Hugging Face's own eager attention, one sequence, no cache."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logp.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("name", CONFIGS)
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


def test_the_ends_of_fixed_sequences_are_scored_while_answers_run(
    make_engine: Kind,
) -> None:
    engine = make_engine(model_of("qwen3"), vocab_size=30, live_updates=True)
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
        while events := await engine.events():
            out += events
        return out, found

    events, found = asyncio.run(run())
    reference = model_of("qwen3")
    ids = [torch.from_numpy(sequence)[None] for sequence in sequences]
    with torch.no_grad():
        logits = [reference(input_ids=row, use_cache=False).logits[0, :-1, :30] for row in ids]
    for scored in found:
        for row, values, got in zip(ids, logits, scored, strict=True):
            want = torch.log_softmax(values / 0.7, -1).gather(1, row[0, 1:, None])[-5:, 0]
            np.testing.assert_allclose(got, want.numpy(), atol=make_engine.tolerance)
    # Answers under way wrote what they would have written, and nothing else was counted.
    undisturbed = drain(make_engine(model_of("qwen3"), vocab_size=30), groups)
    for event in events:
        want_ids = undisturbed[event.key].segment.token_ids
        np.testing.assert_array_equal(event.segment.token_ids, want_ids)
    assert len(events) == len(undisturbed)
    assert engine.status().generated_tokens == sum(len(e.segment) for e in events)


def test_greedy_answers_equal_hugging_face_generate(make_engine: Kind) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(STOP,))
    groups = groups_of(sampling=sampling, n=1)
    done = drain(make_engine(model_of("qwen3")), groups)
    reference = model_of("qwen3")
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


def test_slots_and_neighbours_do_not_change_an_answer(make_engine: Kind) -> None:
    groups = groups_of()
    wide = drain(make_engine(model_of("qwen3"), slots=32), groups)
    narrow = drain(make_engine(model_of("qwen3"), slots=2, prefill_tokens=1), groups)
    alone = drain(make_engine(model_of("qwen3")), groups[3:4])
    for key, event in wide.items():
        np.testing.assert_array_equal(event.segment.token_ids, narrow[key].segment.token_ids)
    for key, event in alone.items():
        np.testing.assert_array_equal(event.segment.token_ids, wide[key].segment.token_ids)


def test_prompts_of_very_different_lengths_share_a_prefill(
    make_engine: Kind,
) -> None:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=4, stop_token_ids=STOPS)
    groups = [
        GroupRequest(g, rng.integers(3, VOCAB, length), (AnswerRequest(0, g),), sampling, g)
        for g, length in enumerate([10, 200, 1, 90])
    ]
    narrow = drain(make_engine(model_of("qwen3"), slots=1, prefill_tokens=4096), groups)
    for group in groups:
        alone = drain(make_engine(model_of("qwen3")), [group])
        key = (group.group_id, 0)
        np.testing.assert_array_equal(narrow[key].segment.token_ids, alone[key].segment.token_ids)


def test_an_aborted_answer_resumes_exactly_and_keeps_its_versions(
    make_engine: Kind,
) -> None:
    groups = groups_of()
    whole = drain(make_engine(model_of("qwen3")), groups)
    engine = make_engine(model_of("qwen3"))

    async def interrupted() -> list[CompletionEvent]:
        await engine.submit(groups)
        out = list(await engine.events())
        await engine.abort([g.group_id for g in groups])
        out += await engine.events()
        assert await engine.events() == []
        assert engine.status().running == engine.status().queued == 0
        return out

    events = asyncio.run(interrupted())
    assert len(events) == 15
    aborted = [e for e in events if e.kind == "aborted"]
    assert any(len(e.segment) for e in aborted)
    assert any(not len(e.segment) for e in aborted), "no answer was still queued"
    asyncio.run(engine.load_weights(WeightUpdate(version=1)))
    again = [
        GroupRequest(
            e.group_id,
            groups[e.group_id].prompt_ids,
            (AnswerRequest(e.answer, 2**63 + 1000 * e.group_id + e.answer, e.segment),),
            groups[e.group_id].sampling,
            e.group_id,
        )
        for e in aborted
    ]
    resumed = drain(engine, again)
    for event in aborted:
        key = (event.group_id, event.answer)
        got, want = resumed[key].segment, whole[key].segment
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-6)
        spans = [(s.version, s.stop) for s in got.spans]
        begun = [(0, len(event.segment))] if len(event.segment) else []
        assert spans == [*begun, (1, len(got))]
    fresh = sum(len(e.segment) for e in [*resumed.values()])
    finished_before = sum(len(e.segment) for e in events if e.kind == "finished")
    assert engine.status().generated_tokens == fresh + finished_before


def test_the_limit_truncates_and_counts_the_prefix(make_engine: Kind) -> None:
    prefix = Segment(np.array([5, 6, 7]), np.zeros(3, np.float32), ())
    request = GroupRequest(
        0, np.array([4]), (AnswerRequest(0, 1, prefix),), SamplingParams(max_tokens=5), 0
    )
    event = drain(make_engine(model_of("qwen3")), [request])[0, 0]
    assert event.finish_reason == "length"
    assert len(event.segment) == 5
    np.testing.assert_array_equal(event.segment.token_ids[:3], [5, 6, 7])


def test_a_stop_token_ends_an_answer_and_stays_in_it(make_engine: Kind) -> None:
    done = drain(make_engine(model_of("qwen3")), groups_of(count=20, n=4))
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

    free = drain(
        make_engine(model_of("qwen3"), decode=decode), groups_of(sampling=SamplingParams(24))
    )
    text = decode(free[0, 0].segment.token_ids)
    stop = text[3:5]
    stopped = drain(
        make_engine(model_of("qwen3"), decode=decode),
        groups_of(sampling=SamplingParams(24, stop=(stop,))),
    )
    got = decode(stopped[0, 0].segment.token_ids)
    assert got == text[: text.index(stop) + len(stop)]
    assert stopped[0, 0].finish_reason == "stop"


def test_ids_beyond_the_tokenizer_are_never_drawn(
    make_engine: Kind,
) -> None:
    engine = make_engine(model_of("qwen3"), vocab_size=20)
    groups = groups_of(sampling=SamplingParams(max_tokens=24))
    for group in groups:
        group.prompt_ids[:] %= 20
    done = drain(engine, groups)
    assert max(e.segment.token_ids.max() for e in done.values()) < 20
    assert all((e.segment.logprobs <= 0).all() for e in done.values())


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999}], ids=lambda d: next(iter(d))
)
def test_a_support_of_one_token_is_greedy(make_engine: Kind, narrow: dict[str, float]) -> None:
    greedy = drain(
        make_engine(model_of("qwen3")),
        groups_of(sampling=SamplingParams(max_tokens=16, temperature=0.0)),
    )
    sampled = drain(
        make_engine(model_of("qwen3")),
        groups_of(sampling=SamplingParams(max_tokens=16, **narrow)),  # type: ignore[arg-type]
    )
    for key, event in greedy.items():
        np.testing.assert_array_equal(event.segment.token_ids, sampled[key].segment.token_ids)


def test_rows_with_different_settings_decode_side_by_side(
    make_engine: Kind,
) -> None:
    plain = groups_of(count=4, sampling=SamplingParams(max_tokens=16))
    greedy = groups_of(count=4, sampling=SamplingParams(max_tokens=16, temperature=0.0))
    mixed = [plain[0], greedy[1], plain[2], greedy[3]]
    want_plain = drain(make_engine(model_of("qwen3")), plain)
    want_greedy = drain(make_engine(model_of("qwen3")), greedy)
    got = drain(make_engine(model_of("qwen3"), slots=32), mixed)
    for (group, answer), event in got.items():
        want = (want_greedy if group % 2 else want_plain)[group, answer]
        np.testing.assert_array_equal(event.segment.token_ids, want.segment.token_ids)


def with_greedy_last(groups: Sequence[GroupRequest]) -> list[GroupRequest]:
    """The same requests, but the last answer of each is greedy."""
    return [
        replace(group, answers=(*group.answers[:-1], replace(group.answers[-1], greedy=True)))
        for group in groups
    ]


@pytest.mark.parametrize("slots", [4, 32])
@pytest.mark.parametrize("narrow", [{}, {"top_p": 0.8, "top_k": 9}], ids=str)
def test_a_greedy_answer_beside_sampled_ones_is_that_of_a_greedy_request(
    make_engine: Kind, slots: int, narrow: dict[str, float]
) -> None:
    sampling = SamplingParams(24, 0.7, stop_token_ids=STOPS, **narrow)  # type: ignore[arg-type]
    groups = groups_of(n=4, sampling=sampling)
    greedy = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=STOPS)
    want = drain(make_engine(model_of("qwen3"), slots=slots), groups)
    likeliest = drain(make_engine(model_of("qwen3")), groups_of(n=1, sampling=greedy))
    engine = make_engine(model_of("qwen3"), slots=slots)
    got = drain(engine, with_greedy_last(groups))
    assert engine.status().generated_tokens == sum(len(e.segment) for e in got.values())
    for (group, answer), event in got.items():
        same = likeliest[group, 0] if answer == 3 else want[group, answer]
        np.testing.assert_array_equal(event.segment.token_ids, same.segment.token_ids)
        assert event.finish_reason == same.finish_reason
        # A greedy answer's log-probs are under softmax(logits), whatever its neighbours' are.
        prompt, ids = groups[group].prompt_ids, event.segment.token_ids
        temperature = 1.0 if answer == 3 else 0.7
        logprobs = reference_logprobs(model_of("qwen3"), prompt, ids, temperature)
        np.testing.assert_allclose(event.segment.logprobs, logprobs, atol=make_engine.tolerance)
    sampled = [want[group, 3].segment.token_ids.tolist() for group in range(len(groups))]
    assert sampled != [got[group, 3].segment.token_ids.tolist() for group in range(len(groups))]


def test_a_greedy_answer_beside_sampled_ones_resumes_as_one(
    make_engine: Kind,
) -> None:
    groups = with_greedy_last(groups_of(sampling=SamplingParams(max_tokens=24, temperature=0.7)))
    undisturbed = drain(make_engine(model_of("qwen3"), slots=32), groups)
    engine = make_engine(model_of("qwen3"), slots=32)

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        await engine.events(until=7)
        await engine.abort([group.group_id for group in groups])
        prefixes = {(e.group_id, e.answer): e.segment for e in await engine.events()}
        assert {len(prefix) for prefix in prefixes.values()} == {7}
        await engine.submit(
            [
                replace(
                    group,
                    answers=tuple(
                        replace(a, prefix=prefixes[group.group_id, a.index]) for a in group.answers
                    ),
                )
                for group in groups
            ]
        )
        out: list[CompletionEvent] = []
        while events := await engine.events():
            out += events
        return out

    events = asyncio.run(run())
    assert len(events) == len(undisturbed) == 15
    for event in events:
        whole = undisturbed[event.group_id, event.answer].segment
        np.testing.assert_array_equal(event.segment.token_ids, whole.token_ids)


def test_new_weights_are_refused_while_answers_run(make_engine: Kind) -> None:
    engine = make_engine(model_of("qwen3"))

    async def run() -> None:
        await engine.submit(groups_of())
        await engine.load_weights(WeightUpdate(version=1))

    with pytest.raises(ValueError, match="abort what runs"):
        asyncio.run(run())


def test_given_tensors_change_what_is_written(make_engine: Kind) -> None:
    engine = make_engine(model_of("qwen3"))
    other = model_of("qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.3)
    tensors = [(n, p.detach().to(make_engine.dtype)) for n, p in other.named_parameters()]
    asyncio.run(engine.load_weights(WeightUpdate(version=4, tensors=tensors)))
    groups = groups_of()
    done = drain(engine, groups)
    for (group, _), event in done.items():
        want = reference_logprobs(other, groups[group].prompt_ids, event.segment.token_ids)
        np.testing.assert_allclose(event.segment.logprobs, want, atol=make_engine.tolerance)
        assert event.segment.spans[0].version == 4


def test_fresh_answers_follow_priority_and_prefixes_go_first(
    make_engine: Kind,
) -> None:
    sampling = SamplingParams(max_tokens=6)
    prefix = Segment(np.array([5, 6]), np.zeros(2, np.float32), ())
    requests = [
        GroupRequest(10, np.array([3, 4]), (AnswerRequest(0, 1),), sampling, 5),
        GroupRequest(11, np.array([3, 5]), (AnswerRequest(0, 2),), sampling, 1),
        GroupRequest(12, np.array([3, 6]), (AnswerRequest(0, 3, prefix),), sampling, 9),
    ]
    done = drain(make_engine(model_of("qwen3"), slots=1), requests)
    assert sorted(done, key=lambda key: done[key].tick) == [(12, 0), (11, 0), (10, 0)]


def test_events_end_at_the_tick_asked_for(make_engine: Kind) -> None:
    engine = make_engine(model_of("qwen3"))

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
    groups = groups_of()
    undisturbed = drain(make_engine(model_of("qwen3")), groups)
    engine = make_engine(model_of("qwen3"))

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        out: list[CompletionEvent] = []
        cancelled = 0
        while len(out) < len(undisturbed):
            waiting = asyncio.ensure_future(engine.events())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            cancelled += waiting.cancelled()
            out += [] if waiting.cancelled() else waiting.result()
        assert cancelled > 5
        return out

    events = asyncio.run(run())
    assert {(e.group_id, e.answer) for e in events} == set(undisturbed)


def test_progress_interrupts_nothing_and_tells_every_token(
    make_engine: Kind,
) -> None:
    groups = groups_of(count=10)
    undisturbed = drain(make_engine(model_of("qwen3")), groups)
    engine = make_engine(model_of("qwen3"))

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
                whole = undisturbed[event.group_id, event.answer].segment
                count = len(event.segment)
                np.testing.assert_array_equal(event.segment.token_ids, whole.token_ids[:count])
        assert seen > 10
        return out

    events = asyncio.run(run())
    assert len(events) == len(undisturbed)
    for event in events:
        whole = undisturbed[event.group_id, event.answer].segment
        np.testing.assert_array_equal(event.segment.token_ids, whole.token_ids)


def test_progress_reports_first_what_a_cancelled_wait_left(
    make_engine: Kind,
) -> None:
    engine = make_engine(model_of("qwen3"))

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
        while events := await engine.events():
            told += events
        assert len({(e.group_id, e.answer) for e in told}) == len(told) == 15

    asyncio.run(run())


@pytest.mark.parametrize("slots", [8, 32])
def test_answers_go_on_across_new_weights_and_say_which_wrote_what(
    make_engine: Kind, slots: int
) -> None:
    groups = groups_of(sampling=SamplingParams(max_tokens=24))
    engine = make_engine(model_of("qwen3"), slots=slots, live_updates=True)
    assert engine.status().live_updates
    other = model_of("qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.3)
    tensors = [(n, p.detach().to(make_engine.dtype)) for n, p in other.named_parameters()]

    async def run() -> list[CompletionEvent]:
        await engine.submit(groups)
        assert await engine.events(until=9) == []
        await engine.load_weights(WeightUpdate(version=3))
        assert await engine.events(until=14) == []
        await engine.load_weights(WeightUpdate(version=4, tensors=tensors))
        out: list[CompletionEvent] = []
        while events := await engine.events():
            out += events
        return out

    done = {(e.group_id, e.answer): e for e in asyncio.run(run())}
    undisturbed = drain(make_engine(model_of("qwen3"), slots=slots), groups)
    assert set(done) == set(undisturbed)
    begun = sorted(done)[:slots]
    for key, event in done.items():
        got, want = event.segment, undisturbed[key].segment
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


def test_the_abort_of_one_group_leaves_what_the_others_write(make_engine: Kind) -> None:
    groups = groups_of()
    whole = drain(make_engine(model_of("qwen3")), groups)
    engine = make_engine(model_of("qwen3"))

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
        want = whole[event.group_id, event.answer].segment
        got = event.segment
        np.testing.assert_array_equal(got.token_ids, want.token_ids[: len(got)])
        np.testing.assert_allclose(got.logprobs, want.logprobs[: len(got)], atol=1e-6)


def test_an_answer_that_went_on_can_be_aborted_and_resumed(
    make_engine: Kind,
) -> None:
    (group,) = groups_of(count=1, n=1, sampling=SamplingParams(max_tokens=24))
    engine = make_engine(model_of("qwen3"), live_updates=True)

    async def run() -> CompletionEvent:
        await engine.submit([group])
        await engine.events(until=5)
        await engine.load_weights(WeightUpdate(version=1))
        await engine.events(until=8)
        await engine.abort([0])
        (aborted,) = await engine.events()
        await engine.load_weights(WeightUpdate(version=2))
        answer = AnswerRequest(0, group.answers[0].seed, aborted.segment)
        await engine.submit([GroupRequest(0, group.prompt_ids, (answer,), group.sampling, 0)])
        (finished,) = await engine.events()
        return finished

    segment = asyncio.run(run()).segment
    assert [(s.version, s.stop) for s in segment.spans] == [(0, 5), (1, 8), (2, 24)]
    undisturbed = drain(make_engine(model_of("qwen3")), [group])[0, 0].segment
    np.testing.assert_array_equal(segment.token_ids, undisturbed.token_ids)
