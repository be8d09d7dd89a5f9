"""Log-probabilities of given tokens, and entropies, without ever holding all logits.

With logits z = (h W' + b) / temperature and log-sum-exp lse(z), logp(y) = z_y - lse and the
entropy is -sum_v p_v logp_v. Backward uses d logp(y) / dz_v = [v = y] - p_v and
d entropy / dz_v = -p_v (logp_v + entropy), on logits that are computed again chunk by chunk.
What is kept between the passes is the inputs and two numbers a token.

With tensor parallelism each rank has some rows of the head, and a softmax over them alone. A row's
probability among all is w_r times that among its rank's, with w_r = exp(lse_r - lse), so that
logp = logp_r + log w_r and the entropy is sum_r w_r (entropy_r - log w_r) (the grouping property;
C. E. Shannon, 1948). Ranks exchange a few numbers a token, once in the forward pass.

Shapes: `T` tokens, `H` width, `V` vocabulary (or a rank's rows of it), `C` tokens of a chunk, `N`
ranks. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Logits that a chunk has where no number of tokens is set, by the type of device: 128 MiB in
fp32 on a CPU, 512 on a GPU, held twice. Each chunk reads the head and adds to all of its gradient,
which takes a GPU longer than the products of few tokens; its figure is reckoned, not measured."""
MIN_CHUNK_TOKENS = 32
"""Below this a product re-reads the head more than it computes."""
ROWS_AT_ONCE = 8192
ROW_MULTIPLE = 64
"""Half-precision products have a multiple of so many columns, where the head has rows for them: a
GPU's matrix units load 16 bytes at once. With 151,669 ids the products of Qwen3's heads take 1.8 to
2.8 times as long on an H100."""


class TokenLogprobs(NamedTuple):
    """Numbers about the given tokens under the policy; fp32 or fp64, as the arithmetic was."""

    logprob: Tensor
    """[T] nats"""
    entropy: Tensor | None
    """[T] nats; None where it was not requested."""
    prob_square_sum: Tensor | None
    """[T] sum over the vocabulary of squared probabilities, without gradient; None where it was
    not requested."""


class OutputHead(NamedTuple):
    """The layer from states to logits, or a rank's rows of it."""

    weight: Tensor
    """[V, H] in the states' dtype or in `dtype`; may be tied to the embeddings."""
    bias: Tensor | None = None
    """[V]"""
    vocab_size: int | None = None
    """Ids from here on have probability 0 (a head wider than its tokenizer, of which the engine
    never samples the rest); None means V."""
    dtype: torch.dtype | None = None
    """Run the products in this one instead, on states and weights that are cast piece by piece (an
    FP32 head on a bf16 model). Gradients keep the inputs' dtypes."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the head, V rows and biases each, in the order of their ids (V N is the
    vocabulary, padded). All of them call `token_logprobs`, and later run its backward pass, with
    the same of everything else, and get the same bits. The gradient of the states is the whole one,
    summed over the ranks; that of weight and bias is of a rank's own rows."""


