"""The chunked log-prob kernel against plain arithmetic, finite differences and loops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from winnow.algorithms import logprobs
from winnow.algorithms.logprobs import OutputHead, chunk_size, token_logprobs

T, H, V = 11, 5, 13


def make(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """hidden, weight, bias (leaves that ask for gradients) and labels."""
    g = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(*shape, generator=g).to(dtype) for shape in ((T, H), (V, H), (V,))]
    labels = torch.randint(0, V - 3, (T,), generator=g)
    return (*(leaf.requires_grad_() for leaf in leaves), labels)


def naive(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All logits at once; ids beyond the vocabulary at -inf. The third is sum of p^2."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias
    if vocab_size is not None:
        beyond = torch.arange(len(weight)) >= vocab_size
        logits = logits.masked_fill(beyond, -1e30)
    logp = torch.log_softmax(logits / temperature, -1)
    p = logp.exp()
    return logp.gather(1, labels[:, None])[:, 0], -(p * logp).sum(-1), p.square().sum(-1)


@given(
    chunk=st.integers(1, T + 3),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
    vocab_size=st.sampled_from([None, V, V - 2]),
    asked=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
@example(chunk=4, temperature=1.0, with_bias=False, vocab_size=None, asked=(False, True), seed=0)
@example(chunk=4, temperature=1.0, with_bias=False, vocab_size=None, asked=(False, False), seed=0)
def test_values_and_gradients_equal_the_naive_ones_for_any_chunk(
    chunk: int,
    temperature: float,
    with_bias: bool,
    vocab_size: int | None,
    asked: tuple[bool, bool],
    seed: int,
) -> None:
    """Whether or not entropy and sum of squares are asked for; the latter has no gradient."""
    with_entropy, with_squares = asked
    results = []
    for kernel in (True, False):
        hidden, weight, bias, labels = make(seed=seed)
        b = bias if with_bias else None
        outputs: Sequence[Tensor | None] = naive(hidden, weight, labels, temperature, b, vocab_size)
        if kernel:
            outputs = token_logprobs(
                *(hidden, OutputHead(weight, b, vocab_size), labels, temperature),
                with_entropy=with_entropy,
                with_prob_square_sum=with_squares,
                chunk_tokens=chunk,
            )
            assert [output is not None for output in outputs[1:]] == [*asked]
            assert outputs[2] is None or not outputs[2].requires_grad
        g = torch.Generator().manual_seed(seed)
        up = torch.randn(2, T, generator=g, dtype=torch.float64)
        leaves = [hidden, weight, *([bias] if with_bias else [])]
        kept = [o for o, is_kept in zip(outputs, (True, *asked), strict=True) if is_kept]
        loss = sum(o * u for o, u in zip(kept[: 1 + with_entropy], up, strict=False)).sum()
        results.append([*kept, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_inputs_without_gradient_skip_their_part() -> None:
    hidden, weight, _, labels = make()
    token_logprobs(hidden, OutputHead(weight.detach()), labels)[0].sum().backward()
    assert hidden.grad is not None
    hidden_grad = hidden.grad.clone()
    hidden.grad = None
    token_logprobs(hidden.detach(), OutputHead(weight), labels)[0].sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    hidden2, weight2, _, _ = make()
    naive(hidden2, weight2, labels)[0].sum().backward()
    torch.testing.assert_close(hidden_grad, hidden2.grad)
    torch.testing.assert_close(weight.grad, weight2.grad)


def test_bf16_inputs_get_fp32_results_near_the_exact_ones() -> None:
    hidden, weight, _, labels = make(torch.bfloat16)
    logprob, entropy, _ = token_logprobs(hidden, OutputHead(weight), labels, chunk_tokens=3)
    assert entropy is not None
    assert logprob.dtype == entropy.dtype == torch.float32
    exact = naive(hidden, weight, labels)
    torch.testing.assert_close(logprob, exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, exact[1], rtol=1e-5, atol=1e-5)
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    reference = naive(h, w, labels)
    (reference[0].sum() + reference[1].sum()).backward()
    for ours, exactly in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert exactly is not None
        assert float((ours.double() - exactly).norm() / exactly.norm()) < 0.02


@pytest.mark.bits
@pytest.mark.parametrize("vocab_size", [150, 192])
def test_columns_beyond_the_ids_change_nothing(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = set()
    plain = torch.mm

    def seen(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        widths.add(out.shape[1])
        return plain(a, b, out=out)

    results = []
    for multiple in (logprobs.ROW_MULTIPLE, 1):
        g = torch.Generator().manual_seed(0)
        hidden, weight = (
            torch.randn(n, 40, generator=g).bfloat16().requires_grad_() for n in (50, 200)
        )
        labels = torch.randint(0, vocab_size, (50,), generator=g)
        with monkeypatch.context() as patch:
            patch.setattr(logprobs, "ROW_MULTIPLE", multiple)
            patch.setattr(torch, "mm", seen)
            head = OutputHead(weight, vocab_size=vocab_size)
            found = token_logprobs(hidden, head, labels, with_prob_square_sum=True, chunk_tokens=16)
            assert found.entropy is not None
            (found.logprob.sum() + found.entropy.square().sum()).backward()
        results.append([*found, weight.grad, hidden.grad])
    assert widths == {192, vocab_size, 40}
    *same, sums = zip(*results, strict=True)
    for padded, as_is in same:
        assert torch.equal(padded, as_is)
    torch.testing.assert_close(*sums)  # with more zeros, in another order


def test_a_bf16_weight_gradient_does_not_lose_small_addends() -> None:
    """512 chunks add 2^-9 each to 1: summed in bf16 every one of them would vanish."""
    n = 513
    hidden = torch.full((n, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 2.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(n, dtype=torch.int64)
    token_logprobs(hidden, OutputHead(weight), labels, chunk_tokens=1)[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [2.0, -2.0]


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    logprob, entropy, _ = token_logprobs(hidden, OutputHead(weight), torch.tensor([0, 0]))
    assert entropy is not None
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_no_tokens_give_no_results_and_zero_gradients() -> None:
    hidden = torch.empty(0, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    logprob, entropy, _ = token_logprobs(
        hidden, OutputHead(weight), torch.empty(0, dtype=torch.int64)
    )
    assert entropy is not None
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_never_more_logits_than_a_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = logprobs._Head.logits

    def spy(self: logprobs._Head, part: slice) -> tuple[Tensor, Tensor]:
        logits, room = original(self, part)
        sizes.append(len(logits))
        assert logits.untyped_storage().size() == room.untyped_storage().size()
        assert logits.untyped_storage().size() == 8 * V * max(sizes)
        return logits, room

    monkeypatch.setattr(logprobs._Head, "logits", spy)
    hidden, weight, _, labels = make()
    token_logprobs(hidden, OutputHead(weight), labels, chunk_tokens=4)[0].sum().backward()
    assert sizes == [4, 4, 3] * 2
    sizes.clear()
    monkeypatch.setitem(logprobs.CHUNK_LOGITS, "cpu", V * 6 + 1)
    monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    token_logprobs(hidden, OutputHead(weight), labels)
    assert sizes == [6, 5]


def test_a_chunk_is_chosen_by_vocabulary_and_device_unless_it_is_given() -> None:
    assert chunk_size(29) == 2**25 // 29
    assert chunk_size(151_936) == chunk_size(151_936, None, "meta") == 220
    assert chunk_size(10**9) == 32
    assert chunk_size(151_936, None, "cuda") == 883  # 2^27 / 151,936
    assert chunk_size(151_936, 7) == chunk_size(151_936, 7, "cuda") == 7


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [None, V - 2])
def test_an_fp32_head_computes_as_if_model_and_head_were_fp32(
    monkeypatch: pytest.MonkeyPatch, weight_dtype: torch.dtype, vocab_size: int | None
) -> None:
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", 5)  # several pieces of the weight
    hidden, weight, bias, labels = make(torch.bfloat16)
    weight = weight.detach().to(weight_dtype).requires_grad_()
    leaves = (hidden, weight, bias)
    ours = token_logprobs(
        hidden, OutputHead(weight, bias, vocab_size, torch.float32), labels, 0.7, chunk_tokens=4
    )
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    exact = naive(wide[0], wide[1], labels, 0.7, wide[2], vocab_size)
    assert ours.entropy is not None
    torch.testing.assert_close(ours.logprob, exact[0])
    torch.testing.assert_close(ours.entropy, exact[1])
    rounded = token_logprobs(
        hidden, OutputHead(weight.to(torch.bfloat16), bias, vocab_size), labels, 0.7
    )
    assert float((rounded.logprob - exact[0]).detach().abs().max()) > 1e-3
    got = torch.autograd.grad((ours.logprob - 0.3 * ours.entropy).sum(), leaves)
    want = torch.autograd.grad((exact[0] - 0.3 * exact[1]).sum(), wide)
    for leaf, grad, reference in zip(leaves, got, want, strict=True):
        assert grad.dtype == leaf.dtype
        torch.testing.assert_close(grad, reference.to(leaf.dtype), rtol=1e-2, atol=1e-4)
