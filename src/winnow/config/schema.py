"""What the sections say about themselves: their keys, variants, defaults and ranges.

A key path is a tuple of names from the root, such as `("optim", "lr")`. Variants are the
members of a union told apart by `name`; a class with a literal `name` is a union of one.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
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
    """The variants a field offers, by name; empty when it is no union of variants."""
    found: dict[str, type[Section]] = {}
    for option in _options(field.annotation):
        name = option.model_fields.get("name") if _is_section(option) else None
        if name is None or get_origin(name.annotation) is not Literal:
            return {}
        found[get_args(name.annotation)[0]] = option
    return found


def section(field: FieldInfo) -> type[Section] | None:
    """The section a field holds; None for a union of variants and for values."""
    annotation: Any = field.annotation
    return annotation if _is_section(annotation) and not variants(field) else None


def is_table(field: FieldInfo) -> bool:
    """Whether a field holds entries whose names the user chooses."""
    return get_origin(field.annotation) is dict


def is_text(field: FieldInfo) -> bool:
    """Whether a field, or each entry of a table, takes any text."""
    if is_table(field):
        return _entry(field) is str
    return str in _options(field.annotation)


def takes_number(field: FieldInfo) -> bool:
    """Whether a field takes numbers, and no truth values."""
    options = set(_options(field.annotation))
    return bool(options & {int, float}) and bool not in options


def default_tree(cls: type[Section]) -> dict[str, Any]:
    """A section's defaults as a YAML file would hold them, every key present."""
    tree: dict[str, Any] = {}
    for key, field in cls.model_fields.items():
        inner = section(field)
        if not field.is_required():
            tree[key] = to_jsonable_python(field.get_default(call_default_factory=True))
        else:
            tree[key] = default_tree(inner) if inner else REQUIRED
    return tree


class Key(NamedTuple):
    """A key of the schema: a value, a table, or a union of variants."""

    path: Path
    field: FieldInfo
    variant: tuple[Path, str] | None
    """The union and the variant of it that own this key; None outside of variants."""

    @property
    def spelling(self) -> str:
        """How the command line spells it: unions with slashes, values with dots."""
        return ("/" if variants(self.field) else ".").join(self.path)


def all_keys(
    cls: type[Section] = Config, path: Path = (), variant: tuple[Path, str] | None = None
) -> Iterator[Key]:
    """Every key of a section, those of all variants included; `name` stands for its union."""
    for key, field in cls.model_fields.items():
        here = (*path, key)
        inner, options = section(field), variants(field)
        if inner:
            yield from all_keys(inner, here, variant)
        elif options:
            yield Key(here, field, variant)
            for name, option in options.items():
                yield from all_keys(option, here, (here, name))
        elif not (key == "name" and variant and variant[0] == path):
            yield Key(here, field, variant)


def leaf_of(location: Sequence[str | int]) -> tuple[Path, FieldInfo | None, bool]:
    """The key that a pydantic error's location lies in, without variant tags and indices.

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
        options = variants(field)
        if len(options) > 1 and parts:
            cls = options[parts.pop(0)]
        elif options:
            cls = next(iter(options.values()))
        elif is_table(field) and parts[1:] not in ([], ["[key]"]) and _is_section(_entry(field)):
            path, cls = (*path, parts.pop(0)), _entry(field)
        else:
            cls = section(field)
    is_entry = field is not None and is_table(field) and bool(parts)
    return ((*path, parts[0]) if is_entry else path), field, is_entry


def allowed(field: FieldInfo, *, entry: bool = False) -> str:
    """What a field, or an entry of a table, takes, in words: `a number in (0, 1]`."""
    options = variants(field)
    if options:
        return f"one of {', '.join(options)}" if len(options) > 1 else next(iter(options))
    if entry:
        return describe(_entry(field))
    return describe(field.annotation, field.metadata)


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a type takes, in words."""
    options = _options(annotation)
    if len(options) > 1:
        texts = [describe(o, metadata if o is not type(None) else ()) for o in options]
        return " or ".join(texts)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list of {_plural(arguments[0])}"
        return f"a list of {len(arguments)} {_plural(arguments[0])}"
    if origin is dict and _is_section(arguments[1]):
        return f"a table, its entries {describe(arguments[1])}"
    if origin is dict:
        return f"a table of {_plural(arguments[1])}"
    if _is_section(annotation):
        return f"keys ({', '.join(annotation.model_fields)})"
    return _article(*_noun(annotation, metadata))


def join(path: Sequence[str]) -> str:
    """A key path as it is written: `optim.lr`."""
    return ".".join(path)


def lookup(tree: Mapping[str, Any], path: Path) -> Any:
    """The value at a path of a full tree; None where there is none."""
    node: Any = tree
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            return None
        node = node[key]
    return node


def _entry(field: FieldInfo) -> Any:
    """What an entry of a table holds."""
    return get_args(field.annotation)[1]


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
    """What a simple type takes, without article, and the range that follows it."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [*metadata, *_constraints(more)]
    if get_origin(annotation) is Literal:
        values = [str(v) for v in get_args(annotation)]
        return (f"one of {', '.join(values)}" if len(values) > 1 else values[0]), ""
    noun = _NOUNS.get(annotation, (getattr(annotation, "__name__", str(annotation)), ""))[0]
    return noun, _range(metadata)


def _article(noun: str, bounds: str) -> str:
    return f"a {noun}{bounds}" if noun.endswith("number") else f"{noun}{bounds}"


def _plural(annotation: Any) -> str:
    noun, bounds = _noun(annotation, ())
    plurals = dict(_NOUNS.values())
    return f"{plurals.get(noun, noun)}{bounds}"


def _constraints(metadata: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for item in metadata:
        found.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return found


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