def chunk_size(vocab_size: int, chunk_tokens: int | None = None, device_type: str = "cpu") -> int:
    """Return the tokens of a chunk: those given, else as many as have `CHUNK_LOGITS` logits.

    Args:
        device_type: whose number of logits counts; of one that is not named there, the CPU's.
    """
    logits = CHUNK_LOGITS.get(device_type, CHUNK_LOGITS["cpu"])
    return chunk_tokens or max(logits // vocab_size, MIN_CHUNK_TOKENS)


def token_logprobs(
    hidden: Tensor,
    head: OutputHead,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
    with_prob_square_sum: bool = False,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """Compute log-probs of labels, and entropies: softmax((hidden weight' + bias) / temperature).

    Products run in the inputs' dtype, everything after them in fp32 (fp64 for fp64 inputs), as
    an engine does that samples from bf16 logits. The weight's gradient is summed in fp32.

    Args:
        hidden: [T, H], the states that predict the labels.
        labels: [T] int64, in [0, vocab_size).
        temperature: of the policy, > 0.
        with_entropy: False saves its cost.
        with_prob_square_sum: ask for it; it is for weights, which take no gradient.
        chunk_tokens: at most so many x V logits exist at once; None is `chunk_size`'s choice.
    """
    weight, bias, vocab_size, dtype, group = head
    is_shared = group is not None and group.size() > 1
    ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    size, product = vocab_size or len(weight) * ranks, dtype or hidden.dtype
    assert 1 <= size <= len(weight) * ranks, "the head has a row for each id"
    assert weight.dtype in (hidden.dtype, product)
    settings = _Settings(
        temperature,
        first=rank * len(weight),
        rows=min(max(size - rank * len(weight), 0), len(weight)),
        chunk=chunk_size(size, chunk_tokens, hidden.device.type),
        product=product,
        with_entropy=with_entropy,
        with_prob_square_sum=with_prob_square_sum,
        group=group if is_shared else None,
    )
    return TokenLogprobs(*cast(Any, _TokenLogprobs).apply(hidden, weight, bias, labels, settings))


@dataclass(frozen=True)
class _Settings:
    temperature: float
    first: int
    """The id of the head's first row here."""
    rows: int
    """Rows here that have an id; the rest is padding."""
    chunk: int
    product: torch.dtype
    """In which matrices are multiplied."""
    with_entropy: bool
    with_prob_square_sum: bool
    group: dist.ProcessGroup | None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        head = _Head(hidden, weight, bias, settings)
        softmax = _local_softmax(head, labels, settings)
        if settings.group is not None:
            softmax = _merge_softmax(softmax, labels // len(weight), settings.group)
        logprob, lse, entropy, square_sum = softmax
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy)
        ctx.settings = settings
        if square_sum is not None:
            ctx.mark_non_differentiable(square_sum)
        return logprob, entropy, square_sum

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        rows, group, scale = ctx.settings.rows, ctx.settings.group, 1 / ctx.settings.temperature
        head = _Head(hidden, weight, bias, ctx.settings)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=head.exact) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.exact) if for_bias else None
        for part in head.chunks():
            logp_CV, p_CV = head.logits(part)
            logp_CV.sub_(lse[part, None])
            grad_CV = _grad_logits(
                logp_CV,
                p_CV,
                head.label_columns(labels[part, None]),
                _scaled(grad_logprob, part, scale),
                _scaled(grad_entropy, part, scale),
                None if entropy is None else entropy[part, None],
            )
            if grad_bias is not None:
                grad_bias[:rows] += grad_CV.sum(0)
            grad_CV = head.cast(grad_CV)
            if grad_hidden is not None and group is None:
                head.times_weight(grad_CV, grad_hidden[part])
            elif grad_hidden is not None:
                local_CH = torch.empty_like(hidden[part], dtype=grad_CV.dtype)
                head.times_weight(grad_CV, local_CH)
                whole_CH = local_CH.to(head.exact)
                dist.all_reduce(whole_CH, group=group)
                grad_hidden[part] = whole_CH
            if grad_weight is not None:
                _add_product(grad_weight[: head.columns], grad_CV.T, head.chunk_states(part))
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


Softmax = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Log-probs of labels, log-sum-exp, and if requested entropy and sum of squares, [T] each."""


def _local_softmax(head: _Head, labels: Tensor, settings: _Settings) -> Softmax:
    """Compute the softmax over the local rows; log-probs of other ranks' labels are arbitrary."""
    logprob = head.zeros()
    lse = torch.full_like(logprob, -torch.inf, dtype=torch.float64 if settings.group else None)
    entropy = torch.zeros_like(logprob) if settings.with_entropy else None
    square_sum = torch.zeros_like(logprob) if settings.with_prob_square_sum else None
    for part in head.chunks() if settings.rows else ():
        logits_CV, logp_CV = head.logits(part)
        at_C1, _ = head.label_columns(labels[part, None])
        # The log-prob of another rank's label may be far from 0, and rounded much.
        sure_C1 = at_C1 if settings.group is None else logits_CV.argmax(1, True)
        chosen_C1 = logits_CV.gather(1, sure_C1)
        torch.log_softmax(logits_CV, 1, out=logp_CV)
        logprob[part] = logp_CV.gather(1, at_C1)[:, 0]
        lse[part] = (chosen_C1.to(lse.dtype) - logp_CV.gather(1, sure_C1))[:, 0]
        if entropy is None and square_sum is None:
            continue
        p_CV = torch.exp(logp_CV, out=logits_CV)
        if square_sum is not None:
            square_sum[part] = torch.linalg.vector_norm(p_CV, dim=1).square_()
        if entropy is not None:
            entropy[part] = p_CV.mul_(logp_CV).sum(1).neg_()
    return logprob, lse, entropy, square_sum


def _merge_softmax(local: Softmax, owners_T: Tensor, group: dist.ProcessGroup) -> Softmax:
    """Join the softmax over each rank's rows to the softmax over all of them.

    Args:
        local: of this rank.
        owners_T: the rank that has each label.
    """
    # In fp64: of large log-sum-exps the differences are small. Four numbers a token are few.
    sent = torch.stack([(torch.zeros_like(local[1]) if x is None else x).double() for x in local])
    every = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(every, sent, group=group)
    logprob_NT, lse_NT, entropy_NT, square_sum_NT = torch.stack(every, 1)
    log_w_NT = torch.log_softmax(lse_NT, 0)
    w_NT = log_w_NT.exp()
    joined = (
        (logprob_NT + log_w_NT).gather(0, owners_T[None])[0],
        lse_NT.logsumexp(0),
        (w_NT * entropy_NT + torch.special.entr(w_NT)).sum(0),
        (w_NT.square() * square_sum_NT).sum(0),
    )
    pairs = zip(local, (each.to(local[0].dtype) for each in joined), strict=True)
    return cast(Softmax, tuple(None if mine is None else each for mine, each in pairs))


