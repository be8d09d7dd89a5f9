"""All estimators through their one interface: against loops, and under what must not matter."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from tests.objectives import ADVANTAGE_SECTIONS, advantages
from tests.ragged_steps import COMPONENTS, Sample, Token, inputs_of, steps
from torch import Tensor

from winnow.algorithms.advantages import ESTIMATORS, AdvantageInputs, gae, reward_to_go, whiten

Rows = list[list[float]]
Reference = Callable[..., list[float] | Rows]


def mates(samples: Sequence[Sample], sample: Sample) -> list[Sample]:
    return [other for other in samples if other.group == sample.group]


def mean_of(rewards: list[float]) -> float:
    return 0.0 if len(rewards) == 1 else statistics.fmean(rewards)


def std_of(rewards: list[float]) -> float:
    return 1.0 if len(rewards) == 1 else statistics.stdev(rewards)


def loop_grpo(samples: Sequence[Sample], std_normalization: str = "group") -> list[float]:
    every = [sample.reward for sample in samples]
    result = []
    for sample in samples:
        own = [mate.reward for mate in mates(samples, sample)]
        std = {"group": std_of(own), "batch": std_of(every), "none": 1 - 1e-6}[std_normalization]
        result.append((sample.reward - mean_of(own)) / (std + 1e-6))
    return result


def loop_grpo_passk(samples: Sequence[Sample], std_normalization: str = "group") -> list[float]:
    result = []
    for sample in samples:
        own = sorted(mate.reward for mate in mates(samples, sample))
        lead = own[-1] - own[-2] if sample.reward == own[-1] else 0.0
        result.append(lead / (std_of(own) + 1e-6) if std_normalization == "group" else lead)
    return result


def loop_rloo(samples: Sequence[Sample]) -> list[float]:
    result = []
    for sample in samples:
        others = [mate.reward for mate in mates(samples, sample) if mate is not sample]
        result.append(sample.reward - (statistics.fmean(others) if others else 0.0))
    return result


def loop_opo(samples: Sequence[Sample]) -> list[float]:
    result = []
    for sample in samples:
        own = mates(samples, sample)
        weights = [len(mate.written) for mate in own]
        if not any(weights):
            weights = [1] * len(own)
        baseline = sum(w * mate.reward for w, mate in zip(weights, own, strict=True)) / sum(weights)
        result.append(sample.reward - (baseline if len(own) > 1 else 0.0))
    return result


def loop_gpg(samples: Sequence[Sample], alpha: str = "groups") -> list[float]:
    teaching = 0
    for sample in samples:
        own = [mate.reward for mate in mates(samples, sample)]
        differs = len(own) == 1 or min(own) < max(own)
        teaching += differs if alpha == "groups" else sample.reward != 0
    scale = len(samples) / max(teaching, 1)
    return [scale * a for a in loop_grpo(samples, "none")]


def loop_spread(samples: Sequence[Sample], numbers: list[float]) -> Rows:
    return [[a] * len(s.tokens) for s, a in zip(samples, numbers, strict=True)]


def loop_whitened(samples: Sequence[Sample], rows: Rows) -> Rows:
    pairs = [zip(s.tokens, row, strict=True) for s, row in zip(samples, rows, strict=True)]
    learnt = [x for pair in pairs for token, x in pair if token.learns]
    mean = statistics.fmean(learnt) if learnt else 0.0
    variance = statistics.variance(learnt) if len(learnt) > 1 else 0.0
    # Equal but for noise, such as two rewards over (std + 1e-6), they teach nothing.
    flat = math.sqrt(variance) <= 1e-6 * max(abs(mean), 1e-4)
    scale = math.inf if flat else math.sqrt(variance + 1e-8)
    return [
        [(x - mean) / scale if t.learns else 0.0 for t, x in zip(s.tokens, row, strict=True)]
        for s, row in zip(samples, rows, strict=True)
    ]


def backwards(sample: Sample, step: Callable[[Token, float], float]) -> list[float]:
    """Fold over the written tokens from the last to the first; 0 on the others."""
    state, row = 0.0, []
    for token in reversed(sample.tokens):
        if token.written:
            state = step(token, state)
        row.append(state if token.written else 0.0)
    return row[::-1]


def loop_to_go(samples: Sequence[Sample], gamma: float) -> Rows:
    return [backwards(s, lambda token, after: token.reward + gamma * after) for s in samples]


def loop_reinforce_plus_plus(samples: Sequence[Sample], gamma: float = 1.0) -> Rows:
    return loop_whitened(samples, loop_to_go(samples, gamma))


def loop_reinforce_plus_plus_baseline(samples: Sequence[Sample]) -> Rows:
    return loop_whitened(samples, loop_spread(samples, loop_grpo(samples, "none")))


def loop_remax(samples: Sequence[Sample], gamma: float = 1.0) -> Rows:
    return [
        [g - s.greedy if t.written else 0.0 for t, g in zip(s.tokens, row, strict=True)]
        for s, row in zip(samples, loop_to_go(samples, gamma), strict=True)
    ]


def loop_gdpo(samples: Sequence[Sample], weights: dict[str, float] | None = None) -> Rows:
    total = [0.0] * len(samples)
    for k, name in enumerate(COMPONENTS):
        one = [replace(s, tokens=(Token(True, reward=s.components[k]),)) for s in samples]
        weight = weights.get(name, 0.0) if weights else 1.0
        total = [a + weight * b for a, b in zip(total, loop_grpo(one), strict=True)]
    return loop_whitened(samples, loop_spread(samples, total))


def loop_optimal_token_baseline(samples: Sequence[Sample]) -> Rows:
    to_go, energy = [], []
    for sample, row in zip(samples, loop_to_go(samples, 1.0), strict=True):
        to_go.append([g for g, token in zip(row, sample.tokens, strict=True) if token.written])
        running = [(1 - 2 * t.prob + t.square) * t.weight**2 for t in sample.written]
        energy.append([sum(running[: t + 1]) for t in range(len(running))])
    result = []
    for b, sample in enumerate(samples):
        own = [c for c, other in enumerate(samples) if other.group == sample.group]
        own_advantages = []
        for t, g in enumerate(to_go[b]):
            there = [c for c in own if len(to_go[c]) > t]
            above = sum(to_go[c][t] * energy[c][t] for c in there)
            baseline = above / (sum(energy[c][t] for c in there) + 1e-8)
            own_advantages.append(g - (baseline if len(there) > 1 else 0.0))
        result.append([own_advantages.pop(0) if t.written else 0.0 for t in sample.tokens])
    return result


def loop_raw_gae(samples: Sequence[Sample], gamma: float, lam: float) -> Rows:
    rows = []
    for sample in samples:
        value_after = 0.0

        def step(token: Token, after: float) -> float:
            nonlocal value_after
            delta = token.reward + gamma * value_after - token.value
            value_after = token.value
            return delta + gamma * lam * after

        rows.append(backwards(sample, step))
    return rows


def loop_gae(samples: Sequence[Sample], gamma: float = 1.0, lam: float = 1.0) -> Rows:
    return loop_whitened(samples, loop_raw_gae(samples, gamma, lam))


CASES: list[tuple[str, dict[str, Any], Reference]] = [
    ("grpo", {}, loop_grpo),
    ("grpo", {"std_normalization": "batch"}, loop_grpo),
    ("grpo", {"std_normalization": "none"}, loop_grpo),
    ("grpo_passk", {}, loop_grpo_passk),
    ("grpo_passk", {"std_normalization": "none"}, loop_grpo_passk),
    ("rloo", {}, loop_rloo),
    ("opo", {}, loop_opo),
    ("gpg", {}, loop_gpg),
    ("gpg", {"alpha": "nonzero_reward"}, loop_gpg),
    ("reinforce_plus_plus", {}, loop_reinforce_plus_plus),
    ("reinforce_plus_plus", {"gamma": 0.75}, loop_reinforce_plus_plus),
    ("reinforce_plus_plus", {"gamma": 0.0}, loop_reinforce_plus_plus),
    ("reinforce_plus_plus_baseline", {}, loop_reinforce_plus_plus_baseline),
    ("remax", {}, loop_remax),
    ("remax", {"gamma": 0.5}, loop_remax),
    ("gdpo", {}, loop_gdpo),
    ("gdpo", {"weights": {"format": 0.25, "accuracy": 2.0}}, loop_gdpo),
    ("gdpo", {"weights": {"format": 1.0}}, loop_gdpo),
    ("optimal_token_baseline", {}, loop_optimal_token_baseline),
    ("gae", {}, loop_gae),
    ("gae", {"gamma": 0.75, "lam": 0.5}, loop_gae),
    ("gae", {"lam": 0.0}, loop_gae),
]
WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gae"}
OUTCOME = {"grpo", "grpo_passk", "rloo", "opo", "gpg"}
every_case = pytest.mark.parametrize(
    ("name", "options", "reference"), CASES, ids=[f"{name}-{o}" for name, o, _ in CASES]
)
of_each_size = pytest.mark.parametrize("min_group", [1, 2])


def cases_of(min_group: int) -> Iterator[tuple[str, dict[str, Any], Reference]]:
    """The estimators that take groups of so many at least."""
    for name, options, reference in CASES:
        if ESTIMATORS[name].min_group == min_group:
            note(f"{name} {options}")
            yield name, options, reference


def expected_tokens(name: str, samples: Sequence[Sample], rows: Rows) -> list[float]:
    """The rows end to end, 0 where the estimator has no say."""
    keep = (lambda t: t.learns) if name in WHITENED else (lambda t: t.written)
    return [
        x if keep(token) else 0.0
        for sample, row in zip(samples, rows, strict=True)
        for token, x in zip(sample.tokens, row, strict=True)
    ]


def rows_of(samples: Sequence[Sample], tokens: torch.Tensor) -> Rows:
    return [row.tolist() for row in tokens.split([len(s.tokens) for s in samples])]


@of_each_size
@given(data=st.data())
def test_loops_agree(min_group: int, data: st.DataObject) -> None:
    samples = data.draw(steps(min_group=min_group))
    for name, options, reference in cases_of(min_group):
        assert_loops_agree(name, options, reference, samples)


def assert_loops_agree(
    name: str, options: dict[str, Any], reference: Reference, samples: list[Sample]
) -> None:
    expected: Any = reference(samples, **options)
    rows: Rows = loop_spread(samples, expected) if name in OUTCOME else expected
    got = advantages(name, inputs_of(samples), options)
    tokens = expected_tokens(name, samples, rows)
    # fp32; the tests of the single functions are sharper.
    assert got.tokens.tolist() == pytest.approx(tokens, rel=1e-6, abs=2e-6)
    for b, sample in enumerate(samples):
        if name in OUTCOME:
            wanted = expected[b]
        else:
            chosen = [t.learns if name in WHITENED else t.written for t in sample.tokens]
            inside = [x for x, keep in zip(rows[b], chosen, strict=True) if keep]
            wanted = statistics.fmean(inside) if inside else 0.0
        assert float(got.samples[b]) == pytest.approx(wanted, rel=1e-9, abs=2e-6)
    assert (got.tokens.dtype, got.samples.dtype) == (torch.float32, torch.float64)
    assert (got.returns is None) == (name != "gae")
    if got.returns is not None:
        raw = loop_raw_gae(samples, options.get("gamma", 1.0), options.get("lam", 1.0))
        returns = [
            a + token.value if token.written else 0.0
            for sample, row in zip(samples, raw, strict=True)
            for token, a in zip(sample.tokens, row, strict=True)
        ]
        assert got.returns.dtype == torch.float32
        assert got.returns.tolist() == pytest.approx(returns, rel=1e-6, abs=1e-6)


@of_each_size
@given(data=st.data(), random_order=st.randoms(use_true_random=False))
def test_order_and_names_of_samples_and_groups_do_not_matter(
    min_group: int, data: st.DataObject, random_order: random.Random
) -> None:
    samples = data.draw(steps(min_group))
    order = list(range(len(samples)))
    random_order.shuffle(order)
    numbers = sorted({sample.group for sample in samples})
    renamed = dict(zip(numbers, random_order.sample(range(100), len(numbers)), strict=True))
    moved = [replace(samples[i], group=renamed[samples[i].group]) for i in order]
    for name, options, _ in cases_of(min_group):
        before = advantages(name, inputs_of(samples), options)
        after = advantages(name, inputs_of(moved), options)
        torch.testing.assert_close(after.samples, before.samples[order], rtol=1e-9, atol=1e-9)
        rows = rows_of(samples, before.tokens)
        for got, i in zip(rows_of(moved, after.tokens), order, strict=True):
            assert got == pytest.approx(rows[i], rel=1e-6, abs=1e-7)


@of_each_size
@given(data=st.data(), bad=st.sampled_from([math.nan, math.inf, 1e30]))
def test_tokens_outside_the_masks_change_nothing(
    min_group: int, data: st.DataObject, bad: float
) -> None:
    samples = data.draw(steps(min_group))
    foreign = Token(False, reward=bad, value=bad, prob=bad, square=bad, weight=bad)
    noisy = []
    for sample in samples:
        tokens: list[Token] = []
        for token in sample.tokens:
            tokens += [foreign] * data.draw(st.integers(0, 2))
            tokens.append(token if token.written else foreign)
        noisy.append(replace(sample, tokens=tuple(tokens)))
    written = inputs_of(noisy).gen_mask
    for name, options, _ in cases_of(min_group):
        before = advantages(name, inputs_of(samples), options)
        after = advantages(name, inputs_of(noisy), options)
        assert torch.equal(after.tokens[written], before.tokens[inputs_of(samples).gen_mask])
        assert torch.equal(after.samples, before.samples)
        assert not after.tokens[~written].any()


@every_case
def test_rewards_that_are_equal_but_for_noise_teach_nothing(
    name: str, options: dict[str, Any], reference: Reference
) -> None:
    for value in (0.1, -1.0, 0.0, 1e6):
        size = max(abs(value) * 1e-9, 1e-12)
        samples = [
            Sample(0, (Token(False), Token(True, True, r, 0.0, 0.5, 0.4)), value, (r, r))
            for r in (value + size, value - size) * 2
        ]
        got = advantages(name, inputs_of(samples), options)
        if name in OUTCOME | WHITENED:
            assert not got.tokens.any()
            assert not got.samples.any()
        else:
            # Nothing is divided: the noise stays as small as it is, beside 1e-8 of the value.
            assert got.tokens.abs().max() <= 2e-8 * max(abs(value), 1)


@every_case
def test_small_steps_and_empty_masks_give_numbers(
    name: str, options: dict[str, Any], reference: Reference
) -> None:
    for n, written, learns in itertools.product((0, 1, 2), (0, 1), (False, True)):
        token = Token(True, learns, 1.0, 0.5, 0.5, 0.4)
        samples = [Sample(3, (Token(False), *[token] * written), 0.25, (1.0, 0.0))] * n
        if n == 1 and ESTIMATORS[name].min_group == 2:
            with pytest.raises(ValueError, match=f"{name} needs at least 2 answers"):
                advantages(name, inputs_of(samples), options)
            continue
        got = advantages(name, inputs_of(samples), options)
        assert got.tokens.shape == (n * (1 + written),)
        assert got.samples.shape == (n,)
        assert torch.isfinite(got.tokens).all()
        assert torch.isfinite(got.samples).all()
        if name in WHITENED and n * written * learns <= 1:
            assert not got.tokens.any()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(name: str, bad: float) -> None:
    good = Token(True, True, 1.0, 0.5, 0.5, 0.4)
    worse = Token(True, True, bad, bad, bad, bad)
    samples = [
        Sample(0, (Token(False), good), 0.0, (1.0, 0.0)),
        Sample(0, (Token(False), worse), bad, (bad, bad)),
    ]
    with pytest.raises(ValueError, match="must be finite") as caught:
        advantages(name, inputs_of(samples))
    assert "\n" not in str(caught.value)


OPTIONAL = {"components", "greedy_rewards", "values", "prob", "prob_square_sum"}
"""What a step computes only where its estimator needs it."""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_needs_what_it_says_and_no_more(name: str) -> None:
    samples = [
        Sample(0, (Token(False), Token(True, True, r, 0.5, 0.5, 0.4)), 0.0, (r, 1.0))
        for r in (1.0, -1.0)
    ]
    full = inputs_of(samples)
    absent: dict[str, Any] = {f.name: f.default for f in fields(full) if f.default is None}
    del absent["weights"]  # which there are where the recipe weighs
    absent["components"] = {}
    assert set(absent) == OPTIONAL
    needed = ESTIMATORS[name].needs
    enough = {field: value for field, value in absent.items() if field not in needed}
    assert torch.equal(
        advantages(name, replace(full, **enough), {}).tokens, advantages(name, full, {}).tokens
    )
    for field in needed:
        with pytest.raises(ValueError, match=rf"algorithm/advantage={name} needs {field}") as e:
            advantages(name, replace(full, **{field: absent[field]}), {})
        assert "\n" not in str(e.value)


def test_every_estimator_has_its_section_in_a_recipe() -> None:
    assert {*ESTIMATORS, "custom"} == ADVANTAGE_SECTIONS.keys()


def test_gdpo_names_components_that_are_not_there() -> None:
    samples = [Sample(0, (Token(False), Token(True, True, 1.0)), 0.0, (1.0, 0.0))] * 2
    with pytest.raises(ValueError, match="name tidy, but the reward components are accuracy, form"):
        advantages("gdpo", inputs_of(samples), {"weights": {"tidy": 1.0, "accuracy": 1.0}})


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def step(token_rewards: Tensor, lengths: list[int], **columns: Tensor) -> AdvantageInputs:
    """One group of answers of these lengths, without their prompts."""
    every = torch.ones(len(token_rewards), dtype=torch.bool)
    return AdvantageInputs(
        rewards=columns.pop("rewards", f64(*[0.0] * len(lengths))),
        groups=torch.zeros(len(lengths), dtype=torch.int64),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        gen_mask=every,
        loss_mask=every,
        token_rewards=token_rewards,
        **columns,
    )


LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 0, 31, 1025]


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5])
def test_scans_over_answers_of_every_length_equal_loops(gamma: float) -> None:
    draw = random.Random(0)
    rewards = [[draw.uniform(-1, 1) for _ in range(n)] for n in LENGTHS]
    values = [[draw.uniform(-1, 1) for _ in range(n)] for n in LENGTHS]
    to_go, looped = [], []
    for r_row, v_row in zip(rewards, values, strict=True):
        g = a = v_after = 0.0
        g_row, a_row = [], []
        for r, v in zip(reversed(r_row), reversed(v_row), strict=True):
            g = r + gamma * g
            a = r + gamma * v_after - v + gamma * 0.95 * a
            v_after = v
            g_row.append(g)
            a_row.append(a)
        to_go += g_row[::-1]
        looped += a_row[::-1]
    r_T, v_T = f64(*chain(*rewards)), f64(*chain(*values))
    inputs = step(r_T, LENGTHS, values=v_T)
    torch.testing.assert_close(reward_to_go(inputs, gamma), f64(*to_go), rtol=1e-11, atol=1e-11)
    _, returns = gae(inputs, gamma=gamma, lam=0.95)
    torch.testing.assert_close(returns, f64(*looped) + v_T, rtol=1e-11, atol=1e-11)


def test_a_neighbour_s_huge_rewards_do_not_round_a_sample() -> None:
    inputs = step(f64(1e16, 0.125, 0.25, 1e16), [1, 2, 1])
    assert reward_to_go(inputs, 1.0).tolist() == [1e16, 0.375, 0.25, 1e16]


def test_sums_are_exact_where_fp32_would_round() -> None:
    # Around 2^24 the sum of four has no exact fp32; the differences from the mean do.
    rewards = f64(16777216.0, 16777218.0, 16777220.0, 16777116.0)
    found = advantages(
        "grpo", step(rewards, [1] * 4, rewards=rewards), {"std_normalization": "none"}
    ).samples
    assert found.tolist() == [23.5, 25.5, 27.5, -76.5]


def test_an_answer_that_is_alone_learns_from_its_reward() -> None:
    for name in ("grpo", "rloo", "opo", "gpg"):
        found = advantages(name, step(f64(0.5), [1], rewards=f64(0.5)), {}).samples
        assert found.tolist() == pytest.approx([0.5], rel=1e-5), name


# Whitening.


def mask_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_three_numbers_are_whitened_by_hand() -> None:
    got = whiten(f64(1.0, 99.0, 1.0, -1.0), mask_of(1, 0, 1, 1))
    # Mean 1/3; squares 4/9 + 4/9 + 16/9 = 8/3, over two: variance 4/3.
    std = math.sqrt(4 / 3 + 1e-8)
    assert got.tolist() == pytest.approx([2 / 3 / std, 0.0, 2 / 3 / std, -4 / 3 / std], rel=1e-12)
    for bad in (math.nan, math.inf):
        assert torch.equal(whiten(f64(1.0, bad, 1.0, -1.0), mask_of(1, 0, 1, 1)), got)
    for single in (0, 1):
        assert whiten(f64(7.0, 3.0), mask_of(single, 0)).tolist() == [0.0, 0.0]
    assert whiten(f64(), mask_of()).shape == (0,)


def test_small_numbers_that_differ_are_no_noise() -> None:
    got = whiten(f64(1e-4, -1e-4), mask_of(1, 1))
    # Variance 2e-8, beside 1e-8.
    assert got.tolist() == pytest.approx([1e-4 / math.sqrt(3e-8), -1e-4 / math.sqrt(3e-8)])
