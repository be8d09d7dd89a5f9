"""The rules that keep Winnow small, checked on the source itself.

Each rule is a function from the modules of a package to the places that break it. It is run
twice: on `src/winnow`, where it must find nothing, and on a made-up package that breaks it.
import-linter checks the layers too, with indirect imports; here a fault names its line.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from benchmarks.size import budget, sizes

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 70

# A module may import its own layer and those with a smaller number.
LAYERS = {
    "types": 0,
    "errors": 0,
    "gc_tuning": 0,
    "user_code": 0,
    "config": 1,
    "observe": 2,
    "http": 2,
    "models": 3,
    "workers": 3,
    "sandbox": 4,
    "algorithms": 5,
    "data": 5,
    "rewards": 5,
    "rollout": 5,
    "sampling": 6,
    "learning": 6,
    "evaluation": 7,
    "runs": 8,
    "plan": 9,
    "dashboard": 10,
    "cli": 11,
    "api": 11,
}
CONFINED = {
    "megatron": ("winnow.learning.megatron", "winnow.models.mcore_*", "winnow.plan.megatron"),
    "ray": ("winnow.workers.ray",),
    "vllm": ("winnow.rollout.vllm_engine", "winnow.rollout.vllm_plugin"),
}
HEAVY = {"torch", "transformers"}
NEVER_HEAVY = ("winnow.types", "winnow.errors", "winnow.config")
LIGHT_TO_IMPORT = ("winnow", "winnow.cli", "winnow.observe", "winnow.http")
ALGORITHMS_MAY_IMPORT = {"torch", *sys.stdlib_module_names}


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, and what it holds."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def component(self) -> str:
        """`rollout` for `winnow.rollout.engine`, "" for `winnow` itself."""
        return component(self.name)

    def within(self, *packages: str) -> bool:
        """Whether the module is one of the packages, or lies in one; a name may end with *."""
        return any(fnmatch(self.name, p) or self.name.startswith(p + ".") for p in packages)


@dataclass(frozen=True)
class Import:
    """One imported name, as written in full; `runs_on_import` when loading the module runs it."""

    target: str
    line: int
    runs_on_import: bool

    @property
    def package(self) -> str:
        """The outermost package."""
        return self.target.partition(".")[0]


def component(name: str) -> str:
    """The part of a dotted name under `winnow`; dunder names belong to `winnow` itself."""
    part = name.split(".")[1] if "." in name else ""
    return "" if part.startswith("__") else part


def read_modules(root: Path) -> list[Module]:
    """All modules of the package in the folder `root`, by name."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, is_package, text, ast.parse(text, str(path))))
    return modules


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """Every import of a module, wherever it stands."""

    def visit(node: ast.AST, runs: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, runs)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(f"{source_of(module, node)}.{alias.name}", node.lineno, runs)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from visit_all(node.body, False)
            yield from visit_all(node.orelse, runs)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit_all(ast.iter_child_nodes(node), runs and not is_function)

    def visit_all(nodes: list[ast.stmt] | Iterator[ast.AST], runs: bool) -> Iterator[Import]:
        for node in nodes:
            yield from visit(node, runs)

    return tuple(visit(module.tree, True))


