"""Who may ask a service of ours: whoever has its token; without one, this machine and no web page.
And how one that may not is let go.

A page in a browser of the same machine can ask an address of it, too: in its own name, or after its
own host name was pointed here (DNS rebinding). Hence no other body than JSON, and no other `Host`.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.requests import Request

_DRAIN_S = 5.0
_DRAIN_BYTES = 64 << 20


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own and reaches no further."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def is_asked_here(host: str) -> bool:
    """Whether a `Host` header, with its port or without, names this machine by such an address."""
    with suppress(ValueError):
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    return False


def bears(authorization: str, token: str) -> bool:
    """Whether an `Authorization` header holds the token; `Bearer` in any case of letters."""
    scheme, _, given = authorization.partition(" ")
    is_ours = hmac.compare_digest(given.strip().encode(), token.encode())
    return is_ours and scheme.lower() == "bearer"


def is_json(content_type: str) -> bool:
    """Whether a `Content-Type` header promises JSON, which no page may send elsewhere unasked."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


async def drain(request: Request, longest: int) -> None:
    """Let a refused client end what it is sending, unread, for a while and within bounds.

    One that is cut off while it sends may not see why.

    Args:
        longest: bytes of the longest body that would have been taken.
    """
    from starlette.requests import ClientDisconnect

    left = max(_DRAIN_BYTES, 2 * longest)
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # the last: all is read
        async with asyncio.timeout(_DRAIN_S):
            async for part in request.stream():
                left -= len(part)
                if left < 0:
                    return
