"""Recipe files: YAML with the lines of its keys, and the recipes it includes.

The YAML is that of version 1.2 where the two differ, as in Hydra's grammar: `1e-6` is a
number, and of the bare words only true and false are truth values (`console: off` is text).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from winnow.errors import ConfigError

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
MOST_BYTES = 1_000_000
"""Most bytes of one file; the longest that ships has 4,000."""
MOST_NODES = 20_000
"""Most keys, values and lists of one file, each as often as anchors repeat it."""
MOST_FILES = 100
"""Most files that a recipe may take in, each as often as it is included."""
_SUFFIXES = (".yaml", ".yml")
_EVALUATION = "eval_"


@dataclass(frozen=True)
class Layer:
    """Keys of one file alone, to be laid over what came before it."""

    source: str
    """Name of the file in messages."""
    tree: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]
    """Line of each key."""

    def place(self, path: tuple[str, ...]) -> str:
        """Return where a key is set: file and line."""
        around = [path[:stop] for stop in range(len(path), 0, -1)]
        line = next((self.lines[key] for key in around if key in self.lines), None)
        return f"{self.source}, line {line}" if line else self.source


def available_recipes() -> list[str]:
    """Return the names of the training recipes that ship with Winnow."""
    names = (path.stem for path in RECIPES.glob("*.yaml"))
    return sorted(name for name in names if not name.startswith(_EVALUATION))


def evaluation_recipes() -> list[str]:
    """Return the names of the shipped recipes that only evaluate, for `winnow eval --recipe`."""
    return sorted(path.stem[len(_EVALUATION) :] for path in RECIPES.glob(f"{_EVALUATION}*.yaml"))


def evaluation_recipe(name: str) -> str:
    """Return what `read_layers` takes for a recipe of `--recipe`: any recipe can be given."""
    return str(RECIPES / f"{_EVALUATION}{name}.yaml") if name in evaluation_recipes() else name


def read_layers(recipe: str) -> list[Layer]:
    """Read the file of a recipe and all it includes, in the order in which they apply.

    Raises:
        ConfigError: a file is missing, unreadable, no YAML, includes itself, or asks for more
            than any recipe needs.
    """
    layers = []
    # Files that include one another twice each grow as anchors do: they are counted as they come.
    for layer in _layers(_find(recipe), ()):
        layers.append(layer)
        if len(layers) > MOST_FILES:
            raise ConfigError(
                f"recipe {recipe} includes more than {MOST_FILES} recipes, the last of them "
                f"{layer.source}; include each only once in `defaults`"
            )
    return layers


def is_encodable(text: str) -> bool:
    """Return whether text can be written to a file: it holds no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return a tree as the text of a recipe file."""
    text = yaml.dump(tree, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=100)
    return str(text)


def _find(recipe: str) -> Path:
    if recipe in available_recipes():
        return RECIPES / f"{recipe}.yaml"
    path = Path(recipe)
    if path.is_file():
        return path
    if path.suffix in _SUFFIXES or os.sep in recipe:
        kind = "is a folder, not a recipe file" if path.is_dir() else "does not exist"
        raise ConfigError(f"recipe {recipe!r} {kind}; {_choices(recipe)}")
    raise ConfigError(f"there is no recipe {recipe!r}; {_choices(recipe)}")


def _choices(recipe: str) -> str:
    near = difflib.get_close_matches(Path(recipe).stem, available_recipes(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}Give the path of a YAML file, or a name that `winnow recipes` lists"


def _layers(path: Path, including: tuple[Path, ...]) -> Iterator[Layer]:
    if len(including) > MOST_FILES:
        raise ConfigError(
            f"recipe {path} is included by more than {MOST_FILES} recipes, one in the other; "
            "include fewer in `defaults`"
        )
    resolved = path.resolve()
    if resolved in including:
        chain = " -> ".join(p.name for p in (*including[including.index(resolved) :], resolved))
        raise ConfigError(f"recipe {path} includes itself ({chain}); remove it from `defaults`")
    own = _read(path)
    where = own.place(("defaults",))
    entries = own.tree.pop("defaults", [])
    if not isinstance(entries, list):
        raise ConfigError(f"`defaults` must be a list of recipes, got {entries!r} ({where})")
    if entries.count("_self_") > 1:
        raise ConfigError(f"`defaults` names _self_ more than once; keep one ({where})")
    # As in Hydra, a file's own keys come last unless `_self_` says otherwise.
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            yield own
        elif isinstance(entry, str):
            yield from _layers(_included(entry, path, where), (*including, resolved))
        else:
            yield Layer(own.source, _variant_tree(entry, where), own.lines)


def _included(entry: str, path: Path, where: str) -> Path:
    names = [entry] if entry.endswith(_SUFFIXES) else [f"{entry}{s}" for s in _SUFFIXES]
    beside = [path.parent / name for name in names if (path.parent / name).is_file()]
    if beside:
        return beside[0]
    if entry in available_recipes():
        return RECIPES / f"{entry}.yaml"
    raise ConfigError(
        f"`defaults` includes {entry!r}, which is neither a file beside it nor a shipped recipe "
        f"({where}); {_choices(entry)}"
    )


def _variant_tree(entry: Any, where: str) -> dict[str, Any]:
    """Turn `algorithm/policy_loss: reinforce` into the tree that says the same."""
    pair = list(entry.items()) if isinstance(entry, dict) else []
    if len(pair) != 1 or not isinstance(pair[0][1], str):
        raise ConfigError(
            f"an entry of `defaults` must be a recipe or GROUP: VARIANT, got {entry!r} ({where})"
        )
    group, tree = pair[0]
    for key in reversed(group.removeprefix("override ").strip("/").split("/")):
        tree = {key: tree}
    return dict(tree)


def _read(path: Path) -> Layer:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"recipe {path} has more than {MOST_BYTES:,} bytes; give a recipe, not data"
            )
        text = content.decode("utf-8")
        tree, lines = _parse(text)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"recipe {path} is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else "?"
        problem = " ".join((error.problem or error.context or "syntax error").split())
        raise ConfigError(f"recipe {path}, line {line}: {problem}; mend the YAML there") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"character {text[error.position]!r} is not allowed"
        raise ConfigError(f"recipe {path}, line {line}: {problem}; remove it") from None
    except RecursionError:
        raise ConfigError(f"recipe {path} is nested too deeply; flatten it") from None
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        raise ConfigError(f"recipe {path} must hold sections (`optim:` …), got a {kind}")
    return Layer(str(path), tree, lines)


def _parse(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    loader = _RecipeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        _count(node, {}, frozenset())
        lines = dict(_lines(node, ()))
        return loader.construct_document(node), lines
    finally:
        loader.dispose()


def _fault(node: Node, problem: str) -> ConstructorError:
    return ConstructorError(None, None, problem, node.start_mark)


def _count(node: Node, sizes: dict[Node, int], around: frozenset[Node]) -> int:
    """Count values; refuse anchors that hold themselves or make a short file a giant.

    An anchor stands in the tree once and is written out as often as it is named, in each anchor
    around it again ("billion laughs"); so it is counted once and multiplied.
    """
    if node in around:
        raise _fault(node, "an anchor contains itself")
    if node not in sizes:
        children: list[Node] = []
        if isinstance(node, SequenceNode):
            children = node.value
        elif isinstance(node, MappingNode):
            children = [part for pair in node.value for part in pair]
        sizes[node] = 1 + sum(_count(child, sizes, around | {node}) for child in children)
        if sizes[node] > MOST_NODES:
            raise _fault(
                node, f"more than {MOST_NODES:,} values, anchors written out; repeat fewer anchors"
            )
    return sizes[node]


def _lines(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the line of each key."""
    if isinstance(node, SequenceNode):
        for item in node.value:
            yield from _lines(item, (*path, "[]"))
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            here = (*path, key.value) if isinstance(key, ScalarNode) else path
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)


