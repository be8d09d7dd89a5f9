"""Break one line of the source at a time, and see whether the tests notice.

    python -m benchmarks.mutants [--only ROOM ...] [--list FOLDER] [--tree TREE] [-j N] [--check]

A mutant is an entry of benchmarks/mutants/ROOM.toml: a `file`, a text to `find` that stands in it
once, what to `replace` it with, and the `tests` that are expected to fail. Each is applied to a
copy of the tree, never to the tree itself. The tests run in a process forked from this one, which
has imported what Winnow builds upon, and nothing of Winnow. The exit code is the number of mutants
that survive; `--check` only sees that each entry's text and tests are there.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import gc
import importlib
import os
import py_compile
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md")
PRELOADED = (
    *("pytest", "hypothesis", "numpy", "torch", "torch.distributed", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.device_mesh"),
    *("pydantic", "typer.testing", "rich.console", "yaml", "httpx", "fsspec", "hydra", "omegaconf"),
    *("pyarrow.parquet", "pyarrow.compute", "safetensors.torch", "tokenizers", "transformers"),
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
FIRST_PARTY = ("winnow", "tests", "benchmarks")
LOG = "pytest.log"
TIME_LIMIT_S = 300
TESTS_PASSED, TESTS_FAILED = 0, 1


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
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
        mutants += [Mutant(path.stem, **entry) for entry in entries]
    return mutants


def stale(mutant: Mutant, tree: Path) -> str:
    """The reason why a mutant cannot be tried on a tree, whose text or test is gone; "" if none."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (times := text.count(mutant.find)) != 1:
        return f"its text stands {times} times in {mutant.file}"
    arguments = iter(mutant.tests)
    selected = []
    for argument in arguments:
        if argument == "-k":
            selected += re.findall(r"\w+", next(arguments))
            continue
        file, _, test = argument.partition("::")
        if not (tree / file).is_file():
            return f"no file {file}"
        if test and test.partition("[")[0] not in _functions(tree / file):
            return f"no test {argument}"
    words = {*selected} - {"and", "or", "not"}
    files = [(tree / t).read_text() for t in mutant.tests if t.endswith(".py")]
    missing = [word for word in words if not any(word in text for text in files)]
    return f"no test is selected by {missing[0]}" if missing else ""


@cache
def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in tree.body if isinstance(node, kinds)}


class Trial:
    """A mutant in a copy of the tree, and the process that runs its tests."""

    def __init__(self, mutant: Mutant, tree: Path) -> None:
        self.mutant, self.tree = mutant, tree
        self._path = tree / mutant.file
        self._text = self._path.read_text(encoding="utf-8")
        self._started = time.monotonic()
        self._path.write_text(self._text.replace(mutant.find, mutant.replace), encoding="utf-8")
        self._pid = os.fork()
        if self._pid == 0:
            _run_tests(mutant.tests, tree)
        self.ends = os.pidfd_open(self._pid)

    def overdue(self) -> bool:
        """Whether the tests take longer than any should."""
        return time.monotonic() - self._started > TIME_LIMIT_S

    def end(self) -> tuple[str, float, str]:
        """End what still runs, mend the tree; the verdict, CPU seconds and the test that failed.

        The verdict is `caught` or `survived`, or that there is none; a hang is caught.
        """
        overdue = self.overdue()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        _, status, usage = os.wait4(self._pid, 0)
        os.close(self.ends)
        self._path.write_text(self._text, encoding="utf-8")
        code = os.waitstatus_to_exitcode(status)
        verdicts = {TESTS_PASSED: "survived", TESTS_FAILED: "caught"}
        verdict = verdicts.get(code, f"no verdict (pytest said {code})")
        lines = (self.tree / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), "")
        seconds = usage.ru_utime + usage.ru_stime
        return ("caught", seconds, "hangs") if overdue else (verdict, seconds, failed)


def _run_tests(arguments: Sequence[str], tree: Path) -> NoReturn:
    """Be a process that began with pytest in a tree."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(tree / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    first = [str(tree / "src"), str(tree)]
    # For the processes that tests start, too. A test's file would be compiled anew each time it
    # is written; a mutant may have the size and the second of its source.
    os.environ.update(PYTHONPATH=os.pathsep.join(first), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:] = first + [p for p in sys.path if Path(p).resolve() not in (ROOT, ROOT / "src")]
    for name in [n for n in sys.modules if n.partition(".")[0] in FIRST_PARTY]:
        del sys.modules[name]
    code: int = TESTS_FAILED + 1
    try:
        import pytest

        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(code)  # neither this program's exit handlers nor its folders are the child's


def run(
    mutants: Sequence[Mutant],
    trees: Sequence[Path],
    tell: Callable[[Mutant, str, float, str], None],
) -> None:
    """Try mutants, one at a time in each copy of the tree."""
    waiting, free = list(reversed(mutants)), list(trees)
    running: list[Trial] = []
    try:
        while waiting or running:
            while waiting and free:
                running.append(Trial(waiting.pop(), free.pop()))
            ended, _, _ = select.select([trial.ends for trial in running], [], [], 1.0)
            for trial in [t for t in running if t.ends in ended or t.overdue()]:
                running.remove(trial)
                tell(trial.mutant, *trial.end())
                free.append(trial.tree)
    finally:
        for trial in running:
            trial.end()


def copies(tree: Path, scratch: Path, count: int) -> Iterator[Path]:
    """Copies of a tree whose compiled source is used only where it is that of the source."""
    for i in range(count):
        copy = scratch / str(i)
        for name in COPIED:
            source = tree / name
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy / name)
            else:
                shutil.copy2(source, copy / name)
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / "src", quiet=2, force=True, invalidation_mode=checked)
        yield copy


def preload() -> None:
    """Import what the tests of each mutant would import."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Try the mutants, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="ROOM", help="lists to try")
    parser.add_argument("--list", type=Path, default=ROOT / "benchmarks" / "mutants")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the source tree to break a copy of"
    )
    parser.add_argument("-j", type=int, default=2, metavar="N", help="mutants tried at once")
    parser.add_argument("--check", action="store_true", help="run no test")
    options = parser.parse_args()
    mutants = [m for m in read(options.list) if not options.only or m.room in options.only]
    caught = 0

    def tell(mutant: Mutant, verdict: str, seconds: float, failed: str) -> None:
        nonlocal caught
        caught += verdict == "caught"
        print(f"{verdict:<10} {seconds:5.1f} s {mutant.room}: {mutant.name}")
        print(f"                   {failed[:200]}", flush=True)

    ready = []
    for mutant in mutants:
        if reason := stale(mutant, options.tree):
            print(f"stale      {mutant.room}: {mutant.name}: {reason}", flush=True)
        else:
            ready.append(mutant)
    if options.check:
        sys.exit(len(mutants) - len(ready))
    preload()
    with tempfile.TemporaryDirectory() as scratch:
        run(ready, list(copies(options.tree, Path(scratch), options.j)), tell)
    print(f"{caught} of {len(mutants)} caught")
    sys.exit(len(mutants) - caught)


if __name__ == "__main__":
    main()
