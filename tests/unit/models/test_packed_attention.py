"""Attention over packed sequences against attention over each sequence alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor
from torch.nn.attention import varlen

from winnow.models import packed_attention as packed
from winnow.models.packed_attention import PackedLayout, copy_tokens

CPU = torch.device("cpu")


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """Softmax attention written out, sequence by sequence, head by head."""
    repeats = q.shape[1] // k.shape[1]
    outs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        heads = []
        for head in range(q.shape[1]):
            scores = q[rows, head] @ k[rows, head // repeats].T * scale
            at = torch.arange(length)
            unseen = at[None] > at[:, None]
            if window is not None:
                unseen |= at[None] <= at[:, None] - window
            heads.append(
                scores.masked_fill(unseen, -torch.inf).softmax(1) @ v[rows, head // repeats]
            )
        outs.append(torch.stack(heads, 1))
    return torch.cat(outs)


def copied(lengths: list[int], prefixes: list[int]) -> tuple[list[int], list[int], Tensor]:
    """Packed tokens with each prefix before each sequence, their lengths, and which are its own."""
    starts = np.cumsum(lengths) - lengths
    tokens = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    before = [tokens[p] if p >= 0 else tokens[0][:0] for p in prefixes]
    pairs = [pair for both in zip(before, tokens, strict=True) for pair in both]
    own = np.repeat(np.tile([False, True], len(lengths)), [*map(len, pairs)])
    whole = [len(a) + len(b) for a, b in zip(before, tokens, strict=True)]
    return np.concatenate(pairs).tolist(), whole, torch.from_numpy(own)


@examples(8)
@given(
    groups=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=4),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 25),
    call_cost=st.sampled_from([0, 1 << 12, 1 << 30]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_behind_a_shared_prefix_are_those_behind_copies_of_it(
    groups: list[list[int]], kv_heads: int, window: int | None, call_cost: int, seed: int
) -> None:
    # Each group is a prefix and what continues it, in any order.
    sequences = [(g, i, n) for g, group in enumerate(groups) for i, n in enumerate(group)]
    np.random.default_rng(seed).shuffle(sequences)
    first = {g: place for place, (g, i, _) in enumerate(sequences) if i == 0}
    lengths = [n for _, _, n in sequences]
    prefixes = [first[g] if i else -1 for g, i, _ in sequences]
    tokens, whole, own = copied(lengths, prefixes)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(sum(lengths), n, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (4, kv_heads, kv_heads, 4)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_CALL_COST", call_cost)
        found = PackedLayout(lengths, CPU, None, prefixes).attend(0, q, k, v, 0.3, window)
    wanted = one_by_one(q[tokens], k[tokens], v[tokens], whole, 0.3, window)[own]
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    mine, theirs = (torch.autograd.grad(x, (q, k, v), grad) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@examples(8)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 45),
    call_cost=st.sampled_from([0, 1 << 12, 1 << 30]),
)
def test_values_and_gradients_are_those_of_each_sequence_alone(
    lengths: list[int], kv_heads: int, window: int | None, call_cost: int
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v, grad = (
        torch.randn(total, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads, 4)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_CALL_COST", call_cost)
        found = PackedLayout(lengths, CPU).attend(0, q, k, v, 0.3, window)
    wanted = one_by_one(q, k, v, lengths, 0.3, window)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    pairs = zip(
        torch.autograd.grad(found, (q, k, v), grad),
        torch.autograd.grad(wanted, (q, k, v), grad),
        strict=True,
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.bits
def test_what_stands_beside_a_sequence_changes_nothing_of_it() -> None:
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    alone = PackedLayout([7], CPU).attend(0, q[:7], k[:7], v[:7], 0.3, None)
    beside = PackedLayout([7, 5], CPU).attend(0, q, k, v, 0.3, None)
    for x in (q, k, v):
        x[7:] = torch.nan
    with_nan = PackedLayout([7, 5], CPU).attend(0, q, k, v, 0.3, None)
    torch.testing.assert_close(beside[:7], alone, atol=1e-6, rtol=0)
    assert torch.equal(with_nan[:7], beside[:7])


def test_no_sequence_is_no_work() -> None:
    q = torch.empty(0, 4, 8)
    assert PackedLayout([], CPU).attend(0, q, q, q, 1.0, None).shape == (0, 4, 8)


def test_sequences_of_like_length_share_a_call_with_little_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    areas = []
    plain = F.scaled_dot_product_attention

    def counted(q: Tensor, *args: object, **options: object) -> Tensor:
        areas.append(q.shape[0] * q.shape[2] ** 2)
        return plain(q, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    lengths = [20 + (37 * i) % 109 for i in range(128)]
    q = torch.randn(sum(lengths), 4, 16)
    PackedLayout(lengths, CPU).attend(0, q, q, q, 0.25, None)
    assert len(areas) <= 16
    assert sum(areas) < 1.25 * sum(length**2 for length in lengths)


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.parametrize("window", [None, 3])
def test_in_fp32_cuda_gets_as_many_heads_of_keys_as_of_queries(
    window: int | None, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[tuple[int, int, bool]] = []
    plain = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        assert k.shape == v.shape
        heads.append((q.shape[1], k.shape[1], enable_gqa))
        return plain(q, k, v, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q, k, v = (torch.randn(9, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    out = PackedLayout([5, 4], CPU, kernels).attend(0, q, k, v, 0.3, window)
    assert set(heads) == {(4, 4, False) if kernels == "cuda" else (4, 2, True)}
    exact = one_by_one(q, k, v, [5, 4], 0.3, window)
    torch.testing.assert_close(out, exact, atol=1e-12, rtol=0)
    mine, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, exact))
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_variable_length_attention_is_called_as_its_version_takes_it(
    version: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def varlen_2_11(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: object = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        calls.append(locals())
        return query + 1

    def varlen_2_13(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        assert enable_gqa == (heads != 4)
        return varlen_2_11(*args, **options)

    stub = varlen_2_11 if version == "2.11" else varlen_2_13
    monkeypatch.setattr(varlen, "varlen_attn", stub)
    q = torch.randn(7, 4, 8, dtype=torch.bfloat16)
    k = q[:, :heads]
    out = PackedLayout([4, 3], CPU, "cuda").attend(0, q, k, k, 0.3, 3)
    assert torch.equal(out, q + 1)
    (call,) = calls
    assert call["cu_seq_q"].tolist() == call["cu_seq_k"].tolist() == [0, 4, 7]
    expected = {"max_q": 4, "max_k": 4, "scale": 0.3, "window_size": (2, 0)}
    assert {name: call[name] for name in expected} == expected


def test_half_precision_heads_that_no_kernel_of_cuda_takes_attend_in_blocks() -> None:
    """Variable-length attention wants heads of a multiple of 8 channels, and a GPU."""
    q, k, v = (torch.randn(7, 2, 4).bfloat16() for _ in range(3))
    blocks = PackedLayout([4, 3], CPU).attend(0, q, k, v, 0.5, None)
    assert torch.equal(PackedLayout([4, 3], CPU, "cuda").attend(0, q, k, v, 0.5, None), blocks)


@pytest.mark.parametrize("window", [None, 5])
def test_variable_length_attention_gets_copies_of_a_prefix(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention written out stands in for the kernel: a query's place counts from the last key."""

    def written_out(
        q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, *_: int, **options: Any
    ) -> Tensor:
        queries, keys = q_at.diff().tolist(), k_at.diff().tolist()
        pairs = [*zip(queries, keys, strict=True)]
        padded = [
            F.pad(x, (0, 0, 0, 0, n - len(x), 0))
            for x, n in zip(q.split(queries), keys, strict=True)
        ]
        own = torch.cat([torch.arange(n) >= n - m for m, n in pairs])
        reach = options["window_size"][0]
        seen = None if reach < 0 else reach + 1
        out = one_by_one(torch.cat(padded), k, v, keys, options["scale"], seen)
        return out[own]

    monkeypatch.setattr(varlen, "varlen_attn", written_out)
    monkeypatch.setattr(packed, "_HALF", (torch.float64,))
    lengths, prefixes = [4, 3, 6, 5, 2], [-1, 0, -1, 0, 2]
    tokens, whole, own = copied(lengths, prefixes)
    q, k, v, grad = (torch.randn(20, n, 8).double().requires_grad_() for n in (4, 2, 2, 4))
    found = PackedLayout(lengths, CPU, "cuda", prefixes).attend(0, q, k, v, 0.3, window)
    wanted = one_by_one(q[tokens], k[tokens], v[tokens], whole, 0.3, window)[own]
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    mine, theirs = (torch.autograd.grad(x, (q, k, v), grad) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.gpu
def test_gradients_of_copies_on_cuda_are_summed_in_fp32() -> None:
    device = torch.device("cuda")
    state = torch.ones(1, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    copy_tokens(state, torch.zeros(1000, dtype=torch.int64, device=device)).sum().backward()
    assert state.grad is not None
    assert state.grad.tolist() == [[1000.0, 1000.0]]  # sums in bf16 stop at 256


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
def test_half_precision_on_cuda_shares_prefixes_as_fp32_does(window: int | None) -> None:
    device = torch.device("cuda")
    lengths, prefixes = [40, 3, 129, 64, 7, 33], [-1, 0, 0, -1, 0, 3]
    tokens, whole, own = copied(lengths, prefixes)
    inputs = [torch.randn(sum(lengths), n, 64, device=device) for n in (4, 2, 2, 4)]
    q, k, v, grad = (x.bfloat16().float().requires_grad_() for x in inputs)
    copies = PackedLayout(whole, device).attend(0, q[tokens], k[tokens], v[tokens], 0.125, window)
    exact = copies[own.to(device)]
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    half = PackedLayout(lengths, device, None, prefixes).attend(0, *halves, 0.125, window)
    torch.testing.assert_close(half.float(), exact, atol=3e-2, rtol=0)
    wanted = torch.autograd.grad(exact, (q, k, v), grad)
    found = torch.autograd.grad(half, halves, grad.bfloat16())
    for mine, theirs in zip(found, wanted, strict=True):
        away = (mine.float() - theirs).norm() / theirs.norm()
        assert away < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
def test_half_precision_on_cuda_is_near_fp32(window: int | None) -> None:
    device = torch.device("cuda")
    lengths = [40, 3, 129, 64]
    q = torch.randn(sum(lengths), 4, 64, device=device)
    k, v = (torch.randn(sum(lengths), 2, 64, device=device) for _ in range(2))
    layout = PackedLayout(lengths, device)
    exact = layout.attend(0, q, k, v, 0.125, window)
    half = layout.attend(0, q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.125, window)
    torch.testing.assert_close(half.float(), exact, atol=3e-2, rtol=0)
