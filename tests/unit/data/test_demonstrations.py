"""The mix that a warm start is taught."""

from __future__ import annotations

import numpy as np
import pytest

from winnow.config.data import SortDigitsTask
from winnow.config.model import DemonstrationConfig
from winnow.data.sort_digits import (
    EOS,
    VOCABULARY,
    Demonstration,
    demonstrations,
    is_held_out,
    solution,
)

LIMIT = 128


def worked_form(digits: str) -> str:
    """Sort by selection, with the answer: what a demonstration without errors writes."""
    steps = []
    remaining = digits
    while remaining:
        least = min(remaining)
        remaining = remaining.replace(least, "", 1)
        steps.append(f"{least}|{remaining}")
    return f"{';'.join(steps)}#{solution(digits)}"


def make(count: int = 4000, seed: int = 0, **config: float) -> list[Demonstration]:
    rng = np.random.default_rng(seed)
    return demonstrations(count, DemonstrationConfig(**config), SortDigitsTask(), LIMIT, rng)


def texts(made: list[Demonstration]) -> list[tuple[str, str]]:
    """Problem and response of each, in characters."""

    def text(ids: np.ndarray) -> str:
        return "".join(VOCABULARY[i] for i in ids)

    return [(text(d.prompt_ids).removesuffix(":"), text(d.response_ids)) for d in made]


def test_the_same_seed_gives_the_same_demonstrations() -> None:
    assert texts(make(300, seed=5)) == texts(make(300, seed=5))
    assert texts(make(300, seed=5)) != texts(make(300, seed=6))


def test_problems_are_training_problems() -> None:
    assert not any(is_held_out(digits) for digits, _ in texts(make()))


def test_half_are_guesses_and_a_tenth_is_cut_at_the_limit_without_an_end() -> None:
    pairs = texts(make())
    guesses = [response for _, response in pairs if response.startswith("#")]
    cut = [response for _, response in pairs if not response.endswith(EOS)]
    assert len(guesses) / len(pairs) == pytest.approx(0.5, abs=0.03)
    assert len(cut) / len(pairs) == pytest.approx(0.1, abs=0.02)
    assert all(len(response) == LIMIT and "?" in response for response in cut)


def test_no_demonstration_is_longer_than_the_limit() -> None:
    assert max(len(d.response_ids) for d in make()) == LIMIT


def test_a_guess_holds_the_digits_of_the_problem_and_is_seldom_right() -> None:
    pairs = texts(make(guess_share=1.0, working_share=0.0))
    assert all(
        sorted(response.removeprefix("#").removesuffix(EOS)) == sorted(d) for d, response in pairs
    )
    right = sum(response == f"#{solution(digits)}{EOS}" for digits, response in pairs)
    assert right / len(pairs) == pytest.approx(0.12, abs=0.02)


def test_a_guess_without_noise_is_right() -> None:
    pairs = texts(make(200, guess_share=1.0, working_share=0.0, guess_noise=0.0))
    assert all(response == f"#{solution(digits)}{EOS}" for digits, response in pairs)


def test_working_without_errors_is_selection_sort() -> None:
    assert worked_form("3313") == "1|333;3|33;3|3;3|#1333"
    assert worked_form("2121") == "1|221;1|22;2|2;2|#1122"
    assert worked_form("7") == "7|#7"
    pairs = texts(make(500, guess_share=0.0, working_share=1.0, step_error=0.0))
    assert all(response == worked_form(digits) + EOS for digits, response in pairs)


def test_a_step_errs_as_often_as_asked() -> None:
    pairs = texts(make(guess_share=0.0, working_share=1.0, step_error=0.01))
    steps = sum(response.count("|") for _, response in pairs)
    wrong = sum(response != worked_form(digits) + EOS for digits, response in pairs)
    assert wrong / steps == pytest.approx(0.01, rel=0.3)


def test_after_an_erring_step_the_chain_goes_on_from_what_it_wrote() -> None:
    pairs = texts(make(1500, guess_share=0.0, working_share=1.0, step_error=0.3))
    for digits, response in pairs:
        working, _, answer = response.removesuffix(EOS).partition("#")
        steps = [step.partition("|") for step in working.split(";")]
        rests = [digits, *(rest for _, _, rest in steps)]
        assert [len(rest) for rest in rests] == list(range(len(digits), -1, -1))
        assert answer == "".join(least for least, _, _ in steps)


def test_an_erring_step_is_always_wrong() -> None:
    pairs = texts(make(1000, guess_share=0.0, working_share=1.0, step_error=1.0))
    for digits, response in pairs:
        remaining = digits
        for step in response.partition("#")[0].split(";"):
            right = f"{min(remaining)}|{remaining.replace(min(remaining), '', 1)}"
            assert step != right
            remaining = step.partition("|")[2]


def test_rambling_starts_over_after_a_question_mark_and_answers_at_its_end() -> None:
    pairs = texts(make(2000, guess_share=0.0, working_share=0.0, step_error=0.0))
    for digits, response in pairs:
        chain, _, answer = worked_form(digits).partition("#")
        if response.endswith(EOS):
            times = response.count("?") + 1
            assert response == "?".join([chain] * times) + f"#{answer}{EOS}"
        else:
            assert "?".join([chain] * LIMIT)[:LIMIT].startswith(response.partition("#")[0])
    started_over = sum("?" in response for _, response in pairs)
    assert started_over / len(pairs) == pytest.approx(0.75, abs=0.03)
