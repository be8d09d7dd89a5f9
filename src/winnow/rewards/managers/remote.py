"""Scores from a service over HTTP, asked with verl's arguments as JSON.

    POST URL  {"data_source": "…", "solution_str": "…", "ground_truth": …, "extra_info": {…}}
    200       0.5   or   {"score": 0.5, "acc": 1, …}   or   {"error": "ValueError: …"}

An `error` is the sample's own failure and is not asked for again; what the connection or the
service fails in is (`winnow.http.client`).
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from winnow.config.reward import RemoteManager, RewardConfig
from winnow.errors import RewardError
from winnow.http.client import HttpJson, RemoteError, token_of
from winnow.rewards.task import Failure, checked, failure_of
from winnow.rewards.user_function import read_result
from winnow.types import Prompt, Score

_FIELD = "reward.manager.url"
_CONNECT_S = 10.0
_SLACK_S = 10.0
"""What a request may take beyond the time of its answer: waiting there, and the way."""


class Remote:
    """Asks the service for each answer, many at once within one limit over the whole run."""

    def __init__(self, config: RewardConfig) -> None:
        """Read the address and the token; nothing is connected yet.

        Raises:
            RewardError: one of them cannot be used.
        """
        section = config.manager
        assert isinstance(section, RemoteManager)
        self._url, self._patience_s = section.url, config.timeout_s + _SLACK_S
        base, _, self._path = section.url.rpartition("/")
        if base.endswith(("/", ":")):  # no path: it was the scheme's slash
            base, self._path = section.url, ""
        try:
            self._http = HttpJson(
                base,
                token=token_of(section.token_env, "reward.manager.token_env"),
                max_concurrent=section.max_concurrent,
                retries=section.tries,
            )
        except ValueError as error:
            raise RewardError(f"{_FIELD} {self._url}: {error}; mend it") from error
        self.scored = 0

    def prepare(self, data_sources: Iterable[str]) -> None:
        """See that somebody listens; whatever the sources are, the service must know them.

        Raises:
            RewardError: nobody does.
        """
        url = urllib.parse.urlsplit(self._url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((str(url.hostname), port), _CONNECT_S).close()
        except (OSError, UnicodeError) as error:  # Unicode: a name that no resolver takes
            raise RewardError(
                f"{_FIELD}: {url.hostname}:{port} cannot be reached ({error}); start the service "
                "first (`winnow reward serve`), or mend the address"
            ) from error

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Always: others work at it."""
        return True

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What the service says."""
        try:
            body = {
                "data_source": prompt.data_source,
                "solution_str": text,
                "ground_truth": plain(prompt.ground_truth),
                "extra_info": plain(prompt.extra.get("extra_info") or {}),
            }
            return _read(await self._http.post(self._path, body, self._patience_s))
        except RemoteError as error:
            return Failure(error.line, error.line)
        except (TypeError, ValueError, ArithmeticError) as error:  # the last: a number too large
            return failure_of(error, None)
        finally:
            self.scored += 1

    def close(self) -> None:
        """End the requests; may be called twice."""
        self._http.close()


def _read(said: Any) -> Score | Failure:
    if isinstance(said, Mapping) and "score" not in said and isinstance(said.get("error"), str):
        line = " ".join(said["error"].split())
        return Failure(line, line)
    return checked(read_result(said))


def plain(value: Any) -> Any:
    """As JSON holds it: arrays as lists, bytes and objects as their text."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
