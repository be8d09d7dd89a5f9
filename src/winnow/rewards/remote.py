"""Scores from a service over HTTP, asked with verl's arguments as JSON.

    POST URL  {"data_source": "…", "solution_str": "…", "ground_truth": …, "extra_info": {…}}
    200       0.5   or   {"score": 0.5, "acc": 1, …}   or   {"error": "ValueError: …"}

An `error` is the sample's own failure and is not asked for again; a failure of the connection or
the service is (`winnow.http.client`).
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from winnow.config.reward import RemoteManager, RewardConfig
from winnow.errors import RewardError
from winnow.http.client import JsonClient, RemoteError, read_token
from winnow.rewards.manager import Manager
from winnow.rewards.task import Failure, check_score, make_failure, parse_result
from winnow.types import Prompt, Score

_CONNECT_S = 10.0
_SLACK_S = 10.0
"""Time of a request beyond that of its answer: waiting there, and the way."""


class HttpManager(Manager):
    """Asks a service for each answer, many at once within one limit over the whole run.

    Raises:
        RewardError: the address or the token cannot be used. Nothing is connected yet.
    """

    def __init__(self, config: RewardConfig) -> None:
        section = config.manager
        assert isinstance(section, RemoteManager)
        self._url, self._patience_s = section.url, config.timeout_s + _SLACK_S
        base, _, self._path = section.url.rpartition("/")
        if base.endswith(("/", ":")):  # no path: it was the scheme's slash
            base, self._path = section.url, ""
        token = read_token(section.token_env, "reward.manager.token_env")
        self._http = JsonClient(base, token, section.max_concurrent, section.tries)

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Check that the service listens; its sources are not known here."""
        url = urllib.parse.urlsplit(self._url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((str(url.hostname), port), _CONNECT_S).close()
        except (OSError, UnicodeError) as error:  # Unicode: a name that no resolver takes
            raise RewardError(
                f"reward.manager.url: {url.hostname}:{port} cannot be reached ({error}); "
                "start the service first (`winnow reward serve`), or fix the address"
            ) from error

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        try:
            body = {
                "data_source": prompt.data_source,
                "solution_str": text,
                "ground_truth": to_json_value(prompt.ground_truth),
                "extra_info": to_json_value(prompt.extra.get("extra_info") or {}),
            }
            reply = await self._http.post(self._path, body, self._patience_s)
            if isinstance(reply, Mapping) and "score" not in reply and "error" in reply:
                return Failure(" ".join(str(reply["error"]).split()))
            return check_score(parse_result(reply))
        except RemoteError as error:
            return Failure(error.line)
        except (TypeError, ValueError, ArithmeticError) as error:  # the last: a number too large
            return make_failure(error, None)
        finally:
            self._done += 1

    def close(self) -> None:
        self._http.close()


def to_json_value(value: Any) -> Any:
    """Return a value as JSON holds it: arrays as lists, bytes and objects as their text."""
    if isinstance(value, np.ndarray):
        return to_json_value(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
