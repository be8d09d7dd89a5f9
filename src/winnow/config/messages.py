"""Messages for a wrong recipe: one line a fault, with key, value and remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from winnow.config.base import ConflictError, SecretError
from winnow.config.root import Config
from winnow.config.schema import Path, all_keys, allowed, is_text, leaf_of, lookup, takes_number

_LONGEST_VALUE = 80
_RESEMBLES = 0.6


def show(value: Any) -> str:
    """Return a value on one line, as YAML and Hydra write it."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def spell(path: Path) -> str:
    """Return a key path as it is written, on one line whatever was typed."""
    text = ".".join(path)
    return text if text and text.isprintable() else repr(text)


def nearest_keys(key: str) -> list[str]:
    """Return up to three known keys that resemble what was typed, the nearest first."""
    typed = key.replace("/", ".").lower()
    last = typed.split(".")[-1]
    scores: dict[str, float] = {}
    for known in all_keys():
        name = ".".join(known.path)
        full = difflib.SequenceMatcher(None, typed, name).ratio()
        tail = difflib.SequenceMatcher(None, last, known.path[-1]).ratio()
        # The right key in the wrong section counts nearly as much as a misspelt one, and so
        # does an abbreviation: learning_rate for lr, wd for weight_decay.
        short = _initials(last) == known.path[-1] or last == _initials(known.path[-1])
        bonus = 0.1 if typed.startswith(known.path[0] + ".") else 0.0
        score = max(full, 0.9 * tail + bonus, 0.9 * short + bonus)
        scores[known.spelling] = max(score, scores.get(known.spelling, 0.0))
    ranked = sorted(scores, key=lambda name: (-scores[name], name))
    bar = max(_RESEMBLES, scores[ranked[0]] - 0.15)
    return [name for name in ranked[:3] if scores[name] >= bar]


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def unknown_key(path: Path, place: str) -> str:
    """Return the message for a key that no section has."""
    near = nearest_keys(".".join(path))
    parts = ".".join(path).split(".")
    if len(parts) > len(path) and any(key.path == tuple(parts) for key in all_keys()):
        nested = ": {".join(parts) + ": …" + "}" * (len(parts) - 1)
        remedy = f"a file nests keys instead of dotting them: {nested}"
    elif near:
        remedy = f"did you mean {' or '.join(near)}?"
    else:
        remedy = f"the sections are {', '.join(Config.model_fields)}; see --help-config"
    return f"{spell(path)} is no known key (set by {place}); {remedy}"


def foreign_key(path: Path, union: Path, chosen: str, place: str) -> str:
    """Return the message for a key within a variant that does not have it."""
    group = "/".join(union)
    within = [key for key in all_keys() if key.variant and key.variant[0] == union]
    owners = {key.variant[1] for key in within if key.variant and key.path[: len(path)] == path}
    if owners:
        choices = " or ".join(f"{group}={owner}" for owner in sorted(owners))
        remedy = f"choose {choices}, or leave the key out"
    else:
        own = {".".join(key.path[len(union) :]) for key in within if key.variant == (union, chosen)}
        remedy = f"its keys are {', '.join(sorted(own))}" if own else "it has no keys"
    return f"{spell(path)} is no key of {group}={chosen} (set by {place}); {remedy}"


def validation_lines(
    error: ValidationError, tree: Mapping[str, Any], place: Callable[[Path], str]
) -> list[str]:
    """Put pydantic's findings into our words, one line a key."""
    lines: dict[Path, str] = {}
    for fault in error.errors(include_url=False):
        path, field, is_entry = leaf_of(fault["loc"])
        if path in lines:
            continue
        # A validator of ours says what it wants; for the rest the schema knows it better.
        reason = fault.get("ctx", {}).get("error")
        if isinstance(reason, ConflictError):
            lines[path] = str(reason)
        elif field is None:
            lines[path] = unknown_key(path, place(path))
        elif isinstance(reason, SecretError):
            lines[path] = f"{spell(path)} {reason} (set by {place(path)})"
        else:
            own = str(reason) if isinstance(reason, ValueError) else ""
            want = own or f"must be {allowed(field, entry=is_entry)}"
            lines[path] = _line(path, field, want, lookup(tree, path), place)
    return list(lines.values())


def truth_value_lines(tree: Mapping[str, Any], place: Callable[[Path], str]) -> list[str]:
    """Report numbers given as true or false, which Python, and so pydantic, counts as 1 and 0."""
    found = [(key, lookup(tree, key.path)) for key in all_keys() if takes_number(key.field)]
    wrong = {key.path: (key.field, value) for key, value in found if isinstance(value, bool)}
    return [
        _line(path, field, f"must be {allowed(field)}", value, place)
        for path, (field, value) in wrong.items()
    ]


def _line(path: Path, field: FieldInfo, want: str, value: Any, place: Callable[[Path], str]) -> str:
    hint = _hint(path, field, want, value)
    return f"{spell(path)} {want}, got {show(value)} (set by {place(path)}){hint}"


def _hint(path: Path, field: FieldInfo, want: str, value: Any) -> str:
    """Return what to write instead, where the range alone does not say it."""
    if isinstance(value, str) and show(value) == f"'{value}'" and "a list of" in want:
        return f"; write {'.'.join(path)}=[{value}]"
    if isinstance(value, str) and value.lower() == "none" and "null" in want:
        return "; write null for none"
    if isinstance(value, bool | int | float) and is_text(field) and "a table" not in want:
        return "; put it in quotes"
    return ""
