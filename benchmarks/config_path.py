"""The way of the root configuration through a start: who receives it, and in which packages.

    python -m benchmarks.config_path [RECIPE] [OVERRIDE ...] [--source TREE]

Starts a training run in a process that is watched by `sys.setprofile`, from the first call until
its loop begins, and counts the functions of winnow that receive the root configuration, or an
object that holds it (as an attribute, or in a tuple, list or dict), by an argument. `--source`
takes another checkout of Winnow, to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SETTINGS = (
    "run.name=followed",
    "trainer.steps=1",
    "evaluation.before=false",
    "observe.console=off",
)


class _Started(BaseException):
    """The loop has begun."""


def holds_config(value: object) -> bool:
    """Return whether a value is the root configuration, or holds it directly."""
    kinds = [type(value)]
    if isinstance(value, tuple | list):
        kinds += map(type, value)
    elif isinstance(value, dict):
        kinds += map(type, value.values())
    else:
        kinds += map(type, getattr(value, "__dict__", {}).values())
    return any(k.__name__ == "Config" and k.__module__ == "winnow.config.root" for k in kinds)


def follow(arguments: list[str], report: Path) -> None:
    """Run `winnow` with arguments in this process until the loop begins; write the calls."""
    from winnow.cli import main

    calls: Counter[CodeType] = Counter()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or f"winnow{os.sep}" not in code.co_filename:
            return
        if code.co_name == "train" and code.co_filename.endswith("loop.py"):
            sys.setprofile(None)
            raise _Started
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(holds_config(frame.f_locals.get(name)) for name in names):
            calls[code] += 1

    sys.argv = ["winnow", *arguments]
    sys.setprofile(watch)
    try:
        main()
    except _Started:
        pass
    finally:
        sys.setprofile(None)
        found = [(c.co_filename, c.co_qualname, count) for c, count in calls.items()]
        report.write_text(json.dumps(found))


def count(recipe: str, overrides: list[str], source: Path) -> dict[str, int]:
    """Return numbers of calls, functions, files and packages on the way."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "calls.json"
        command = [sys.executable, "-m", "benchmarks.config_path", "--report", str(report)]
        path = os.pathsep.join([str(source / "src"), str(REPOSITORY)])
        subprocess.run(
            [*command, "train", recipe, *SETTINGS, *overrides],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            check=False,
            stdout=subprocess.DEVNULL,
        )
        rows = json.loads(report.read_text())
    root = str(source / "src" / "winnow") + os.sep
    files = {name.removeprefix(root) for name, _, _ in rows}
    return {
        "calls": sum(number for _, _, number in rows),
        "functions": len(rows),
        "files": len(files),
        "packages": len({name.partition(os.sep)[0] for name in files}),
    }


def main() -> None:
    """Print the numbers, or, with `--report`, follow a command in this process."""
    if sys.argv[1:2] == ["--report"]:
        follow(sys.argv[3:], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--source", type=Path, default=REPOSITORY, help="a checkout of Winnow")
    options = parser.parse_args()
    numbers = count(options.recipe, options.overrides, options.source.resolve())
    print(", ".join(f"{number} {name}" for name, number in numbers.items()))


if __name__ == "__main__":
    main()
