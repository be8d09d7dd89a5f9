"""A limit of requests and tokens a minute, as token buckets; callers do the waiting.

A bucket holds a tenth of a minute's allowance, so that what has been saved up cannot come at once,
and fills at a rate that leaves room for it: no minute sees more than the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_MINUTE_S = 60.0
_NOTHING = 1e-9


class TokenBucket:
    """An allowance that fills with time.

    Args:
        limit: a minute's.
        whole: its unit is indivisible, as a request is.
        now: seconds of any clock that does not go back.
    """

    def __init__(self, limit: int, whole: bool, now: float) -> None:
        # One by one, a bucket of c lets fewer than c + 60 * rate + 1 through in less than a minute.
        self._capacity = float(max(1, limit // 10)) if whole else limit / 10
        self._rate = (limit - self._capacity + whole) / _MINUTE_S
        self._level = self._capacity
        self._since = now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until so much may be taken, or the bucket is full if it holds less."""
        self._fill(now)
        lacking = min(amount, self._capacity) - self._level
        return max(lacking, 0.0) / self._rate if lacking > _NOTHING else 0.0

    def take(self, amount: float) -> None:
        """Take an amount, into debt if need be; a negative one gives back."""
        self._level = min(self._level - amount, self._capacity)

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._since) * self._rate, self._capacity)
        self._since = now


class RateLimit:
    """Limits the requests and tokens of any minute.

    Args:
        clock: seconds; does not go back.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        now = clock()
        self._requests = (
            TokenBucket(requests_per_minute, True, now) if requests_per_minute else None
        )
        self._tokens = TokenBucket(tokens_per_minute, False, now) if tokens_per_minute else None
        self._paused_until = now

    def ask(self, tokens: float) -> float:
        """Take a request of so many tokens; return 0, or the seconds after which to ask again."""
        now = self._clock()
        waits = [self._paused_until - now]
        waits += [self._requests.wait_s(1.0, now)] if self._requests else []
        waits += [self._tokens.wait_s(tokens, now)] if self._tokens else []
        if max(waits) > 0:
            return max(waits)
        if self._requests:
            self._requests.take(1.0)
        self.settle(0.0, tokens)
        return 0.0

    def settle(self, estimated: float, used: float) -> None:
        """Correct the estimate that a request was let through with."""
        if self._tokens:
            self._tokens.take(used - estimated)

    def pause(self, seconds: float) -> None:
        """Let nothing through for a while, as a service asked for."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)
