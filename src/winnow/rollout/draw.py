"""Drawing of tokens from logits, with random numbers that depend on nothing but their key.

The number for a token is a hash of (answer seed, position in the response), so neither the
batch around it, nor when it was drawn, nor where it was resumed can change it.

Shapes: `R` rows decoded together, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from winnow.rollout.engine import SamplingParams
from winnow.types import FloatArray

DRAWS = "winnow"
"""The key of a request's `extra_args` under which a vLLM with our processor finds its draws."""
_SCORED_AT_ONCE = 256
"""Tokens of a given sequence whose logits exist at once."""
_BLOCK = 64
"""Tokens of a block of the vocabulary, for a draw in two levels."""
_TWO_LEVELS = 2048
"""Size of a vocabulary from which a CPU draws in two levels."""
_CHUNK = 1 << 17
"""Logits whose exponentials are computed at once: half a MiB, which stays in a core's cache."""
_DOUBT = (_BLOCK + 8) * 2.0**-23
"""Share of a target by which a bound summed over fp32 blocks, less the target, may be wrong: twice
the rounding error of a sum of so many numbers (each addition at most 2^-24), and the error of
exponentials that are computed a second time (each at most 2^-23)."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign, which torch's own shift keeps."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [R], of int64 seeds and positions [R].

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over seed + golden * (position + 1).
    """
    z = seeds + (positions + 1) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).to(torch.float64) * 2.0**-53


def draw_arguments(
    sampling: SamplingParams,
    seed: int,
    start: int,
    vocabulary: int,
    forced: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the `extra_args` of a request to a vLLM that draws by `rollout.vllm.plugin`.

    Args:
        sampling: temperature and truncation; the rest does not matter here.
        seed: key of the answer's random numbers, 64 bits.
        start: tokens of the context before position 0 of the answer.
        vocabulary: ids at or beyond it are never drawn.
        forced: ids from position 0 on that are taken instead of drawn ones.
    """
    numbers = [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p]
    signed = int(np.uint64(seed).astype(np.int64))
    own = {"numbers": numbers, "seed": signed, "start": start, "vocabulary": vocabulary}
    return {DRAWS: own | ({} if forced is None else {"forced": list(forced)})}


def truncate(logprobs: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return probabilities [R, V], 0 outside the nucleus of each row, not renormalised.

    Args:
        logprobs: [R, V] nats.
        top_p: [R]; the smallest set of likeliest tokens whose mass reaches it stays.
        top_k: [R]; 0 keeps all.
        min_p: [R]; least probability relative to the row's likeliest.
    """
    probs = logprobs.exp()
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = before < top_p[:, None]
    keep &= (top_k[:, None] == 0) | (rank < top_k[:, None])
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    # Rounding must never empty a row, whatever the bounds say.
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(-1, order, ordered * keep)


class RowParams:
    """Sampling settings of rows, as tensors [R]; what no row asks for is None, and costs nothing.

    Args:
        settings: the settings that occur.
        index: [R] place of each row's settings among them.
    """

    def __init__(self, settings: Sequence[SamplingParams], index: Tensor) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=index.device)[index]

        self.temperature: Tensor | None = None
        if any(each.temperature not in (0, 1) for each in settings):
            self.temperature = column([float(each.temperature or 1) for each in settings])
        self.truncation: tuple[Tensor, Tensor, Tensor] | None = None
        if any(each.top_p < 1 or each.top_k > 0 or each.min_p > 0 for each in settings):
            top_p = column([float(each.top_p) for each in settings])
            top_k = column([each.top_k for each in settings])
            self.truncation = top_p, top_k, column([float(each.min_p) for each in settings])
        self.greedy: Tensor | None = None
        if any(each.temperature == 0 for each in settings):
            self.greedy = column([each.temperature == 0 for each in settings])


