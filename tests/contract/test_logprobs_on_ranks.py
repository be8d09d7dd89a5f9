"""Log-probs from a head whose rows are shared by ranks are those of the whole head."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.ranks import Ranks
from torch import Tensor

from winnow.algorithms import logprobs
from winnow.algorithms.logprobs import token_logprobs

H = 5


@dataclass(frozen=True)
class Case:
    """A head of `rows` on each of `ranks`, and what is asked of it."""

    ranks: int = 2
    rows: int = 7
    vocab_size: int | None = None
    tokens: int = 11
    chunk: int | None = 4
    temperature: float = 0.7
    with_bias: bool = True
    with_entropy: bool = True
    dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    scale: float = 1.0
    seed: int = 0

    def inputs(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Hidden, weight and bias of the whole head; labels; gradients of what comes out [2, T]."""
        g = torch.Generator().manual_seed(self.seed)
        V = self.ranks * self.rows
        leaves = [torch.randn(*shape, generator=g) for shape in ((self.tokens, H), (V, H), (V,))]
        leaves[0] *= self.scale
        leaves = [leaf.to(self.dtype) for leaf in leaves]
        leaves[1] = leaves[1].to(self.weight_dtype or self.dtype)
        # Labels go round, so that each rank which has any ids has some of the labels.
        labels = torch.arange(self.tokens) * (self.rows - 1) % (self.vocab_size or V)
        return leaves, labels, torch.randn(2, self.tokens, generator=g)


Found = dict[str, Tensor]


def found_by(case: Case, group: dist.ProcessGroup | None, own: slice) -> Found:
    """Everything that comes out, for some rows of the head."""
    (hidden, weight, bias), labels, up = case.inputs()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight[own], bias[own])]
    read = token_logprobs(
        *(leaves[0], leaves[1], labels, case.temperature),
        leaves[2] if case.with_bias else None,
        case.vocab_size,
        case.with_entropy,
        case.chunk,
        with_prob_square_sum=True,
        head_dtype=case.head_dtype,
        group=group,
    )
    outputs = {name: each.detach() for name, each in read._asdict().items() if each is not None}
    loss = (read.logprob * up[0]).sum()
    if read.entropy is not None:
        loss = loss + (read.entropy * up[1]).sum()
    loss.backward()
    names = ("hidden", "weight", "bias") if case.with_bias else ("hidden", "weight")
    grads = {f"{name}'s gradient": leaf.grad for name, leaf in zip(names, leaves, strict=False)}
    return outputs | {name: each for name, each in grads.items() if each is not None}


@cache
def neighbours(size: int) -> Any:
    """This rank's group of `size` neighbours."""
    return dist.new_subgroups(size)[0]


def on_ranks(case: Case) -> Found:
    group = neighbours(case.ranks)
    first = group.rank() * case.rows
    return found_by(case, group, slice(first, first + case.rows))


