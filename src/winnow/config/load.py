"""From a recipe and overrides to a checked `Config`, and back to YAML.

Files and overrides are laid over a full tree of the sections' defaults, its `${…}` are resolved,
and the result is validated by pydantic, then checked across sections (`rules`). A union of variants
is replaced whole: naming another variant drops every value of the old one and starts from the new
one's defaults. Overrides are in Hydra's grammar, of which a known key needs no `+`, `a.b.name=x` is
the choice `a/b=x`, and a number typed for a text key stays as it was typed. Every fault is a
`ConfigError` of one line a fault.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from winnow.config.base import Change
from winnow.config.files import VERSION_PREFIX, is_encodable, read_layers, to_yaml
from winnow.config.other_names import current_key, find_foreign_value
from winnow.config.root import Config, EnvironmentValue
from winnow.config.rules import check_config
from winnow.config.schema import (
    Key,
    KeyPath,
    all_keys,
    default_values,
    describe_type,
    dotted,
    find_key,
    is_enumeration,
    is_name_list,
    is_section,
    is_table,
    lookup,
    quote,
    suggest_keys,
    takes_number,
    takes_text,
    type_message,
    unknown_key_message,
    validation_errors,
    variant_hint,
    variants,
)
from winnow.errors import ConfigError
from winnow.version import __version__

log = logging.getLogger(__name__)

COMMAND_LINE = "the command line"
SHORTHANDS = {"seed": "run.seed"}
"""Bare names that the command line takes for the full key."""
MAX_CHARACTERS = 1_000_000
"""Most characters that the `${…}` of a recipe may write out."""
REQUIRED = "???"
"""OmegaConf's mark for a value that must be given."""
ABSENT = "(absent)"
"""Value of a key that a configuration's variants do not have."""
_MIN_SECRET_LENGTH = 4
"""Characters of a value from the environment that messages do not quote."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")
"""With the backslashes before it, which then count as escapes."""


def load_recipe(recipe: str, overrides: Sequence[str | Setting] = ()) -> Config:
    """Load a recipe, by shipped name or path, with overrides such as `optim.lr=1e-5`, checked.

    Raises:
        ConfigError: with one line for each fault found.
    """
    config = parse_recipe(recipe, overrides)
    try:
        check_config(config)
    except ConfigError as error:
        raise ConfigError(redact_secrets(str(error), config)) from None
    return config


def parse_recipe(recipe: str | None, overrides: Sequence[str | Setting] = ()) -> Config:
    """Load a recipe without the rules across sections, such as one still to be completed.

    Args:
        recipe: None lays the overrides over the defaults alone.

    Raises:
        ConfigError: with one line for each fault found.
    """
    tree = _recipe_tree(recipe)
    tree.apply([setting for each in overrides for setting in _settings(each)])
    if tree.faults:
        raise ConfigError("\n".join(tree.faults))
    references = _ReferenceResolver(tree.values)
    values = references.resolve((), tree.values)
    faults = list(_boolean_errors(values, tree))
    secrets = {p: EnvironmentValue(t, lookup(values, p)) for p, t in references.secrets.items()}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        for path, (text, _) in secrets.items():
            _set_path(values, path, text)
        faults += validation_errors(error, values, tree.source_of)
    if faults:
        raise ConfigError(_replace_secrets("\n".join(dict.fromkeys(faults)), secrets))
    valid = config.model_dump(mode="json") if secrets else {}
    for path, (text, _) in secrets.items():
        value = lookup(valid, path)
        # Numbers and choices are settings, which a run keeps as they were.
        if isinstance(value, str | list) and not is_enumeration(valid, path):
            config.from_environment[path] = EnvironmentValue(text, value)
    return config


def _recipe_tree(recipe: str | None) -> ConfigTree:
    tree = ConfigTree()
    for layer in () if recipe is None else read_layers(recipe):
        tree.apply([Setting(p, value, layer.source_of(p)) for p, value in _leaves(layer.tree) if p])
    return tree


def recipe_values(recipe: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe by their full names, with the variants of a configuration.

    Where that has another variant than the recipe, it is the variant's defaults. A value of the
    environment, and one that cannot be resolved, such as `???`, stays as it is written.

    Args:
        recipe: None is the defaults.
        config: tree of the configuration.

    Raises:
        ConfigError: the recipe's file is missing or invalid.
    """
    tree = _recipe_tree(recipe)
    for path, name in sorted(_leaves(config), key=lambda leaf: len(leaf[0])):  # outer unions first
        if path[-1:] == ("name",):
            tree.choose_variant(Setting(path, name, ""))
    references, values = _ReferenceResolver(tree.values), copy.deepcopy(tree.values)
    for path, value in _leaves(tree.values):
        with suppress(ConfigError):
            _set_path(values, path, references.resolve(path, value))
    for path, text in references.secrets.items():
        _set_path(values, path, text)
    return flatten(values)


