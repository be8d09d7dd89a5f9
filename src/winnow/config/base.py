"""What every section shares: frozen, no unknown keys, docstrings of fields as their help."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Decay = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of AdamW."""


def _user_object(value: str) -> str:
    module, _, name = value.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError("must be FILE.py:NAME or package.module:NAME")
    return value


UserObject = Annotated[str, AfterValidator(_user_object)]
"""The place of a user's own function or class: `FILE.py:NAME` or `package.module:NAME`."""
Options = dict[str, bool | int | float | str]
"""Keyword arguments of a user's own function or class."""


class Section(BaseModel):
    """A section of a recipe. Its fields' docstrings are what `--help-config` prints."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )


class SecretError(ValueError):
    """What a validator raises where the value itself must not be shown."""


_ENVIRONMENT_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")


def environment_name(value: str | None, secret: str) -> str | None:
    """The name of a variable that holds a secret, or None.

    Args:
        secret: what it holds, for the error.

    Raises:
        SecretError: it looks as if it were the secret.
    """
    if value is not None and not _ENVIRONMENT_NAME.fullmatch(value):
        raise SecretError(
            f"must be the name of an environment variable in capitals, never a {secret} itself"
        )
    return value


def web_address(
    value: str, instead: str, wanted: str = "must begin with http:// or https:// and name a host"
) -> SplitResult:
    """An address of HTTP, in its parts.

    Args:
        instead: what is for the password that someone may put into it, for the error.
        wanted: what the error asks for where it is no address.

    Raises:
        ValueError: it is none.
        SecretError: it holds a user or a password, or might.
    """
    try:
        parts = urlsplit(value)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_whole = is_whole and parts.port != 0 and value.isprintable() and " " not in value
        str(parts.hostname).encode("idna")
    except ValueError:  # a port that is no number, a bracket left open, an empty part of a name
        is_whole = False
    if not is_whole:
        kind = SecretError if "@" in value else ValueError
        raise kind(wanted)
    if parts.username is not None or parts.password is not None:
        raise SecretError(f"must hold no user and password ({instead})")
    return parts
