"""Which scorer a data source goes to.

Patterns match without regard to case, the whole name or, with `*` at the end, its beginning.
The recipe's come before the built-in ones; among those of one kind the longest wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from winnow.errors import RewardError
from winnow.rewards.scorers import SCORERS, Scorer
from winnow.types import Score

# Leaves a source to the reward model: no part of its own, and no accuracy to speak of.
NO_SCORER = Scorer("none", lambda *_: Score(0.0, 0.0), 0.0)
_CHOICES = {**SCORERS, NO_SCORER.name: NO_SCORER}
# MATH-500 goes by the `Answer:` line, as its prompts are asked here; a gold answer written in
# another way than the model's counts as wrong.
ROUTES: Mapping[str, str] = {
    "sort_digits": "sort_digits",
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "math_dapo*": "dapo_math",
    "dapo_math*": "dapo_math",
    "dapo-math*": "dapo_math",
    "dapo-17k*": "dapo_math",
    "aime*": "dapo_math",
    "math-500*": "dapo_math",
    "HuggingFaceH4/MATH-500": "dapo_math",
}


class Router:
    """The built-in routes under those of the recipe (`reward.scorers`)."""

    def __init__(self, overrides: Mapping[str, str]) -> None:
        for source, name in overrides.items():
            if name not in _CHOICES:
                raise RewardError(
                    f"reward.scorers.{source} is {name}, which is no scorer; "
                    f"there are {', '.join(_CHOICES)}"
                )
        self._layers = [_by_length(overrides), _by_length(ROUTES)]

    def scorer(self, data_source: str) -> Scorer:
        """The scorer of a data source.

        Raises:
            RewardError: none is known for it.
        """
        name = data_source.lower()
        for patterns in self._layers:
            for pattern, scorer in patterns:
                if name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern:
                    return _CHOICES[scorer]
        raise RewardError(
            f"data_source {data_source} has no scorer; known are {', '.join(ROUTES)}. Name one of "
            f"{', '.join(SCORERS)} in reward.scorers, or your own function in reward.function.path"
        )

    def check(self, data_sources: Iterable[str]) -> None:
        """See before training that every source has a scorer.

        Raises:
            RewardError: one has none.
        """
        for data_source in sorted(data_sources):
            self.scorer(data_source)


def _by_length(patterns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Lower-case; whole names first, then prefixes from the longest."""
    lower = [(pattern.lower(), scorer) for pattern, scorer in patterns.items()]
    return sorted(lower, key=lambda item: (item[0].endswith("*"), -len(item[0])))
