"""HTTP between processes: a JSON client that retries, and what our own services check."""

from pydantic import ValidationError

_SHOWN = 60


def first_fault(error: ValidationError) -> str:
    """Return a line on the first field that is wrong in a body: its name, the reason, its value."""
    fault = error.errors()[0]
    name = ".".join(map(str, fault["loc"])) or "the body"
    reason = fault["msg"].removeprefix("Value error, ")
    value = "" if fault["type"] == "missing" else f", got {_shown(repr(fault['input']))}"
    return f"{_shown(name)}: {reason}{value}"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
