"""Names that verl, TRL, OpenRLHF, Hydra, Ray and earlier versions have for our keys.

The table is other_names.yaml; `python -m benchmarks.other_names docs/coming_from.md` writes its
page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

OURS = "Winnow"
"""The part of the table with keys of a recipe, for values that other systems know."""
_TABLE = Path(__file__).with_suffix(".yaml")
SUBKEYS = ".*"
"""End of a key that stands for all keys below it."""
NO_KEY_REASONS = {
    "-": "no setting needed",
    "!": "not in Winnow yet",
    "?": "no counterpart in docs/coming_from.md",
}


class OtherName(NamedTuple):
    """A key of another system, or a value that it has for a key."""

    system: str
    name: str
    value: str
    """The value that the row is about; empty for all others."""
    ours: str
    """Our key, also with a value (KEY=VALUE), and with `.*` at its end for keys below a table; else
    `-` where nothing is to be set, `!` what Winnow lacks, `?` where no answer is known."""
    meaning: str
    """A few words on a difference between the two; what is lacking; why nothing is to be set."""

    @property
    def answer(self) -> str:
        """Our key, or the reason why there is none."""
        if self.ours in NO_KEY_REASONS:
            return NO_KEY_REASONS[self.ours] + (f": {self.meaning}" if self.meaning else "")
        return self.ours.removesuffix(SUBKEYS) + (f" ({self.meaning})" if self.meaning else "")

    def for_subkey(self, rest: Sequence[str]) -> OtherName | None:
        """Return the row for a key below this one; None if the row covers this key alone."""
        if self.ours.endswith(SUBKEYS) and rest:
            return self._replace(ours=self.ours[:-1] + ".".join(rest))
        return self if self.ours in NO_KEY_REASONS or not rest else None

    @property
    def remedy(self) -> str:
        """The key to write, or the reason why there is none, in words."""
        if self.system == OURS:
            return self.answer if self.ours in NO_KEY_REASONS else f"write {self.answer}"
        link = ", and" if self.ours in NO_KEY_REASONS else " for"
        return f"that is {self.system}'s name{link} {self.answer}"


@cache
def load_other_names() -> Mapping[str, Sequence[OtherName]]:
    """Read the table: rows by name."""
    rows: dict[str, list[OtherName]] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # eleven times as fast
    for system, names in yaml.load(_TABLE.read_text(encoding="utf-8"), loader).items():
        for name, texts in names.items():
            for value, text in (texts if isinstance(texts, dict) else {"*": texts}).items():
                ours, _, meaning = text.partition(" | ")
                plain = "" if value == "*" else _normalize_value(value)
                rows.setdefault(name, []).append(OtherName(system, name, plain, ours, meaning))
    return rows


def _normalize_value(value: Any) -> str:
    """Write a value as rows have it: `0` for 0.0 and '0', `true` for True."""
    text = "null" if value is None else str(value).lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def explain_foreign_key(typed: str, value: Any = "") -> str:
    """Return the remedy for a key of another system; empty for an unknown name.

    Args:
        typed: a key, or one below it: what verl has under `override_config` is of no use either.
        value: value typed for it; empty where it is not known.
    """
    parts = typed.replace("/", ".").split(".")
    for stop in range(len(parts), 0, -1):
        named = _find_rows(".".join(parts[:stop]), value if stop == len(parts) else "")
        rows = [row for each in named if (row := each.for_subkey(parts[stop:]))]
        systems = {row.answer: [r.system for r in rows if r.answer == row.answer] for row in rows}
        if rows:
            merged = [row._replace(system=" and ".join(systems[row.answer])) for row in rows]
            return "; ".join(dict.fromkeys(row.remedy for row in merged))
    return ""


def _find_rows(name: str, value: Any) -> list[OtherName]:
    """Return the row of each system for a name: of the value, else that of all values."""
    plain = _normalize_value(value)
    rows = [row for row in load_other_names().get(name, ()) if row.value in ("", plain)]
    return list({row.system: row for row in sorted(rows, key=lambda row: row.value != "")}.values())


def find_foreign_value(path: Sequence[str], value: Any) -> OtherName | None:
    """Return the row for a value that other systems have for a key of ours, if there is one."""
    rows = _find_rows(".".join(path), value)
    return next((row for row in rows if row.system == OURS and row.value), None)


def current_key(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name that a key of an earlier version has now; any other key as it is."""
    for stop in range(len(path), 0, -1):
        for row in load_other_names().get(".".join(path[:stop]), ()):
            now = row.for_subkey(path[stop:]) if row.system.startswith(f"{OURS} ") else None
            if now and now.ours not in NO_KEY_REASONS:
                return tuple(now.ours.removesuffix(SUBKEYS).replace("/", ".").split("."))
    return path
