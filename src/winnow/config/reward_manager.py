"""Who calls what scores, and where: one by one, in workers, in batches, or over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from winnow.config.base import Section, UserObject, environment_name, web_address


class AutoManager(Section):
    """Your function in workers, quick built-in rules in the run's own process."""

    name: Literal["auto"] = "auto"


class NaiveManager(Section):
    """Answers one by one in the run's own process, without limits of time and memory."""

    name: Literal["naive"] = "naive"


class ParallelManager(Section):
    """Everything that scores in worker processes, with limits for each answer."""

    name: Literal["parallel"] = "parallel"


class BatchManager(Section):
    """Your function gets the answers that wait together in one call, in a worker."""

    name: Literal["batch"] = "batch"
    max_answers: int = Field(64, ge=1)
    """Answers in one call at most; reward.timeout_s is the time of the whole call."""


class DapoManager(Section):
    """As auto, for reward.overlong; logs `overlong` and `overlong_reward` as verl's dapo does."""

    name: Literal["dapo"] = "dapo"


class RemoteManager(Section):
    """A service over HTTP scores every source."""

    name: Literal["remote"] = "remote"
    url: str
    """Where answers are posted to, with verl's arguments as JSON."""
    token_env: str | None = None
    """Environment variable that holds the service's token, which is sent as a bearer."""
    max_concurrent: int = Field(64, ge=1)
    """Requests in flight at once over the whole run."""
    tries: int = Field(3, ge=1)
    """Of each request, at statuses 429, 502, 503 and 504 and where the connection fails."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        web_address(value, "reward.manager.token_env is for tokens")
        return value

    @field_validator("token_env")
    @classmethod
    def _is_variable(cls, value: str | None) -> str | None:
        return environment_name(value, "token")


class CustomManager(Section):
    """A class of your own scores every source."""

    name: Literal["custom"] = "custom"
    path: UserObject
    """Place of the class: FILE.py:NAME or package.module:NAME."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the class."""


RewardManager = Annotated[
    AutoManager
    | NaiveManager
    | ParallelManager
    | BatchManager
    | DapoManager
    | RemoteManager
    | CustomManager,
    Field(discriminator="name"),
]
