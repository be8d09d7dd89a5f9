"""The closed prefix: how far, in admission order, every group is closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from winnow.sampling.admission import QualifyRate

Outcome = Literal["qualified", "not", "failed", "dropped"]


class ClosedPrefix:
    """Passes outcomes on in admission order, to p̂ and to whoever cuts."""

    def __init__(self, decay: float, *, filtered: bool = True) -> None:
        """`decay` is the memory of p̂, and `filtered` whether a group may fail to qualify."""
        self.rate = QualifyRate(decay, filtered=filtered)
        self._next = 0  # the first id not known to be closed
        self._outcomes: dict[int, tuple[str, Outcome]] = {}  # closed, yet to be passed

    def close(self, group_id: int, uid: str, outcome: Outcome) -> list[int]:
        """A group closed; returns the qualified groups that the prefix now passes."""
        passed: list[int] = []
        if group_id < self._next:
            return passed
        self._outcomes[group_id] = (uid, outcome)
        while (known := self._outcomes.pop(self._next, None)) is not None:
            uid, outcome = known
            if outcome == "qualified":
                passed.append(self._next)
            if outcome != "dropped":
                # A failure of engine or scorer says nothing of the prompt.
                self.rate.observe(uid, outcome == "qualified", own=outcome != "failed")
            self._next += 1
        return passed

    def skip_to(self, group_id: int) -> None:
        """Look no further at any group before `group_id`."""
        self._outcomes.clear()
        self._next = group_id

    def state_dict(self) -> dict[str, Any]:
        """Everything it knows, as plain values."""
        outcomes = [[group_id, *known] for group_id, known in self._outcomes.items()]
        return {"next": self._next, "outcomes": outcomes, "rate": self.rate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self._next = state["next"]
        self._outcomes = {group_id: (uid, outcome) for group_id, uid, outcome in state["outcomes"]}
        self.rate.load_state_dict(state["rate"])
