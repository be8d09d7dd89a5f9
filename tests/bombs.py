"""Pickles that show whether they were read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Bomb:
    """An object whose pickle makes the folder `mark` when it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)
