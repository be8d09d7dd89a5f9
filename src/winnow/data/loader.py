"""An endless walk over the prompts of a run, from a cursor that can be restored.

A finite source comes round in epochs, each shuffled by a seed of its own; an endless one is
walked by index. Prompts given back come first again, in the order given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from winnow.errors import CheckpointError
from winnow.types import IntArray, Prompt

_SHUFFLE = 0x5EED_0DA7A
"""Keeps the shuffles apart from other streams of the same seed."""


class PromptSource(Protocol):
    """Prompts by index and by uid; `PromptSet` and `GeneratedPrompts` are ones."""

    @property
    def size(self) -> int | None:
        """The number of prompts; None when they never end."""
        ...

    @property
    def data_sources(self) -> frozenset[str]:
        """Their data sources, to be checked against the scorers before training."""
        ...

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """For each file (or task), a text that changes when its prompts do."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index below `size`."""
        ...

    def find(self, uid: str) -> Prompt:
        """Return the prompt of a uid; KeyError when there is none."""
        ...


class PromptLoader:
    """An endless walk over a source. Its state is a cursor and the prompts given back."""

    def __init__(self, source: PromptSource, seed: int, shuffle: bool = True) -> None:
        assert source.size is None or source.size > 0
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order: tuple[int, IntArray] | None = None
        self._returned: deque[Prompt] = deque()

    def next(self) -> Prompt:
        """Return the next prompt: the first of those given back, else the one under the cursor."""
        if self._returned:
            return self._returned.popleft()
        size = self._source.size
        if size is None:
            prompt = self._source.prompt(self._position)
            self._position += 1
            return prompt
        prompt = self._source.prompt(int(self._epoch_order(size)[self._position]))
        self._position += 1
        if self._position == size:
            self._epoch, self._position = self._epoch + 1, 0
        return prompt

    def give_back(self, prompts: Iterable[Prompt]) -> None:
        """Put prompts in front of all others; the first of them comes next."""
        self._returned.extendleft(reversed(list(prompts)))

    def state_dict(self) -> dict[str, Any]:
        """Return the walk so far as plain JSON values."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "returned": [prompt.uid for prompt in self._returned],
            "data": dict(self._source.fingerprints),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: it was taken from other data, or in another order of them.
        """
        _same_data(state["data"], self._source.fingerprints)
        for key, now in (("run.seed", self._seed), ("data.shuffle", self._shuffle)):
            was = state[key.partition(".")[2]]
            if was != now:
                raise CheckpointError(
                    f"{key} was {was} when the checkpoint was saved and is {now} now, which "
                    "changes the order of the prompts; set it back, or start a new run"
                )
        try:
            returned = deque(self._source.find(uid) for uid in state["returned"])
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint holds the prompt {error.args[0]}, which the data no longer has; "
                "restore the data, or start a new run"
            ) from error
        self._epoch, self._position = state["epoch"], state["position"]
        self._returned = returned

    def _epoch_order(self, size: int) -> IntArray:
        if self._order is None or self._order[0] != self._epoch:
            order: IntArray = np.arange(size, dtype=np.int64)
            if self._shuffle:
                np.random.default_rng([self._seed, _SHUFFLE, self._epoch]).shuffle(order)
            self._order = (self._epoch, order)
        return self._order[1]


def _same_data(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in was:
        if name not in now:
            raise CheckpointError(
                f"{name}: the checkpoint was saved with this data, which is not given now; "
                "name it in data.train_files, or start a new run"
            )
        if was[name] != now[name]:
            raise CheckpointError(
                f"{name}: the prompts differ from those the checkpoint was saved with; restore "
                "the file, the tokenizer and the section data, or start a new run"
            )
    added = next((name for name in now if name not in was), None)
    if added is not None:
        raise CheckpointError(
            f"{added}: the checkpoint was saved without this data; leave it out, or start a new run"
        )
    if list(was) != list(now):
        raise CheckpointError(
            f"the data came in the order {', '.join(was)} when the checkpoint was saved and comes "
            f"as {', '.join(now)} now; restore the order, or start a new run"
        )
