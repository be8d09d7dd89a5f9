"""The size of the source, a row a package, and what a command runs and imports of it.

    python -m benchmarks.size                       # the table, beside the budget
    python -m benchmarks.size --path quickstart     # and what a short run passes through
    python -m benchmarks.size --imports             # and the CPU time of importing the trainer
    python -m benchmarks.size --sample --reward --publication  # and what these pass through

Code is a line that is neither blank, comment nor docstring. The path of a recipe counts the modules
of which a function runs while two small steps are trained, and those that are only imported. A call
counts what runs in the run's own process, in all threads, while it lasts.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "winnow"
BUDGET = ROOT / "tests" / "budget.toml"


@dataclass
class Size:
    """What a package holds."""

    files: int = 0
    lines: int = 0
    code: int = 0
    docstrings: int = 0
    functions: int = 0

    def add(self, other: Size) -> None:
        """Count another's, too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def size_of(path: Path) -> Size:
    """The size of one file; `docstrings` counts their lines."""
    text = path.read_text(encoding="utf-8")
    docstring_lines, in_texts = set[int](), set[int]()
    functions = 0
    for node in ast.walk(ast.parse(text)):
        functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        match node:
            # Docstrings of fields are strings that stand alone, too.
            case ast.Expr(value=ast.Constant(value=str())):
                docstring_lines |= _lines(node)
            case ast.Constant(value=str()) | ast.JoinedStr():
                in_texts |= _lines(node)
    written = {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    return Size(
        files=1,
        lines=text.count("\n"),
        code=len((written | in_texts) - docstring_lines),
        docstrings=len(docstring_lines),
        functions=functions,
    )


def _lines(node: ast.expr | ast.stmt) -> set[int]:
    assert node.end_lineno is not None
    return set(range(node.lineno, node.end_lineno + 1))


def sizes(source: Path = SOURCE) -> dict[str, Size]:
    """Each package's size by its name; modules beside the packages are `winnow`'s own."""
    found: dict[str, Size] = defaultdict(Size)
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        found[parts[0] if len(parts) > 1 else "winnow"].add(size_of(path))
    return dict(found)


def budget() -> dict[str, int]:
    """Lines of code that each package may have, and `files` and `total` for all of them."""
    with BUDGET.open("rb") as file:
        read: dict[str, int] = tomllib.load(file)
    return read


def print_sizes() -> None:
    """Print a row a package, and their sum."""
    allowed, total = budget(), Size()
    row = "{:<12} {:>6} {:>7} {:>7} {:>7} {:>11} {:>10}"
    print(row.format("package", "files", "lines", "code", "budget", "docstrings", "functions"))
    for name, size in sorted(sizes().items()):
        total.add(size)
        shown = size.files, size.lines, size.code, allowed.get(name, "-")
        print(row.format(name, *shown, size.docstrings, size.functions))
    shown = total.files, total.lines, total.code, allowed["total"]
    print(row.format("all", *shown, total.docstrings, total.functions))


TRACER = """
import atexit, os, sys, threading
import_depth = threading.local()
seen = set()
active = True
def profile(frame, event, argument):
    if active and event == "call":
        code = frame.f_code
        # A class body and a module have no fast locals of their own; a function has.
        if code.co_flags & 1 and "/src/winnow/" in code.co_filename:
            seen.add((code.co_filename, code.co_name, code.co_firstlineno))
def write():
    sys.setprofile(None)
    imported = [m.__file__ for n, m in list(sys.modules.items())
                if n.split(".")[0] == "winnow" and getattr(m, "__file__", None)]
    with open(os.environ["WINNOW_PATH_OUT"], "w") as out:
        for file, name, line in sorted(seen): out.write(f"ran {file} {name} {line}\\n")
        for file in sorted(imported): out.write(f"imported {file}\\n")
"""

RUN = """
from winnow.cli.main import main
sys.argv = ["winnow", *sys.argv[1:]]
atexit.register(write)
threading.setprofile(profile)
sys.setprofile(profile)
main()
"""

ONLY_IN = """
active = False
import functools, importlib
place, _, name = os.environ["WINNOW_PATH_CALL"].partition(":")
owner = getattr(importlib.import_module(place), name.split(".")[0])
method = getattr(owner, name.split(".")[1])
@functools.wraps(method)
async def traced(*arguments, **options):
    global active
    active = True
    try:
        return await method(*arguments, **options)
    finally:
        active = False
setattr(owner, name.split(".")[1], traced)
"""

ONE_GROUP = (
    *("trainer.steps=1", "trainer.mini_batch_groups=1", "sampling.groups_per_step=1"),
    *("sampling/filter=none", "rollout.n=2"),
)
CALLS = {
    "sample": ("winnow.sampling.stream:Sampler.step", ONE_GROUP),
    "reward": ("winnow.rewards.rewards:Rewards.score", ONE_GROUP),
    "publication": (
        "winnow.rollout.remote_engine:RemoteEngine.load_weights",
        (*ONE_GROUP, "rollout.engine.processes=1"),
    ),
}
"""One prompt with two answers; one answer's reward; one set of weights to an engine's process."""

SHORT = (
    *("trainer.steps=2", "evaluation.n=1", "data.task.eval_problems=4", "optim.warmup_steps=1"),
    *("observe.console=off", "run.name=path", "rollout.n=4", "sampling.groups_per_step=16"),
)


def traced(recipe: str, *settings: str, call: str = "") -> list[list[str]]:
    """Train two small steps of a recipe; rows of what ran, all of it or in a call, and imports."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "path.txt"
        program = TRACER + (ONLY_IN if call else "") + RUN
        subprocess.run(
            [sys.executable, "-c", program, "train", recipe, *SHORT, *settings],
            cwd=scratch,
            check=True,
            env={
                **os.environ,
                **{"WINNOW_PATH_OUT": str(out), "WINNOW_PATH_CALL": call, "OMP_NUM_THREADS": "1"},
            },
        )
        return [line.split() for line in out.read_text().splitlines()]


def print_files(title: str, files: set[str]) -> None:
    """Print how many modules and lines these are, and their names."""
    lines = sum(size_of(Path(file)).lines for file in files)
    print(f"\n{title} {len(files)} modules, {lines:,} lines:")
    print("  " + "\n  ".join(sorted(str(Path(file).relative_to(SOURCE)) for file in files)))


def print_path(recipe: str) -> None:
    """Print the modules that a recipe runs and imports."""
    rows = traced(recipe)
    ran = {row[1] for row in rows if row[0] == "ran"}
    # A package's own file holds a docstring, no module that anybody reads.
    imported = {row[1] for row in rows if row[0] == "imported"} - ran
    print_files(f"{recipe} runs through", ran)
    print_files(f"{recipe} only imports", {file for file in imported if size_of(Path(file)).code})


def print_call(name: str) -> None:
    """Print the functions and modules that one of `CALLS` passes through."""
    call, settings = CALLS[name]
    ran = [row for row in traced("quickstart", *settings, call=call) if row[0] == "ran"]
    print_files(f"{name} runs {len(ran)} functions of", {row[1] for row in ran})
    print("  " + ", ".join(f"{Path(row[1]).stem}.{row[2]}" for row in ran))


IMPORTS = """
import resource, sys, time
import torch, transformers, pyarrow.parquet, pydantic, rich.console, rich.table, rich.live
import matplotlib.figure, typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
began = time.process_time()
import winnow.cli.main, winnow.commands.train
print(f"importing winnow.commands.train: {time.process_time() - began:.2f} s of CPU beyond torch, "
      "transformers, pyarrow, pydantic, rich, typer and matplotlib")
"""


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--path", metavar="RECIPE", help="trace a short run of this recipe")
    parser.add_argument("--imports", action="store_true", help="time the imports")
    for name, (call, _) in CALLS.items():
        shown = f"trace {call} in the quickstart"
        parser.add_argument(
            f"--{name}", dest="calls", action="append_const", const=name, help=shown
        )
    asked = parser.parse_args()
    print_sizes()
    if asked.imports:
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    if asked.path:
        print_path(asked.path)
    for name in asked.calls or ():
        print_call(name)


if __name__ == "__main__":
    main()