def draw(logits: Tensor, u: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Draw a token a row, with its log-prob under softmax(logits / temperature).

    The log-prob is that of the whole distribution, also where sampling is truncated.

    Args:
        logits: [R, V] fp32.
        u: [R] float64 in [0, 1).
        params: of these rows.

    Returns:
        ids [R] int64 and log-probs [R] fp32 in nats.
    """
    large = logits.shape[-1] >= _TWO_LEVELS and logits.device.type == "cpu"
    if large and params.truncation is None:
        return _draw_by_blocks(logits, u, params)
    if params.temperature is not None:
        logits = logits / params.temperature[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    bounds = params.truncation
    probs = logprobs.exp() if bounds is None else truncate(logprobs, *bounds)
    ids = select_by_blocks(probs, u) if large else select(probs, u)
    if params.greedy is not None:
        ids = torch.where(params.greedy, logprobs.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)


def select(probs: Tensor, u: Tensor) -> Tensor:
    """Return the first ids [R] at which the cumulated probability exceeds u * total.

    Args:
        probs: [R, V] fp32, not necessarily normalised.
        u: [R] float64 in [0, 1).
    """
    cdf = probs.to(torch.float64).cumsum(-1)
    # That entry has a probability > 0 by construction; not where probabilities are not numbers.
    ids = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(-1)
    return ids.clamp_(max=probs.shape[-1] - 1)


def select_by_blocks(probs: Tensor, u: Tensor) -> Tensor:
    """Select as `select` does, with the same ids, but sum blocks of the vocabulary first.

    Only the block of the drawn token is cumulated. Blocks are summed in fp32; a row in which that
    rounding could decide is summed in float64, and one in which even the order of float64 sums
    could decide is left to `select`.
    """
    ids, doubtful = _find(_block_sums(probs), u, probs.shape[-1], partial(probs.gather, -1), _DOUBT)
    if doubtful.any():
        ids[doubtful] = _select_in_float64(probs[doubtful], u[doubtful])
    return ids


def _draw_by_blocks(logits: Tensor, u: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Draw as `draw` does where nothing is truncated; no table [R, V] is made.

    The ids are those of `select` on exp((logits - their maximum) / temperature).
    """
    top = logits.amax(-1, keepdim=True)

    def shifted(rows: slice | Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = torch.sub(x, top[rows], out=out)
        return x if params.temperature is None else x.div_(params.temperature[rows, None])

    count, vocabulary = logits.shape
    sums = logits.new_empty(count, -(-vocabulary // _BLOCK))
    step = max(1, _CHUNK // vocabulary)
    exps = logits.new_empty(min(step, count), vocabulary)
    for chunk in (slice(first, first + step) for first in range(0, count, step)):
        here = logits[chunk]
        _block_sums(shifted(chunk, here, exps[: len(here)]).exp_(), sums[chunk])
    rows = slice(None)

    def probs_at(places: Tensor) -> Tensor:
        return shifted(rows, logits.gather(-1, places)).exp_()

    ids, doubtful = _find(sums, u, vocabulary, probs_at, _DOUBT)
    for again in torch.split(doubtful.nonzero().flatten(), step):
        ids[again] = _select_in_float64(shifted(again, logits[again]).exp_(), u[again])
    if params.greedy is not None:
        ids = torch.where(params.greedy, logits.argmax(-1), ids)
    chosen = shifted(rows, logits.gather(-1, ids[:, None])).squeeze(-1)
    return ids, (chosen - sums.sum(-1, dtype=torch.float64).log()).float()


def _select_in_float64(probs: Tensor, u: Tensor) -> Tensor:
    """Select as `select` does, from blocks summed in float64."""
    # The sums of a block, those of all blocks and the cumulated ones of `select` round apart.
    doubt = probs.shape[-1] * 2.0**-51
    exact = probs.to(torch.float64)
    ids, doubtful = _find(_block_sums(exact), u, probs.shape[-1], partial(exact.gather, -1), doubt)
    if doubtful.any():
        ids[doubtful] = select(probs[doubtful], u[doubtful])
    return ids


def _find(
    sums: Tensor, u: Tensor, vocabulary: int, probs_at: Callable[[Tensor], Tensor], doubt: float
) -> tuple[Tensor, Tensor]:
    """Return the ids [R] at which u * total is exceeded, and in which rows rounding could decide.

    Args:
        sums: [R, blocks] of the probabilities.
        u: [R] float64 in [0, 1).
        vocabulary: V; the last block may be short, and its last probability is read again then,
            behind all that a target can reach.
        probs_at: probabilities [R, N] at places [R, N].
        doubt: share of the target by which a bound may be wrong.
    """
    sums = sums.to(torch.float64)
    cdf = sums.cumsum(-1)
    target = u[:, None] * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=sums.shape[-1] - 1)
    places = block * _BLOCK + torch.arange(_BLOCK, device=sums.device)
    inside = probs_at(places.clamp(max=vocabulary - 1)).to(torch.float64)
    bounds = inside.cumsum(-1) + (cdf - sums).gather(-1, block)
    place = torch.searchsorted(bounds, target, right=True).clamp_(max=_BLOCK - 1)
    above = bounds.gather(-1, place) - target
    near = torch.minimum(above, inside.gather(-1, place) - above)  # the closer of its two bounds
    # Where probabilities are not numbers, no comparison holds, and some id is as good as another.
    ids = (block * _BLOCK + place).clamp_(max=vocabulary - 1)
    return ids.squeeze(-1), (near <= doubt * target).squeeze(-1)


def _block_sums(probs: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum each block of the vocabulary: [R, V] to [R, ceil(V / block)]; the last may be short."""
    count, vocabulary = probs.shape
    whole = vocabulary // _BLOCK
    if out is None:
        out = probs.new_empty(count, -(-vocabulary // _BLOCK))
    torch.sum(probs[:, : whole * _BLOCK].view(count, whole, _BLOCK), -1, out=out[:, :whole])
    if whole < out.shape[-1]:
        torch.sum(probs[:, whole * _BLOCK :], -1, out=out[:, whole])
    return out


def token_logprobs(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, ids: Tensor, temperature: float
) -> FloatArray:
    """Return log-probs [L] in nats of given tokens, under softmax(logits / temperature).

    Args:
        logits_of: logits [T, V] of hidden states [T, H]; asked for a stretch at a time.
        hidden: [L, H], of the token before each.
        ids: [L]
        temperature: above 0.
    """
    found = torch.empty(len(ids))
    for start in range(0, len(ids), _SCORED_AT_ONCE):
        here = slice(start, start + _SCORED_AT_ONCE)
        logprobs = torch.log_softmax(logits_of(hidden[here]) / temperature, dim=-1)
        found[here] = logprobs.gather(-1, ids[here, None]).squeeze(-1)
    return found.numpy()
