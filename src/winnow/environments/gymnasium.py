"""Environments of Gymnasium with discrete actions; the package is an extra.

An observation is the picture of the render mode `ansi` where there is one, else the observation as
text. An action is a name or number in square brackets; the last ones of a turn count. Anything else
is answered without a step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from winnow.environments import Step, Turn, episode_seed, missing_extra
from winnow.errors import ConfigError

_ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Names of actions, which Gymnasium says in its documentation alone."""
_COLOURS = "gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson"
_COLOURED = re.compile(r"\x1b\[[34](\d)[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
_ACTION = re.compile(r"\[([^\[\]]*)\]")


class GymnasiumEpisode:
    """An episode of an environment by its id.

    Args:
        id: as `gymnasium.make` takes it.
        options: further arguments of `gymnasium.make`.
        actions: names of the actions; empty: the known ones, else numbers alone.

    Raises:
        ConfigError: the package or the environment is missing, or it has other than a finite
            number of actions.
    """

    def __init__(self, id: str, options: Mapping[str, Any], actions: Sequence[str]) -> None:
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise missing_extra("gymnasium", error) from error
        try:
            modes = gymnasium.make(id, **options).metadata["render_modes"]
            is_drawn = {"render_mode": "ansi"} if "ansi" in modes else {}
            self._env = gymnasium.make(id, **{**is_drawn, **options})
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"environment.id is {id}: {' '.join(str(error).split())}") from error
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(f"environment.id is {id}, whose actions are {space}, not Discrete")
        self._first, count = int(space.start), int(space.n)
        names = actions or _ACTIONS.get(self._env.spec.name, ())
        if names and len(names) != count:
            raise ConfigError(f"environment.actions has {len(names)} names, {id} has {count}")
        numbers = [str(number) for number in range(self._first, self._first + count)]
        choices = zip(names or numbers, numbers, strict=True)
        self._choices = ", ".join(f"[{a}]" if a == b else f"[{a}] or [{b}]" for a, b in choices)
        self._places = {n.lower(): i for each in (names, numbers) for i, n in enumerate(each)}

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin an episode; its seed is the row's."""
        observation, _ = self._env.reset(seed=episode_seed(row))
        about = " ".join((inspect.getdoc(self._env.unwrapped) or "").split("\n\n")[0].split())
        rule = f"Write one action a turn in square brackets: {self._choices}."
        return "\n".join(filter(None, [about, rule, self._describe(observation)]))

    def step(self, turn: Turn) -> Step:
        """Take the action that a turn names, if it names one."""
        words = _ACTION.findall(turn.text)
        place = self._places.get(words[-1].strip().lower()) if words else None
        if place is None:
            return Step(f"This is no action. Write one of {self._choices}.")
        observation, reward, is_end, is_cut, info = self._env.step(self._first + place)
        figures = {k: float(v) for k, v in info.items() if isinstance(v, int | float)}
        figures |= {"terminated": float(is_end), "truncated": float(is_cut)}
        return Step(self._describe(observation), float(reward), bool(is_end or is_cut), figures)

    def close(self) -> None:
        """Free what the environment holds."""
        self._env.close()

    def _describe(self, observation: Any) -> str:
        picture = self._env.render() if self._env.render_mode == "ansi" else observation
        return _COLOURED.sub(lambda m: f"<{_COLOURS[int(m[1])]} {m[2]}>", str(picture)).rstrip()