def source_of(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name that `from … import` draws from."""
    if node.level == 0:
        return node.module or ""
    package = module.name.split(".")
    up = node.level - 1 if module.is_package else node.level
    base = package[: len(package) - up]
    return ".".join([*base, node.module] if node.module else base)


def long_modules(modules: list[Module]) -> Iterator[str]:
    """Modules over the limit."""
    for module in modules:
        lines = len(module.text.splitlines())
        if lines > MAX_MODULE_LINES:
            yield f"{module.name} has {lines} lines; {MAX_MODULE_LINES} is the limit"


def long_functions(modules: list[Module]) -> Iterator[str]:
    """Functions over the limit, docstring included, decorators not."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    where = f"{module.name}:{node.lineno} {node.name}"
                    yield f"{where} has {lines} lines; {MAX_FUNCTION_LINES} is the limit"


def modules_without_layer(modules: list[Module]) -> Iterator[str]:
    """Modules that the layer map does not know."""
    for module in modules:
        if module.component and module.component not in LAYERS:
            yield f"{module.name} is in no layer; give it a place in LAYERS and pyproject.toml"


def upward_imports(modules: list[Module]) -> Iterator[str]:
    """Imports of a higher layer."""
    for module in modules:
        own_layer = LAYERS.get(module.component, -1)
        for imported in imports(module):
            if imported.package != "winnow":
                continue
            if module.name == "winnow" and imported.target.startswith("winnow.api"):
                continue  # its names, looked up when they are asked for
            if LAYERS.get(component(imported.target), -1) > own_layer:
                yield f"{module.name}:{imported.line} imports {imported.target}, which lies higher"


def escaped_imports(modules: list[Module]) -> Iterator[str]:
    """Ray, vLLM and megatron-core outside the one place that may import each."""
    for module in modules:
        for imported in imports(module):
            homes = CONFINED.get(imported.package)
            if homes and not module.within(*homes):
                may = " and ".join(homes)
                yield f"{module.name}:{imported.line} imports {imported.package}, only {may} may"


def heavy_imports(modules: list[Module]) -> Iterator[str]:
    """torch and transformers where they may not be, or not while the module loads."""
    for module in modules:
        never = module.within(*NEVER_HEAVY)
        light = module.name in LIGHT_TO_IMPORT or module.within(*LIGHT_TO_IMPORT[1:])
        for imported in imports(module):
            if imported.package in HEAVY and (never or (light and imported.runs_on_import)):
                yield f"{module.name}:{imported.line} imports {imported.package}"


def impure_algorithms(modules: list[Module]) -> Iterator[str]:
    """What `winnow.algorithms` imports besides torch, the standard library and `winnow.errors`."""
    for module in modules:
        if not module.within("winnow.algorithms"):
            continue
        for imported in imports(module):
            ours = imported.package == "winnow"
            allowed = component(imported.target) in {"algorithms", "errors"}
            if (ours and not allowed) or not (ours or imported.package in ALGORITHMS_MAY_IMPORT):
                yield f"{module.name}:{imported.line} imports {imported.target}"


def swallowed_errors(modules: list[Module]) -> Iterator[str]:
    """Handlers that catch everything and do nothing."""
    broad = {"Exception", "BaseException"}

    def names(node: ast.expr | None) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node else broad

    def is_idle(statement: ast.stmt) -> bool:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return is_text or isinstance(statement, ast.Pass | ast.Continue)

    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                swallows = bool(broad & names(node.type)) and all(map(is_idle, node.body))
            elif isinstance(node, ast.Call):
                swallows = ast.unparse(node.func).rpartition(".")[2] == "suppress" and any(
                    broad & names(argument) for argument in node.args
                )
            else:
                continue
            if swallows:
                yield f"{module.name}:{node.lineno} swallows every error"


def unfinished_lines(modules: list[Module]) -> Iterator[str]:
    """Notes of work left undone."""
    for module in modules:
        for number, line in enumerate(module.text.splitlines(), start=1):
            if re.search(r"\b(TODO|FIXME|XXX)\b", line):
                yield f"{module.name}:{number} is unfinished: {line.strip()}"


def undocumented(modules: list[Module]) -> Iterator[str]:
    """Modules, and public functions and classes in them, without a docstring."""
    for module in modules:
        if module.tree.body and ast.get_docstring(module.tree) is None:
            yield f"{module.name} has no docstring"
        for node in module.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            is_overload = any(ast.unparse(d).endswith("overload") for d in node.decorator_list)
            is_public = not node.name.startswith("_") and not is_overload
            if is_public and ast.get_docstring(node) is None:
                yield f"{module.name}:{node.lineno} {node.name} has no docstring"


RIDDLE = re.compile(r"(What|Who|Whoever|Whose|Whether|How|Where|When|Which|See|Of|So that)\b")


def riddles(modules: list[Module]) -> Iterator[str]:
    """Docstrings, of fields too, that open as a fragment or a riddle, not as a sentence."""

    def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str() as text)):
                        yield statement.lineno, text

    for module in modules:
        for node in ast.walk(module.tree):
            for line, text in docstrings(node):
                if RIDDLE.match(text.strip()):
                    yield f"{module.name}:{line} opens with a riddle: {text.strip()[:60]}"


def shared_names(modules: list[Module]) -> Iterator[str]:
    """Classes of one name in two modules."""
    first: dict[str, str] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                if node.name in first:
                    yield f"{module.name}:{node.lineno} {node.name} is also in {first[node.name]}"
                first.setdefault(node.name, module.name)


