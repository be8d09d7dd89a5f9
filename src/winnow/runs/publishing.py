"""Publication of a step's weights to the engine, with a check that it answers with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from winnow.learning.canary import Canary
from winnow.observe.names import Number
from winnow.rollout.engine import Engine, PublishedEngine, WeightUpdate
from winnow.rollout.engine_group import EngineGroup
from winnow.types import FloatArray

Weights = Callable[[int], WeightUpdate]


class Sending:
    """Publishes weights, and has a canary check that the engine uses them.

    Args:
        weights: makes the update of a version, for an engine of this kind.
        expected: computes the trainer's log-probs of the canary's sequences.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        canary: Canary,
        expected: Callable[[Canary], Sequence[FloatArray]],
    ) -> None:
        self._engine, self._weights = engine, weights
        self._canary, self._expected = canary, expected

    async def __call__(self, version: int) -> Mapping[str, Number]:
        """Publish and return `publish/max_delta` in nats.

        Raises:
            PublicationError: an engine holds other weights, or does not answer with them.
        """
        expected = self._expected(self._canary)
        await self._engine.load_weights(self._weights(version))
        engine = self._engine
        members = engine.engines if isinstance(engine, EngineGroup) else {"the engine": engine}
        asked = cast("Mapping[str, PublishedEngine]", members)
        return {"publish/max_delta": await self._canary.check(expected, version, asked)}
