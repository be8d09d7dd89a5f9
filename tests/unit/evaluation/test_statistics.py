"""Statistics and paired tests against hand-computed numbers and exhaustive counting."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from winnow.evaluation.compare import EXACT_FLIPS, FLIPS, paired_test, sign_flip_p
from winnow.evaluation.statistics import (
    EXACT_ANSWERS,
    PromptAnswers,
    default_ks,
    finite_numbers,
    maj_at_k,
    majority_accuracy,
    mean_of,
    pass_at_k,
    summarise,
    two_sided_bound,
    two_sided_p,
)


def brute_maj(accuracies: Sequence[float], parsed: Sequence[str | None], k: int) -> float:
    """The mean over all draws of k different answers."""
    worths = []
    for draw in itertools.combinations(range(len(parsed)), k):
        votes = Counter(parsed[i] for i in draw if parsed[i] is not None)
        most = max(votes.values(), default=0)
        winners = [said for said, number in votes.items() if number == most]
        right = [
            np.mean([a for a, p in zip(accuracies, parsed, strict=True) if p == said])
            for said in winners
        ]
        worths.append(float(np.mean(right)) if right else 0.0)
    return float(np.mean(worths))


def test_pass_at_k_by_hand() -> None:
    # 4 answers, 1 right, 2 drawn: 3 of the 6 pairs hold it. 2 right: 5 of 6.
    assert pass_at_k([4, 4, 4, 4], [0, 1, 2, 4], 2) == pytest.approx([0, 1 / 2, 5 / 6, 1])


@settings(max_examples=25)
@given(st.integers(1, 3000), st.data())
def test_pass_at_k_equals_exact_binomials_where_floats_would_overflow(
    n: int, data: st.DataObject
) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - math.comb(n - correct, k) / math.comb(n, k)
    assert pass_at_k(n, correct, k) == pytest.approx(exact, abs=1e-12)


def test_maj_at_k_by_hand() -> None:
    # Pairs of {a, a, b}: one is a-a, two tie and share: 1/3 + 2/3 * 1/2. All three: a.
    assert maj_at_k([1, 1, 0], ["a", "a", "b"], [1, 2, 3]) == pytest.approx([2 / 3, 2 / 3, 1])
    # Three ways to tie in each draw of 2 and of 3.
    assert maj_at_k([1, 0, 0], ["a", "b", "c"], [1, 2, 3]) == pytest.approx([1 / 3] * 3)
    # A wrong majority wins in the end.
    assert maj_at_k([0, 0, 1], ["a", "a", "b"], [3])[0] == 0


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(0, 1)), min_size=1,
                max_size=8))  # fmt: skip
def test_the_majority_of_all_is_maj_at_n(answers: list[tuple[str | None, float]]) -> None:
    parsed, accuracies = [p for p, _ in answers], [a for _, a in answers]
    wanted = maj_at_k(accuracies, parsed, [len(answers)])[0]
    assert majority_accuracy(accuracies, parsed) == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(0, 1)), min_size=1,
                max_size=8))  # fmt: skip
def test_maj_at_k_equals_counting_all_draws(answers: list[tuple[str | None, float]]) -> None:
    parsed, accuracies = [said for said, _ in answers], [mark for _, mark in answers]
    ks = range(1, len(answers) + 1)
    counted = [brute_maj(accuracies, parsed, k) for k in ks]
    assert maj_at_k(accuracies, parsed, ks) == pytest.approx(counted, abs=1e-12)


def test_random_draws_come_near_the_exact_expectation() -> None:
    accuracies, parsed = [1, 0.5, 0, 0, 0, 1], ["a", "a", None, "b", "b", "c"]
    exact = maj_at_k(accuracies, parsed, range(1, 7))
    drawn = maj_at_k(accuracies, parsed, range(1, 7), seed=1, exact_answers=5)
    assert drawn == pytest.approx(exact, abs=0.04)
    assert drawn[-1] == exact[-1], "there is one draw of all answers"
    assert maj_at_k([0] * 3, [None] * 3, [2], exact_answers=1).tolist() == [0], "none has a vote"


def test_many_answers_are_exact_up_to_the_limit() -> None:
    # 2 voices of 128 that differ from the rest win a draw only where nobody else is in it.
    n = EXACT_ANSWERS
    found = maj_at_k([1, 1] + [0] * (n - 2), ["a", "a"] + ["b"] * (n - 2), [1, 2, n])
    tied = 2 * (n - 2) / math.comb(n, 2)
    assert found == pytest.approx([2 / n, tied / 2 + 1 / math.comb(n, 2), 0], rel=1e-12)


def test_an_estimate_by_hand() -> None:
    found = mean_of([1.0, 0.0, 0.5, 0.5])
    assert found.mean == 0.5
    # Sample variance 1/6, over 4 prompts.
    assert found.standard_error == pytest.approx(math.sqrt(1 / 6 / 4))
    assert found.prompts == 4


def test_the_interval_is_wilsons_where_each_prompt_has_one_answer() -> None:
    n, right = 1000, 300
    p, z = right / n, 1.959963984540054
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = mean_of([1.0] * right + [0.0] * (n - right)).interval
    assert (low, high) == pytest.approx((centre - half, centre + half), abs=1e-4)


def test_all_right_is_not_certain() -> None:
    low, high = mean_of([1.0] * 30).interval
    assert low == pytest.approx(30 / (30 + 2.045229642132703**2))  # Student's bound, 29
    assert high == pytest.approx(1.0)
    assert mean_of([0.0] * 30).interval[0] == pytest.approx(0, abs=1e-12)


def test_one_prompt_has_no_standard_error_and_none_is_refused() -> None:
    found = mean_of([0.5])
    assert math.isnan(found.standard_error)
    assert 0 <= found.interval[0] < 0.5 < found.interval[1] <= 1
    with pytest.raises(AssertionError, match="at least one prompt"):
        mean_of([])


@pytest.mark.parametrize(("prompts", "n"), [(200, 4), (30, 1)])
def test_the_interval_covers_the_truth_about_95_times_of_100(prompts: int, n: int) -> None:
    generator = np.random.default_rng(0)
    rates = generator.beta(0.5, 2, size=(1000, prompts))  # evaluations of unlike prompts
    scores = generator.binomial(n, rates) / n
    intervals = [mean_of(row).interval for row in scores]
    covered = np.mean([low <= 0.2 <= high for low, high in intervals])
    assert 0.93 <= covered <= 0.975


def test_the_accuracy_of_answers_that_ended_is_a_ratio_over_all_of_them_by_hand() -> None:
    prompts = [
        PromptAnswers("sums", [1, 0], truncated=[False, True]),
        PromptAnswers("sums", [0, 0, 0, 1], truncated=[False, False, False, True]),
    ]
    ended = summarise(prompts)["sums"].ended
    assert ended is not None
    # 1 of 4; residuals of the ratio (1 - 1/4) / 2 and (0 - 3/4) / 2.
    assert (ended.mean, ended.standard_error, ended.prompts) == (0.25, pytest.approx(0.375), 2)
    cut = [PromptAnswers("sums", [1], truncated=[True])]
    assert summarise(cut)["sums"].ended is None


def test_the_ks_are_powers_of_two_and_n_itself() -> None:
    assert default_ks(1) == (1,)
    assert default_ks(6) == (1, 2, 4, 6)
    assert default_ks(16) == (1, 2, 4, 8, 16)


def test_a_summary_means_over_prompts_within_each_source() -> None:
    summary = summarise(
        [
            PromptAnswers("a", [1, 1, 0, 0], ["x", "x", "y", None]),
            PromptAnswers("b", [1, 0.5]),
            PromptAnswers("a", [0, 0, 0, 0], ["y"] * 4),
            PromptAnswers("b", [0, 0, 0]),
        ]
    )
    assert list(summary) == ["a", "b"]
    found = {source: figures.figures for source, figures in summary.items()}
    assert list(found["a"]) == ["avg@4", "std@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"]
    means = {name: value.mean for name, value in found["a"].items()}
    assert (means["avg@4"], means["std@4"], means["pass@4"]) == (0.25, 0.25, 0.5)
    assert means["pass@2"] == pytest.approx((5 / 6) / 2)
    assert list(found["b"]) == ["avg@2", "std@2", "pass@1", "pass@2"]
    # Part marks count for avg@N, not for pass@k: 0.75 against 1/2 for the first prompt.
    assert found["b"]["avg@2"].mean == pytest.approx(0.375)
    assert found["b"]["pass@1"].mean == pytest.approx(0.25)


def test_random_draws_of_a_summary_follow_its_seed_and_the_place_of_a_prompt() -> None:
    n = EXACT_ANSWERS + 1
    like = PromptAnswers("a", [1, 0, 0] * (n // 3), [*"xyz"] * (n // 3))
    prompts = [like, like]
    assert summarise(prompts, seed=3) == summarise(prompts, seed=3)
    assert summarise(prompts, seed=3) != summarise(prompts, seed=4)
    assert summarise(prompts)["a"].figures["maj@2"].standard_error > 0


STUDENT = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 29: 2.045, 100: 1.984, 1_000_000: 1.960}
"""Degrees of freedom, and the bound of a 95 % interval."""


@pytest.mark.parametrize(("degrees", "bound"), STUDENT.items())
def test_students_bounds_are_those_of_the_tables(degrees: int, bound: float) -> None:
    assert two_sided_bound(0.05, degrees) == pytest.approx(bound, abs=6e-4)


@settings(max_examples=25)
@given(st.floats(0, 1e6))
@example(1e-6)
@example(5e-324)
def test_student_with_one_and_two_degrees_there_are_closed_forms(t: float) -> None:
    assert two_sided_p(t, 1) == pytest.approx(2 / math.pi * math.atan2(1, t), abs=1e-12)
    assert two_sided_p(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)


@settings(max_examples=25)
@given(st.integers(1, 5000), st.floats(1e-6, 0.999))
def test_a_bound_is_exceeded_with_its_chance(degrees: int, p: float) -> None:
    assert two_sided_p(two_sided_bound(p, degrees), degrees) == pytest.approx(p, rel=1e-9)


def test_the_ends_of_students_distribution() -> None:
    assert two_sided_p(0, 3) == pytest.approx(1, abs=1e-12)
    assert two_sided_p(math.inf, 3) == 0
    assert 0 < two_sided_p(50, 29) < 1e-25
    assert two_sided_p(1e10, 1) == pytest.approx(2e-10 / math.pi, rel=1e-12, abs=0)


def test_only_numbers_throughout_are_a_scorers_own_numbers() -> None:
    assert finite_numbers([1, 0.5, True]) == [1.0, 0.5, 1.0]
    for odd in ("4", None, float("nan"), float("inf")):
        assert finite_numbers([1.0, odd]) is None


FEW = st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8)


def counted(differences: list[float]) -> float:
    """The share of all sign patterns, zeros included, that go as far."""
    bound = abs(sum(differences)) - 1e-9
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(p, differences, strict=True))) for p in patterns]
    return sum(total >= bound for total in sums) / len(patterns)


def test_a_comparison_by_hand() -> None:
    found = paired_test([0.5, 0.5, 0.0, 1.0], [1.0, 0.5, 0.5, 0.75])
    assert (found.problems, found.won, found.tied, found.lost) == (4, 2, 1, 1)
    assert (found.a, found.b, found.difference) == (0.5, 0.6875, 0.1875)
    # Differences .5 0 .5 -.25: variance .140625 (n - 1), over 4 problems.
    error = math.sqrt(0.140625 / 4)
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx(
        (0.1875 - 3.182446 * error, 0.1875 + 3.182446 * error)
    )
    # t = 1 with 3 degrees of freedom; signs of .5 .5 -.25: 4 of 8 go as far as .75.
    assert found.p_t == pytest.approx(0.391002, abs=1e-6)
    assert found.p_sign_flips == 0.5
    assert not found.is_significant


def test_students_example_of_two_drugs_for_sleep() -> None:
    # Student 1908; t = 4.0621, 9 degrees of freedom, p = 0.00283 (as R's t.test says).
    a = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_test(a, b)
    assert found.p_t == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    # All nine differences that are not 0 point one way: 2 of 512 patterns.
    assert found.p_sign_flips == 2 / 512
    assert found.is_significant


@settings(max_examples=25)
@given(FEW)
def test_few_differences_are_counted_in_full(differences: list[float]) -> None:
    assert sign_flip_p(differences) == pytest.approx(counted(differences), abs=1e-12)


def test_many_differences_are_drawn_and_come_near_the_count() -> None:
    generator = np.random.default_rng(3)
    few = generator.normal(0.3, 1, size=EXACT_FLIPS)
    exact = sign_flip_p(few)
    # A hair more moves no sum across the bound, but makes them one too many to count.
    drawn = sign_flip_p([*few, 1e-15])
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / FLIPS))
    assert sign_flip_p([*few, 1e-15]) == drawn != sign_flip_p([*few, 1e-15], seed=1)
    assert sign_flip_p(np.ones(100)) == 1 / (1 + FLIPS), "no p is 0"


def test_alike_evaluations_are_called_different_five_times_of_a_hundred() -> None:
    generator = np.random.default_rng(0)
    rates = generator.beta(0.5, 1, size=(400, 12))
    a, b = (generator.binomial(8, rates) / 8 for _ in range(2))
    found = [paired_test(x, y) for x, y in zip(a, b, strict=True)]
    covered = np.mean([f.low <= 0 <= f.high for f in found])
    assert 0.92 <= covered <= 0.98
    for p in ([f.p_t for f in found], [f.p_sign_flips for f in found]):
        assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.08


def test_the_difference_called_visible_is_seen_four_times_of_five() -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 0.1, size=(60, 40))
    shift = paired_test(np.zeros(40), noise[0] / noise[0].std(ddof=1) * 0.1).detectable
    clear = [paired_test(np.zeros(40), row + shift).p_t < 0.05 for row in noise]
    assert 0.7 <= np.mean(clear) <= 0.9


def test_the_same_everywhere_and_a_single_problem() -> None:
    same = paired_test([0.1 + 0.2, 0.5], [0.3, 0.5])
    assert (same.p_t, same.p_sign_flips, same.tied, (same.low, same.high)) == (1, 1, 2, (0, 0))
    one = paired_test([0.0], [1.0])
    assert math.isnan(one.standard_error)
    assert (one.p_t, one.p_sign_flips, (one.low, one.high), one.is_significant) == (
        1,
        1,
        (-1, 1),
        False,
    )
    constant = paired_test([0.0] * 10, [0.5] * 10)
    assert (constant.p_t, constant.p_sign_flips, constant.is_significant) == (0, 2 / 1024, True)