def _boolean_errors(values: Mapping[str, Any], tree: ConfigTree) -> Iterator[str]:
    """Yield an error for each boolean given for a number, which pydantic would take for 1 or 0."""
    for path, value in _leaves(values):
        field = find_key(values, path).field if isinstance(value, bool) else None
        if field and takes_number(field):
            yield type_message(path, field, value, tree.source_of(path))


def dump_config(config: Config, recipe: str | None = None) -> str:
    """Return a configuration as a recipe in YAML that loads back to an equal one.

    Its first line is a comment with the version of Winnow and the name of the recipe.

    Args:
        recipe: as `recipe_name` returns it.
    """
    head = f"{VERSION_PREFIX}{__version__}" + (f" from the recipe {recipe}" if recipe else "")
    return f"{head}\n{to_yaml(config_to_dict(config, _escape))}"


def config_to_dict(config: Config, convert: Callable[[Any], Any] = copy.deepcopy) -> dict[str, Any]:
    """Return a configuration as a tree, with `${oc.env:NAME}` where it was written so.

    Args:
        form: returns a copy of the values in another form.
    """
    values = config.model_dump(mode="json")
    tree: dict[str, Any] = convert(values)
    for path, (text, value) in config.from_environment.items():
        if lookup(values, path) == value:
            _set_path(tree, path, text)
    return tree


def redact_secrets(text: str, *configs: Config) -> str:
    """Replace values from the environment in a text by their `${oc.env:NAME}`."""
    for config in configs:
        text = _replace_secrets(text, config.from_environment)
    return text


def _replace_secrets(text: str, secrets: Mapping[KeyPath, EnvironmentValue]) -> str:
    for written, value in secrets.values():
        for each in value if isinstance(value, list) else [value]:
            if len(str(each)) >= _MIN_SECRET_LENGTH:
                # Whole before it is cut, or its end would stay.
                text = text.replace(str(each), written).replace(quote(each)[1:-1], written)
    return text


def _set_path(tree: Any, path: KeyPath, value: Any) -> None:
    around = lookup(tree, path[:-1])
    around[int(path[-1]) if isinstance(around, list) else path[-1]] = value


def _escape(value: Any) -> Any:
    """Escape, as OmegaConf asks, text in which `${` would be read as an interpolation."""
    if isinstance(value, dict):
        return {key: _escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escape(inner) for inner in value]
    return _INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


class KeyHelp(NamedTuple):
    """A line of `--help-config`."""

    key: str
    type: str
    default: str
    """Value in the recipe; for the keys of other variants, their own default."""
    meaning: str
    variant: str
    """`GROUP=VARIANT` that must be chosen for the key to exist; empty if it does now."""


def describe_config(config: Config, prefix: str | None = None) -> list[KeyHelp]:
    """Describe every key, or those under a prefix such as `optim`: type, default and meaning.

    Raises:
        ConfigError: no key starts with the prefix.
    """
    values = config_to_dict(config)
    start = tuple(re.findall(r"[^./]+", prefix or ""))
    rows = [_key_help(key, values) for key in all_keys() if key.path[: len(start)] == start]
    if not rows:
        raise ConfigError(f"no key starts with {quote(prefix)}; {suggest_keys('.'.join(start))}")
    return rows


