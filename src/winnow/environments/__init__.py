"""Environments: what answers the policy's turns in a conversation, and rewards them.

    row ─► reset ─► first messages ─► turn 1 ─► step ─► messages, reward ─► turn 2 ─► … ─► done

An environment is a class with `reset` and `step`:

    class Guess:
        def reset(self, row):
            self.secret = int(row["ground_truth"])
            return "Guess a number from 1 to 64."

        def step(self, turn):
            guess = int(turn.text) if turn.text.isdecimal() else 0
            if guess == self.secret:
                return Step(reward=1.0, done=True)
            return Step("higher" if guess < self.secret else "lower")
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from winnow.errors import ConfigError
from winnow.types import Image

Message = Mapping[str, Any]
"""With `role` and `content` at least, as chat templates take it."""
_PARTS = {"text": str, "image": bytes | str | Image}
"""Types of the values of the parts of a content, by their own type."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the policy wrote."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """A turn that the policy wrote."""

    text: str
    """Without calls, and without the token that ends the turn."""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """The fault of each call that could not be parsed, in one line."""


@dataclass(frozen=True)
class Step:
    """An environment's reply to a turn."""

    observation: str | Sequence[Message] = ()
    """A text becomes a message of the role user. The content of a message is a text, or a list of
    `{"type": "text", "text": …}` and `{"type": "image", "image": BYTES_OR_PATH}`."""
    reward: float = 0.0
    """For the turn."""
    done: bool = False
    """True ends the conversation; the observation is then not shown to the policy."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the conversation; the last one of a name counts. The names turns, calls,
    malformed, malformed_turns, reward, reply_s and faults are taken."""
    state: str = ""
    """The environment's `state_dict()` behind the step as JSON, which Winnow adds."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The observation as messages; none where the conversation is done.

        Raises:
            TypeError: it is neither a text nor messages with `role` and `content`.
        """
        return () if self.done else messages_of(self.observation)


class Environment(Protocol):
    """One conversation's counterpart; the same row has to give the same start.

    Optional methods: `state_dict()`, of values that JSON can hold, and `load_state_dict(state)`,
    called behind `reset`, by which a resumed conversation goes on without its turns being replayed;
    and `close()`. An optional attribute `tools` has the functions that the policy may call.
    """

    def reset(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        """Begin a conversation; return its first messages, or a text of the role user.

        Without a text or messages it begins with those of the row.
        """

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Reply to a turn."""


def messages_of(observation: str | Sequence[Message]) -> tuple[Message, ...]:
    """Return an observation as messages.

    Raises:
        TypeError: it is neither a text nor messages with `role` and `content`.
    """
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    messages = tuple(observation)
    for each in messages:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise TypeError(f"{each!r:.80} is neither a text nor a message with role and content")
        content = each.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if not all(map(_is_part, parts)):
            raise TypeError(
                f"the content of a message is {content!r:.80}, neither a text nor a list of parts "
                'such as {"type": "image", "image": …}'
            )
    return messages


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind in _PARTS and isinstance(part.get(kind), _PARTS[kind])


def episode_seed(row: Mapping[str, Any]) -> int:
    """Return the seed of a row, for an environment that makes its episodes of seeds.

    Raises:
        ConfigError: there is none.
    """
    seed = row.get("seed")
    if not isinstance(seed, int):
        raise ConfigError(
            f"a row of {row['data_source']} has no seed, of which its episode is made; set "
            "data/task=episodes, or give rows a column seed"
        )
    return seed


def missing_extra(name: str, error: ModuleNotFoundError) -> ConfigError:
    """Return the error of a package of environments that is not installed.

    Args:
        name: of its extra.
    """
    return ConfigError(
        f"environment={name} needs the package {error.name}, which is not installed; "
        f"pip install 'winnow-rl[{name}]'"
    )
