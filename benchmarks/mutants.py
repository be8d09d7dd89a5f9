"""Break one line of the source at a time, and see whether the tests notice.

    OMP_NUM_THREADS=1 python -m benchmarks.mutants [--only ROOM ...] [--list FOLDER] [--tree TREE]

A mutant is an entry of benchmarks/mutants/ROOM.toml: a `file`, a text to `find` that stands in it
once, what to `replace` it with, and the `tests` that are expected to fail. Each is applied to a
copy of the tree, never to the tree itself. The exit code is the number of mutants that survive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md")
TIME_LIMIT_S = 300
TESTS_FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    room: str
    name: str
    file: str
    find: str
    replace: str
    tests: list[str]


def read(folder: Path) -> list[Mutant]:
    """All mutants of a folder's lists, by room."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
        found += [Mutant(path.stem, **entry) for entry in entries]
    return found


def verdict(mutant: Mutant, tree: Path) -> str:
    """`caught`, or why not: `survived`, `not found` (the text has moved), `no tests`."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.find) != 1:
        return "not found"
    path.write_text(text.replace(mutant.find, mutant.replace), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
    # Ahead of the installed package, in the processes that tests start as well.
    paths = os.pathsep.join([str(tree / "src"), str(tree)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "caught"  # a hang is seen
    finally:
        path.write_text(text, encoding="utf-8")
    if run.returncode == TESTS_FAILED or b"error" in run.stdout.splitlines()[-1:]:
        return "caught"
    return "survived" if run.returncode == 0 else f"no verdict (pytest said {run.returncode})"


def main() -> None:
    """Try the mutants, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="ROOM", help="lists to try")
    parser.add_argument("--list", type=Path, default=ROOT / "benchmarks" / "mutants")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the source tree to break a copy of"
    )
    asked = parser.parse_args()
    mutants = [m for m in read(asked.list) if not asked.only or m.room in asked.only]
    survivors = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "winnow"
        for name in COPIED:
            source = asked.tree / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            copy(source, tree / name)
        for mutant in mutants:
            said = verdict(mutant, tree)
            survivors += said != "caught"
            print(f"{said:<10} {mutant.room}: {mutant.name}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} caught")
    sys.exit(survivors)


if __name__ == "__main__":
    main()
