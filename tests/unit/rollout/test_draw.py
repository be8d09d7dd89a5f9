"""Random numbers by key, and drawing from logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.rollout.draw import RowParams, draw, select, select_by_blocks, truncate, uniform
from winnow.rollout.engine import SamplingParams, answer_seed

MASK = (1 << 64) - 1


def splitmix(seed: int, position: int) -> float:
    """The same number with Python's unbounded integers."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


def params_of(rows: int, **sampling: float) -> RowParams:
    kinds = [SamplingParams(8, **sampling)]  # type: ignore[arg-type]
    return RowParams(kinds, torch.zeros(rows, dtype=torch.long))


def test_a_seed_is_the_same_in_every_process() -> None:
    assert answer_seed(1, 2, 3) == 13041116711478803063


@given(st.integers(0, MASK), st.integers(0, 2**40))
def test_a_number_is_the_splitmix_hash_of_its_seed_and_position(seed: int, position: int) -> None:
    signed = np.array([seed], np.uint64).astype(np.int64)
    got = uniform(torch.from_numpy(signed), torch.tensor([position]))
    assert got.item() == splitmix(seed, position)
    assert 0 <= got.item() < 1


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).repeat(40_000, 1)
    u = uniform(torch.zeros(40_000, dtype=torch.long), torch.arange(40_000))
    ids, logprobs = draw(logits, u, params_of(40_000, temperature=2.0))
    p = torch.softmax(logits[0] / 2, -1)
    share = torch.bincount(ids, minlength=4) / 40_000
    # Six standard deviations.
    assert ((share - p).abs() < 6 * (p * (1 - p) / 40_000).sqrt()).all()
    torch.testing.assert_close(logprobs, p.log()[ids])


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 6), st.data())
def test_a_token_without_probability_is_never_drawn(
    u: float, alive: int, data: st.DataObject
) -> None:
    kept = data.draw(st.permutations(range(8)))[:alive]
    logits = torch.full((1, 8), -torch.inf)
    logits[0, kept] = torch.linspace(-30.0, 5.0, alive)
    ids, logprobs = draw(logits, torch.tensor([u], dtype=torch.float64), params_of(1))
    assert ids.item() in kept
    assert torch.isfinite(logprobs).all()


def counted(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """How many cumulated probabilities do not exceed u * total: the definition of a draw."""
    cdf = probs.to(torch.float64).cumsum(-1)
    return (cdf <= (u * cdf[:, -1])[:, None]).sum(-1)


@given(
    st.integers(1, 6),
    st.sampled_from([1, 63, 64, 65, 100, 2048, 5000]),
    st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    st.integers(0, 2**31),
    st.data(),
)
@pytest.mark.bits
def test_a_draw_in_two_levels_gives_the_ids_of_a_plain_one(
    rows: int, vocabulary: int, spread: float, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * spread
    probs = torch.softmax(logits, -1)
    probs[torch.rand(probs.shape, generator=generator) < data.draw(st.sampled_from([0, 0.9]))] = 0
    probs[:, int(torch.randint(vocabulary, (1,), generator=generator))] += 1e-3
    cdf = probs.double().cumsum(-1)
    # On a bound, a hair beside one, and anywhere.
    bound = cdf.gather(1, torch.randint(vocabulary, (rows, 1), generator=generator))[:, 0]
    hair = data.draw(st.sampled_from([0.0, 1e-16, -1e-16, 1e-8, -1e-8, 1e-6, -1e-6]))
    beside = (bound / cdf[:, -1] + hair).clamp(0, 1 - 2**-53)
    for u in (beside, torch.rand(rows, generator=generator, dtype=torch.float64)):
        want = counted(probs, u)
        assert torch.equal(select(probs, u), want)
        assert torch.equal(select_by_blocks(probs, u), want)


@given(
    st.sampled_from([2048, 5000, 200_000]),
    st.sampled_from([0.5, 1.0]),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-15, -1e-15, 1e-8, -1e-8, 1e-6, -1e-6]),
)
@pytest.mark.bits
def test_a_draw_from_a_large_vocabulary_gives_the_ids_of_one_cumulative_sum(
    vocabulary: int, temperature: float, seed: int, hair: float
) -> None:
    rows = 3
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()
    cdf = probs.double().cumsum(-1)
    bound = cdf.gather(1, torch.randint(vocabulary, (rows, 1), generator=generator))[:, 0]
    u = (bound / cdf[:, -1] + hair).clamp(0, 1 - 2**-53)
    ids, _ = draw(logits, u, params_of(rows, temperature=temperature))
    assert torch.equal(ids, counted(probs, u))


def test_what_is_not_a_number_is_drawn_as_some_token() -> None:
    for vocabulary in (8, 4096, 5000):
        logits, u = torch.full((1, vocabulary), torch.nan), torch.tensor([0.5]).double()
        ids, logprobs = draw(logits, u, params_of(1))
        assert 0 <= ids.item() < vocabulary
        assert logprobs.isnan().all()


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p", "kept"),
    [
        (1.0, 0, 0.0, [0, 1, 2, 3]),
        (0.49, 0, 0.0, [0]),
        (0.51, 0, 0.0, [0, 1]),
        (0.79, 0, 0.0, [0, 1]),
        (1.0, 3, 0.0, [0, 1, 2]),
        (1.0, 0, 0.3, [0, 1]),
        (0.95, 2, 0.1, [0, 1]),
        (1e-9, 0, 0.0, [0]),
    ],
)
def test_truncation_keeps_the_likeliest(
    top_p: float, top_k: int, min_p: float, kept: list[int]
) -> None:
    order = [2, 0, 3, 1]
    p = torch.tensor([0.5, 0.3, 0.125, 0.075])
    logprobs = torch.empty(1, 4)
    logprobs[0, order] = p.log()
    got = truncate(logprobs, torch.tensor([top_p]), torch.tensor([top_k]), torch.tensor([min_p]))
    want = torch.zeros(1, 4)
    want[0, [order[i] for i in kept]] = p[kept]
    torch.testing.assert_close(got, want)
