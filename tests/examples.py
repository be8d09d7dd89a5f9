"""How many examples Hypothesis tries of a property: few each time, many when asked for.

Tests run often, so that a few examples in each run are many in a week. The long run is for a change
of what the properties are about: `pytest --hypothesis-profile=thorough`.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

QUICK = 10
"""Of a property that says nothing else."""
THOROUGH = 25
"""Times as many in the profile `thorough`."""


def examples(usual: int, **others: Any) -> settings:
    """Settings for a property that needs more than `QUICK` examples, or whose examples are dear.

    Args:
        usual: in the profiles that tests run with; a longer one takes as many times more.
        others: as for `hypothesis.settings`.
    """
    return settings(max_examples=usual * settings.default.max_examples // QUICK, **others)