def _key_help(key: Key, values: Mapping[str, Any]) -> KeyHelp:
    default, variant = lookup(values, key.path), ""
    if key.variant and lookup(values, (*key.variant[0], "name")) != key.variant[1]:
        variant = f"{'/'.join(key.variant[0])}={key.variant[1]}"
        required = key.field.is_required()
        default = REQUIRED if required else key.field.get_default(call_default_factory=True)
    if variants(key.field):
        default = default["name"] if isinstance(default, dict) else default.name
    meaning = " ".join((key.field.description or "").split())
    if key.change <= Change.ON_RESUME:
        meaning += " May change on resuming."
    shown = default if isinstance(default, str) and default else quote(default)
    return KeyHelp(key.spelling, describe_type(key.field), shown, meaning, variant)


def differing_keys(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """Return the keys whose values differ, with both values."""
    first, second = (flatten(config.model_dump()) for config in (a, b))
    pairs = [(key, first.get(key, ABSENT), second.get(key, ABSENT)) for key in {**first, **second}]
    return [(key, x, y) for key, x, y in pairs if x != y or type(x) is not type(y)]


def flatten(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of a recipe's tree by their full names: `{"optim.lr": 0.001, …}`."""
    return {".".join(path): value for path, value in _leaves(tree) if path}


class Setting(NamedTuple):
    """A value that was typed for a key; a text for a union of variants chooses one."""

    path: KeyPath
    value: Any
    place: str
    text: str | None = None
    """The value as it was typed, where it is the whole of an override."""
    removes: bool = False


def _leaves(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of each entry that is no table, or an empty one."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, tree


@cache
def _renamed_path(path: KeyPath) -> KeyPath:
    """Return the current path of a renamed key, with a warning once per process."""
    now = current_key(path)
    if now != path:
        log.warning(
            "%s was renamed to %s; the next version removes the old name", dotted(path), dotted(now)
        )
    return now


class ConfigTree:
    """Values of all keys with the source of each, and the faults of the settings."""

    def __init__(self) -> None:
        self.values = default_values(Config)
        self.places: dict[KeyPath, str] = {}
        self.faults: list[str] = []

    def source_of(self, path: KeyPath) -> str:
        """Return where a key was set: itself, or the nearest key around or within it."""
        for stop in range(len(path), 0, -1):
            if path[:stop] in self.places:
                return self.places[path[:stop]]
        within = [place for typed, place in self.places.items() if typed[: len(path)] == path]
        return within[-1] if within else "default"

    def apply(self, settings: Sequence[Setting]) -> None:
        """Apply the settings of one file, or of the whole command line, to the values."""
        settings = [each._replace(path=_renamed_path(each.path)) for each in settings]
        settings = [each for setting in settings for each in self._split_options(setting)]
        # Choices before values, so that each key meets the variants chosen in the end; outer unions
        # first, as an inner one may belong to the variant chosen for the outer.
        outer_first = sorted(settings, key=lambda s: len(s.path) - (s.path[-1] == "name"))
        choices = [setting for setting in outer_first if self.choose_variant(setting)]
        for setting in settings:
            if setting not in choices:
                self.faults += self._set_value(setting)

    def _split_options(self, setting: Setting) -> Iterator[Setting]:
        """Take the options out of a list of names: `[{name: wandb, mode: offline}]` names wandb,
        and sets `mode` in the section wandb beside the list."""
        path, entries, place, *_ = setting
        is_list = isinstance(entries, list) and is_name_list(find_key(self.values, path).field)
        names = []
        for entry in entries if is_list else ():
            named = isinstance(entry, dict) and isinstance(entry.get("name"), str)
            names.append(entry["name"] if named else entry)
            for key, value in _leaves(entry) if named else ():
                if key != ("name",):
                    yield Setting((*path[:-1], entry["name"], *key), value, place)
        yield setting._replace(value=names) if is_list else setting

    def choose_variant(self, setting: Setting) -> bool:
        """Choose the variant that a setting names; False if it names none."""
        union, field, _, _ = find_key(self.values, setting.path)
        options, name = variants(field), setting.value
        is_other = isinstance(name, str) and name not in options
        row = find_foreign_value(union, name) if is_other else None
        if row is not None and row.ours.partition("=")[2] in options:
            log.warning("%s=%s runs as %s", "/".join(union), name, row.answer)
            name = row.ours.partition("=")[2]
        if setting.removes or not isinstance(name, str) or name not in options:
            return False
        # Naming the variant that is there changes nothing; an override of the group starts it anew.
        is_anew = union == setting.path and setting.place == COMMAND_LINE
        if is_anew or name != lookup(self.values, (*union, "name")):
            lookup(self.values, union[:-1])[union[-1]] = default_values(options[name])
        return True

    def _set_value(self, setting: Setting) -> Iterator[str]:
        """Set or remove a value, or yield its fault; checked against the final variants."""
        path, value, place, text, removes = setting
        key, field, variant, rest = find_key(self.values, path)
        section = lookup(self.values, path)
        theirs = find_foreign_value(key, value) if isinstance(value, str) else None
        if field is None or (rest and not is_table(field)):
            yield unknown_key_message(path, None if field else variant, place, value)
        elif removes and is_table(field) and section is not None:
            del lookup(self.values, path[:-1])[path[-1]]
        elif removes:
            yield f"~{dotted(path)} is not an entry of a table; remove it, or set a value"
        elif value == {} and isinstance(section, dict):
            pass  # adds nothing to a section or a table
        elif theirs is not None:
            yield f"{dotted(key)} does not take {quote(value)} (set by {place}); {theirs.remedy}"
        elif is_section(field):
            hint = variant_hint(key, value) if isinstance(value, str) else ""
            yield type_message(key, field, value, place) + hint
        else:
            if takes_text(field) and text is not None and isinstance(value, bool | int | float):
                value = text
            around = self.values
            for name in path[:-1]:
                if not isinstance(around.get(name), dict):
                    around[name] = {}
                around = around[name]
            around[path[-1]] = copy.copy(value)
            self.places[path] = place


def _settings(override: str | Setting) -> Iterator[Setting]:
    """Yield what an override sets: several keys where it is a section in braces."""
    if isinstance(override, Setting):
        yield override
        return
    text = override
    # Hydra takes 0.2 s to import, which only commands with overrides need.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if not is_encodable(text):
        raise ConfigError(f"override {quote(text)} is not valid UTF-8; type it again")
    try:
        (parsed,) = OverridesParser.create().parse_overrides([text])
    # ValueError: a number of thousands of digits.
    except (HydraException, ValueError, RecursionError) as error:
        reason = str(error).partition("\nSee ")[0].splitlines()[-1].strip(" ^")
        because = f" ({reason})" if reason and reason.isprintable() else ""
        raise ConfigError(
            f"override {quote(text)} is not in Hydra's grammar{because}; write KEY=VALUE, with "
            "special characters in quotes: KEY='\"a: b\"'"
        ) from None
    typed = text.partition("=")[2]
    if parsed.is_sweep_override():
        raise ConfigError(
            f"override {quote(text)} is a sweep over several values; "
            f"give one value, a list in brackets ({parsed.key_or_group}=[a,b]), or --multirun"
        )
    if parsed.package is not None or (parsed.is_delete() and typed):
        raise ConfigError(
            f"override {quote(text)} must be KEY=VALUE without a package (@), or ~KEY without a "
            "value; leave out the rest"
        )
    key = SHORTHANDS.get(parsed.key_or_group, parsed.key_or_group)
    path = tuple(key.replace("/", ".").split("."))
    value = parsed.value()
    whole = None if isinstance(value, dict) else typed
    for inner, leaf in _leaves(value):
        yield Setting((*path, *inner), leaf, COMMAND_LINE, whole, parsed.is_delete())


_PENDING = object()


def _unresolved(path: KeyPath, reason: str) -> ConfigError:
    return ConfigError(f"{dotted(path)}: {reason}; fix the value or its ${{…}}")


class _ReferenceResolver:
    """Resolves the `${…}` of a tree in OmegaConf's grammar, each once.

    OmegaConf itself resolves a value again for each reference to it, without a bound ("billion
    laughs").
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._found: dict[KeyPath, Any] = {}
        self._written = 0
        self.secrets: dict[KeyPath, str] = {}
        """Texts into which the environment goes, by path."""

    def resolve(self, path: KeyPath, node: Any) -> Any:
        """Return the value at a path with every `${…}` in it resolved.

        Raises:
            ConfigError: a reference leads nowhere or in a circle, or a value must still be given.
        """
        if isinstance(node, Mapping):
            return {str(k): self.resolve((*path, str(k)), inner) for k, inner in node.items()}
        if isinstance(node, list):
            return [self.resolve((*path, str(i)), inner) for i, inner in enumerate(node)]
        if node == REQUIRED:
            raise ConfigError(f"{dotted(path)} has no default; add {dotted(path)}=VALUE")
        if not isinstance(node, str) or "${" not in node:
            return node
        if path not in self._found:
            self._found[path] = _PENDING
            self._found[path] = self._resolve_text(path, node)
        if self._found[path] is _PENDING:
            raise _unresolved(path, "recursive interpolation detected")
        return self._found[path]

    def _resolve_text(self, path: KeyPath, text: str) -> Any:
        from omegaconf.errors import OmegaConfBaseException
        from omegaconf.grammar_parser import parse
        from omegaconf.grammar_visitor import GrammarVisitor

        visitor = GrammarVisitor(
            node_interpolation_callback=lambda key, _: self._resolve_reference(path, key, text),
            resolver_interpolation_callback=partial(self._resolve_environment, path, text),
            memo=None,
        )
        try:
            return visitor.visit(parse(text))
        except (KeyError, OmegaConfBaseException, RecursionError) as error:
            message = [*error.args, type(error).__name__][0]
            reason = str(message).partition("\n")[0]
            raise _unresolved(path, f"{reason[:1].lower()}{reason[1:]}") from None

    def _resolve_reference(self, path: KeyPath, key: str, text: str) -> Any:
        """Return the value that a text names, absolutely or (with dots in front) relatively."""
        dots = len(key) - len(key.lstrip("."))
        around = path[: len(path) - dots] if dots else ()
        target = _renamed_path((*around, *re.findall(r"[^.\[\]]+", key)))
        node: Any = self._values
        for stop, name in enumerate(target):
            if isinstance(node, str):  # a table that is a reference itself
                node = self.resolve(target[:stop], node)
            node = lookup(node, (name,), _PENDING)
        if node is _PENDING:
            raise KeyError(f"interpolation key {'.'.join(target)!r} not found")
        value = self.resolve(target, node)
        for secret in [each for each in self.secrets if each[: len(target)] == target]:
            rest = secret[len(target) :]
            self.secrets[path + rest] = f"${{{'.'.join(secret)}}}" if rest else text
        self._written += len(str(value))
        if self._written > MAX_CHARACTERS:
            raise KeyError(f"its ${{…}} write out more than {MAX_CHARACTERS:,} characters")
        return value

    def _resolve_environment(
        self, path: KeyPath, text: str, name: str, args: tuple[Any, ...], args_str: tuple[str, ...]
    ) -> Any:
        """Return the value of `${oc.env:VARIABLE,DEFAULT}`, the one resolver of recipes."""
        from omegaconf.resolvers import oc

        if name != "oc.env" or len(args) not in (1, 2):
            raise KeyError(f"${{{name}:…}} is unknown; use ${{KEY}} or ${{oc.env:NAME,ELSE}}")
        self.secrets[path] = text
        return oc.env(*args)
