"""Recipe files: YAML with the lines of its keys, and the recipes it includes.

The YAML is that of version 1.2 where the two differ, as in Hydra's grammar: `1e-6` is a
number, and of the bare words only true and false are truth values (`console: off` is text).
"""

from __future__ import annotations

import difflib
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from winnow.config.schema import quote
from winnow.errors import ConfigError, WinnowError
from winnow.version import __version__

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
MAX_FILE_BYTES = 1_000_000
"""Most bytes of one file; the longest that ships has 4,000."""
MAX_NODES = 20_000
"""Most keys and items of lists of one file, each as often as anchors repeat it."""
MAX_FILES = 100
"""Most files that a recipe may take in, each as often as it is included."""
VERSION_PREFIX = "# Written by winnow "
"""Beginning of the first line of a recipe that a run keeps; its version and name follow."""
_HEAD = re.compile(
    rf"{VERSION_PREFIX}(\d{{1,9}}(?:\.\d{{1,9}})*)(?: from the recipe (\S.*))?".encode()
)
_EVALUATION = "eval_"


class Layer(NamedTuple):
    """Keys of one file, to be applied over those of earlier files."""

    source: str
    """Name of the file in messages."""
    tree: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]
    """Line of each key and of each item of a list."""

    def source_of(self, path: tuple[str, ...]) -> str:
        """Return where a key is set: file and line."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.source}, line {self.lines[path]}" if path else self.source


def available_recipes() -> list[str]:
    """Return the names of the training recipes that ship with Winnow."""
    names = (path.stem for path in RECIPES.glob("*.yaml"))
    return sorted(name for name in names if not name.startswith(_EVALUATION))


def evaluation_recipes() -> list[str]:
    """Return the names of the shipped recipes that only evaluate, for `winnow eval --recipe`."""
    return sorted(path.stem[len(_EVALUATION) :] for path in RECIPES.glob(f"{_EVALUATION}*.yaml"))


def recipe_title(name: str) -> str:
    """Return the first sentence of the comment at the head of a shipped recipe."""
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = " ".join(line[2:] for line in itertools.takewhile(lambda line: line[:2] == "# ", lines))
    return textwrap.shorten(re.split(r"(?<!Dr)[.:](?: [A-Zw]|$)", head)[0], 100, placeholder="…")


def resolve_evaluation_recipe(name: str) -> str:
    """Return the path of a shipped evaluation recipe, or the name of another recipe as it is."""
    return str(RECIPES / f"{_EVALUATION}{name}.yaml") if name in evaluation_recipes() else name


def read_layers(recipe: str) -> list[Layer]:
    """Read the file of a recipe and all it includes, in the order in which they apply.

    Raises:
        ConfigError: a file is missing, unreadable, no YAML, includes itself, or asks for more
            than any recipe needs.
        WinnowError: a newer version has written one.
    """
    shipped = RECIPES / f"{recipe}.yaml"
    files = [shipped if recipe in available_recipes() else Path(recipe)]
    return list(_iter_layers(_find_recipe_file(recipe, files, ""), (), []))


def recipe_name(recipe: str) -> str | None:
    """Return the name of a recipe as a run records it: a shipped one's, or that of a file.

    A file that a run wrote has the name that was recorded in it, if any.
    """
    head = b""
    with suppress(OSError), Path(recipe).open("rb") as file:
        head = file.readline(MAX_FILE_BYTES)
    name = recorded_recipe(head) if _HEAD.match(head) else Path(recipe).name
    if not _HEAD.match(head) and name != recipe and name in available_recipes():
        name = f"./{name}"  # a file that has the name of a shipped one
    return name if name and name.isprintable() else None


def recorded_recipe(content: bytes) -> str | None:
    """Return the name of the recipe in the first line of a run's config.yaml, None without one."""
    written = _HEAD.match(content)
    return written[2].decode(errors="replace") if written and written[2] else None


def is_encodable(text: str) -> bool:
    """Return whether text can be written to a file: it holds no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return a tree as the text of a recipe file."""
    text = yaml.dump(tree, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=100)
    return str(text)


