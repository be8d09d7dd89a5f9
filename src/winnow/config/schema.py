"""Walks over the sections: their keys, variants and defaults, and what each key takes in words.

A key path is a tuple of names from the root, such as `("optim", "lr")`. Variants are the
members of a union told apart by `name`; a class with a literal `name` is a union of one.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from winnow.config.base import Section
from winnow.config.root import Config

Path = tuple[str, ...]
REQUIRED = "???"
"""OmegaConf's mark for a value that must be given."""


def variants(field: FieldInfo) -> dict[str, type[Section]]:
    """Return the variants a field offers, by name; empty when it is no union of variants."""
    found: dict[str, type[Section]] = {}
    for option in _options(field.annotation):
        name = option.model_fields.get("name") if _is_section(option) else None
        if name is None or get_origin(name.annotation) is not Literal:
            return {}
        found[get_args(name.annotation)[0]] = option
    return found


def section(field: FieldInfo) -> type[Section] | None:
    """Return the section a field holds; None for a union of variants and for values."""
    annotation: Any = field.annotation
    return annotation if _is_section(annotation) and not variants(field) else None


def is_table(field: FieldInfo) -> bool:
    """Return whether a field holds entries whose names the user chooses."""
    return get_origin(field.annotation) is dict


def is_text(field: FieldInfo) -> bool:
    """Return whether a field, or each entry of a table, takes any text and no numbers."""
    entry = _entry(field) if is_table(field) else field.annotation
    return str in _options(entry) and not {int, float} & {*_options(entry)}


def takes_number(field: FieldInfo) -> bool:
    """Return whether a field takes numbers, and no truth values."""
    options = {*_options(field.annotation)}
    return bool(options & {int, float}) and bool not in options


def default_tree(cls: type[Section]) -> dict[str, Any]:
    """Return a section's defaults as a YAML file would hold them, every key present."""
    return {
        key: REQUIRED
        if field.is_required()
        else to_jsonable_python(field.get_default(call_default_factory=True))
        for key, field in cls.model_fields.items()
    }


class Key(NamedTuple):
    """A key of the schema: a value, a table, or a union of variants."""

    path: Path
    field: FieldInfo
    variant: tuple[Path, str] | None
    """The union and the variant of it that own this key; None outside of variants."""

    @property
    def spelling(self) -> str:
        """The key as the command line spells it: unions with slashes, values with dots."""
        return ("/" if variants(self.field) else ".").join(self.path)


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key of a recipe and of all its variants; `name` stands for its union."""
    return tuple(_keys(Config, (), None))


def _keys(cls: type[Section], path: Path, variant: tuple[Path, str] | None) -> Iterator[Key]:
    for key, field in cls.model_fields.items():
        here = (*path, key)
        inner, options = section(field), variants(field)
        if inner:
            yield from _keys(inner, here, variant)
        elif options:
            yield Key(here, field, variant)
            for name, option in options.items():
                yield from _keys(option, here, (here, name))
        elif not (key == "name" and variant and variant[0] == path):
            yield Key(here, field, variant)


def leaf_of(location: Sequence[str | int]) -> tuple[Path, FieldInfo | None, bool]:
    """Return the key that a pydantic error's location lies in, without the tags of variants.

    The field is None where no section has the key; the flag tells an entry of a table. Entries
    that are sections have keys of their own.
    """
    cls: type[Section] | None = Config
    path: Path = ()
    field: FieldInfo | None = None
    parts = [str(part) for part in location]
    while parts and cls:
        path = (*path, parts.pop(0))
        field = cls.model_fields.get(path[-1])
        if field is None:
            break
        options, entry = variants(field), _entry(field)
        if len(options) > 1 and parts:
            cls = options[parts.pop(0)]
        elif options:
            cls = next(iter(options.values()))
        elif _is_section(entry) and parts[1:] not in ([], ["[key]"]):
            path, cls = (*path, parts.pop(0)), entry
        else:
            cls = section(field)
    is_entry = field is not None and is_table(field) and bool(parts)
    return ((*path, parts[0]) if is_entry else path), field, is_entry


def lookup(tree: Any, path: Path) -> Any:
    """Return the value at a path of a full tree; None where there is none."""
    for key in path:
        if isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        elif isinstance(tree, Mapping) and key in tree:
            tree = tree[key]
        else:
            return None
    return tree


def allowed(field: FieldInfo, *, entry: bool = False) -> str:
    """Describe what a field, or an entry of a table, takes: `a number in (0, 1]`."""
    options = variants(field)
    if options:
        return f"one of {', '.join(options)}" if len(options) > 1 else next(iter(options))
    return _describe(_entry(field)) if entry else _describe(field.annotation, field.metadata)


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(_describe(o, metadata if o is not type(None) else ()) for o in options)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (tuple, dict):
        is_pair = origin is tuple and arguments[-1] is not Ellipsis
        what = "a table" if origin is dict else "a list"
        entry = arguments[1] if origin is dict else arguments[0]
        if _is_section(entry):
            return f"{what}, its entries {_describe(entry)}"
        return f"{what} of {f'{len(arguments)} ' if is_pair else ''}{_plural(entry)}"
    if _is_section(annotation):
        return f"keys ({', '.join(annotation.model_fields)})"
    noun, bounds = _noun(annotation, metadata)
    return f"a {noun}{bounds}" if noun.endswith("number") else f"{noun}{bounds}"


def _entry(field: FieldInfo) -> Any:
    """Return the type of an entry of a table or list; None for another field."""
    arguments = get_args(field.annotation)
    if get_origin(field.annotation) is dict:
        return arguments[1]
    return arguments[0] if get_origin(field.annotation) is tuple else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _options(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


_NOUNS: dict[Any, tuple[str, str]] = {
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    str: ("text", "text"),
    bool: ("true or false", "true or false"),
    type(None): ("null", "null"),
    Any: ("any value", "any values"),
}


def _noun(annotation: Any, metadata: Sequence[Any]) -> tuple[str, str]:
    """Return the word for a simple type, without article, and the range that follows it."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        constraints = [item.metadata if isinstance(item, FieldInfo) else [item] for item in more]
        metadata = [*metadata, *(item for items in constraints for item in items)]
    if get_origin(annotation) is Literal:
        values = [str(v) for v in get_args(annotation)]
        return (f"one of {', '.join(values)}" if len(values) > 1 else values[0]), ""
    noun = _NOUNS.get(annotation, (getattr(annotation, "__name__", str(annotation)), ""))[0]
    return noun, _range(metadata)


def _plural(annotation: Any) -> str:
    found = [_noun(option, ()) for option in _options(annotation)]
    plurals = dict(_NOUNS.values())
    return " or ".join(f"{plurals.get(noun, noun)}{bounds}" for noun, bounds in found)


def _range(metadata: Sequence[Any]) -> str:
    low = high = ""
    words: list[str] = []
    for item in metadata:
        match item:
            case annotated_types.Gt(gt=bound):
                low, words = f"({bound}", [*words, f" greater than {bound}"]
            case annotated_types.Ge(ge=bound):
                low, words = f"[{bound}", [*words, f" of at least {bound}"]
            case annotated_types.Lt(lt=bound):
                high, words = f"{bound})", [*words, f" less than {bound}"]
            case annotated_types.Le(le=bound):
                high, words = f"{bound}]", [*words, f" of at most {bound}"]
    return f" in {low}, {high}" if low and high else "".join(words)