Rule = Callable[[list[Module]], Iterator[str]]
DOC = '"""What it is for."""\n'
LONG_BODY = "    x = 1\n" * MAX_FUNCTION_LINES
# Rule, file, a text that breaks the rule, a text beside it that does not.
CASES: list[tuple[Rule, str, str, str]] = [
    (long_modules, "types.py", "x = 1\n" * 601, "x = 1\n" * 600),
    (long_functions, "types.py", f"def f():\n{LONG_BODY}", f"def f():\n{LONG_BODY[10:]}"),
    (long_functions, "types.py", f"class A:\n  async def f(self):\n{LONG_BODY}", "class A: ..."),
    (upward_imports, "errors.py", "import winnow.models.causal_lm", "import winnow.types"),
    (upward_imports, "config/load.py", "from winnow import runs", "from winnow import errors"),
    (upward_imports, "config/load.py", "from ..cli import main", "from ..types import Prompt"),
    (upward_imports, "data/__init__.py", "from ..learning import x", "from .sources import x"),
    (upward_imports, "rewards/a.py", "def f():\n  import winnow.runs.loop", "import runs"),
    (upward_imports, "__init__.py", "from winnow.cli.main import main", "__version__ = '1'"),
    (escaped_imports, "runs/loop.py", "import ray", "import winnow.workers.ray.group"),
    (escaped_imports, "workers/a.py", "def f():\n  from vllm import LLM", "import ray2"),
    (escaped_imports, "rollout/engine.py", "import vllm.envs", "import vllm_other"),
    (escaped_imports, "models/value.py", "from megatron.core import x", "from . import mcore_a"),
    (heavy_imports, "config/load.py", "def f():\n  import torch", "import torchlight"),
    (heavy_imports, "types.py", "from torch import Tensor", "import numpy"),
    (
        heavy_imports,
        "cli/a.py",
        "try:\n  import transformers\nfinally: ...",
        "def f(): import torch",
    ),
    (heavy_imports, "cli/a.py", "if a:\n  import torch", "if TYPE_CHECKING:\n  import torch"),
    (heavy_imports, "observe/sinks.py", "import torch.utils", "class A:\n  def f(s): import torch"),
    (impure_algorithms, "algorithms/kl.py", "import numpy", "import math, torch"),
    (impure_algorithms, "algorithms/kl.py", "import winnow.config", "import winnow.errors"),
    (impure_algorithms, "algorithms/__init__.py", "from ..types import Group", "from . import kl"),
    (swallowed_errors, "cli.py", "try: x\nexcept Exception: pass", "try: x\nexcept OSError: pass"),
    (swallowed_errors, "cli.py", "try: x\nexcept: ...", "try: x\nexcept Exception: raise"),
    (swallowed_errors, "cli.py", "try: x\nexcept (OSError, BaseException) as e: 'no'", "x"),
    (swallowed_errors, "cli.py", "with contextlib.suppress(Exception): x", "suppress(OSError)"),
    (unfinished_lines, "cli.py", "x = 1  # TODO: later", "todo = 1"),
    (unfinished_lines, "cli.py", "# FIXME", "# fixed"),
    (shared_names, "types.py", "class A: ...\nclass A: ...", "class A: ...\nclass B: ..."),
    (riddles, "types.py", '"""Who may ask."""', '"""The callers that may ask."""'),
    (
        riddles,
        "types.py",
        'class A:\n  x = 1\n  """Of k1."""',
        'class A:\n  x = 1\n  """Offers."""',
    ),
    (undocumented, "cli.py", "_x = 1", DOC + "def _f(): ..."),
    (undocumented, "cli.py", DOC + "class A: ...", DOC + "class A:\n  '''a'''"),
    (undocumented, "cli.py", DOC + "def f(): ...", DOC + "@overload\ndef f(): ..."),
]
RULES = list(dict.fromkeys([modules_without_layer, *(rule for rule, *_ in CASES)]))
CASE_IDS = [f"{rule.__name__}-{number}" for number, (rule, *_) in enumerate(CASES)]


def package_with(folder: Path, file: str, text: str) -> list[Module]:
    """A package `winnow` in `folder` that consists of one file."""
    path = folder / "winnow" / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return read_modules(folder / "winnow")


@pytest.fixture(scope="module")
def source() -> list[Module]:
    return read_modules(REPOSITORY / "src" / "winnow")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule, source: list[Module]) -> None:
    assert source
    assert list(rule(source)) == []


@pytest.mark.parametrize(("rule", "file", "bad", "good"), CASES, ids=CASE_IDS)
def test_the_rule_finds_what_breaks_it_and_nothing_else(
    rule: Rule, file: str, bad: str, good: str, tmp_path: Path
) -> None:
    assert len(list(rule(package_with(tmp_path / "bad", file, bad)))) == 1
    assert list(rule(package_with(tmp_path / "good", file, good))) == []


@pytest.mark.parametrize("file", ["utils.py", "utils/__init__.py", "utils/text.py"])
def test_a_module_outside_the_layers_is_found(file: str, tmp_path: Path) -> None:
    assert len(list(modules_without_layer(package_with(tmp_path, file, "")))) == 1


def test_import_linter_knows_the_same_layers_in_the_same_order() -> None:
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    (layers,) = [c["layers"] for c in contracts if c["type"] == "layers"]
    names = [name for layer in reversed(layers) for name in re.findall(r"\w+", layer)]
    assert sorted(names) == sorted(LAYERS)
    assert [LAYERS[name] for name in names] == sorted(LAYERS.values())


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, winnow.cli.main; assert not {'torch', 'transformers'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_package_keeps_its_budget() -> None:
    allowed, found = budget(), sizes()
    over = {name: size.code for name, size in found.items() if size.code > allowed.get(name, 0)}
    assert not over, "make it smaller, or raise its number in tests/budget.toml"
    assert sum(size.code for size in found.values()) <= allowed["total"]
    assert sum(size.files for size in found.values()) <= allowed["files"]
