"""Statistics of an evaluation against hand-computed numbers and exhaustive counting."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from winnow.evaluation.statistics import (
    EXACT_ANSWERS,
    PromptAnswers,
    default_ks,
    estimate,
    maj_at_k,
    majority,
    numbers,
    pass_at_k,
    summarise,
    two_sided_bound,
    two_sided_p,
)


def brute_pass(n: int, correct: int, k: int) -> float:
    """The share of all k-subsets that hold a right answer."""
    draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    return sum(map(any, draws)) / len(draws)


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


ANSWERS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8
)
"""What is said, and whether it is right: the same words need not be equally right."""


def test_pass_at_k_by_hand() -> None:
    # 4 answers, 1 right, 2 drawn: 3 of the 6 pairs hold it. 2 right: 5 of 6.
    assert pass_at_k([4, 4, 4, 4], [0, 1, 2, 4], 2) == pytest.approx([0, 1 / 2, 5 / 6, 1])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_counting_all_subsets(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        assert pass_at_k([n], [correct], k)[0] == pytest.approx(brute_pass(n, correct, k))


@settings(max_examples=25)
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
    with pytest.raises(AssertionError, match="pass@k"):
        pass_at_k(n, correct, k)


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
    assert majority(accuracies, parsed) == pytest.approx(wanted, abs=1e-12)


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


def test_random_draws_follow_their_seed_alone() -> None:
    accuracies, parsed = [1, 0, 0, 1, 0], ["a", "b", "c", "a", "b"]

    def drawn(seed: int) -> float:
        return float(maj_at_k(accuracies, parsed, [3], seed, exact_answers=4)[0])

    assert drawn(5) == drawn(5) != drawn(6)


def test_many_answers_are_exact_up_to_the_limit() -> None:
    # 2 voices of 128 that differ from the rest win a draw only where nobody else is in it.
    n = EXACT_ANSWERS
    found = maj_at_k([1, 1] + [0] * (n - 2), ["a", "a"] + ["b"] * (n - 2), [1, 2, n])
    tied = 2 * (n - 2) / math.comb(n, 2)
    assert found == pytest.approx([2 / n, tied / 2 + 1 / math.comb(n, 2), 0], rel=1e-12)


@settings(max_examples=25)
@given(ANSWERS, st.randoms())
def test_order_and_names_of_answers_do_not_matter(
    answers: list[tuple[str, bool]], random: Random
) -> None:
    mixed = random.sample(answers, len(answers))
    ks = range(1, len(answers) + 1)

    def figures(these: list[tuple[str, bool]]) -> list[float]:
        rights = [float(right) for _, right in these]
        majority = maj_at_k(rights, [said.upper() for said, _ in these], ks)
        found = summarise([PromptAnswers("s", rights, [said for said, _ in these])])["s"]
        return [*majority, *(value.mean for value in found.figures.values())]

    assert figures(mixed) == pytest.approx(figures(answers), abs=1e-12)


@settings(max_examples=25)
@given(ANSWERS)
def test_one_answer_is_the_average_and_more_of_them_pass_more_often(
    answers: list[tuple[str, bool]],
) -> None:
    rights = [float(right) for _, right in answers]
    ks = range(1, len(rights) + 1)
    passed = [float(pass_at_k([len(rights)], [sum(rights)], k)[0]) for k in ks]
    majority = maj_at_k(rights, [said for said, _ in answers], ks)
    assert passed == sorted(passed)
    assert passed[0] == pytest.approx(np.mean(rights))
    assert majority[0] == pytest.approx(np.mean(rights))
    assert all(0 <= m <= 1 + 1e-12 for m in majority)


def test_a_majority_beats_a_minority_as_k_grows() -> None:
    accuracies, parsed = [1, 1, 1, 0, 0], ["a", "a", "a", "b", "c"]
    found = maj_at_k(accuracies, parsed, [1, 3, 5])
    assert found[0] == pytest.approx(0.6)
    assert found[0] < found[1] < found[2] == 1


def test_what_cannot_be_parsed_has_no_vote() -> None:
    assert maj_at_k([0, 0], [None, None], [1, 2]).tolist() == [0, 0]
    assert maj_at_k([0] * 3, [None] * 3, [2], exact_answers=1).tolist() == [0]
    assert maj_at_k([1, 1], ["a", "a"], [2])[0] == 1
    # A single vote wins over any number of unreadable answers, where it is drawn at all.
    parsed = ["a", None, None, None]
    assert maj_at_k([1, 0, 0, 0], parsed, [1, 2, 4]) == pytest.approx([1 / 4, 1 / 2, 1])


@pytest.mark.parametrize(("k", "parsed"), [(0, ["a"]), (2, ["a"]), (1, ["a", "b"])])
def test_maj_at_k_refuses_what_cannot_be(k: int, parsed: list[str]) -> None:
    with pytest.raises(AssertionError, match="maj@k"):
        maj_at_k([1.0], parsed, [k])


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
    assert low == pytest.approx(30 / (30 + 2.045229642132703**2))  # Student's bound, 29
    assert high == pytest.approx(1.0)
    assert estimate([0.0] * 30).interval[0] == pytest.approx(0, abs=1e-12)


def test_one_prompt_has_no_standard_error_and_none_is_refused() -> None:
    found = estimate([0.5])
    assert math.isnan(found.standard_error)
    assert 0 <= found.interval[0] < 0.5 < found.interval[1] <= 1
    with pytest.raises(AssertionError, match="at least one prompt"):
        estimate([])


@pytest.mark.parametrize(("prompts", "n"), [(200, 4), (30, 32), (30, 1)])
def test_the_interval_covers_the_truth_about_95_times_of_100(prompts: int, n: int) -> None:
    generator = np.random.default_rng(0)
    rates = generator.beta(0.5, 2, size=(1000, prompts))  # evaluations of unlike prompts
    scores = generator.binomial(n, rates) / n
    intervals = [estimate(row).interval for row in scores]
    covered = np.mean([low <= 0.2 <= high for low, high in intervals])
    assert 0.93 <= covered <= 0.975


def test_without_clustering_the_interval_would_be_too_narrow() -> None:
    generator = np.random.default_rng(0)
    rates = generator.beta(0.5, 2, size=(500, 30))
    scores = generator.binomial(1, rates[..., None], size=(500, 30, 32)).astype(float)
    intervals = [estimate(row.ravel()).interval for row in scores]
    covered = np.mean([low <= 0.2 <= high for low, high in intervals])
    assert covered < 0.6


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
    assert numbers([1, 0.5, True]) == [1.0, 0.5, 1.0]
    for odd in ("4", None, float("nan"), float("inf")):
        assert numbers([1.0, odd]) is None