def _find_recipe_file(recipe: str, files: list[Path], included: str) -> Path:
    """Return the first existing file of the candidates for a recipe."""
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        near = difflib.get_close_matches(Path(recipe).stem, available_recipes(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"recipe {recipe!r}{included} not found{hint}; give the path of a YAML file, or a name "
            "that `winnow recipes` lists"
        )
    return path


def _iter_layers(path: Path, around: tuple[Path, ...], read: list[Path]) -> Iterator[Layer]:
    """Yield a file's own keys and the layers that it includes; `read` counts the files."""
    resolved = path.resolve()
    if resolved in around:
        chain = " -> ".join(p.name for p in (*around[around.index(resolved) :], resolved))
        raise ConfigError(f"recipe {path} includes itself ({chain}); remove it from `defaults`")
    # Files that include one another twice each grow as anchors do: they are counted as they come.
    read.append(path)
    if len(read) > MAX_FILES:
        raise ConfigError(
            f"recipe {read[0]} includes more than {MAX_FILES} recipes, the last of them {path}; "
            "include each only once in `defaults`"
        )
    layer = _read_layer(path)
    where = layer.source_of(("defaults",))
    entries = layer.tree.pop("defaults", [])
    if not isinstance(entries, list) or entries.count("_self_") > 1:
        raise ConfigError(
            "`defaults` must be a list of recipes, with _self_ at most once, "
            f"got {quote(entries)} ({where})"
        )
    # As in Hydra, a file's own keys come last unless `_self_` says otherwise.
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            yield layer
        elif isinstance(entry, str):
            names = [f"{entry}.yaml", f"{entry}.yml"]
            names = [entry] if entry.endswith((".yaml", ".yml")) else names
            files = [path.parent / name for name in names]
            files += [RECIPES / f"{entry}.yaml"] if entry in available_recipes() else []
            included = _find_recipe_file(entry, files, f" in `defaults` ({where})")
            yield from _iter_layers(included, (*around, resolved), read)
        else:
            yield Layer(layer.source, _parse_variant_entry(entry, where), layer.lines)


def _parse_variant_entry(entry: Any, where: str) -> dict[str, Any]:
    """Parse an entry such as `algorithm/policy_loss: reinforce` into a tree of keys."""
    pair = list(entry.items()) if isinstance(entry, dict) else []
    if len(pair) != 1 or not isinstance(pair[0][1], str):
        raise ConfigError(
            f"an entry of `defaults` must be a recipe or GROUP: VARIANT, got {entry!r} ({where})"
        )
    group, tree = pair[0]
    for key in reversed(group.removeprefix("override ").strip("/").split("/")):
        tree = {key: tree}
    return dict(tree)


def _read_layer(path: Path) -> Layer:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    written = _HEAD.match(content)
    version = written[1].decode() if written else "0"
    if [int(n) for n in version.split(".")] > [int(n) for n in __version__.split(".")]:
        raise WinnowError(
            f"{path} was written by winnow {version}, and this is {__version__}; upgrade "
            "winnow-rl, or remove its first line to read it anyway"
        )
    return parse_layer(content, str(path))


def parse_layer(content: bytes, source: str) -> Layer:
    """Read the text of one recipe file.

    Args:
        source: names the file in messages.

    Raises:
        ConfigError: it is no YAML, or asks for more than any recipe needs.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"recipe {source} exceeds {MAX_FILE_BYTES:,} bytes; give a recipe, not data"
        )
    try:
        loader, lines = _RecipeLoader(content), dict[tuple[str, ...], int]()
        if (node := loader.get_single_node()) is not None:
            _check_node(node, (), (), lines)
        tree = {} if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"recipe {source} is not text in UTF-8 (position {error.position}: {error.reason}); "
            "save it as UTF-8, without control characters"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else "?"
        problem = " ".join((error.problem or error.context or "syntax error").split())
        raise ConfigError(f"recipe {source}, line {line}: {problem}; fix the YAML there") from None
    except RecursionError:
        raise ConfigError(f"recipe {source} is nested too deeply; flatten it") from None
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        raise ConfigError(f"recipe {source} must hold sections (`optim:` …), got a {kind}")
    return Layer(source, tree, lines)


def _check_node(
    node: Node, path: tuple[str, ...], around: tuple[Node, ...], lines: dict[tuple[str, ...], int]
) -> None:
    """Note the line of each key and item; refuse what no recipe holds.

    That is: a key that is no text or appears twice, a tag that makes an object, and anchors that
    hold themselves or make a short file a giant ("billion laughs").
    """
    if node in around:
        raise _yaml_error(node, "an anchor contains itself")
    if len(lines) > MAX_NODES:
        raise _yaml_error(
            (*around, node)[1],
            f"more than {MAX_NODES:,} values after expanding anchors; use fewer anchors",
        )
    if node.tag not in _TAGS:
        raise _yaml_error(node, f"the tag {node.tag!r} is not known")
    if isinstance(node, ScalarNode) and not is_encodable(node.value):
        raise _yaml_error(node, "half a character (surrogate)")
    for name, start, value in _node_entries(node):
        place = (*path, name)
        if place in lines:
            raise _yaml_error(start, f"the key {name!r} appears twice")
        lines[place] = start.start_mark.line + 1
        _check_node(value, place, (*around, node), lines)


def _node_entries(node: Node) -> Iterator[tuple[str, Node, Node]]:
    """Yield name, start and value of each entry; the name of a list's item is its index."""
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield str(index), item, item
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or not is_encodable(key.value):
                raise _yaml_error(key, "a key must be text")
            if key.tag != f"{_TAG}merge":
                key.tag = f"{_TAG}str"
            yield key.value, key, value


def _yaml_error(node: Node, problem: str) -> ConstructorError:
    return ConstructorError(None, None, problem, node.start_mark)


class _RecipeLoader(yaml.SafeLoader):
    """Knows YAML 1.2's plain values only."""

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # A number of thousands of digits, or a tag that its text does not fit (`!!int x`).
        except (ValueError, LookupError):
            kind = node.tag.removeprefix(_TAG)
            raise _yaml_error(node, f"{quote(node.value)} cannot be read as {kind}") from None


class _RecipeDumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something else than text."""

    def represent_text(self, text: str) -> ScalarNode:
        """Represent text; `next line`, which PyYAML would write as a line's end, is escaped."""
        return self.represent_scalar(f"{_TAG}str", text, style='"' if "\x85" in text else None)


_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in ("bool", "int", "float", "null", "str", "seq", "map")}
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
