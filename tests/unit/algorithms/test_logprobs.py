"""The chunked log-prob kernel against plain arithmetic, finite differences and loops."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from winnow.algorithms import logprobs
from winnow.algorithms.logprobs import chunk_size, token_logprobs

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


def test_a_case_worked_by_hand() -> None:
    hidden = torch.tensor([[math.log(3.0)], [0.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    logprob, entropy, square_sum = token_logprobs(
        hidden, weight, torch.tensor([0, 1]), with_prob_square_sum=True
    )
    assert entropy is not None
    assert square_sum is not None
    assert square_sum.tolist() == pytest.approx([0.75**2 + 0.25**2, 0.5])
    assert logprob.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
    expected = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert entropy.tolist() == pytest.approx([expected, math.log(2)])


def test_loops_over_tokens_and_ids_agree() -> None:
    hidden, weight, bias, labels = (x.detach() for x in make())
    logprob, entropy, square_sum = token_logprobs(
        hidden, weight, labels, 0.7, bias, V - 2, chunk_tokens=4, with_prob_square_sum=True
    )
    assert entropy is not None
    assert square_sum is not None
    for t in range(T):
        scores = [
            math.exp((sum(float(hidden[t, i] * weight[v, i]) for i in range(H)) + bias[v]) / 0.7)
            for v in range(V - 2)
        ]
        p = [score / sum(scores) for score in scores]
        assert float(logprob[t]) == pytest.approx(math.log(p[int(labels[t])]), rel=1e-10)
        assert float(entropy[t]) == pytest.approx(-sum(q * math.log(q) for q in p), rel=1e-10)
        assert float(square_sum[t]) == pytest.approx(sum(q * q for q in p), rel=1e-10)


@examples(12)
@given(
    chunk=st.integers(1, T + 3),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
    vocab_size=st.sampled_from([None, V, V - 2]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_the_naive_ones_for_any_chunk(
    chunk: int, temperature: float, with_bias: bool, vocab_size: int | None, seed: int
) -> None:
    results = []
    for kernel in (True, False):
        hidden, weight, bias, labels = make(seed=seed)
        b = bias if with_bias else None
        outputs = (
            token_logprobs(
                *(hidden, weight, labels, temperature, b, vocab_size, True, chunk),
                with_prob_square_sum=True,
            )
            if kernel
            else naive(hidden, weight, labels, temperature, b, vocab_size)
        )
        assert outputs[1] is not None
        g = torch.Generator().manual_seed(seed)
        up = torch.randn(2, T, generator=g, dtype=torch.float64)
        leaves = [hidden, weight, *([bias] if with_bias else [])]
        loss = (outputs[0] * up[0] + outputs[1] * up[1]).sum()
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradient_equals_finite_differences(with_entropy: bool) -> None:
    hidden, weight, bias, labels = make()

    def outputs(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        logprob, entropy, _ = token_logprobs(h, w, labels, 0.8, b, V - 1, with_entropy, 4)
        return (logprob,) if entropy is None else (logprob, entropy)

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("which", [0, 1])
def test_either_output_alone_has_its_gradient(which: int) -> None:
    grads = []
    for function in (token_logprobs, naive):
        hidden, weight, _, labels = make()
        output = function(hidden, weight, labels)[which]
        assert output is not None
        grads.append(torch.autograd.grad(output.square().sum(), [hidden, weight]))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inputs_without_gradient_skip_their_part() -> None:
    hidden, weight, _, labels = make()
    token_logprobs(hidden, weight.detach(), labels)[0].sum().backward()
    assert hidden.grad is not None
    hidden_grad = hidden.grad.clone()
    hidden.grad = None
    token_logprobs(hidden.detach(), weight, labels)[0].sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    hidden2, weight2, _, _ = make()
    naive(hidden2, weight2, labels)[0].sum().backward()
    torch.testing.assert_close(hidden_grad, hidden2.grad)
    torch.testing.assert_close(weight.grad, weight2.grad)


def test_a_head_tied_to_the_embeddings_gets_both_gradients() -> None:
    grads = []
    for function in (token_logprobs, naive):
        _, table, _, labels = make()
        hidden = torch.tanh(table[labels.flip(0)])
        function(hidden, table, labels)[0].sum().backward()
        grads.append(table.grad)
    torch.testing.assert_close(*grads)


def test_bf16_inputs_get_fp32_results_near_the_exact_ones() -> None:
    hidden, weight, _, labels = make(torch.bfloat16)
    logprob, entropy, _ = token_logprobs(hidden, weight, labels, chunk_tokens=3)
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


def test_a_bf16_weight_gradient_does_not_lose_small_addends() -> None:
    """512 chunks add 2^-9 each to 1: summed in bf16 every one of them would vanish."""
    n = 513
    hidden = torch.full((n, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 2.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(n, dtype=torch.int64)
    token_logprobs(hidden, weight, labels, chunk_tokens=1)[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [2.0, -2.0]


def test_ids_beyond_the_vocabulary_have_no_probability_and_no_gradient() -> None:
    hidden, weight, _, labels = make()
    with torch.no_grad():
        weight[V - 3 :] = 50.0
    logprob, _, _ = token_logprobs(hidden, weight, labels, vocab_size=V - 3)
    smaller, _, _ = token_logprobs(hidden, weight[: V - 3], labels)
    torch.testing.assert_close(logprob, smaller)
    logprob.sum().backward()
    assert weight.grad is not None
    assert not weight.grad[V - 3 :].any()


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    logprob, entropy, _ = token_logprobs(hidden, weight, torch.tensor([0, 0]))
    assert entropy is not None
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_no_tokens_give_no_results_and_zero_gradients() -> None:
    hidden = torch.empty(0, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    logprob, entropy, _ = token_logprobs(hidden, weight, torch.empty(0, dtype=torch.int64))
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
    token_logprobs(hidden, weight, labels, chunk_tokens=4)[0].sum().backward()
    assert sizes == [4, 4, 3] * 2
    sizes.clear()
    monkeypatch.setitem(logprobs.CHUNK_LOGITS, "cpu", V * 6 + 1)
    monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    token_logprobs(hidden, weight, labels)
    assert sizes == [6, 5]


def test_a_chunk_is_chosen_by_the_vocabulary_unless_it_is_given() -> None:
    assert chunk_size(29) == 2**25 // 29
    assert chunk_size(151_936) == 220
    assert chunk_size(10**9) == 32
    assert chunk_size(151_936, 7) == 7


def test_a_chunk_on_a_gpu_has_four_times_as_many_tokens() -> None:
    assert chunk_size(151_936, None, "cuda") == 883  # 2^27 / 151,936
    assert chunk_size(151_936, 7, "cuda") == 7
    assert chunk_size(151_936, None, "meta") == 220


def test_the_kernel_asks_for_the_chunk_of_its_inputs_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(logprobs.CHUNK_LOGITS, "meta", V * 5)
    monkeypatch.setattr(logprobs, "MIN_CHUNK_TOKENS", 1)
    chunks: list[int] = []
    parts = logprobs._Head.parts

    def spy(self: logprobs._Head) -> Iterator[slice]:
        chunks.append(self._chunk)
        return parts(self)

    monkeypatch.setattr(logprobs._Head, "parts", spy)
    hidden, weight, _, labels = (t if t is None else t.to("meta") for t in make())
    token_logprobs(hidden, weight, labels)
    assert chunks == [5]


@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_sum_of_squared_probabilities_has_no_gradient_and_changes_none(
    with_entropy: bool,
) -> None:
    grads = []
    for asked in (True, False):
        hidden, weight, _, labels = make()
        found = token_logprobs(
            hidden, weight, labels, with_entropy=with_entropy, with_prob_square_sum=asked
        )
        assert (found.entropy is None) is not with_entropy
        if asked:
            assert found.prob_square_sum is not None
            assert not found.prob_square_sum.requires_grad
            torch.testing.assert_close(found.prob_square_sum, naive(hidden, weight, labels)[2])
        else:
            assert found.prob_square_sum is None
        loss = found.logprob.sum() if found.entropy is None else (found.logprob + found[1]).sum()
        grads.append(torch.autograd.grad(loss, [hidden, weight]))
    for with_sum, without in zip(*grads, strict=True):
        assert torch.equal(with_sum, without)


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
        hidden, weight, labels, 0.7, bias, vocab_size, chunk_tokens=4, head_dtype=torch.float32
    )
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    exact = naive(wide[0], wide[1], labels, 0.7, wide[2], vocab_size)
    assert ours.entropy is not None
    torch.testing.assert_close(ours.logprob, exact[0])
    torch.testing.assert_close(ours.entropy, exact[1])
    rounded = token_logprobs(hidden, weight.to(torch.bfloat16), labels, 0.7, bias, vocab_size)
    assert float((rounded.logprob - exact[0]).detach().abs().max()) > 1e-3
    got = torch.autograd.grad((ours.logprob - 0.3 * ours.entropy).sum(), leaves)
    want = torch.autograd.grad((exact[0] - 0.3 * exact[1]).sum(), wide)
    for leaf, grad, reference in zip(leaves, got, want, strict=True):
        assert grad.dtype == leaf.dtype
        torch.testing.assert_close(grad, reference.to(leaf.dtype), rtol=1e-2, atol=1e-4)


def test_an_fp32_head_that_is_tied_to_the_embeddings_gets_both_gradients() -> None:
    results = []
    for head_dtype in (torch.float32, None):
        _, table, _, labels = make(torch.bfloat16 if head_dtype else torch.float32)
        if head_dtype is None:
            table = table.detach().bfloat16().float().requires_grad_()
        states = table[labels.flip(0)] * 0.5
        token_logprobs(states, table, labels, head_dtype=head_dtype)[0].sum().backward()
        assert table.grad is not None
        results.append(table.grad.float())
    assert float((results[0] - results[1]).norm() / results[1].norm()) < 0.01


@examples(12)
@given(
    seed=st.integers(0, 99),
    order=st.permutations(range(T)),
    cut=st.integers(0, T),
    chunk=st.sampled_from([1, 3, None]),
)
def test_order_and_split_of_the_tokens_change_no_value_and_no_gradient(
    seed: int, order: list[int], cut: int, chunk: int | None
) -> None:
    hidden, weight, bias, labels = make(seed=seed)
    at = torch.tensor(order)

    def run(parts: list[Tensor]) -> tuple[Tensor, ...]:
        found = [
            token_logprobs(hidden[p], weight, labels[p], 1.3, bias, chunk_tokens=chunk)
            for p in parts
        ]
        values = torch.cat([f.logprob for f in found])
        entropies = torch.cat([f.entropy for f in found if f.entropy is not None])
        loss = (values.square() + entropies).sum()
        back = torch.cat(parts).argsort()
        return values[back], entropies[back], *torch.autograd.grad(loss, [hidden, weight, bias])

    whole, parted = run([torch.arange(T)]), run([at[:cut], at[cut:]])
    for one, other in zip(whole, parted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