def assert_as_the_whole(ranks: Ranks, case: Case, tolerance: float) -> None:
    found = ranks.run(on_ranks, case)[: case.ranks]
    for name, wanted in found_by(case, None, slice(None)).items():
        parts = [each[name] for each in found]
        assert all(part.dtype == wanted.dtype for part in parts)
        if name in ("weight's gradient", "bias's gradient"):
            parts = [torch.cat(parts)]
        assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs by rank"
        torch.testing.assert_close(
            parts[0], wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


CASES = {
    "2 ranks": Case(),
    "4 ranks": Case(ranks=4),
    "rows of the last one are padding in part": Case(vocab_size=12),
    "rows of the last one are padding": Case(vocab_size=7),
    "only the first of 4 has ids": Case(ranks=4, rows=3, vocab_size=2),
    "a row each": Case(ranks=4, rows=1, tokens=3),
    "one chunk": Case(chunk=None),
    "no bias, no temperature": Case(with_bias=False, temperature=1.0),
    "no entropy": Case(with_entropy=False),
    "no tokens": Case(tokens=0),
    "logits around a hundred": Case(scale=20.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shared_head_gives_what_the_whole_one_gives(ranks: Ranks, name: str) -> None:
    assert_as_the_whole(ranks, CASES[name], 1e-12)
    if CASES[name].scale == 1.0:
        assert_as_the_whole(ranks, replace(CASES[name], dtype=torch.float32), 1e-5)


@examples(10)
@given(
    case=st.builds(
        lambda kept, **given: Case(**given, vocab_size=max(int(kept * 2 * given["rows"]), 1)),
        kept=st.floats(0.1, 1.0),
        rows=st.integers(2, 9),
        tokens=st.integers(1, 12),
        chunk=st.integers(1, 13),
        temperature=st.sampled_from([0.5, 1.0, 1.7]),
        with_bias=st.booleans(),
        with_entropy=st.booleans(),
        seed=st.integers(0, 99),
    )
)
def test_however_rows_and_tokens_are_cut(ranks: Ranks, case: Case) -> None:
    assert_as_the_whole(ranks, case, 1e-12)


def test_labels_of_the_cases_are_on_every_rank() -> None:
    for name in ("2 ranks", "4 ranks"):
        case = CASES[name]
        assert set((case.inputs()[1] // case.rows).tolist()) == set(range(case.ranks))


def of_thousands() -> tuple[float, ...]:
    rows = torch.tensor([[4000.5], [4000.0], [0.0], [4000.25], [3999.5], [0.0]])
    group = neighbours(2)
    own = rows[3 * group.rank() :][:3]
    read = token_logprobs(torch.ones(1, 1), own, torch.tensor([4]), group=group)
    assert read.entropy is not None
    return float(read.logprob), float(read.entropy)


def test_logits_of_thousands_stay_exact_in_fp32(ranks: Ranks) -> None:
    # A log-sum-exp of 4001 is rounded to 1e-4 in fp32, and so is any log-prob of a logit of 0.
    scores = [math.exp(each) for each in (1.0, 0.5, 0.75, 0.0)]
    p = [score / sum(scores) for score in scores]
    wanted = math.log(p[3]), -sum(each * math.log(each) for each in p)
    for found in ranks.run(of_thousands):
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_an_fp32_head_over_bf16_states_is_that_of_one_process(
    ranks: Ranks, weight_dtype: torch.dtype
) -> None:
    case = Case(
        dtype=torch.bfloat16, weight_dtype=weight_dtype, head_dtype=torch.float32, vocab_size=12
    )
    found = ranks.run(on_ranks, case)[0]
    wanted = found_by(case, None, slice(None))
    for name in ("logprob", "entropy", "prob_square_sum"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    assert_as_the_whole(ranks, case, 2**-7)
    # Summed over ranks in fp32, and rounded once: hardly a number is rounded the other way.
    name = "hidden's gradient"
    assert (found[name] == wanted[name]).double().mean() > 0.95


def test_bf16_heads_differ_by_the_rounding_of_each_ranks_sum(ranks: Ranks) -> None:
    assert_as_the_whole(ranks, Case(dtype=torch.bfloat16), 2**-6)


def counted(case: Case, chunk_logits: int) -> tuple[Counter[str], set[tuple[int, ...]]]:
    """The collectives of a forward and a backward pass, and the shapes of the logits' buffers."""
    calls, shapes = Counter[str](), set[tuple[int, ...]]()
    make = logprobs._Head.__init__

    def seen(self: logprobs._Head, *args: Any) -> None:
        make(self, *args)
        shapes.update(tuple(each.shape) for each in (self._first, self._second))

    def counting(name: str) -> Any:
        plain = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return plain(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with (
        mock.patch.dict(logprobs.CHUNK_LOGITS, cpu=chunk_logits),
        counting("all_reduce"),
        counting("all_gather"),
        mock.patch.object(logprobs._Head, "__init__", seen),
    ):
        on_ranks(case)
    return calls, shapes


def test_a_rank_has_logits_of_its_own_rows_and_meets_others_once_a_chunk(ranks: Ranks) -> None:
    found = ranks.run(counted, Case(chunk=4, tokens=11), 1)
    assert found == [({"all_gather": 1, "all_reduce": 3}, {(4, 7)})] * 4
    assert ranks.run(counted, Case(ranks=1), 1) == [({}, {(4, 7)})] * 4
    # As many tokens as of the whole head, so that a rank's memory falls with the number of ranks.
    found = ranks.run(counted, Case(chunk=None, tokens=50), 14 * 40 + 1)
    assert found == [({"all_gather": 1, "all_reduce": 2}, {(40, 7)})] * 4
