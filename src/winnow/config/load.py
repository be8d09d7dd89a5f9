"""From a recipe and overrides to a checked `Config`, and back to YAML.

A recipe is YAML laid over a full dump of the sections' defaults (`files`, `tree`), overridden
in Hydra's grammar (`overrides`, `compose`), validated by pydantic, then checked across
sections (`checks`). Every fault is a `ConfigError` of one line a fault.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from winnow.config.base import Section
from winnow.config.checks import check_config
from winnow.config.files import available_recipes, read_layers, to_yaml
from winnow.config.messages import nearest_keys, show, truth_value_lines, validation_lines
from winnow.config.root import Config
from winnow.config.schema import REQUIRED, all_keys, allowed, join, lookup, variants
from winnow.config.tree import Tree
from winnow.errors import ConfigError

__all__ = [
    "ABSENT",
    "KeyHelp",
    "available_recipes",
    "describe_config",
    "differing_keys",
    "dump_config",
    "load_recipe",
    "resolve_recipe",
]

_INTERPOLATION = re.compile(r"(\\*)\$\{")
"""With the backslashes before it, which then count as escapes."""

ABSENT = "(absent)"
"""Stands for the value of a key that a configuration's variants do not have."""


def load_recipe(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """A recipe, by shipped name or path, with overrides such as `optim.lr=1e-5`, checked.

    Raises:
        ConfigError: with one line for each fault found.
    """
    config = resolve_recipe(recipe, overrides)
    check_config(config)
    return config


def resolve_recipe(recipe: str | None, overrides: Sequence[str] = ()) -> Config:
    """Like `load_recipe`, without the rules across sections: a recipe to be completed passes.

    Args:
        recipe: None lays the overrides over the defaults alone.

    Raises:
        ConfigError: with one line for each fault found.
    """
    # Hydra takes 0.2 s to import, which only commands that load a recipe need.
    from winnow.config.compose import compose
    from winnow.config.overrides import ready

    tree = Tree()
    for layer in () if recipe is None else read_layers(recipe):
        tree.lay(layer.tree, layer.place)
    commands = ready(tree, overrides)
    if tree.problems:
        raise ConfigError("\n".join(tree.problems))
    values = compose(tree.values, commands)
    faults = truth_value_lines(values, tree.place)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        faults += validation_lines(error, values, tree.place)
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def dump_config(config: Config) -> str:
    """A configuration as a recipe in YAML that loads back to an equal one."""
    return to_yaml(_escaped(config.model_dump(mode="json")))


def _escaped(value: Any) -> Any:
    """Text in which `${` would be read as an interpolation, escaped as OmegaConf asks."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return _INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


class KeyHelp(NamedTuple):
    """A line of `--help-config`."""

    key: str
    type: str
    default: str
    """What the recipe resolves it to; for the keys of other variants, their own default."""
    meaning: str
    variant: str
    """`GROUP=VARIANT` that must be chosen for the key to exist; empty if it does now."""


def describe_config(config: Config, prefix: str | None = None) -> list[KeyHelp]:
    """Every key, or those under a prefix such as `optim`, with type, default and meaning.

    Raises:
        ConfigError: no key starts with the prefix.
    """
    rows = []
    values = config.model_dump(mode="json")
    wanted = tuple((prefix or "").replace("/", ".").strip(".").split(".")) if prefix else ()
    for key in all_keys():
        if key.path[: len(wanted)] != wanted:
            continue
        default = lookup(values, key.path)
        variant = ""
        if key.variant and lookup(values, (*key.variant[0], "name")) != key.variant[1]:
            variant = f"{'/'.join(key.variant[0])}={key.variant[1]}"
            required = key.field.is_required()
            default = REQUIRED if required else key.field.get_default(call_default_factory=True)
        if variants(key.field):
            default = default["name"] if isinstance(default, dict) else default.name
        meaning = " ".join((key.field.description or "").split())
        shown = default if isinstance(default, str) and default else show(default)
        rows.append(KeyHelp(key.spelling, allowed(key.field), shown, meaning, variant))
    if not rows:
        near = difflib.get_close_matches(wanted[0], Config.model_fields, n=1)
        near = near or nearest_keys(join(wanted))
        hint = f"did you mean {' or '.join(near)}?" if near else ""
        sections = ", ".join(Config.model_fields)
        raise ConfigError(f"no key starts with {show(prefix)}; {hint or f'sections: {sections}'}")
    return rows


def differing_keys(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ, with both values."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    keys = [*left, *(key for key in right if key not in left)]
    pairs = [(key, left.get(key, ABSENT), right.get(key, ABSENT)) for key in keys]
    return [(key, x, y) for key, x, y in pairs if x != y or type(x) is not type(y)]


def _leaves(section: Section, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from _leaves(value, (*path, key))
        elif isinstance(value, Mapping) and value:
            yield from ((join((*path, key, str(k))), entry) for k, entry in value.items())
        else:
            yield join((*path, key)), value
