"""Lays files and overrides over a full tree of defaults, and resolves its `${…}`.

A union of variants is replaced whole: naming another variant drops every value of the old one
and starts from the new one's defaults. Overrides are in Hydra's grammar, of which a known key
needs no `+`, `a.b.name=x` is the choice `a/b=x`, and a number typed for a text key stays as it
was typed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from winnow.config.base import Section
from winnow.config.files import is_encodable
from winnow.config.messages import foreign_key, show, spell, unknown_key
from winnow.config.root import Config
from winnow.config.schema import (
    REQUIRED,
    Path,
    allowed,
    default_tree,
    is_table,
    is_text,
    lookup,
    section,
    variants,
)
from winnow.errors import ConfigError

Place = Callable[[Path], str]
COMMAND_LINE = "the command line"
SHORTHANDS = {"seed": "run.seed"}
"""Bare names that the command line takes for the full key."""
MOST_CHARACTERS = 1_000_000
"""Most characters that the `${…}` of a recipe may write out."""


class Tree:
    """Values of every key, the place that set each, and the faults of what was typed."""

    def __init__(self, root: type[Section] = Config) -> None:
        self.root = root
        self.values = default_tree(root)
        self.places: dict[Path, str] = {}
        self.problems: list[str] = []

    def place(self, path: Path) -> str:
        """Return where the value of a key was typed: itself, the nearest key around or within."""
        for stop in range(len(path), 0, -1):
            if path[:stop] in self.places:
                return self.places[path[:stop]]
        within = [place for typed, place in self.places.items() if typed[: len(path)] == path]
        return within[-1] if within else "default"

    def lay(self, typed: dict[str, Any], place: Place) -> None:
        """Lay typed sections over the values; faults are added to `problems`."""
        self._lay(self.root, self.values, typed, (), place)

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `key=value` settings; faults are added to `problems`.

        Raises:
            ConfigError: an override is not in Hydra's grammar.
        """
        parsed = [_parse(text) for text in overrides]
        # Choices before values, so that each key meets the variants chosen in the end; outer unions
        # first, as an inner one may belong to the variant chosen for the outer.
        typed = {}
        for override in sorted(parsed, key=lambda o: len(o.path) - (o.path[-1] == "name")):
            typed[override] = self._chosen((), override.tree(override.value))
        for override in parsed:
            self._apply(override, typed[override])

    def _find(self, path: Path) -> tuple[FieldInfo | None, tuple[Path, str] | None]:
        """Return the field at a path under the chosen variants, or the variant that lacks it.

        The field is None where there is no such key, and for what lies within a value.
        """
        cls: type[Section] | None = self.root
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
                union = path[:stop], self._variant(path[:stop])
                cls = options[union[1]]
            else:
                cls = section(field)
        return field, None

    def _variant(self, union: Path) -> str:
        return str(lookup(self.values, (*union, "name")))

    def _choose(self, union: Path, name: str) -> None:
        """Replace a union of variants by the defaults of one of them."""
        field, _ = self._find(union)
        assert field is not None
        lookup(self.values, union[:-1])[union[-1]] = default_tree(variants(field)[name])
        self.places = {p: w for p, w in self.places.items() if p[: len(union)] != union}

    def _unknown(self, path: Path, place: str) -> None:
        _, lacking = self._find(path)
        fault = foreign_key(path, *lacking, place) if lacking else unknown_key(path, place)
        self.problems.append(fault)

    def _lay(
        self,
        cls: type[Section],
        values: dict[str, Any],
        typed: dict[str, Any],
        at: Path,
        place: Place,
    ) -> None:
        for key, value in typed.items():
            path = (*at, key)
            field = cls.model_fields.get(key)
            if field is None:
                self._unknown(path, place(path))
                continue
            inner = section(field)
            if variants(field):
                value = {"name": value} if isinstance(value, str) else value
                name = value.get("name", self._variant(path)) if isinstance(value, dict) else value
                if not isinstance(name, str) or name not in variants(field):
                    want = f"{spell(path)} must be {allowed(field)}"
                    self.problems.append(f"{want}, got {show(name)} (set by {place(path)})")
                    continue
                if name != self._variant(path):
                    self._choose(path, name)
                inner = variants(field)[name]
            if inner is None:
                values[key] = _merged(values[key], value)
                self.places[path] = place(path)
            elif isinstance(value, dict):
                self._lay(inner, values[key], value, path, place)
            else:
                keys = ", ".join(inner.model_fields)
                got = f"got {show(value)} (set by {place(path)})"
                self.problems.append(f"{spell(path)} must hold keys ({keys}), {got}")

    def _chosen(self, path: Path, value: Any) -> Any:
        """Choose the variants that a typed value names, and return the rest of it."""
        field, _ = self._find(path)
        name = value.get("name") if isinstance(value, dict) else value
        if field and isinstance(name, str) and name in variants(field):
            # Naming the variant that is there changes nothing; choosing the group starts it anew.
            if value == name or name != self._variant(path):
                self._choose(path, name)
            value = {k: v for k, v in value.items() if k != "name"} if value != name else {}
        if isinstance(value, dict):
            return {key: self._chosen((*path, key), inner) for key, inner in value.items()}
        return value

    def _apply(self, override: _Override, typed: dict[str, Any]) -> None:
        """Set or remove a value, checked against the final variants."""
        path, value = override.path, override.value
        field, _ = self._find(path)
        if field is None:
            self._unknown(path, COMMAND_LINE)
            return
        if override.deletes:
            self._delete(path, field)
            return
        is_whole_table = is_table(field) and self._find(path[:-1])[0] is not field
        if is_text(field) and not is_whole_table and isinstance(value, bool | int | float):
            typed = override.tree(override.text)
        self.lay(typed, lambda _: COMMAND_LINE)

    def _delete(self, path: Path, field: FieldInfo) -> None:
        around = lookup(self.values, path[:-1])
        if not is_table(field):
            problem = f"~{spell(path)} cannot remove a key that is always there; set it to a value"
        elif lookup(self.values, path) is None:
            problem = f"~{spell(path)} has nothing to remove; leave it out"
        elif self._find(path[:-1])[0] is field:
            del around[path[-1]]
            return
        else:
            around[path[-1]] = {}
            return
        self.problems.append(problem)