class _Head:
    """The head's logits chunk by chunk, in two buffers [C, V] that every chunk uses again.

    (Fresh ones of this size cost more time in page faults than the arithmetic does.) A weight of
    another dtype than the products' is cast by rows, into a third, small buffer.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings
    ) -> None:
        size, product = settings.rows, settings.product
        self.exact = torch.float64 if product == torch.float64 else torch.float32
        self._hidden, self._size = hidden, size
        self._bias = None if bias is None else bias[:size]
        self._first_id, self._temperature = settings.first, settings.temperature
        self._chunk = settings.chunk
        shape = (min(settings.chunk, len(hidden)), size)
        self._first = hidden.new_empty(shape, dtype=self.exact)
        self._second = hidden.new_empty(shape, dtype=self.exact)
        self._product = self._first
        self.columns = size
        if product != self.exact:
            width = size + -size % ROW_MULTIPLE
            self.columns = min(width, len(weight))
            self._product = hidden.new_zeros((shape[0], width), dtype=product)[:, : self.columns]
        self._weight = weight[: self.columns]
        self._room: Tensor | None = None
        if weight.dtype != product:
            self._room = weight.new_empty((min(size, ROWS_AT_ONCE), weight.shape[1]), dtype=product)

    def zeros(self) -> Tensor:
        """A zero for each token [T], in fp32 or fp64."""
        return self._hidden.new_zeros(len(self._hidden), dtype=self.exact)

    def label_columns(self, labels_C1: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of labels, and where they are: other ranks' labels get any column."""
        columns = labels_C1 - self._first_id
        within = columns.clamp(0, max(self._size - 1, 0))
        return within, within == columns

    def chunks(self) -> Iterator[slice]:
        """The chunks of the tokens."""
        for start in range(0, len(self._hidden), self._chunk):
            yield slice(start, min(start + self._chunk, len(self._hidden)))

    def chunk_states(self, part: slice) -> Tensor:
        """The hidden states of a chunk [C, H] in the products' dtype."""
        return self._hidden[part].to(self._product.dtype)

    def logits(self, part: slice) -> tuple[Tensor, Tensor]:
        """z of a chunk [C, V] in fp32 or fp64, and the other buffer; both the caller's to use."""
        size = part.stop - part.start
        product, logits = self._product[:size], self._first[:size]
        states = self.chunk_states(part)
        for rows, weight in self._weight_rows():
            torch.mm(states, weight.T, out=product[:, rows])
        if product.dtype != self.exact:
            logits.copy_(product[:, : self._size])
        if self._bias is not None:
            logits += self._bias
        if self._temperature != 1.0:
            logits /= self._temperature
        return logits, self._second[:size]

    def cast(self, values: Tensor) -> Tensor:
        """`values` in the products' dtype and columns, 0 beyond V; valid until the next chunk."""
        if self._product.dtype == self.exact:
            return values
        product = self._product[: len(values)]
        product[:, : self._size] = values
        product[:, self._size :] = 0.0
        return product

    def times_weight(self, values: Tensor, out: Tensor) -> None:
        """Fill `out` [C, H] with cast values times the weight, summed in the products' dtype."""
        if self._room is None and out.dtype == self._product.dtype:
            torch.mm(values, self._weight, out=out)
            return
        total = torch.zeros_like(out, dtype=self._product.dtype)
        for rows, weight in self._weight_rows():
            total.addmm_(values[:, rows], weight)
        out.copy_(total)

    def _weight_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """The weight in the products' dtype: whole, or rows of it that are valid one by one."""
        if self._room is None:
            yield slice(None), self._weight
            return
        for start in range(0, len(self._weight), ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, len(self._weight)))
            yield rows, self._room[: rows.stop - start].copy_(self._weight[rows])


def _grad_logits(
    logp_CV: Tensor,
    p_CV: Tensor,
    places_C1: tuple[Tensor, Tensor],
    grad_logprob_C1: Tensor | None,
    grad_entropy_C1: Tensor | None,
    entropy_C1: Tensor | None,
) -> Tensor:
    """The loss's gradient with respect to z [C, V]; uses up `logp_CV`, and `p_CV` as room.

    Args:
        places_C1: of the labels, as `_Head.label_columns` gives them.
    """
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
    if grad_logprob_C1 is not None and grad_CV.shape[1]:
        at_C1, is_local_C1 = places_C1
        grad_CV.scatter_add_(1, at_C1, grad_logprob_C1 * is_local_C1)
    return grad_CV


def _add_product(total_VH: Tensor, grad_VC: Tensor, states_CH: Tensor) -> None:
    """total += grad states. A bf16 product goes by rows, to be widened while it is in cache."""
    if states_CH.dtype == total_VH.dtype:
        total_VH.addmm_(grad_VC, states_CH)
        return
    for start in range(0, len(total_VH), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        total_VH[rows] += (grad_VC[rows] @ states_CH).to(total_VH.dtype)


def _scaled(grad: Tensor | None, part: slice, factor: float) -> Tensor | None:
    return None if grad is None else grad[part, None] * factor
