"""Log-probs from a head whose rows are shared by ranks are those of the whole head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import Ranks
from torch import Tensor

from winnow.algorithms.logprobs import OutputHead, token_logprobs

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
        # Labels go round, so that each rank which has any ids has some of the labels.
        labels = torch.arange(self.tokens) * (self.rows - 1) % (self.vocab_size or V)
        return leaves, labels, torch.randn(2, self.tokens, generator=g)


Found = dict[str, Tensor]


def found_by(case: Case, group: dist.ProcessGroup | None, own: slice) -> Found:
    """Everything that comes out, for some rows of the head."""
    (hidden, weight, bias), labels, up = case.inputs()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight[own], bias[own])]
    bias_rows = leaves[2] if case.with_bias else None
    head = OutputHead(leaves[1], bias_rows, case.vocab_size, case.head_dtype, group)
    read = token_logprobs(
        *(leaves[0], head, labels, case.temperature),
        with_entropy=case.with_entropy,
        with_prob_square_sum=True,
        chunk_tokens=case.chunk,
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


def of_thousands() -> tuple[float, ...]:
    rows = torch.tensor([[4000.5], [4000.0], [0.0], [4000.25], [3999.5], [0.0]])
    group = neighbours(2)
    own = rows[3 * group.rank() :][:3]
    read = token_logprobs(torch.ones(1, 1), OutputHead(own, group=group), torch.tensor([4]))
    assert read.entropy is not None
    return float(read.logprob), float(read.entropy)


def test_logits_of_thousands_stay_exact_in_fp32(ranks: Ranks) -> None:
    # A log-sum-exp of 4001 is rounded to 1e-4 in fp32, and so is any log-prob of a logit of 0.
    scores = [math.exp(each) for each in (1.0, 0.5, 0.75, 0.0)]
    p = [score / sum(scores) for score in scores]
    wanted = math.log(p[3]), -sum(each * math.log(each) for each in p)
    for found in ranks.run(of_thousands):
        assert found == pytest.approx(wanted, abs=1e-6)


def test_an_fp32_head_over_bf16_states_is_that_of_one_process(ranks: Ranks) -> None:
    case = Case(dtype=torch.bfloat16, head_dtype=torch.float32, vocab_size=12)
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