class _RecipeLoader(yaml.SafeLoader):
    """YAML 1.2's plain values only; keys are always text and never appear twice."""

    def construct_scalar(self, node: ScalarNode | MappingNode) -> Any:
        text = super().construct_scalar(node)
        if not is_encodable(text):
            raise _fault(node, "half a character (surrogate)")
        return text

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # A number of thousands of digits, or a tag that its text does not fit (`!!int x`).
        except (ValueError, LookupError):
            shown = str(node.value)
            shown = shown if len(shown) <= 40 else f"{shown[:39]}…"
            kind = node.tag.removeprefix(_TAG)
            raise _fault(node, f"{shown!r} cannot be read as {kind}") from None

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise _fault(key, "a key must be text")
            if key.tag != f"{_TAG}merge":
                key.tag = f"{_TAG}str"
                if key.value in seen:
                    raise _fault(key, f"the key {key.value!r} appears twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _RecipeDumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something else than text."""

    def represent_text(self, text: str) -> ScalarNode:
        """Represent text; `next line`, which PyYAML would write as a line's end, is escaped."""
        return self.represent_scalar(f"{_TAG}str", text, style='"' if "\x85" in text else None)


_TAG = "tag:yaml.org,2002:"
_KINDS = {"bool", "int", "float", "null", "str", "seq", "map"}
_RecipeDumper.add_representer(str, _RecipeDumper.represent_text)
_RecipeLoader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    for _class in (_RecipeLoader, _RecipeDumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))
_RecipeLoader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in _KINDS
}
