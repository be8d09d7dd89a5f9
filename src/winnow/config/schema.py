"""The keys of a recipe, as its sections declare them: variants, what each takes, messages.

A key path is a tuple of names from the root, such as `("optim", "lr")`. Variants are the members
of a union told apart by `name`.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from winnow.config.base import Change, ConflictError, SecretError, Section
from winnow.config.other_names import explain_foreign_key
from winnow.config.root import Config

KeyPath = tuple[str, ...]
_MAX_VALUE_CHARACTERS = 80
_MIN_SIMILARITY = 0.6


def variants(field: FieldInfo | None) -> dict[str, type[Section]]:
    """Return the variants a field offers, by name; empty when it is no union of variants."""
    if field is None or field.discriminator is None:
        return {}
    options = _union_members(field.annotation)
    return {get_args(option.model_fields["name"].annotation)[0]: option for option in options}


def section_type(annotation: Any) -> type[Section] | None:
    """Return the section that a type is; None for a union of variants and for values."""
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None


def is_section(field: FieldInfo) -> bool:
    """Return whether a field is a section or a union of variants."""
    return section_type(field.annotation) is not None or bool(variants(field))


def is_table(field: FieldInfo | None) -> bool:
    """Return whether a field is a dict with keys of the user's choice."""
    return field is not None and get_origin(field.annotation) is dict


def is_name_list(field: FieldInfo | None) -> bool:
    """Return whether a field is a list of names from a fixed set."""
    return field is not None and get_origin(_entry_type(field)) is Literal


def takes_text(field: FieldInfo) -> bool:
    """Return whether a field, or each entry of a table, takes any text and no numbers."""
    options = _union_members(_entry_type(field) if is_table(field) else field.annotation)
    return str in options and not {int, float} & {*options}


def is_enumeration(values: Mapping[str, Any], path: KeyPath) -> bool:
    """Return whether the key at a path takes values from a fixed set."""
    field = find_key(values, path).field
    options = () if field is None else _union_members(field.annotation)
    return any(get_origin(option) is Literal for option in options)


def takes_number(field: FieldInfo) -> bool:
    """Return whether a field takes numbers, and no truth values."""
    options = {*_union_members(field.annotation)}
    return bool(options & {int, float}) and bool not in options


def _union_members(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _entry_type(field: FieldInfo) -> Any:
    """Return the type of an entry of a table or list; None for another field."""
    arguments = get_args(field.annotation)
    if is_table(field):
        return arguments[1]
    return arguments[0] if get_origin(field.annotation) is tuple else None


def default_values(cls: type[Section]) -> dict[str, Any]:
    """Return a section's defaults as a YAML file would hold them, without required keys."""
    return cls.model_construct().model_dump(mode="json")


class Key(NamedTuple):
    """A key of the schema: a value, a table, or a union of variants."""

    path: KeyPath
    field: FieldInfo
    variant: tuple[KeyPath, str] | None
    """The union and the variant of it that own this key; None outside of variants."""
    change: Change
    """The mark that says when a run may go on with another value, or another variant of a union."""

    @property
    def spelling(self) -> str:
        """The key as the command line spells it: unions with slashes, values with dots."""
        return ("/" if variants(self.field) else ".").join(self.path)


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key of a recipe and of all its variants; `name` stands for its union."""
    return tuple(_keys(Config, (), None, {"": Change.IN_FORK}))


def _keys(
    cls: type[Section],
    path: KeyPath,
    variant: tuple[KeyPath, str] | None,
    marks: Mapping[str, Change],
) -> Iterator[Key]:
    for key, field in cls.model_fields.items():
        key_path, metadata = (*path, key), field.metadata
        change = next((mark for mark in metadata if isinstance(mark, Change)), marks[""])
        named = next((mark for mark in metadata if isinstance(mark, dict)), {})
        within = {"": marks.get(key, change), **named}
        if inner := section_type(field.annotation):
            yield from _keys(inner, key_path, variant, within)
        elif not (key == "name" and variant and variant[0] == path):
            yield Key(key_path, field, variant, within.get("name", within[""]))
            for name, option in variants(field).items():
                yield from _keys(option, key_path, (key_path, name), within)


class KeyMatch(NamedTuple):
    """The key that a path leads to, under the variants that a tree of values has chosen."""

    path: KeyPath
    """Path of the key; of an entry where it leads into a table, of the union for its `name`."""
    field: FieldInfo | None
    """None where no section has the key."""
    variant: tuple[KeyPath, str] | None
    """Innermost union around the key, and the variant chosen there."""
    rest: KeyPath
    """Rest of the path, below a value or, with the entry's name, below a table."""


def find_key(
    values: Mapping[str, Any], path: Sequence[str | int], *, has_tags: bool = False
) -> KeyMatch:
    """Follow a path through the sections, and through the entries of tables that are sections.

    Args:
        values: full tree, whose names choose the variants.
        path: from the root; with `has_tags`, as pydantic puts it, a union's variant follows it.
    """
    cls: type[Section] | None = Config
    field: FieldInfo | None = None
    variant: tuple[KeyPath, str] | None = None
    place: KeyPath = ()
    rest = [str(part) for part in path if part != "[key]"]
    while rest and cls:
        place = (*place, rest.pop(0))
        field = cls.model_fields.get(place[-1])
        if field is None:
            break
        if options := variants(field):
            if rest == ["name"]:
                return KeyMatch(place, field, variant, ())
            variant = place, lookup(values, place)["name"]
            cls = options[variant[1]]
            del rest[:has_tags]
        elif rest[1:] and (entry := section_type(_entry_type(field))):
            place, cls, variant = (*place, rest.pop(0)), entry, None
        else:
            cls = section_type(field.annotation)
    if is_table(field) and rest:
        place = (*place, rest[0])
    return KeyMatch(place, field, variant, tuple(rest))


def lookup(tree: Any, path: Sequence[str], default: Any = None) -> Any:
    """Return the value at a path of a full tree, or the default where there is none."""
    for key in path:
        try:
            tree = tree[int(key) if isinstance(tree, list) else key]
        except (LookupError, TypeError, ValueError):
            return default
    return tree


# What a key takes, in words


def describe_type(field: FieldInfo, *, entry: bool = False) -> str:
    """Describe what a field, or an entry of a table, takes: `a number in (0, 1]`."""
    if options := variants(field):
        return f"one of {', '.join(options)}"
    return _type_text(_entry_type(field)) if entry else _type_text(field.annotation, field.metadata)


_NOUNS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "any value",
}
_BOUNDS = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}


