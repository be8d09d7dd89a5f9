"""Statistics of an evaluation against hand-computed numbers and exhaustive counting."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.trainer.evaluation_math import (
    Estimate,
    PromptAnswers,
    as_record,
    default_ks,
    estimate,
    maj_at_k,
    pass_at_k,
    summarise,
)


def brute_pass(n: int, correct: int, k: int) -> float:
    """The share of all k-subsets that hold a right answer."""
    draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    return sum(map(any, draws)) / len(draws)


def brute_maj(accuracies: Sequence[float], parsed: Sequence[str | None], k: int) -> float:
    """The expectation over all N**k draws with replacement."""
    total = 0.0
    for draw in itertools.product(range(len(parsed)), repeat=k):
        votes = Counter(parsed[i] for i in draw if parsed[i] is not None)
        if votes:
            most = max(votes.values())
            winners = [said for said, number in votes.items() if number == most]
            worths = [
                np.mean([a for a, p in zip(accuracies, parsed, strict=True) if p == said])
                for said in winners
            ]
            total += float(np.mean(worths))
    return total / len(parsed) ** k


def test_pass_at_k_by_hand() -> None:
    # 4 answers, 1 right, 2 drawn: 3 of the 6 pairs hold it. 2 right: 5 of 6.
    assert pass_at_k([4, 4, 4, 4], [0, 1, 2, 4], 2) == pytest.approx([0, 1 / 2, 5 / 6, 1])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_counting_all_subsets(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        assert pass_at_k([n], [correct], k)[0] == pytest.approx(brute_pass(n, correct, k))


@given(st.integers(1, 3000), st.data())
def test_pass_at_k_equals_exact_binomials_where_floats_would_overflow(
    n: int, data: st.DataObject
) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - math.comb(n - correct, k) / math.comb(n, k)
    assert pass_at_k(n, correct, k) == pytest.approx(exact, abs=1e-12)


def test_pass_at_1_is_the_share_of_right_answers_and_pass_at_n_whether_any_is() -> None:
    right = np.arange(17)
    assert pass_at_k(16, right, 1) == pytest.approx(right / 16)
    assert pass_at_k(16, right, 16).tolist() == [0.0] + [1.0] * 16


@pytest.mark.parametrize(("n", "correct", "k"), [([4, 2], [1, 1], 3), ([4], [5], 1), ([4], [1], 0)])
def test_pass_at_k_refuses_what_cannot_be(n: list[int], correct: list[int], k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(
    ("accuracies", "parsed"),
    [
        ([1, 1, 0, 0], ["a", "a", "b", "c"]),
        ([1, 0, 0, 0], ["a", "b", "b", None]),
        ([1, 0.5, 0, 0], ["a", "a", None, None]),
        ([0, 1, 0, 1], [None, "x", "y", "x"]),
    ],
)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_maj_at_k_comes_near_the_expectation_over_all_draws(
    accuracies: list[float], parsed: list[str | None], k: int
) -> None:
    found = maj_at_k(accuracies, parsed, k, seed=1, resamples=40_000)
    assert found == pytest.approx(brute_maj(accuracies, parsed, k), abs=0.012)


def test_ties_share_the_credit() -> None:
    # One draw of 2 from {right, wrong}: both right 1/4, both wrong 1/4, a tie 1/2 worth 1/2.
    assert brute_maj([1, 0], ["a", "b"], 2) == 0.5
    assert maj_at_k([1, 0], ["a", "b"], 2, seed=0, resamples=40_000) == pytest.approx(0.5, abs=0.01)


def test_a_majority_beats_a_minority_as_k_grows() -> None:
    accuracies, parsed = [1, 1, 1, 0, 0], ["a", "a", "a", "b", "c"]
    found = [maj_at_k(accuracies, parsed, k, seed=0, resamples=5000) for k in (1, 5, 51)]
    assert found[0] == pytest.approx(0.6, abs=0.03)
    assert found[0] < found[1] < found[2]
    assert found[2] > 0.97


def test_what_cannot_be_parsed_has_no_vote() -> None:
    assert maj_at_k([0, 0], [None, None], 2, seed=0) == 0.0
    assert maj_at_k([1, 1], ["a", "a"], 2, seed=0) == 1.0
    # A single vote wins over any number of unreadable answers, where it is drawn at all.
    parsed = ["a", None, None, None]
    found = maj_at_k([1, 0, 0, 0], parsed, 4, seed=0, resamples=40_000)
    assert found == pytest.approx(1 - (3 / 4) ** 4, abs=0.01)


def test_maj_at_k_follows_its_seed_alone() -> None:
    accuracies, parsed = [1, 0, 0, 1, 0], ["a", "b", "c", "a", "b"]
    assert maj_at_k(accuracies, parsed, 3, seed=5) == maj_at_k(accuracies, parsed, 3, seed=5)
    assert maj_at_k(accuracies, parsed, 3, seed=5) != maj_at_k(accuracies, parsed, 3, seed=6)


@pytest.mark.parametrize(("k", "parsed"), [(0, ["a"]), (1, ["a", "b"])])
def test_maj_at_k_refuses_what_cannot_be(k: int, parsed: list[str]) -> None:
    with pytest.raises(ValueError, match="maj@k"):
        maj_at_k([1.0], parsed, k, seed=0)


def test_an_estimate_by_hand() -> None:
    found = estimate([1.0, 0.0, 0.5, 0.5])
    assert found.mean == 0.5
    # Sample variance 1/6, over 4 prompts.
    assert found.standard_error == pytest.approx(math.sqrt(1 / 6 / 4))
    assert found.prompts == 4


def test_the_interval_is_wilsons_where_each_prompt_has_one_answer() -> None:
    n, right = 1000, 300
    p, z = right / n, 1.959963984540054
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = estimate([1.0] * right + [0.0] * (n - right)).interval
    assert (low, high) == pytest.approx((centre - half, centre + half), abs=1e-4)


def test_all_right_is_not_certain() -> None:
    low, high = estimate([1.0] * 30).interval
    assert low == pytest.approx(30 / (30 + 1.959963984540054**2))
    assert high == pytest.approx(1.0)
    assert estimate([0.0] * 30).interval[0] == 0.0


def test_one_prompt_has_no_standard_error_and_none_is_refused() -> None:
    found = estimate([0.5])
    assert math.isnan(found.standard_error)
    assert 0 <= found.interval[0] < 0.5 < found.interval[1] <= 1
    with pytest.raises(ValueError, match="at least one prompt"):
        estimate([])


def test_the_interval_covers_the_truth_about_95_times_of_100() -> None:
    generator = np.random.default_rng(0)
    rates = generator.beta(0.5, 2, size=(400, 200))  # 400 evaluations of 200 unlike prompts
    scores = generator.binomial(4, rates) / 4
    intervals = [estimate(row).interval for row in scores]
    covered = np.mean([low <= 0.2 <= high for low, high in intervals])
    assert 0.92 <= covered <= 0.98


def test_the_ks_are_powers_of_two_and_n_itself() -> None:
    assert default_ks(1) == (1,)
    assert default_ks(6) == (1, 2, 4, 6)
    assert default_ks(16) == (1, 2, 4, 8, 16)


def test_a_summary_means_over_prompts_within_each_source() -> None:
    found = summarise(
        [
            PromptAnswers("a", [1, 1, 0, 0], ["x", "x", "y", None]),
            PromptAnswers("b", [1, 0.5]),
            PromptAnswers("a", [0, 0, 0, 0], ["y"] * 4),
            PromptAnswers("b", [0, 0, 0]),
        ]
    )
    assert list(found) == ["a", "b"]
    assert list(found["a"]) == ["avg@4", "std@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"]
    means = {name: value.mean for name, value in found["a"].items()}
    assert (means["avg@4"], means["std@4"], means["pass@4"]) == (0.25, 0.25, 0.5)
    assert means["pass@2"] == pytest.approx((5 / 6) / 2)
    assert list(found["b"]) == ["avg@2", "std@2", "pass@1", "pass@2"]
    # Part marks count for avg@N, not for pass@k: 0.75 against 1/2 for the first prompt.
    assert found["b"]["avg@2"].mean == pytest.approx(0.375)
    assert found["b"]["pass@1"].mean == pytest.approx(0.25)


def test_a_summary_repeats_with_its_seed() -> None:
    prompts = [PromptAnswers("a", [1, 0, 0], ["x", "y", "z"]) for _ in range(3)]
    assert summarise(prompts, seed=3) == summarise(prompts, seed=3)
    assert summarise(prompts, seed=3) != summarise(prompts, seed=4)


def test_like_prompts_get_draws_of_their_own() -> None:
    prompts = [PromptAnswers("a", [1, 0, 0], ["x", "y", "z"]) for _ in range(3)]
    assert summarise(prompts)["a"]["maj@2"].standard_error > 0


def test_a_prompt_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 of a has no answer"):
        summarise([PromptAnswers("a", [1]), PromptAnswers("a", [])])


def test_the_record_names_the_figures_by_source() -> None:
    sampled = {"a": {"avg@2": Estimate(0.4, 0.1, 9), "pass@1": Estimate(0.4, 0.1, 9)}}
    greedy = {"a": {"avg@1": Estimate(0.7, 0.2, 9), "pass@1": Estimate(0.6, 0.2, 9)}}
    assert as_record(sampled, greedy) == {
        "eval/a/avg@2": 0.4,
        "eval/a/avg@2_se": 0.1,
        "eval/a/prompts": 9,
        "eval/a/pass@1": 0.4,
        "eval/a/greedy": 0.6,
        "eval/a/greedy_se": 0.2,
    }
