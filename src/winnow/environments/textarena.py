"""Games of TextArena for one player as environments; the package is an extra.

The policy's turn is the game's action as it stands. The game's messages since the last turn are
the observation, without the echo of the action, which a conversation has anyway. Games reward
their end: 1 for a solution, mostly a share of it otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from winnow.environments import Step, Turn, episode_seed, missing_extra
from winnow.errors import ConfigError


class TextArenaGame:
    """A game by its id.

    Args:
        id: as `textarena.make` takes it.
        options: further arguments of `textarena.make`.

    Raises:
        ConfigError: the package or the game is missing.
    """

    def __init__(self, id: str, options: Mapping[str, Any]) -> None:
        self._id, self._options = id, options
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ModuleNotFoundError as error:
            raise missing_extra("textarena", error) from error
        self._textarena = textarena
        if id not in ENV_REGISTRY:
            raise ConfigError(f"environment.id is {id}, and textarena has no such game")
        self._generator: Any = None

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin a game; its seed is the row's.

        Raises:
            ConfigError: the game is for several players, or refuses its options.
        """
        seed = episode_seed(row)
        with self._own_generator():
            random.seed(seed)  # some games draw when they are made
            try:
                self._env = self._textarena.make(self._id, **self._options)
            except TypeError as error:
                raise ConfigError(f"environment.options of {self._id}: {error}") from error
            self._game = self._env
            while isinstance(self._game, self._textarena.Wrapper):
                self._game = self._game.env
            try:
                self._env.reset(num_players=1, seed=seed)
                is_single = isinstance(self._game.state, self._textarena.SinglePlayerState)
            except AssertionError:
                is_single = False
        if not is_single:
            raise ConfigError(
                f"environment.id is {self._id}, a game of several players; choose one of one player"
            )
        return self._observe()

    def step(self, turn: Turn) -> Step:
        """Make a move."""
        with self._own_generator():
            is_done, _ = self._env.step(action=turn.text)
        observation = self._observe()
        if not is_done:
            return Step(observation, metrics={"success": 0.0})
        rewards, info = self._env.close()
        # Countdown gives its reason in the place of the reward after an invalid move.
        reward = (rewards or {}).get(0)
        reward = float(reward) if isinstance(reward, int | float) else 0.0
        figures = {k: float(v) for k, v in info[0].items() if isinstance(v, int | float)}
        return Step((), reward, True, figures | {"success": float(reward >= 1)})

    def _observe(self) -> str:
        _, messages = self._game.get_observation()
        echo = self._textarena.ObservationType.PLAYER_ACTION
        game = self._textarena.GAME_ID
        return "\n".join(
            text.strip() for sender, text, kind in messages if sender == game and kind != echo
        )

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Games draw from Python's global generator: each conversation has a state of its own."""
        outside = random.getstate()
        if self._generator is not None:
            random.setstate(self._generator)
        try:
            yield
        finally:
            self._generator = random.getstate()
            random.setstate(outside)
