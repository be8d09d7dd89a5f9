"""A baseline for asynchronous training: groups are taken as they end, late ones are thrown away.

    python -m benchmarks.drop_stale [--pool 1] [--refill 1] [--ahead 1]
        RECIPE trainer/mode=async [KEY=VALUE …]

Trains a recipe as `winnow train` does, with the same loop, sampler, engines and learner; only the
ledger's rules are others. They are those of prime-rl's scheduler (its `max_inflight_rollouts`,
`max_off_policy_steps` and `max_async_level`), with the limit of age at `sampling.max_staleness`:

- a constant number of groups is under way, `pool` x `sampling.groups_per_step`; each that ends is
  replaced by the next prompt (`refill` of them together, where single prefills are dear);
- a step is made of the first N groups that end and qualify (completion order);
- sampling runs at most `ahead` steps ahead of the learner, then no group begins;
- when a step begins, each group whose oldest token would be older than `sampling.max_staleness`
  where it is learnt is thrown away with its tokens, ended or not. Its prompt does not come back.
"""

from __future__ import annotations

import argparse
from collections import deque
from typing import Any

from winnow.cli.main import app
from winnow.sampling import stream
from winnow.sampling.groups import GroupState
from winnow.sampling.ledger import Ledger
from winnow.types import Prompt


class DropStaleLedger(Ledger):
    """Completion order, a constant number of groups under way, and nothing that is late is kept."""

    pool = 1.0
    """Open groups, in steps of N groups."""
    refill = 1
    """Groups that begin together: fewer prefills, each larger."""
    ahead = 1
    """Steps that may be cut and not published while groups still begin."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_order = False
        self._late: set[int] = set()
        self._is_filling = True

    @property
    def may_keep_running(self) -> bool:
        return True

    def begin_step(self, version: int, learns: int | None = None) -> list[Prompt]:
        self.version, self.learns = version, version if learns is None else learns
        oldest = self.learns - self.config.max_staleness
        for group in self.groups.uncommitted_groups():
            if group.version < oldest:
                self._throw_away(group)
        self.queue = deque(number for number in self.queue if number in self.groups.qualified)
        self.looked_at = self.in_flight + self.qualified
        return []

    def may_admit(self) -> bool:
        free = self.pool * self.target - self.in_flight
        self._is_filling = free > 0 and (self._is_filling or free >= self.refill)
        is_ahead = self.unlearnt_steps > self.ahead or self.looked_at >= self.bound
        return self._is_filling and not is_ahead

    def _throw_away(self, group: GroupState) -> None:
        if group.id in self.groups.qualified:
            self._drop(group, "stale")
            return
        self._end_group(group, "dropped")
        self._late.add(group.id)
        self.groups.failing[group.id] = group  # the sampler takes its answers from the engine
        self._settle_failed(group)

    def _settle_failed(self, group: GroupState) -> None:
        if group.id not in self._late:
            super()._settle_failed(group)
        elif not group.running:
            self._late.remove(group.id)
            late = self.groups.failing.pop(group.id)
            self.accounting.close_group(late, "stale", self.learns)


def main() -> None:
    """Train a recipe with the baseline's rules."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pool", type=float, default=DropStaleLedger.pool)
    parser.add_argument("--refill", type=int, default=DropStaleLedger.refill)
    parser.add_argument("--ahead", type=int, default=DropStaleLedger.ahead)
    parser.add_argument("words", nargs="+", metavar="RECIPE KEY=VALUE")
    given = parser.parse_args()
    DropStaleLedger.pool, DropStaleLedger.refill = given.pool, given.refill
    DropStaleLedger.ahead = given.ahead
    stream.Ledger = DropStaleLedger  # type: ignore[attr-defined]
    app(["train", *given.words], standalone_mode=False)


if __name__ == "__main__":
    main()
