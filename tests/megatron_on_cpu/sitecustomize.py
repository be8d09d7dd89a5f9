"""Megatron's answers on a CPU for every Python process with this folder in its PYTHONPATH.

Python imports a module of this name at its start. This one costs a process nothing that does not
use megatron-core: it waits for `megatron.core` to be imported, and installs `cuda_answers` then.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
ANSWERS = "tests.megatron_on_cpu.cuda_answers"


class AfterMegatron(MetaPathFinder):
    """Lets `megatron.core` be imported as it is, and installs the answers behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `megatron.core`, and nothing for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name == "megatron.core" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            # Under the name that tests use: there is one such module in a process.
            if ANSWERS not in sys.modules:
                run(ANSWERS, FOLDER / "cuda_answers.py")
            sys.modules[ANSWERS].install()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def run(name: str, file: Path) -> None:
    """Import a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def run_next_one() -> None:
    """Run the sitecustomize that Python would have found without this folder."""
    others = [entry for entry in sys.path if Path(entry).resolve() != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.origin is not None:
        run("_next_sitecustomize", Path(spec.origin))


sys.meta_path.insert(0, AfterMegatron())
run_next_one()
