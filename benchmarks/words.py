"""The share of house words among the parts of all names in a package.

    python -m benchmarks.words [FOLDER ...] [--words WORD ...]

Names are those of variables, attributes that are assigned, arguments, functions and classes, each
where it is bound; their parts are split at underscores and capitals. House words are those that
say little to a reader from elsewhere (`found`, `told`, `own`); prints their share, the count of
each, and the files with most of them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HOUSE_WORDS = frozenset(
    (
        *("own", "found", "said", "told", "given", "held", "made", "kept", "there", "here"),
        *("wanted", "known", "asked", "more", "words", "others", "beside", "apart", "left"),
    )
)
"""Words of identifiers that stand for a relation or a deed where a noun of the field is due."""
_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a module binds, where it binds it."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def parts_of(name: str) -> list[str]:
    """Split a name into its words, in lower case. Example: `EngineGroup` gives engine, group."""
    return [part.lower() for part in _PART.findall(name)]


def house_words(
    folders: list[Path], words: frozenset[str] = HOUSE_WORDS
) -> tuple[Counter[str], Counter[str], int]:
    """Count house words among the parts of names: by word, by file, and the parts in all."""
    by_word, by_file, total = Counter[str](), Counter[str](), 0
    for path in sorted(file for folder in folders for file in folder.rglob("*.py")):
        for name in bound_names(ast.parse(path.read_text())):
            parts = parts_of(name)
            total += len(parts)
            by_word.update(hits := [part for part in parts if part in words])
            by_file[str(path)] += len(hits)
    return by_word, by_file, total


def main() -> None:
    """Print the share, and where it comes from."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("src/winnow")])
    parser.add_argument("--words", nargs="*", default=sorted(HOUSE_WORDS))
    asked = parser.parse_args()
    by_word, by_file, total = house_words(asked.folders, frozenset(asked.words))
    count = by_word.total()
    print(f"{count:,} of {total:,} parts of names: {count / max(total, 1):.2%}")
    print(", ".join(f"{word} {times}" for word, times in by_word.most_common()))
    for path, times in by_file.most_common(15):
        print(f"{times:>5}  {path}")


if __name__ == "__main__":
    main()