def _merged(old: Any, new: Any) -> Any:
    """Return a new value; a table keeps the entries that are not given anew."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return copy.deepcopy(new)


@dataclass(frozen=True, eq=False)
class _Override:
    """One parsed override: a key path and what it asks for."""

    path: Path
    value: Any
    text: str
    """Text after the equals sign."""
    deletes: bool

    def tree(self, value: Any) -> dict[str, Any]:
        """Return the sections around a value for the key."""
        for key in reversed(self.path):
            value = {key: value}
        return dict(value)


def _parse(text: str) -> _Override:
    # Hydra takes 0.2 s to import, which only commands with overrides need.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if not is_encodable(text):
        raise ConfigError(f"override {show(text)} is not valid UTF-8; type it anew")
    try:
        (parsed,) = OverridesParser.create().parse_overrides([text])
    # ValueError: a number of thousands of digits.
    except (HydraException, ValueError, RecursionError) as error:
        said = [line.strip() for line in str(error).splitlines()]
        reasons = [line for line in said if text not in line and not line.startswith(("^", "See"))]
        because = f" ({reasons[0]})" if reasons and reasons[0].isprintable() else ""
        remedy = "write KEY=VALUE, with special characters in quotes: KEY='\"a: b\"'"
        if "=" not in text and text.isprintable() and text:
            because, remedy = "", f"write {text}=VALUE"
        raise ConfigError(
            f"override {show(text)} is not in Hydra's grammar{because}; {remedy}"
        ) from None
    if parsed.is_sweep_override():
        raise ConfigError(
            f"override {show(text)} is a sweep over several values; "
            f"give one value, or a list in brackets: {parsed.key_or_group}=[a,b]"
        )
    if parsed.package is not None:
        raise ConfigError(
            f"override {show(text)} names a package with @; leave out @{parsed.package}"
        )
    key = SHORTHANDS.get(parsed.key_or_group, parsed.key_or_group)
    value = text.partition("=")[2]
    if parsed.is_delete() and value:
        raise ConfigError(f"override {show(text)} removes an entry and takes no value; drop it")
    path = tuple(key.replace("/", ".").split("."))
    return _Override(path, _with_text_keys(parsed.value()), value, parsed.is_delete())


def _with_text_keys(value: Any) -> Any:
    """Turn keys that Hydra's grammar read as numbers, such as a source called 7, into text."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with every `${…}` resolved.

    Raises:
        ConfigError: a reference leads nowhere or in a circle, or a value must still be given.
    """
    try:
        resolved = _References(values).at(())
    except RecursionError:
        raise ConfigError("the recipe's ${…} refer to each other in a circle; break it") from None
    assert isinstance(resolved, dict)
    return resolved


_PENDING = object()


def _broken(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{spell(path)}: {reason}; mend the value or its ${{…}}")


class _References:
    """Resolves the `${…}` of a tree in OmegaConf's grammar, each value once.

    OmegaConf itself writes a value out as often as it is named, in each value around it again
    ("billion laughs"), and has no bound of its own.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._found: dict[Path, Any] = {}
        self._written = 0

    def at(self, path: Path) -> Any:
        """Return the resolved value at a path; KeyError where there is none."""
        if path not in self._found:
            self._found[path] = _PENDING
            self._found[path] = self._resolved(path, self._raw(path))
        if self._found[path] is _PENDING:
            raise _broken(path, "recursive interpolation detected")
        return self._found[path]

    def _raw(self, path: Path) -> Any:
        node: Any = self._values
        for depth, key in enumerate(path):
            if isinstance(node, str) and "${" in node:
                node = self.at(path[:depth])
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, Mapping) and key in node:
                node = node[key]
            else:
                raise KeyError(f"interpolation key {'.'.join(path)!r} not found")
        return node

    def _resolved(self, path: Path, node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: self.at((*path, key)) for key in node}
        if isinstance(node, list):
            return [self.at((*path, str(index))) for index in range(len(node))]
        if node == REQUIRED:
            raise ConfigError(f"{spell(path)} has no default; add {spell(path)}=VALUE")
        return self._text(path, node) if isinstance(node, str) and "${" in node else node

    def _text(self, path: Path, text: str) -> Any:
        from omegaconf.errors import OmegaConfBaseException
        from omegaconf.grammar_parser import parse
        from omegaconf.grammar_visitor import GrammarVisitor

        visitor = GrammarVisitor(
            node_interpolation_callback=lambda key, _: self._reference(path, key),
            resolver_interpolation_callback=_environment,
            memo=None,
        )
        try:
            return visitor.visit(parse(text))
        except (KeyError, OmegaConfBaseException) as error:
            said = str(error.args[0] if isinstance(error, KeyError) else error)
            reason = said.splitlines()[0] if said else type(error).__name__
            raise _broken(path, f"{reason[:1].lower()}{reason[1:]}") from None

    def _reference(self, path: Path, key: str) -> Any:
        """Return the value that a text names, absolutely or (with dots in front) relatively."""
        dots = len(key) - len(key.lstrip("."))
        around = path[: len(path) - dots] if dots else ()
        value = self.at((*around, *re.findall(r"[^.\[\]]+", key)))
        self._written += len(str(value))
        if self._written > MOST_CHARACTERS:
            raise KeyError(f"its ${{…}} write out more than {MOST_CHARACTERS:,} characters")
        return value


def _environment(name: str, args: tuple[Any, ...], args_str: tuple[str, ...]) -> Any:
    """Return the value of `${oc.env:VARIABLE,DEFAULT}`, the one resolver of recipes."""
    from omegaconf.resolvers import oc

    if name != "oc.env" or len(args) not in (1, 2):
        raise KeyError(f"${{{name}:…}} is unknown; a recipe has ${{KEY}} and ${{oc.env:NAME,ELSE}}")
    return oc.env(*args)
