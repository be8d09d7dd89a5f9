"""Lays what a user typed over a full tree of values, checking each key on the way.

A union of variants is replaced whole: naming another variant drops every value of the old one
and starts from the new one's defaults. What was typed for that variant is then checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from winnow.config.base import Section
from winnow.config.messages import foreign_key, show, spell, unknown_key
from winnow.config.root import Config
from winnow.config.schema import (
    Path,
    allowed,
    default_tree,
    is_table,
    lookup,
    section,
    variants,
)

Place = Callable[[Path], str]


class Tree:
    """Values of every key, where each typed one came from, and what was wrong with the rest."""

    def __init__(self) -> None:
        self.values = default_tree(Config)
        self.places: dict[Path, str] = {}
        self.problems: list[str] = []

    def copy(self) -> Tree:
        """An independent copy."""
        return copy.deepcopy(self)

    def place(self, path: Path) -> str:
        """Where the value of a key was typed: itself, the nearest key around or within it."""
        for stop in range(len(path), 0, -1):
            if path[:stop] in self.places:
                return self.places[path[:stop]]
        within = [place for typed, place in self.places.items() if typed[: len(path)] == path]
        return within[-1] if within else "default"

    def lay(self, typed: dict[str, Any], place: Place, *, shorthand: bool = True) -> None:
        """Lay typed sections over the values; faults are added to `problems`.

        With `shorthand` a union may be given as the bare name of a variant. Without it the
        variants are settled already, and naming another one is a fault.
        """
        self._lay(Config, self.values, typed, (), place, shorthand)

    def choose(self, union: Path, name: str) -> None:
        """Replace a union of variants by the defaults of one of them."""
        field, _ = self.find(union)
        parent = lookup(self.values, union[:-1])
        assert field is not None
        parent[union[-1]] = default_tree(variants(field)[name])
        self.places = {p: w for p, w in self.places.items() if p[: len(union)] != union}

    def find(self, path: Path) -> tuple[FieldInfo | None, tuple[Path, str] | None]:
        """The field at a path under the chosen variants, and the variant that lacks it if one does.

        The field is None where there is no such key, and for what lies within a value.
        """
        cls: type[Section] | None = Config
        field: FieldInfo | None = None
        union: tuple[Path, str] | None = None
        for stop, key in enumerate(path, start=1):
            if cls is None:
                # Below a table lie its entries; below any other value lies nothing.
                return (field if field and is_table(field) else None), None
            field = cls.model_fields.get(key)
            if field is None:
                return None, union
            options = variants(field)
            if options:
                union = path[:stop], self.variant(path[:stop])
                cls = options[union[1]]
            else:
                cls = section(field)
        return field, None

    def variant(self, union: Path) -> str:
        """The variant chosen for a union."""
        return str(lookup(self.values, (*union, "name")))

    def unknown(self, path: Path, place: str) -> str:
        """The message for a path at which there is no key."""
        _, lacking = self.find(path)
        return foreign_key(path, *lacking, place) if lacking else unknown_key(path, place)

    def unknown_variant(self, union: Path, name: Any, place: str) -> str:
        """The message for a variant that a union does not have."""
        field, _ = self.find(union)
        assert field is not None
        return f"{spell(union)} must be {allowed(field)}, got {show(name)} (set by {place})"

    def _lay(
        self,
        cls: type[Section],
        values: dict[str, Any],
        typed: dict[str, Any],
        at: Path,
        place: Place,
        shorthand: bool,
    ) -> None:
        for key, value in typed.items():
            path = (*at, key)
            field = cls.model_fields.get(key)
            if field is None:
                self.problems.append(self.unknown(path, place(path)))
                continue
            inner = section(field)
            if variants(field):
                if shorthand and isinstance(value, str):
                    value = {"name": value}
                inner = self._settle(path, value, variants(field), place, shorthand)
                if inner is None:
                    continue
            if inner is None:
                if isinstance(value, dict) and isinstance(values[key], dict):
                    values[key].update(_entries(values[key], value))
                else:
                    values[key] = copy.deepcopy(value)
                self.places[path] = place(path)
            elif isinstance(value, dict):
                self._lay(inner, values[key], value, path, place, shorthand)
            else:
                keys = ", ".join(inner.model_fields)
                got = f"got {show(value)} (set by {place(path)})"
                self.problems.append(f"{spell(path)} must hold keys ({keys}), {got}")

    def _settle(
        self,
        path: Path,
        value: Any,
        options: dict[str, type[Section]],
        place: Place,
        may_change: bool,
    ) -> type[Section] | None:
        """The variant of a union that `value` is for, changed to if need be; None if unknown."""
        current = self.variant(path)
        name = value.get("name", current) if isinstance(value, dict) else value
        if not isinstance(name, str) or name not in options:
            self.problems.append(self.unknown_variant(path, name, place(path)))
            return None
        if isinstance(value, str):
            self.problems.append(
                f"{spell(path)} must hold keys, got {show(value)} (set by {place(path)}); "
                f"choose a variant with {'/'.join(path)}={value}"
            )
            return None
        if name != current and not may_change:
            self.problems.append(
                f"{spell(path)} is chosen twice, as {name} and as {current} "
                f"(set by {place(path)}); keep one"
            )
            return None
        if name != current:
            self.choose(path, name)
        return options[name]


def _entries(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """New entries of a table; one that holds keys keeps those that it does not give anew."""
    merged = copy.deepcopy(dict(new))
    for name, entry in merged.items():
        before = old.get(name)
        if isinstance(entry, dict) and isinstance(before, dict):
            merged[name] = {**before, **entry}
    return merged
