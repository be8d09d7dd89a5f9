"""Log-probabilities of given tokens, and entropies, without ever holding all logits.

With logits z = (h W' + b) / temperature and log-sum-exp lse(z), logp(y) = z_y - lse and the
entropy is -sum_v p_v logp_v. Backward uses d logp(y) / dz_v = [v = y] - p_v and
d entropy / dz_v = -p_v (logp_v + entropy), on logits that are computed again chunk by chunk.
What is kept between the passes is the inputs and two numbers a token.

Shapes: `T` tokens, `H` width, `V` vocabulary, `C` tokens of a chunk. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SMALL_CHUNK_LOGITS = 1 << 22
"""Logits (16 MiB in fp32) that a chunk may always hold: small vocabularies run in one piece."""
ROWS_AT_ONCE = 8192


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = True,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label, and entropy, under softmax((hidden weight' + bias) / temperature).

    Products run in the inputs' dtype, everything after them in fp32 (fp64 for fp64 inputs), as
    an engine does that samples from bf16 logits. The weight's gradient is summed in fp32.

    Args:
        hidden: [T, H], the states that predict the labels.
        weight: [V, H] of the head, in hidden's dtype; may be tied to the embeddings.
        labels: [T] int64, in [0, vocab_size).
        temperature: of the policy, > 0.
        bias: [V] of the head.
        vocab_size: ids from here on have probability 0 (a head wider than its tokenizer, of
            which the engine never samples the rest); None means V.
        with_entropy: False saves its cost.
        chunk_tokens: at most chunk_tokens x V logits exist at once (or 4 Mi, if that is more).

    Returns:
        Log-probs [T] and entropies [T] (None without), in nats, fp32 or fp64.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a number out of its range.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, H] and weight [V, H], got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels must be [{len(hidden)}], got {list(labels.shape)}")
    if weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight must have hidden's dtype {hidden.dtype}, got {weight.dtype}; cast one of them"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    size = weight.shape[0] if vocab_size is None else vocab_size
    if not 1 <= size <= weight.shape[0]:
        raise ValueError(f"vocab_size must lie in [1, {weight.shape[0]}], got {size}")
    chunk = max(chunk_tokens, SMALL_CHUNK_LOGITS // size)
    apply = cast(Any, _TokenLogprobs).apply
    logprob, entropy = apply(hidden, weight, bias, labels, temperature, size, with_entropy, chunk)
    return logprob, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        vocab_size: int,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        head = _Head(hidden, weight, bias, temperature, vocab_size, chunk)
        logprob = hidden.new_empty(len(hidden), dtype=head.exact)
        lse = torch.empty_like(logprob)
        entropy = torch.empty_like(logprob) if with_entropy else None
        for part in head.parts():
            logits_CV, logp_CV = head.logits(part)
            labels_C1 = labels[part, None]
            chosen_C1 = logits_CV.gather(1, labels_C1)
            torch.log_softmax(logits_CV, 1, out=logp_CV)
            logprob_C1 = logp_CV.gather(1, labels_C1)
            logprob[part] = logprob_C1[:, 0]
            lse[part] = (chosen_C1 - logprob_C1)[:, 0]
            if entropy is not None:
                p_CV = torch.exp(logp_CV, out=logits_CV)
                entropy[part] = p_CV.mul_(logp_CV).sum(1).neg_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy)
        ctx.settings = (temperature, vocab_size, chunk)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        temperature, size, chunk = ctx.settings
        head = _Head(hidden, weight, bias, temperature, size, chunk)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=head.exact) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.exact) if for_bias else None
        for part in head.parts():
            logp_CV, p_CV = head.logits(part)
            logp_CV.sub_(lse[part, None])
            grad_CV = _grad_logits(
                logp_CV,
                p_CV,
                labels[part, None],
                _scaled(grad_logprob, part, 1 / temperature),
                _scaled(grad_entropy, part, 1 / temperature),
                None if entropy is None else entropy[part, None],
            )
            if grad_bias is not None:
                grad_bias[:size] += grad_CV.sum(0)
            grad_CV = head.rounded(grad_CV)
            if grad_hidden is not None:
                torch.mm(grad_CV, weight[:size], out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight[:size], grad_CV.T, hidden[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


class _Head:
    """The head's logits chunk by chunk, in two buffers [C, V] that every chunk uses again.

    (Fresh ones of this size cost more time in page faults than the arithmetic does.)
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        vocab_size: int,
        chunk: int,
    ) -> None:
        self.exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self._hidden = hidden
        self._weight = weight[:vocab_size]
        self._bias = None if bias is None else bias[:vocab_size]
        self._temperature = temperature
        self._chunk = chunk
        shape = (min(chunk, len(hidden)), vocab_size)
        self._first = hidden.new_empty(shape, dtype=self.exact)
        self._second = hidden.new_empty(shape, dtype=self.exact)
        same = hidden.dtype == self.exact
        self._product = self._first if same else hidden.new_empty(shape)

    def parts(self) -> Iterator[slice]:
        """The chunks of the tokens."""
        for start in range(0, len(self._hidden), self._chunk):
            yield slice(start, min(start + self._chunk, len(self._hidden)))

    def logits(self, part: slice) -> tuple[Tensor, Tensor]:
        """z of a chunk [C, V] in fp32 or fp64, and the other buffer; both the caller's to use."""
        size = part.stop - part.start
        product = torch.mm(self._hidden[part], self._weight.T, out=self._product[:size])
        logits = self._first[:size]
        if product.dtype != self.exact:
            logits.copy_(product)
        if self._bias is not None:
            logits += self._bias
        if self._temperature != 1.0:
            logits /= self._temperature
        return logits, self._second[:size]

    def rounded(self, values: Tensor) -> Tensor:
        """`values` [C, V] in the inputs' dtype, valid until the next chunk."""
        if self._product.dtype == self.exact:
            return values
        return self._product[: len(values)].copy_(values)


def _grad_logits(
    logp_CV: Tensor,
    p_CV: Tensor,
    labels_C1: Tensor,
    grad_logprob_C1: Tensor | None,
    grad_entropy_C1: Tensor | None,
    entropy_C1: Tensor | None,
) -> Tensor:
    """The loss's gradient with respect to z [C, V]; uses up `logp_CV`, and `p_CV` as room."""
    torch.exp(logp_CV, out=p_CV)
    if grad_entropy_C1 is None:
        if grad_logprob_C1 is None:
            return p_CV.zero_()
        grad_CV = p_CV.mul_(-grad_logprob_C1)
    else:
        assert entropy_C1 is not None
        grad_CV = logp_CV.add_(entropy_C1).mul_(-grad_entropy_C1)
        if grad_logprob_C1 is not None:
            grad_CV.sub_(grad_logprob_C1)
        grad_CV.mul_(p_CV)
    if grad_logprob_C1 is not None:
        grad_CV.scatter_add_(1, labels_C1, grad_logprob_C1)
    return grad_CV


def _add_product(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """total += left right. A bf16 product goes by rows, to be widened while it is in cache."""
    if right_CH.dtype == total_VH.dtype:
        total_VH.addmm_(left_VC, right_CH)
        return
    for start in range(0, len(total_VH), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        total_VH[rows] += (left_VC[rows] @ right_CH).to(total_VH.dtype)


def _scaled(grad: Tensor | None, part: slice, factor: float) -> Tensor | None:
    return None if grad is None else grad[part, None] * factor
