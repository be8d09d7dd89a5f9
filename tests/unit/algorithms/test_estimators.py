"""All estimators through their one interface: against loops, and under what must not matter."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from tests.examples import examples
from tests.objectives import ADVANTAGE_SECTIONS, advantages
from tests.ragged_steps import COMPONENTS, SIXTEENTHS, Sample, Token, inputs_of, steps

from winnow.algorithms.advantages import ESTIMATORS, AdvantageInputs, Advantages

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


def estimate(name: str, inputs: AdvantageInputs, options: dict[str, Any]) -> Advantages:
    return advantages(name, inputs, options)


def fitting(name: str) -> st.SearchStrategy[list[Sample]]:
    return steps(min_group=ESTIMATORS[name].min_group)


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


@pytest.mark.parametrize("min_group", [1, 2])
@examples(16)
@given(data=st.data())
def test_loops_agree(min_group: int, data: st.DataObject) -> None:
    samples = data.draw(steps(min_group=min_group))
    for name, options, reference in CASES:
        if ESTIMATORS[name].min_group == min_group:
            note(f"{name} {options}")
            assert_loops_agree(name, options, reference, samples)


def assert_loops_agree(
    name: str, options: dict[str, Any], reference: Reference, samples: list[Sample]
) -> None:
    expected: Any = reference(samples, **options)
    rows: Rows = loop_spread(samples, expected) if name in OUTCOME else expected
    got = estimate(name, inputs_of(samples), options)
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


@given(samples=steps())
def test_returns_are_unwhitened_advantages_plus_values(samples: list[Sample]) -> None:
    returns = estimate("gae", inputs_of(samples), {"gamma": 0.75, "lam": 0.5}).returns
    raw = loop_raw_gae(samples, 0.75, 0.5)
    expected = [
        a + token.value if token.written else 0.0
        for sample, row in zip(samples, raw, strict=True)
        for token, a in zip(sample.tokens, row, strict=True)
    ]
    assert returns is not None
    assert returns.dtype == torch.float32
    assert returns.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@every_case
@examples(6)
@given(data=st.data(), random_order=st.randoms(use_true_random=False))
def test_order_and_names_of_samples_and_groups_do_not_matter(
    name: str,
    options: dict[str, Any],
    reference: Reference,
    data: st.DataObject,
    random_order: random.Random,
) -> None:
    samples = data.draw(fitting(name))
    order = list(range(len(samples)))
    random_order.shuffle(order)
    numbers = sorted({sample.group for sample in samples})
    renamed = dict(zip(numbers, random_order.sample(range(100), len(numbers)), strict=True))
    moved = [replace(samples[i], group=renamed[samples[i].group]) for i in order]
    before = estimate(name, inputs_of(samples), options)
    after = estimate(name, inputs_of(moved), options)
    torch.testing.assert_close(after.samples, before.samples[order], rtol=1e-9, atol=1e-9)
    rows = rows_of(samples, before.tokens)
    for got, i in zip(rows_of(moved, after.tokens), order, strict=True):
        assert got == pytest.approx(rows[i], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name, options, _ in CASES if name in OUTCOME - {"gpg"}]
    + [("gpg", {}), ("reinforce_plus_plus_baseline", {}), ("remax", {})],
)
@examples(10)
@given(samples=steps(min_group=2), shift=SIXTEENTHS)
def test_a_constant_shift_of_rewards_changes_nothing(
    name: str, options: dict[str, Any], samples: list[Sample], shift: float
) -> None:
    moved = []
    for sample in samples:
        tokens = list(sample.tokens)
        last = max((t for t, token in enumerate(tokens) if token.written), default=None)
        if last is None:
            tokens.append(Token(True))  # a sample needs a token for the shift to reach it
            last = len(tokens) - 1
        moved.append(
            (
                replace(sample, tokens=tuple(tokens)),
                replace(
                    sample,
                    tokens=(
                        *tokens[:last],
                        replace(tokens[last], reward=tokens[last].reward + shift),
                        *tokens[last + 1 :],
                    ),
                    greedy=sample.greedy + shift,
                ),
            )
        )
    before = estimate(name, inputs_of([plain for plain, _ in moved]), options)
    after = estimate(name, inputs_of([shifted for _, shifted in moved]), options)
    torch.testing.assert_close(after.samples, before.samples, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after.tokens, before.tokens, rtol=1e-6, atol=1e-7)


@every_case
@examples(6)
@given(data=st.data(), bad=st.sampled_from([math.nan, math.inf, 1e30]))
def test_tokens_outside_the_masks_change_nothing(
    name: str,
    options: dict[str, Any],
    reference: Reference,
    data: st.DataObject,
    bad: float,
) -> None:
    samples = data.draw(fitting(name))
    foreign = Token(False, reward=bad, value=bad, prob=bad, square=bad, weight=bad)
    noisy = []
    for sample in samples:
        tokens: list[Token] = []
        for token in sample.tokens:
            tokens += [foreign] * data.draw(st.integers(0, 2))
            tokens.append(token if token.written else foreign)
        noisy.append(replace(sample, tokens=tuple(tokens)))
    before = estimate(name, inputs_of(samples), options)
    after = estimate(name, inputs_of(noisy), options)
    written = inputs_of(noisy).gen_mask
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
        got = estimate(name, inputs_of(samples), options)
        if name in OUTCOME | WHITENED:
            assert not got.tokens.any()
            assert not got.samples.any()
        else:
            # Nothing is divided: the noise stays as small as it is, beside 1e-8 of the value.
            assert got.tokens.abs().max() <= 2e-8 * max(abs(value), 1)


@every_case
@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("learns", [False, True])
def test_small_steps_and_empty_masks_give_numbers(
    name: str, options: dict[str, Any], reference: Reference, n: int, written: int, learns: bool
) -> None:
    token = Token(True, learns, 1.0, 0.5, 0.5, 0.4)
    samples = [Sample(3, (Token(False), *[token] * written), 0.25, (1.0, 0.0))] * n
    if n == 1 and ESTIMATORS[name].min_group == 2:
        with pytest.raises(ValueError, match=f"{name} needs at least 2 answers"):
            estimate(name, inputs_of(samples), options)
        return
    got = estimate(name, inputs_of(samples), options)
    assert got.tokens.shape == (n * (1 + written),)
    assert got.samples.shape == (n,)
    assert torch.isfinite(got.tokens).all()
    assert torch.isfinite(got.samples).all()
    if name in WHITENED and n * written * learns <= 1:
        assert not got.tokens.any()


@every_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(
    name: str, options: dict[str, Any], reference: Reference, bad: float
) -> None:
    good = Token(True, True, 1.0, 0.5, 0.5, 0.4)
    worse = Token(True, True, bad, bad, bad, bad)
    samples = [
        Sample(0, (Token(False), good), 0.0, (1.0, 0.0)),
        Sample(0, (Token(False), worse), bad, (bad, bad)),
    ]
    with pytest.raises(ValueError, match="must be finite") as caught:
        estimate(name, inputs_of(samples), options)
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
        estimate(name, replace(full, **enough), {}).tokens, estimate(name, full, {}).tokens
    )
    for field in needed:
        with pytest.raises(ValueError, match=rf"algorithm/advantage={name} needs {field}") as e:
            estimate(name, replace(full, **{field: absent[field]}), {})
        assert "\n" not in str(e.value)


def test_every_estimator_has_its_section_in_a_recipe() -> None:
    assert {*ESTIMATORS, "custom"} == ADVANTAGE_SECTIONS.keys()


def test_gdpo_names_components_that_are_not_there() -> None:
    samples = [Sample(0, (Token(False), Token(True, True, 1.0)), 0.0, (1.0, 0.0))] * 2
    with pytest.raises(ValueError, match="name tidy, but the reward components are accuracy, form"):
        estimate("gdpo", inputs_of(samples), {"weights": {"tidy": 1.0, "accuracy": 1.0}})