def _type_text(annotation: Any, metadata: Sequence[Any] = (), *, plural: bool = False) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *metadata_of = get_args(annotation)
        metadata = [c for item in metadata_of for c in getattr(item, "metadata", [item])]
    options, arguments = _union_members(annotation), get_args(annotation)
    if len(options) > 1:
        ranges = [() if option is type(None) else metadata for option in options]
        texts = [_type_text(o, r, plural=plural) for o, r in zip(options, ranges, strict=True)]
        return " or ".join(texts)
    if get_origin(annotation) is Literal:
        values = ", ".join(map(str, arguments))
        return f"one of {values}" if len(arguments) > 1 else values
    if get_origin(annotation) in (dict, tuple):
        is_pair = get_origin(annotation) is tuple and arguments[-1] is not Ellipsis
        entry = arguments[1] if get_origin(annotation) is dict else arguments[0]
        entries = f" of {f'{len(arguments)} ' if is_pair else ''}{_type_text(entry, plural=True)}"
        entries = f", its entries {_type_text(entry)}" if section_type(entry) else entries
        return f"{'a table' if get_origin(annotation) is dict else 'a list'}{entries}"
    if cls := section_type(annotation):
        return f"keys ({', '.join(cls.model_fields)})"
    noun = _NOUNS[annotation]
    if plural:
        noun = f"{noun}s" if noun.endswith(("number", "value")) else noun
    elif noun.endswith("number"):
        noun = f"a {noun}"
    return noun + _range_text(metadata)


def _range_text(metadata: Sequence[Any]) -> str:
    bounds = {k: getattr(item, k) for item in metadata for k in _BOUNDS if hasattr(item, k)}
    if len(bounds) < 2:
        return "".join(f" {_BOUNDS[kind]} {bound}" for kind, bound in bounds.items())
    (low, least), (high, most) = bounds.items()
    return f" in {'[' if low == 'ge' else '('}{least}, {most}{']' if high == 'le' else ')'}"


# Messages for a wrong recipe: one line a fault, with key, value and remedy


