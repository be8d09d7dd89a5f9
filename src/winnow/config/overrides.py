"""Checks `key=value` overrides in Hydra's grammar and readies them for Hydra.

What Hydra would refuse or take amiss is settled here, with messages that name known keys:
a known key never needs `+`, `a.b.name=x` is the choice `a/b=x`, and a number typed for a text
key stays as it was typed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from winnow.config.files import is_encodable
from winnow.config.messages import show, spell
from winnow.config.schema import Path, is_table, is_text, join, lookup, variants
from winnow.config.tree import Tree
from winnow.errors import ConfigError

COMMAND_LINE = "the command line"
SHORTHANDS = {"seed": "run.seed"}
"""Bare names that the command line takes for the full key."""


def ready(tree: Tree, overrides: Sequence[str]) -> list[str]:
    """Overrides that Hydra applies to `tree` as the user meant them.

    Adds to the tree's problems what is wrong with them, and to its places what they set.

    Raises:
        ConfigError: an override is not in Hydra's grammar.
    """
    parsed = [_parse(text) for text in overrides]
    # A copy takes choices and values, so that each key meets the variants chosen in the end.
    final = tree.copy()
    chosen: dict[Path, str] = {}
    # Outer unions first: an inner one may belong to the variant chosen for the outer.
    for override in sorted(parsed, key=lambda o: len(o.union)):
        for union, name in _choices(final, override):
            final.choose(union, name)
            chosen[union] = name
    commands = [f"{'/'.join(union)}={name}" for union, name in chosen.items()]
    commands += [command for override in parsed if (command := _command(final, override))]
    tree.places, tree.problems = final.places, final.problems
    return commands


@dataclass(frozen=True)
class _Override:
    """One parsed override: a key path and what it asks for."""

    path: Path
    value: Any
    text: str
    """What stands after the equals sign."""
    deletes: bool

    @property
    def union(self) -> Path:
        """The union it chooses for, if it chooses."""
        return self.path[:-1] if self.path[-1] == "name" else self.path


def _parse(text: str) -> _Override:
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
    return _Override(path, parsed.value(), value, parsed.is_delete())


def _choices(tree: Tree, override: _Override) -> Iterator[tuple[Path, str]]:
    """The variants that an override chooses."""
    if override.deletes:
        return
    field, _ = tree.find(override.union)
    options = variants(field) if field else {}
    if options and isinstance(override.value, str):
        if override.value not in options:
            problem = tree.unknown_variant(override.union, override.value, COMMAND_LINE)
            tree.problems.append(problem)
        # Naming the variant that is there changes nothing; choosing the group starts it anew.
        elif override.union == override.path or tree.variant(override.union) != override.value:
            yield override.union, override.value
    elif isinstance(override.value, dict):
        yield from _choices_within(tree, override.path, override.value)


def _choices_within(tree: Tree, path: Path, value: dict[Any, Any]) -> Iterator[tuple[Path, str]]:
    """The variants chosen by `name` inside a value in braces."""
    field, _ = tree.find(path)
    options = variants(field) if field else {}
    name = value.get("name")
    if isinstance(name, str) and name in options and name != tree.variant(path):
        yield path, name
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _choices_within(tree, (*path, str(key)), inner)


def _command(tree: Tree, override: _Override) -> str | None:
    """The override for Hydra, checked against the final variants; None where none is needed."""
    path, value = override.path, override.value
    field, _ = tree.find(path)
    if field is None:
        tree.problems.append(tree.unknown(path, COMMAND_LINE))
        return None
    if override.deletes:
        return _deletion(tree, path, is_table(field))
    around, _ = tree.find(override.union)
    if around and variants(around) and not isinstance(value, dict):
        if not isinstance(value, str):
            tree.problems.append(tree.unknown_variant(override.union, value, COMMAND_LINE))
        return None
    text = override.text
    is_whole_table = is_table(field) and tree.find(path[:-1])[0] is not field
    if is_text(field) and not is_whole_table and isinstance(value, bool | int | float):
        value = override.text
        text = QuotedString(value, Quote.single).with_quotes()
    before = len(tree.problems)
    typed = value
    for key in reversed(path):
        typed = {key: typed}
    tree.lay(typed, lambda _: COMMAND_LINE, shorthand=False)
    return f"++{join(path)}={text}" if len(tree.problems) == before else None


def _deletion(tree: Tree, path: Path, within_table: bool) -> str | None:
    if not within_table:
        problem = f"~{spell(path)} cannot remove a key that is always there; set it to a value"
    elif lookup(tree.values, path) is None:
        problem = f"~{spell(path)} has nothing to remove; leave it out"
    else:
        lookup(tree.values, path[:-1]).pop(path[-1])
        return f"~{join(path)}"
    tree.problems.append(problem)
    return None
