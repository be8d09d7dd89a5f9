"""Base class and field types that the sections of a recipe share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator


class SecretError(ValueError):
    """Fault of a value that must not be shown, such as a password in an address."""


class ConflictError(ValueError):
    """Contradiction between fields of one section, as complete lines for the user."""


class Section(BaseModel):
    """A section of a recipe: frozen, without unknown keys.

    `--help-config` prints the docstrings of its fields.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )

    def conflicts(self) -> Iterator[str]:
        """Yield a line for each contradiction between fields, with its remedy."""
        yield from ()

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        if faults := list(self.conflicts()):
            raise ConflictError("\n".join(faults))
        return self

    def order_conflicts(
        self, key: str, low: str, high: str, *, equal: bool = False
    ) -> Iterator[str]:
        """Yield a line if a lower bound is above its upper bound.

        Args:
            at: key of this section.
            equal: allow both to be the same.
        """
        least, most = getattr(self, low), getattr(self, high)
        if least > most or (least == most and not equal):
            relation = "above" if equal else "not below"
            bounds = f"{key}.{low}={least:g} is {relation} {key}.{high}={most:g}"
            yield f"{bounds}; lower the one or raise the other"


@dataclass(frozen=True)
class SideEffect:
    """Mark of a field with an effect outside the run's folder."""

    effect: str
    """Verb and object, for messages."""


CODE = SideEffect("runs Python code")
PROGRAM = SideEffect("starts a program, or sets its environment")
ADDRESS = SideEffect("sends data to an address")
PLACE = SideEffect("writes files outside the run's folder")


class Change(IntEnum):
    """Mark of a field, and of all within it, that says when its value may change.

    A dict of marks is of keys within the field; its `name` is the choice of a variant.
    """

    SILENTLY = auto()
    """On resuming, without a line that tells it: a setting of a start, not of the run."""
    ON_RESUME = auto()
    """On resuming and in a fork: no figure of a step depends on it but times."""
    IN_FORK = auto()
    """In a fork alone; fields without a mark have this one."""
    BETWEEN_GROUPS = auto()
    """In a fork alone, of a checkpoint without unfinished groups."""
    NEVER = auto()
    """Neither on resuming nor in a fork: the state of the run rests on it."""


SHIPPED_TOOLS = frozenset(
    f"winnow.environments.{name}"
    for name in ("calculator:calc", "python_tool:python", "python_tool:python_session")
)
"""Import paths that are not code of the recipe's author."""


def side_effects(
    section: Section, at: str = "", around: SideEffect | None = None
) -> Iterator[EffectSetting]:
    """Yield the non-default settings of a section, and of those within, that have side effects.

    Args:
        at: key of the section.
        around: mark of the section, which holds for each of its fields.
    """
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{at}.{name}" if at else name
        reach = next((mark for mark in field.metadata if isinstance(mark, SideEffect)), around)
        entries = dict(enumerate(value)) if isinstance(value, tuple) else value
        entries = entries.items() if isinstance(entries, Mapping) else [("", value)]
        inner = [
            (f"{key}.{n}" if n != "" else key, v) for n, v in entries if isinstance(v, Section)
        ]
        for place, each in inner:
            yield from side_effects(each, place, reach)
        is_default = value == field.get_default(call_default_factory=True)
        if reach and not inner and not is_default and value not in ("auto", "none"):
            texts = value if isinstance(value, tuple) else (value,)
            yield from ((key, text, reach) for text in texts if str(text) not in SHIPPED_TOOLS)


EffectSetting = tuple[str, Any, SideEffect]
"""Key and value of a setting, and the mark of its field."""


def check_import_path(value: str) -> str:
    """Return the place of a user's object, if it is one.

    Raises:
        ValueError: it is none.
    """
    module, _, name = value.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError("must be FILE.py:NAME or package.module:NAME")
    return value


ImportPath = Annotated[str, AfterValidator(check_import_path), CODE]
"""Place of a user's own function or class: `FILE.py:NAME` or `package.module:NAME`."""
Options = dict[str, bool | int | float | str]
"""Keyword arguments of a user's own function or class."""


class UserCode(Section):
    """A custom variant, given by its import path."""

    name: Literal["custom"] = "custom"
    path: ImportPath
    """Place of the function or class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the function or class."""


Dtype = Literal["float32", "bfloat16"]
TEMPERATURES = 0.001, 1000
"""Bounds of a sampling temperature; beyond them logits overflow, or the policy hardly counts."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of AdamW."""
Aggregation = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
]
"""Meaning of "mean" in a loss; the names of `winnow.algorithms.aggregation`."""

_ENVIRONMENT_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")


def _check_environment_name(value: str | None, info: ValidationInfo) -> str | None:
    if value is not None and not _ENVIRONMENT_NAME.fullmatch(value):
        secret = "key" if "key" in str(info.field_name) else "token"
        raise SecretError(f"must name an environment variable in capitals, never a {secret} itself")
    return value


EnvironmentName = Annotated[str | None, AfterValidator(_check_environment_name)]
"""Name of the environment variable that holds a secret, never the secret itself."""


def http_url(remedy: str, *, with_query: bool = False) -> AfterValidator:
    """Return the validator of an HTTP address; one with a user or password is never shown.

    Args:
        remedy: for the error about a user or password in the address.
        with_query: allow a query and a fragment behind a path.
    """

    def check(value: str) -> str:
        try:
            parts = urlsplit(value)
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_whole = is_whole and parts.port != 0 and value.isprintable() and " " not in value
            str(parts.hostname).encode("idna")
        except ValueError:  # a port that is no number, a bracket left open, an empty part of a name
            is_whole = False
        if not is_whole:
            kind = SecretError if "@" in value else ValueError
            raise kind("must begin with http:// or https:// and name a host")
        if parts.username is not None or parts.password is not None:
            raise SecretError(f"must not hold a user or a password ({remedy})")
        if (parts.query or parts.fragment) and not (with_query and parts.path):
            rule = "have a path, such as /," if with_query else "end"
            raise ValueError(f"must {rule} before ? and #")
        return value

    return AfterValidator(check)
