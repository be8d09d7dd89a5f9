"""Prompts that are run once: which tokens, in which micro-batches, and with which gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_routing import trainable
from tests.examples import examples
from transformers import LlamaConfig, LlamaForCausalLM

from winnow.learning.balance import assign, assign_groups, estimate_work
from winnow.learning.batch import Batch, MicroBatch, pack, split_update
from winnow.learning.runner import Outputs
from winnow.learning.shared_prompts import share_prompts
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.models.causal_lm import use_layout_attention
from winnow.types import Answer, Group, Image, Prompt, Score, Segment, Trajectory


def test_the_tokens_of_a_micro_batch_by_hand() -> None:
    ids, alike = np.array([7, 8, 9, 1, 2, 7, 8, 9, 3]), np.array([0, 0])
    shared = share_prompts(ids, np.array([0, 5]), np.array([3, 3]), alike)
    assert shared is not None
    assert shared.tokens.tolist() == [0, 1, 2, 3, 4, 8]
    assert shared.rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert (shared.lengths, shared.prefixes) == ((3, 2, 1), (-1, 0, 0))


def test_only_the_same_tokens_and_images_of_one_group_are_shared() -> None:
    ids, pair, one_group = np.array([7, 8, 1, 7, 8, 3]), np.array([2, 2]), np.array([0, 0])
    starts = np.array([0, 3])
    cat, dog = (Image(1, (1, 1), b"", digest) for digest in ("cat", "dog"))

    def shares(groups: np.ndarray = one_group, *images: Image) -> bool:
        return share_prompts(ids, starts, pair, groups, images) is not None

    assert shares()
    assert not shares(np.array([0, 1]))
    assert shares(one_group, cat, cat.at(4))
    assert not shares(one_group, cat, dog.at(4))
    assert not shares(one_group, cat)
    wide = Image(1, (1, 2), b"", "wide")  # ends behind the prompt
    assert not shares(one_group, wide, wide.at(4))
    assert share_prompts(np.array([7, 8, 1, 7, 9, 3]), starts, pair, one_group) is None


def test_a_context_that_is_rendered_anew_shares_the_prompt_that_it_begins_with() -> None:
    # The prompt 7 8 with an answer; again with what replaces the answer; then something else.
    ids, prompts = np.array([7, 8, 1, 7, 8, 2, 3, 9, 4, 7, 8]), np.full(4, 2)
    shared = share_prompts(ids, np.array([0, 3, 7, 9]), prompts, np.zeros(4))
    assert shared is not None
    assert (shared.lengths, shared.prefixes) == ((2, 1, 2, 2), (-1, 0, 0, -1))
    assert shared.rows.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 0, 1]


def test_a_group_is_cut_where_a_micro_batch_is_full_and_each_part_has_the_prompt() -> None:
    lengths, prompts, groups = np.array([9, 8, 8, 7, 6]), np.full(5, 5), np.array([0, 0, 1, 0, 1])
    # 5 + 4 + 3 tokens of the first group, 5 + 3 + 1 of the second, and 5 + 2 that are left.
    found = assign_groups(lengths, prompts, groups, 12)
    assert found.places.tolist() == [0, 0, 1, 2, 1]
    seen = estimate_work(lengths, 1) - estimate_work(prompts, 1)
    prompt = int(estimate_work(np.array([5]), 1)[0])
    sums = [seen[[0, 1]].sum(), seen[[2, 4]].sum(), seen[3]]
    assert found.work.tolist() == [[prompt + int(each) for each in sums]]


def test_ranks_part_a_group_only_if_they_are_done_sooner() -> None:
    groups = np.zeros(4, np.int64)
    # Four answers of 10 behind 2 tokens: apart, two ranks are done in the time of 22 of 42.
    apart = assign_groups(np.full(4, 12), np.full(4, 2), groups, 100, 2, 10**6)
    assert np.bincount(apart.places).tolist() == [2, 2]
    # Two pairs of groups stay whole: each rank has the prompt of one.
    pairs = assign_groups(np.full(4, 101), np.full(4, 100), groups // 1 + [0, 1, 0, 1], 300, 2)
    assert pairs.places[0] == pairs.places[2] != pairs.places[1] == pairs.places[3]


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9), ranks=st.integers(1, 3))
def test_groups_of_one_answer_are_dealt_out_as_samples_are(lengths: list[int], ranks: int) -> None:
    ordered = np.sort(np.array(lengths))[::-1]
    shapes = ordered, np.ones_like(ordered), np.arange(len(ordered))
    found, wanted = assign_groups(*shapes, 25, ranks, 3), assign(ordered, 25, ranks, 3)
    assert found.places.tolist() == wanted.places.tolist()
    assert found.work.tolist() == wanted.work.tolist()


def test_a_rank_runs_no_more_tokens_than_a_micro_batch_may_have() -> None:
    batch = conversations(np.random.default_rng(3), groups=6)
    for ranks in (1, 3):
        shares = split_update(batch, range(6), 25, ranks, 8, shares_prompts=True)
        parts = [each for rank in range(ranks) for each in shares.micro_batches(rank)]
        assert sorted(i for each in parts for i in each.samples.tolist()) == [*range(24)]
        for micro in parts:
            run = sum((micro.shared or micro).lengths)
            assert run <= max(25, *micro.lengths, 0)


def conversations(rng: np.random.Generator, groups: int = 3) -> Batch:
    """Groups of four answers: of one turn, of none, and with a context rendered anew."""

    def segment(tokens: int, source: str = "model", restarts: bool = False) -> Segment:
        ids = rng.integers(2, 30, tokens)
        logprobs = np.zeros(tokens if source == "model" else 0, np.float32)
        return Segment(ids, logprobs, (), source, restarts)  # type: ignore[arg-type]

    made = []
    for number in range(groups):
        prompt = rng.integers(2, 30, int(rng.integers(1, 9)))
        again = replace(segment(0, "environment", restarts=True), token_ids=prompt)
        turns = [
            (segment(5),),
            (segment(2), segment(3, "environment"), segment(1)),
            (segment(2), again, segment(3)),
            (segment(1), segment(4, "environment", restarts=True), segment(2)),
        ]
        answers = tuple(Answer(Trajectory(each, "stop"), Score(0.0, 0.0)) for each in turns)
        made.append(Group(number, Prompt(str(number), prompt, "", "", None), answers))
    return pack(made)


@examples(5)
@given(seed=st.integers(0, 99), budget=st.sampled_from([9, 25, 1000]), recomputes=st.booleans())
def test_conversations_learn_with_shared_prompts_what_they_learn_with_copies(
    seed: int, budget: int, recomputes: bool
) -> None:
    batch, found = conversations(np.random.default_rng(seed)), {}
    for shares in (False, True):
        strategy = Strategy(tiny_model(), gradient_checkpointing=recomputes)
        strategy.sharder = strategy.sharder.sharing_prompts(0.0 if shares else math.inf)
        outputs = run_pass(strategy, batch, frozenset({"logprob", "entropy"}), budget)
        parts = strategy.sharder.cut_update(batch, range(batch.n_groups), budget)
        strategy.forward_backward(parts, frozenset({"logprob"}), weighted)
        named = strategy.model.named_parameters()
        found[shares] = {**outputs, **{name: parameter.grad for name, parameter in named}}
    assert budget < 1000 or all(micro.shared is not None for micro in parts)
    for name, wanted in found[False].items():
        away = float((found[True][name] - wanted).norm() / wanted.norm())
        assert away < 1e-12, name


def weighted(micro: MicroBatch, outputs: Outputs) -> LossResult:
    weights = torch.cos(micro.token_ids.double() + micro.positions)
    return LossResult((outputs["logprob"] * weights * micro.gen_mask).sum(), {})


def tiny_model(**changed: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changed})).double().eval()
    use_layout_attention(model)
    return model


@pytest.mark.parametrize(
    ("kernels", "dtype", "width", "shares"),
    [
        ("cpu", torch.float32, 16, True),
        ("cuda", torch.bfloat16, 32, True),
        ("cuda", torch.float32, 32, False),
        ("cuda", torch.bfloat16, 16, False),  # heads of 4 channels
    ],
)
def test_prompts_are_shared_where_attention_can(
    kernels: str, dtype: torch.dtype, width: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Strategy, "kernels", kernels)
    strategy = Strategy(tiny_model(hidden_size=width).to(dtype))
    parts = strategy.sharder.all_micro_batches(conversations(np.random.default_rng(0)), 1000)
    assert [micro.shared is not None for micro in parts] == [shares]


@pytest.mark.parametrize("replays", [False, True])
def test_prompts_whose_experts_are_replayed_are_run_with_each_answer(replays: bool) -> None:
    strategy = Strategy(trainable(), replays_routes=replays)
    (micro,) = strategy.sharder.all_micro_batches(conversations(np.random.default_rng(0)), 1000)
    assert (micro.shared is None) == replays
