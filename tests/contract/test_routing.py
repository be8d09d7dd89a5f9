"""Routes of a mixture's tokens: engines tell those they took, and strategies learn with them.

What is held against both is Hugging Face's own model, sample after sample with its own attention,
whose mixture layers are written out here in float64.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_engine import ENGINES as MADE
from tests.contract.test_engine import (
    engine_group,
    remote_engine,
    resumed,
    to_the_end,
    torch_engine,
)
from tests.contract.test_fsdp2 import gradients_of, mesh_of, sequence_of
from tests.devices import DEVICE
from tests.objectives import advantage_stage, policy_objective
from tests.ranks import Ranks
from tests.recorded import recorded_groups
from tests.small_models import digits_model
from torch import Tensor, nn
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
)

from winnow.config.model import LoraAdapter
from winnow.errors import ModelError, TrainingError
from winnow.learning.batch import Batch, MicroBatch, micro_batches, pack
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.learner import Learner, LearnerSettings
from winnow.learning.policy import KlTerm, Policy
from winnow.learning.routes import load_figures, token_routes
from winnow.learning.runner import Output, Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.models.causal_lm import use_layout_attention
from winnow.models.lora import add_lora
from winnow.models.routing import ExpertLoad, route_shape
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    Engine,
    GroupRequest,
    SamplingParams,
    answer_seed,
)
from winnow.types import PROMPT_ROUTES, ROUTES, Group

EXPERTS, CHOICES, LAYERS = 5, 2, 2
TEMPERATURE = 0.7
SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 4,
    "head_dim": 6,
    "initializer_range": 0.4,
    "norm_topk_prob": True,
}
LOGPROB: frozenset[Output] = frozenset({"logprob"})


def mixture(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Layers 0 and 2 are mixtures, the one between them is not."""
    model: Any = digits_model(True, **SHAPE | changes)
    model.set_experts_implementation("eager")  # torch's grouped products know no float64
    return model.to(dtype).eval()


def trainable(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    model = mixture(dtype, **changes).to(DEVICE)
    use_layout_attention(model)
    return model


@cache
def routed_groups() -> list[Group]:
    """Recorded answers with random routes, of which some tokens have none."""
    rng, groups = np.random.default_rng(5), []
    for group in recorded_groups(2, 3):

        def drawn(tokens: int) -> Any:
            order = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)
            routes = order[..., :CHOICES].astype(np.int8)
            routes[rng.random(tokens) < 0.1] = -1
            return routes

        answers = []
        for answer in group.answers:
            length = len(answer.trajectory.token_ids)
            extras = {PROMPT_ROUTES: drawn(len(group.prompt.token_ids) - 1), ROUTES: drawn(length)}
            trajectory = replace(answer.trajectory, extras=extras)
            answers.append(replace(answer, trajectory=trajectory))
        groups.append(replace(group, answers=tuple(answers)))
    return groups


