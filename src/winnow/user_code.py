"""Loading of a user's own Python: a class or function that a recipe names by its place.

A place is `FILE.py:NAME` or `package.module:NAME`. A file may import its neighbours, as when
`python FILE.py` runs it. `program:NAME` is an object of the running program that no other process
can import, such as a lambda or a notebook's function.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from winnow.errors import WinnowError

PROGRAM = "program"
"""The module in the place of an object of the running program."""
program_objects: dict[str, Any] = {}
"""These objects, by name."""
_refusal = ""
"""The reason why this process runs no code of users; empty where it does."""


def disable_user_code(reason: str) -> None:
    """Refuse to import user code in this process from now on.

    Args:
        reason: and remedy, as the end of a message.
    """
    global _refusal
    _refusal = reason


def place_of(thing: Callable[..., Any]) -> str:
    """Return the place of a function or class that other processes can import, else its name
    alone: that of a lambda, of a local function, or of the program that runs."""
    name = getattr(thing, "__qualname__", type(thing).__name__).rpartition(".")[2]
    module = sys.modules.get(getattr(thing, "__module__", None) or "__main__")
    if (
        module is None
        or module is sys.modules["__main__"]
        or getattr(module, name, None) is not thing
    ):
        return name if name.isidentifier() else "function"
    is_alone = "." not in module.__name__ and not hasattr(module, "__path__")
    file = getattr(module, "__file__", None) or ""
    return f"{file if is_alone and file.endswith('.py') else module.__name__}:{name}"


def load_user_object(
    place: str, field: str, error: type[WinnowError], name: str | None = None
) -> Callable[..., Any]:
    """Import the function or class that a recipe names.

    Args:
        place: `FILE.py:NAME` or `package.module:NAME`; without `:NAME` where `name` is given.
        field: key of the recipe that holds the place, for messages.
        error: type of the error to raise.

    Raises:
        WinnowError: of type `error`, where the file is missing, its import fails, or it has no
            such callable. The message has the field, the place and a remedy.
    """
    where = f"{field} {place}"
    if _refusal:
        raise error(f"{where} {_refusal}")
    if name is None:
        place, _, name = place.rpartition(":")
        if not place:
            raise error(f"{where} names no object; give FILE.py:NAME or package.module:NAME")
    if place == PROGRAM:
        if name not in program_objects:
            raise error(
                f"{field}={PROGRAM}: {name} is an object of the program that began the run, which "
                "no other process can import; continue the run by that program's winnow.Trainer, "
                "or define it in a file"
            )
        return program_objects[name]  # type: ignore[no-any-return]
    module = _import(place, where, error)
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        choices = f"give one of {', '.join(own)}" if own else f"define {name} in it"
        raise error(f"{where} has no callable {name}; {choices}")
    return found  # type: ignore[no-any-return]


def check_user_file(
    place: str, where: str, error: type[WinnowError], name: str | None = None
) -> None:
    """Refuse a Python file that is missing, is none, or never says a name, without running it.

    Args:
        where: beginning of the message.
    """
    file = Path(place).expanduser()
    if not file.is_file():
        raise error(f"{where}: no such file; give the Python file that holds it")
    text = file.read_bytes()
    try:
        found = ast.parse(text).body
    except (SyntaxError, ValueError) as fault:
        line, kind = getattr(fault, "lineno", None) or "?", type(fault).__name__
        reason = f"importing it fails with {kind}: {fault}; correct the file"
        raise error(f"{where}, line {line}: {reason}") from fault
    if name is not None and name.encode() not in text:
        callables = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        own = [each.name for each in found if isinstance(each, callables)]
        choices = f"give one of {', '.join(own)}" if own else f"define {name} in it"
        raise error(f"{where} has no callable {name}; {choices}")


def _import(place: str, where: str, error: type[WinnowError]) -> ModuleType:
    file = Path(place).expanduser().absolute()
    is_file = place.endswith(".py") or file.is_file()
    if is_file and not file.is_file():
        raise error(f"{where}: no such file; give the Python file that holds it")
    try:
        return _import_file(file) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as fault:
        reason = " ".join(str(fault).split())
        line = f", line {_error_line(fault, str(file))}" if is_file else ""
        raise error(
            f"{where}{line}: importing it fails with {type(fault).__name__}: {reason}; correct "
            f"{'the file' if is_file else 'the module, or give FILE.py:NAME'}"
        ) from fault


def _import_file(file: Path) -> ModuleType:
    """Import a file under a unique module name, so that files of one name do not collide."""
    name = f"winnow_user_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Behind what is installed: a neighbour called json.py must not replace the library's.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # Dataclasses and pickles look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _error_line(error: BaseException, file: str) -> int | str:
    """The last line of the file that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or "?"
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or "?" for f in reversed(frames) if f.filename == file), "?")
