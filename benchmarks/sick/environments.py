"""A tool and an environment with faults on purpose, for benchmarks/doctor.py."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from winnow.environments import Step, Turn


def rest(digits: str) -> str:
    """Sort the digits that are left.

    Args:
        digits: such as 539.
    """
    return "".join(sorted(digits))


class Fragile:
    """Fails for one answer in twenty, as a server does that some requests crash; has one turn."""

    def reset(self, row: Any) -> tuple[()]:
        """Leave the prompt as it is."""
        return ()

    def step(self, turn: Turn) -> Step:
        """End the conversation, or fail."""
        if crc32(turn.text.encode()) % 20 == 0:
            raise ConnectionError("the server closed the connection")
        return Step(done=True)