def weights_of(tokens: int) -> Tensor:
    """A weight of each token's log-prob in the loss."""
    return torch.randn(tokens, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@cache
def routed_batch(with_routes: bool = True) -> Batch:
    groups = routed_groups()
    batch = pack(groups)
    batch.columns["advantages"] = weights_of(len(batch.token_ids))
    if with_routes:
        batch.columns[ROUTES] = token_routes(groups, batch, route_shape(mixture()))
    return batch


def weighted(micro: MicroBatch, outputs: Outputs) -> LossResult:
    terms = outputs["logprob"] * micro.columns["advantages"].to(outputs["logprob"].dtype)
    return LossResult(terms.sum(), {})


def strategy_of(model: nn.Module, **options: Any) -> Strategy:
    return Strategy(model, temperature=TEMPERATURE, replays_routes=True, **options)


# -- the reference --------------------------------------------------------------------------------


class WrittenOut:
    """Mixture layers of a Hugging Face model, written out, with routes from here."""

    def __init__(self, model: Any) -> None:
        self.given: Tensor | None = None
        """[T, LAYERS, CHOICES] of the next forward pass."""
        self.own: list[Tensor] = []
        """The choices of each layer, best first, in each forward pass."""
        self.load = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
        self.rerouted = 0
        blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        for number, block in enumerate(blocks):
            block.forward = self._forward(number, block)
        for norm in [each for each in model.modules() if hasattr(each, "variance_epsilon")]:
            norm.forward = partial(_normed, norm)  # theirs computes in float32

    def _forward(self, number: int, block: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            states = x[0]
            logits = states @ block.gate.weight.T
            shares = logits.exp() / logits.exp().sum(1, keepdim=True)
            own = shares.argsort(1, descending=True)[:, :CHOICES]
            self.own.append(own)
            chosen = own if self.given is None else self.given[:, number].long()
            chosen = torch.where(chosen < 0, own, chosen)
            out = torch.zeros_like(states)
            for t in range(len(states)):
                mine = chosen[t].tolist()
                total = sum(shares[t, e] for e in mine)
                for e in mine:
                    gate, up = (block.experts.gate_up_proj[e] @ states[t]).chunk(2)
                    product = block.experts.down_proj[e] @ (F.silu(gate) * up)
                    out[t] = out[t] + shares[t, e] / total * product
                    self.load[number, e] += 1
                    self.rerouted += e not in own[t].tolist()
            return out[None]

        return forward


def _normed(norm: Any, x: Tensor) -> Tensor:
    scaled: Tensor = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled


@cache
def wanted() -> tuple[dict[str, Tensor], WrittenOut]:
    """The gradients of the loss with the routes of `routed_batch`, and where its tokens went."""
    model, batch = mixture(), routed_batch()
    written = WrittenOut(model)
    for start, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        here = slice(start, stop)
        written.given = batch.columns[ROUTES][here]
        logits = model(batch.token_ids[None, here]).logits[0, :-1] / TEMPERATURE
        logprobs = torch.log_softmax(logits, 1).gather(1, batch.token_ids[here][1:, None])[:, 0]
        counted = batch.gen_mask[here][1:]
        (logprobs * batch.columns["advantages"][here][1:] * counted).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, written


def assert_near(found: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    """Against `wanted`; routers compute their weights in float32 within a float64 model."""
    gradients, _ = wanted()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        away = float((found[name].cpu() - gradient).norm() / gradient.norm())
        assert away <= tolerance, f"{name}: {away:.1e}"


def assert_load(load: ExpertLoad | None) -> None:
    _, written = wanted()
    assert load is not None
    assert load.tokens.tolist() == written.load.tolist()
    assert load.rerouted == written.rerouted
    assert load.replayed == int((routed_batch().columns[ROUTES] >= 0).sum())


# -- strategies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpointing", "tokens"), [(False, 60), (True, 9999)])
def test_gradients_with_given_routes_are_those_of_the_reference(
    checkpointing: bool, tokens: int
) -> None:
    batch = routed_batch()
    assert (batch.columns[ROUTES][batch.offsets[1:] - 1] == -1).all()
    strategy = strategy_of(trainable(), gradient_checkpointing=checkpointing)
    micro = micro_batches(batch, range(batch.n_groups), tokens)
    assert len(micro) == (3 if tokens == 60 else 1)
    strategy.forward_backward(micro, LOGPROB, weighted)
    assert_near(gradients_of(strategy))
    assert_load(strategy.expert_load())
    # The counts are taken, and a pass without a gradient adds none.
    strategy.forward(micro, LOGPROB)
    empty = strategy.expert_load()
    assert empty is not None
    assert not empty.tokens.any()


def learn_on_rank(shape: tuple[int, int], size: int, checkpointing: bool) -> Any:
    """Gradients and loads after two updates of a group each, whose samples change ranks."""
    strategy = FSDP2Strategy(
        trainable(),
        mesh_of(shape),
        Sharding(),
        sequence_of(size),
        temperature=TEMPERATURE,
        gradient_checkpointing=checkpointing,
        replays_routes=True,
    )
    assert strategy.replayed is not None
    groups, sharder = routed_groups(), strategy.sharder
    batch = sharder.pack(groups, 60)
    batch.columns["advantages"] = batch.local_part(weights_of(int(batch.lengths.sum())))
    batch.columns[ROUTES] = token_routes(groups, batch, strategy.replayed)
    for group in range(batch.n_groups):
        micro = sharder.cut_update(batch, [group], 60)
        strategy.forward_backward(micro, LOGPROB, weighted)
    gradients = {name: g.numpy() for name, g in gradients_of(strategy).items()}
    return gradients, strategy.expert_load()


@pytest.mark.host
@pytest.mark.parametrize(
    ("shape", "size", "checkpointing"), [((1, 4), 2, True), ((2, 2), 1, False), ((1, 4), 4, False)]
)
def test_so_are_those_of_ranks_that_share_batches_and_sequences(
    ranks: Ranks, shape: tuple[int, int], size: int, checkpointing: bool
) -> None:
    for gradients, load in ranks.run(learn_on_rank, shape, size, checkpointing):
        assert_near({name: torch.from_numpy(g) for name, g in gradients.items()})
        assert_load(load)


@pytest.mark.bits
@pytest.mark.parametrize(("scaled", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_routers_own_choice_replayed_changes_no_bit(dtype: torch.dtype, scaled: bool) -> None:
    found, own = [], list[Tensor]()
    batch = replace(routed_batch(False), columns=dict(routed_batch(False).columns))
    for _ in range(2):
        model = trainable(dtype, norm_topk_prob=scaled)
        strategy = strategy_of(model)
        own.clear()
        gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        hooks = [g.register_forward_hook(lambda _, __, out: own.append(out[2])) for g in gates]
        micro = micro_batches(batch, range(batch.n_groups), 9999)
        strategy.forward_backward(micro, LOGPROB, weighted)
        outputs = strategy.forward(micro, LOGPROB)[0]["logprob"]
        found.append((gradients_of(strategy), outputs))
        for hook in hooks:
            hook.remove()
        assert strategy.replayed is not None
        routes = torch.stack(own[:LAYERS], 1).to("cpu", strategy.replayed.dtype)
        batch.columns[ROUTES] = torch.empty_like(routes)
        batch.columns[ROUTES][micro[0].source] = routes
    load = strategy.expert_load()
    assert load is not None
    assert (load.rerouted, load.replayed) == (0, routes.numel())
    (gradients, outputs), (others, again) = found
    assert torch.equal(outputs, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


@pytest.mark.bits
def test_a_loss_for_the_balance_of_experts_is_never_added() -> None:
    batch = routed_batch(False)
    micro = micro_batches(batch, range(batch.n_groups), 9999)
    asked = {"output_router_logits": True, "router_aux_loss_coef": 10.0}
    found = []
    for changes in ({}, asked):
        strategy = Strategy(trainable(torch.float32, **changes))
        strategy.forward_backward(micro, LOGPROB, weighted)
        found.append(gradients_of(strategy))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.bits
def test_only_a_strategy_that_is_to_replay_does() -> None:
    batch, found = routed_batch(), []
    for replays in (True, False):
        strategy = Strategy(trainable(), replays_routes=replays)
        assert (strategy.replayed is not None) is replays
        found.append(run_pass(strategy, batch, LOGPROB, 60)["logprob"])
        found.append(run_pass(strategy, replace(batch, columns={}), LOGPROB, 60)["logprob"])
    with_routes, without, ignoring, plain = found
    assert not torch.allclose(with_routes, without)
    assert torch.equal(without, ignoring)
    assert torch.equal(without, plain)


def test_an_adapters_model_that_answers_as_the_reference_chooses_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trainable(torch.float32)
    add_lora(model, LoraAdapter(rank=2, target_modules=("q_proj",)), seed=0)
    strategy = strategy_of(model)
    has_routes: list[bool] = []

    def noted(micro: Sequence[MicroBatch], outputs: frozenset[Output]) -> Any:
        has_routes.extend(ROUTES in each.columns for each in micro)
        return Strategy.forward(strategy, micro, outputs)

    monkeypatch.setattr(strategy, "forward", noted)
    cut = LearnerSettings(1, 1, 9999, False, 3, seed=1, lr=lambda step: 1e-3)
    objective = policy_objective("ppo_clip", kl=KlTerm(0.1, "k3"))
    policy, stage = Policy(strategy, objective), advantage_stage("grpo", {})
    metrics = Metrics()
    learner = Learner(policy, stage, cut, reference=strategy)
    learner.learn(routed_groups(), 1, metrics, Stopwatch())
    assert has_routes == [True, False]  # for old log-probs, and for the reference
    assert 0 < metrics.record()["experts/rerouted"] < 1


def test_a_router_that_returns_other_things_is_left_alone() -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    config = GraniteMoeConfig(
        vocab_size=29, hidden_size=24, num_attention_heads=4, intermediate_size=16, **shape
    )
    model: Any = GraniteMoeForCausalLM(config).eval()
    use_layout_attention(model)
    with pytest.raises(ModelError, match=r"routing_replay=true needs .*GraniteMoe.* has none"):
        Strategy(model, replays_routes=True)
    strategy, batch = Strategy(model), routed_batch(False)
    micro = micro_batches(batch, range(batch.n_groups), 9999)
    strategy.forward_backward(micro, LOGPROB, weighted)
    assert strategy.expert_load() is None


def test_a_dense_model_has_no_load() -> None:
    assert Strategy(digits_model().eval()).expert_load() is None
    assert load_figures(None).record() == {}


def test_figures_of_the_load_by_hand() -> None:
    tokens = torch.tensor([[4, 0, 2, 2], [1, 1, 1, 5]])
    found = load_figures(ExpertLoad(tokens, rerouted=3, replayed=12)).record()
    assert found == {
        "experts/max_load": 2.5,
        "experts/unused": 0.125,
        "experts/rerouted": 0.25,
    }
    assert "experts/rerouted" not in load_figures(ExpertLoad(tokens, 0, 0)).record()
    assert load_figures(ExpertLoad(tokens * 0, 0, 0)).record() == {}


# -- routes of a batch ----------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_routes_stand_at_their_tokens_whichever_samples_are_here(held: list[bool]) -> None:
    groups = routed_groups()
    batch = pack(groups, local_samples=np.array(held))
    found = token_routes(groups, batch, route_shape(mixture()))
    expected = []
    answers = [(g.prompt, a.trajectory) for g in groups for a in g.answers]
    for is_here, (prompt, trajectory) in zip(held, answers, strict=True):
        if is_here:
            expected += trajectory.extras[PROMPT_ROUTES].tolist()
            expected += trajectory.extras[ROUTES].tolist()
            expected.append([[-1] * CHOICES] * LAYERS)
            assert len(prompt.token_ids) - 1 == len(trajectory.extras[PROMPT_ROUTES])
    assert found.dtype == torch.int8
    assert found.tolist() == expected


def test_an_answer_without_its_routes_is_refused_in_one_line() -> None:
    (group, *_), shape = routed_groups(), route_shape(mixture())
    first = group.answers[0].trajectory
    short = {**first.extras, ROUTES: first.extras[ROUTES][1:]}
    wide = {name: each[:, :, :1] for name, each in first.extras.items()}
    some = np.int64(first.extras[ROUTES])
    others = [np.where(some == 0, wrong, some) for wrong in (200, EXPERTS, -2)]
    strange = [{**first.extras, ROUTES: each} for each in (*others, np.float32(some))]
    for extras in ({}, short, wide, *strange):
        answer = replace(group.answers[0], trajectory=replace(first, extras=extras))
        bad = replace(group, answers=(answer,))
        line = r"answer 0 of group \d+ has routes .*; have the engine .*routing_replay=false$"
        with pytest.raises(TrainingError, match=line):
            token_routes([bad], pack([bad]), shape)


def test_more_than_128_experts_take_two_bytes() -> None:
    few, many = (route_shape(mixture(num_experts=n)) for n in (128, 129))
    assert (few.dtype, many.dtype) == (torch.int8, torch.int16)


# -- engines --------------------------------------------------------------------------------------

STOP = 1
ENGINES: dict[str, Callable[..., Engine]] = {
    "torch": torch_engine,
    "group": engine_group(2),
    "remote": remote_engine,
}
ON_SECOND_RUNNER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""True where `tests/vllm/test_second_runner.py` runs these tests."""
if ON_SECOND_RUNNER:
    ENGINES["vllm"] = MADE["vllm"]


def written_by() -> Any:
    """A mixture of widths that vLLM's CPU kernels take."""
    return mixture(head_dim=32, hidden_size=32)


def requests() -> list[GroupRequest]:
    """Four answers each to prompts of 1 to 7 tokens; more than the engines write at once."""
    sampling = SamplingParams(9, stop_token_ids=(STOP,))
    rng, found = np.random.default_rng(0), []
    for group, length in enumerate((4, 1, 7)):
        answers = tuple(AnswerRequest(i, answer_seed(0, group, i)) for i in range(4))
        found.append(GroupRequest(group, rng.integers(2, 29, length), answers, sampling, group))
    return found


async def written(engine: Engine, abort_at: int | None = None) -> list[CompletionEvent]:
    """All answers; where asked, aborted at a tick and gone on with from their prefixes."""
    await engine.submit(requests())
    done: list[CompletionEvent] = []
    if abort_at is not None:
        done += await engine.events(abort_at)
        await engine.abort([0, 1, 2])
        done += await engine.events()
        aborted = [event for event in done if event.kind == "aborted"]
        assert any(len(event.segment) for event in aborted)
        done = [event for event in done if event.kind == "finished"]
        await engine.submit(resumed(requests(), aborted))
    done += await to_the_end(engine)
    await engine.close()
    return sorted(done, key=lambda event: event.key)


def routes_of(event: CompletionEvent) -> Any:
    parts = [np.asarray(event.extras[name]) for name in (PROMPT_ROUTES, ROUTES)]
    assert parts[0].dtype == parts[1].dtype == np.int8
    assert len(parts[1]) == len(event.segment)
    return np.concatenate(parts)


def own_routes(model: Any, ids: Sequence[int]) -> Any:
    """[T, LAYERS, CHOICES] of a forward pass over all tokens at once."""
    written = WrittenOut(model)
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    return torch.stack(written.own, 1).numpy()


@pytest.mark.parametrize(("kind", "abort_at"), [("torch", None), *((kind, 4) for kind in ENGINES)])
def test_engines_tell_the_experts_that_each_token_went_to(kind: str, abort_at: int | None) -> None:
    prompts = {group.group_id: group.prompt_ids for group in requests()}
    engine = ENGINES[kind](written_by(), slots=5, prefill_tokens=12, routes=True)
    events = asyncio.run(written(engine, abort_at))
    assert len(events) == 12
    for event in events:
        ids = [*prompts[event.group_id], *np.asarray(event.segment.token_ids)]
        expected = own_routes(written_by(), ids)[:-1]
        assert routes_of(event).tolist() == expected.tolist(), event.key
    # vLLM's are told by the tokens of the torch engine, to save a vLLM.
    is_vllm = kind == "vllm"
    other_kind = ENGINES["torch" if is_vllm else kind]
    plain = asyncio.run(written(other_kind(written_by(), slots=5, prefill_tokens=12), abort_at))
    for event, other in zip(events, plain, strict=True):
        assert event.key == other.key
        assert other.extras == {}
        mine, theirs = event.segment, other.segment
        assert np.array_equal(mine.token_ids, theirs.token_ids)
        tolerance = 3e-5 if is_vllm else 0
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=tolerance)
    if kind == "torch":
        shared = {(e.group_id, id(e.extras[PROMPT_ROUTES])) for e in events}
        assert len(shared) == 3 or abort_at is not None
