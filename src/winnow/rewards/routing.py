"""Which scorer a data source goes to.

Patterns match without regard to case, the whole name or, with `*` at the end, its beginning.
The recipe's come before the built-in ones; among those of one kind the longest wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec

from winnow.errors import RewardError
from winnow.rewards.routes import ROUTES
from winnow.rewards.scorers import SCORERS, Scorer

# Leaves a source to the reward model: no part of its own, and no accuracy to speak of.
NO_SCORER = Scorer("none", "tags:score_nothing", 0.0)
_CHOICES = {**SCORERS, NO_SCORER.name: NO_SCORER}


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
        known = {pattern.lower().rstrip("*"): pattern for pattern in ROUTES}
        near = [known[each] for each in get_close_matches(name, known, cutoff=0.65)]
        near_text = f" (near it: {', '.join(near)})" if near else ""
        raise RewardError(
            f"data_source {data_source} has no scorer{near_text}; name one of "
            f"{', '.join(SCORERS)} in reward.scorers, or your own function in reward.function.path"
        )

    def check(self, data_sources: Iterable[str]) -> None:
        """See before training that every source has a scorer.

        Raises:
            RewardError: one has none, or the scorer's package is not installed.
        """
        for data_source in sorted(data_sources):
            check_package(self.scorer(data_source), f"data_source {data_source}", "reward.scorers")


def check_package(scorer: Scorer, what: str, setting: str) -> None:
    """See that a scorer has what it imports.

    Args:
        what: is scored by it.
        setting: can name another.

    Raises:
        RewardError: the package is not installed.
    """
    if scorer.package and find_spec(scorer.package) is None:
        extra = scorer.package.replace("_", "-")
        raise RewardError(
            f"{what} is scored by {scorer.name}, whose package is not installed; "
            f"pip install 'winnow-rl[{extra}]', or name another in {setting}"
        )


def _by_length(patterns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Lower-case; whole names first, then prefixes from the longest."""
    lower = [(pattern.lower(), scorer) for pattern, scorer in patterns.items()]
    return sorted(lower, key=lambda item: (item[0].endswith("*"), -len(item[0])))
