"""The maths: pure functions of tensors and floats, which know torch and nothing else of Winnow.

Each kind names its variants in a dict (`ESTIMATORS`, `POLICY_LOSSES`, `KL_ESTIMATORS`,
`AGGREGATIONS`), keyed as in a recipe. A variant's options are required keyword arguments of the
names that its section of the recipe has; their defaults and ranges stand there alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def imported_late(place: str) -> Callable[..., Any]:
    """Return a function that imports the one at `module:name`, below this package, when called."""
    module, _, name = place.partition(":")

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"{__name__}.{module}"), name)(*args, **options)

    return call
