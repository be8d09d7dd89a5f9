"""Routes from data sources to scorers.

Patterns match without regard to case, the whole name or, with `*` at the end, its beginning.
The recipe's come before the built-in ones; among those of one kind the longest wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec

from winnow.errors import RewardError
from winnow.rewards.scorers import SCORERS, Scorer

_SOURCES: Mapping[str, str] = {
    "sort_digits": "sort_digits",
    "calc": "calc shapes",
    "gsm8k": "gsm8k openai/gsm8k",
    "gsm8k_flexible": "arithmetic",
    # Asked for, trained and published by the line `Answer:`.
    "dapo_math": "math_dapo* dapo_math* dapo-math* dapo-17k* aime*",
    "math_verify": """
        math math-500* math_500* math500* HuggingFaceH4/MATH-500 lighteval/MATH*
        DigitalLearningGmbH/MATH-lighteval hendrycks/competition_math EleutherAI/hendrycks_math*
        numina* AI-MO/NuminaMath* amc* AI-MO/aimo-validation-amc math-ai/amc23
        olympiadbench* minerva*
    """,
    "geometry3k": "geometry3k* geo3k* hiyouga/geometry3k",
    "search_qa_em": """
        searchR1_* nq nq_* triviaqa* popqa* hotpotqa* 2wikimultihopqa* musique* bamboogle*
    """,
    "multiple_choice": """
        multiple_choice* mmlu* cais/mmlu* TIGER-Lab/MMLU-Pro* gpqa* Idavidrein/gpqa*
        ai2_arc* allenai/ai2_arc* commonsense_qa* openbookqa*
    """,
    "code": """
        apps* codeparrot/apps taco* BAAI/TACO codecontests* code_contests* deepmind/code_contests
        codeforces* humaneval* openai_humaneval* openai/openai_humaneval
        mbpp* google-research-datasets/mbpp
    """,
    "countdown": "countdown* Jiayi-Pan/Countdown-Tasks-3to4",
    "reasoning_gym": "reasoning_gym reasoning_gym/*",
}

ROUTES: Mapping[str, str] = {
    source: scorer for scorer, sources in _SOURCES.items() for source in sources.split()
}
"""Scorers by the data sources that have one without a recipe's word; a name ends in `*` where a
set has variants."""

# Leaves a source to the reward model: no part, and no accuracy to speak of.
NO_SCORER = Scorer("none", "markers:score_nothing", 0.0)
_CHOICES = {**SCORERS, NO_SCORER.name: NO_SCORER}


class Router:
    """The built-in routes under those of the recipe (`reward.scorers`).

    Raises:
        RewardError: a recipe's route leads to no scorer.
    """

    def __init__(self, overrides: Mapping[str, str]) -> None:
        for source, name in overrides.items():
            find_scorer(name, f"reward.scorers.{source}", _CHOICES)
        self._layers = [_sort_patterns(overrides), _sort_patterns(ROUTES)]
        self.scorer: Callable[[str], Scorer] = cache(self._find)
        """Returns the scorer of a data source; raises RewardError where none is known for it."""

    def _find(self, data_source: str) -> Scorer:
        name = data_source.lower()
        for patterns in self._layers:
            for pattern, scorer in patterns:
                if name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern:
                    return _CHOICES[scorer]
        by_prefix = {pattern.lower().rstrip("*"): pattern for pattern in ROUTES}
        near = [by_prefix[each] for each in get_close_matches(name, by_prefix, cutoff=0.65)]
        near_text = f" (similar: {', '.join(near)})" if near else ""
        raise RewardError(
            f"data_source {data_source} has no scorer{near_text}; name one of "
            f"{', '.join(SCORERS)} in reward.scorers, or your own function in reward.function.path"
        )

    def check(self, data_sources: Iterable[str]) -> None:
        """Check before training that every source has a scorer.

        Raises:
            RewardError: one has none, or the scorer's package is not installed.
        """
        for data_source in sorted(data_sources):
            check_package(self.scorer(data_source), f"data_source {data_source}", "reward.scorers")


def find_scorer(name: str, setting: str, choices: Mapping[str, Scorer] = SCORERS) -> Scorer:
    """Look up the scorer that a key of the recipe names.

    Raises:
        RewardError: it is none of `choices`.
    """
    if name not in choices:
        supported = ", ".join(choices)
        raise RewardError(f"{setting} is {name}, which is not a scorer; available: {supported}")
    return choices[name]


def check_package(scorer: Scorer, what: str, setting: str) -> None:
    """Check that a scorer's package is installed.

    Args:
        what: names what it scores, for the message.
        setting: key of the recipe that can name another scorer.

    Raises:
        RewardError: the package is not installed.
    """
    if scorer.package and find_spec(scorer.package) is None:
        extra = scorer.package.replace("_", "-")
        raise RewardError(
            f"{what} is scored by {scorer.name}, whose package is not installed; "
            f"pip install 'winnow-rl[{extra}]', or name another in {setting}"
        )


def _sort_patterns(patterns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Lower-case; whole names first, then prefixes from the longest."""
    lower = [(pattern.lower(), scorer) for pattern, scorer in patterns.items()]
    return sorted(lower, key=lambda item: (item[0].endswith("*"), -len(item[0])))