def quote(value: Any) -> str:
    """Return a value as one line of YAML, cut to 80 characters."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 1]}…"


def dotted(path: KeyPath) -> str:
    """Return a key path joined by dots, on one line."""
    text = ".".join(path)
    return text if text and text.isprintable() else repr(text)


def variant_hint(path: KeyPath, name: object) -> str:
    """Return a hint to the variants of that name within a section, as for `algorithm=grpo`."""
    matches = [k for k in all_keys() if name in variants(k.field) and k.path[: len(path)] == path]
    choices = " or ".join(f"{key.spelling}={name}" for key in matches)
    return f"; choose {choices}" if choices else ""


def suggest_keys(key: str) -> str:
    """Return a remedy with the section or the keys that resemble an unknown key."""
    sections = () if "." in key else Config.model_fields
    if near := difflib.get_close_matches(key, sections, n=1) or _nearest_keys(key):
        return f"did you mean {' or '.join(near)}?"
    return f"the sections are {', '.join(Config.model_fields)}; see --help-config"


def _nearest_keys(key: str) -> list[str]:
    """Return up to three known keys that resemble what was typed, those of its section first."""
    typed = key.replace("/", ".").lower()
    parent, _, last = typed.rpartition(".")
    scores: dict[str, float] = {}
    for candidate in all_keys():
        full = difflib.SequenceMatcher(None, typed, ".".join(candidate.path)).ratio()
        tail = difflib.SequenceMatcher(None, last, candidate.path[-1]).ratio()
        # The right key in the wrong section counts nearly as much as a misspelt one, and so
        # does an abbreviation: learning_rate for lr, wd for weight_decay.
        is_short = _initials(last) == candidate.path[-1] or last == _initials(candidate.path[-1])
        bonus = 0.1 if typed.startswith(candidate.path[0] + ".") else 0.0
        score = max(full, 0.9 * max(tail, is_short) + bonus)
        scores[candidate.spelling] = max(score, scores.get(candidate.spelling, 0.0))
    ranked = sorted(scores, key=lambda name: (-scores[name], name))
    bar = max(_MIN_SIMILARITY, scores[ranked[0]] - 0.15)
    near = [name for name in ranked if scores[name] >= bar]
    return sorted(near, key=lambda n: n.replace("/", ".").rpartition(".")[0] != parent)[:3]


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def type_message(path: KeyPath, field: FieldInfo, value: Any, place: str) -> str:
    """Return the message for a value of the wrong type."""
    return f"{dotted(path)} must be {describe_type(field)}, got {quote(value)} (set by {place})"


def unknown_key_message(
    path: KeyPath, variant: tuple[KeyPath, str] | None, place: str, value: Any = ""
) -> str:
    """Return the message for a key that no section, or not the chosen variant, has."""
    parts = ".".join(path).split(".")
    group = "" if variant is None else "/".join(variant[0])
    fault = "not a known key" if variant is None else f"not a key of {group}={variant[1]}"
    if len(parts) > len(path) and any(key.path == tuple(parts) for key in all_keys()):
        nested = ": {".join(parts) + ": …" + "}" * (len(parts) - 1)
        remedy = f"nest keys in a file: {nested}"
    elif elsewhere := explain_foreign_key(".".join(path), value):
        remedy = elsewhere
    elif variant is not None:
        union = variant[0]
        siblings = [key for key in all_keys() if key.variant and key.variant[0] == union]
        names = {
            key.variant[1] for key in siblings if key.variant and key.path[: len(path)] == path
        }
        within = path[:-1] if len(path) > len(union) + 1 else union
        mine = [key.path for key in siblings if key.variant == variant]
        near = [key for key in mine if key[: len(within)] == within] or mine
        keys = {".".join(key[len(union) :]) for key in near}
        remedy = f"its keys are {', '.join(sorted(keys))}" if keys else "it has no keys"
        if names:
            choices = " or ".join(f"{group}={name}" for name in sorted(names))
            remedy = f"choose {choices}, or leave the key out"
    else:
        remedy = suggest_keys(".".join(path))
    return f"{dotted(path)} is {fault} (set by {place}); {remedy}"


def validation_errors(
    error: ValidationError, values: Mapping[str, Any], place: Callable[[KeyPath], str]
) -> list[str]:
    """Return a message of ours for each key that pydantic refuses."""
    lines: dict[KeyPath, str] = {}
    for fault in error.errors(include_url=False):
        path, field, _, rest = find_key(values, fault["loc"], has_tags=True)
        # A validator of ours says what it wants; for the rest the schema knows it better.
        reason = fault.get("ctx", {}).get("error")
        if isinstance(reason, ConflictError):
            line = str(reason)
        elif field is None:
            line = unknown_key_message(path, None, place(path))
        elif fault["type"] == "missing" and field.is_required():
            line = f"{dotted(path)} has no default; add {dotted(path)}=VALUE"
        elif isinstance(reason, SecretError):
            line = f"{dotted(path)} {reason} (set by {place(path)})"
        else:
            takes = describe_type(field, entry=is_table(field) and bool(rest))
            want = str(reason) if isinstance(reason, ValueError) else f"must be {takes}"
            value = lookup(values, path)
            got = (
                f"got {quote(value)} (set by {place(path)}){_value_hint(path, field, want, value)}"
            )
            line = f"{dotted(path)} {want}, {got}"
        lines.setdefault(path, line)
    return list(lines.values())


def _value_hint(path: KeyPath, field: FieldInfo, want: str, value: Any) -> str:
    """Return a hint about the value to write, if the type alone does not show it."""
    if isinstance(value, str) and quote(value) == f"'{value}'" and "a list of" in want:
        return f"; write {'.'.join(path)}=[{value}]"
    if isinstance(value, str) and value.lower() == "none" and "null" in want:
        return "; write null for none"
    if isinstance(value, bool | int | float) and takes_text(field) and "a table" not in want:
        return "; put it in quotes"
    return ""
