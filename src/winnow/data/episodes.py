"""The task `episodes`: rows that are seeds, of which an environment makes its episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from winnow.config.data import EpisodesTask
from winnow.data.sources import Row

DATA_SOURCE = "episodes"
_HELD_OUT = 1 << 30
"""First seed of those for evaluation."""


class EpisodeRows:
    """Rows of seeds; `TaskRows`. Their first messages come from the environment."""

    data_sources = frozenset({DATA_SOURCE})
    fingerprints: Mapping[str, str] = {}

    def __init__(self, task: EpisodesTask) -> None:
        self.size, self._eval_episodes = task.train_episodes, task.eval_episodes

    def candidates(self, index: int) -> Iterator[Row]:
        yield _make_row(index)

    def candidates_of(self, uid: str) -> Iterator[Row]:
        if uid not in {f"{DATA_SOURCE}:{seed}" for seed in range(self.size)}:
            raise KeyError(uid)
        return self.candidates(int(uid.rpartition(":")[2]))

    def held_out(self) -> list[Row]:
        return [_make_row(_HELD_OUT + index) for index in range(self._eval_episodes)]


def _make_row(seed: int) -> Row:
    messages = ({"role": "user", "content": ""},)
    uid = f"{DATA_SOURCE}:{seed}"
    return Row(uid, f"episode {seed}", DATA_SOURCE, messages, "", {"seed": seed})
