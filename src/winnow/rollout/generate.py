"""Write a set of answers to the end and wait for all: evaluation, and whoever needs no refill."""

from __future__ import annotations

from collections.abc import Sequence

from winnow.errors import TrainingError
from winnow.rollout.engine import Engine, GroupRequest
from winnow.rollout.single_turn import trajectory_of
from winnow.types import Trajectory


async def generate(
    engine: Engine, requests: Sequence[GroupRequest]
) -> dict[tuple[int, int], Trajectory]:
    """The trajectories by (group id, answer index). Nothing else may be running on the engine.

    Raises:
        TrainingError: the engine gave an answer up, or fell idle before all were written.
    """
    wanted = sum(len(request.answers) for request in requests)
    done: dict[tuple[int, int], Trajectory] = {}
    await engine.submit(requests)
    while len(done) < wanted:
        events = await engine.events()
        if not events:
            raise TrainingError(f"the engine fell idle with {wanted - len(done)} answers missing")
        for event in events:
            if event.kind != "finished":
                raise TrainingError(
                    f"the engine {event.kind} answer {event.answer} of prompt {event.group_id}"
                    f"{': ' if event.error else ''}{event.error}"
                )
            done[event.group_id, event.answer] = trajectory_of(event)
    return done
