"""A handle of what lies elsewhere, for tests: counts how often it is fetched."""

from __future__ import annotations

from typing import Any


class Elsewhere:
    """Implements `Handle`."""

    def __init__(self, value: Any) -> None:
        self.value, self.begun, self.fetched = value, 0, 0

    def prefetch(self) -> None:
        self.begun += 1

    def get(self) -> Any:
        self.fetched += 1
        return self.value
