"""The rules that keep Winnow small, checked on the source itself.

Each rule is a function from the modules of a package to the places that break it. It is run
twice: on `src/winnow`, where it must find nothing, and on a made-up package that breaks it.
Who may import whom is for import-linter (`make lint`), which sees indirect imports, too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutants import Mutant, read, stale
from benchmarks.size import budget, sizes
from benchmarks.words import house_words

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 8

HEAVY = {"torch", "transformers"}
LIGHT_TO_IMPORT = ("winnow", "winnow.cli", "winnow.observe", "winnow.http")
ALGORITHMS_MAY_IMPORT = {"torch", "winnow", *sys.stdlib_module_names}


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, and what it holds."""

    name: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree; walking it takes longer than any rule."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import, wherever it stands."""
        return tuple(imports(self))

    def within(self, *packages: str) -> bool:
        """Whether the module is one of the packages, or lies in one."""
        return any(f"{self.name}.".startswith(f"{package}.") for package in packages)


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


def read_modules(root: Path) -> list[Module]:
    """All modules of the package in the folder `root`, by name."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts).removesuffix(".__init__")
        modules.append(Module(name, text, ast.parse(text, str(path))))
    return modules


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, wherever it stands."""

    def visit(node: ast.AST, runs: bool) -> Iterator[Import]:
        if isinstance(node, ast.expr):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, runs)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names if not node.level else ():  # others are imports of ours
                yield Import(f"{node.module}.{alias.name}", node.lineno, runs)
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            yield from visit_all(node.body, False)
            yield from visit_all(node.orelse, runs)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit_all(ast.iter_child_nodes(node), runs and not is_function)

    def visit_all(nodes: list[ast.stmt] | Iterator[ast.AST], runs: bool) -> Iterator[Import]:
        for node in nodes:
            yield from visit(node, runs)

    return visit(module.tree, True)


def long_modules(modules: list[Module]) -> Iterator[str]:
    """Modules over the limit."""
    for module in modules:
        lines = len(module.text.splitlines())
        if lines > MAX_MODULE_LINES:
            yield f"{module.name} has {lines} lines; {MAX_MODULE_LINES} is the limit"


def long_functions(modules: list[Module]) -> Iterator[str]:
    """Functions over the limit, docstring included, decorators not."""
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    where = f"{module.name}:{node.lineno} {node.name}"
                    yield f"{where} has {lines} lines; {MAX_FUNCTION_LINES} is the limit"


def many_parameters(modules: list[Module]) -> Iterator[str]:
    """Functions with too many parameters beside self; not options of commands, and not those of
    public constructors."""
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(arg.arg not in ("self", "cls") for arg in args)
            is_free = node.name == "__init__" or module.within("winnow.cli")
            if count > MAX_PARAMETERS and not is_free:
                where = f"{module.name}:{node.lineno} {node.name}"
                yield f"{where} has {count} parameters; {MAX_PARAMETERS} is the limit"


def circular_imports(modules: list[Module]) -> Iterator[str]:
    """Files that import one another, imports in functions and for types included."""
    names = {module.name for module in modules}

    def owner(target: str) -> str:
        while target and target not in names:
            target = target.rpartition(".")[0]
        return target

    after = {m.name: {owner(i.target) for i in m.imports} - {m.name, ""} for m in modules}
    # `winnow` itself offers the names of its API, and looks them up when they are asked for.
    apis = {"winnow.api", "winnow.session", "winnow.trainer"}
    after["winnow"] = after.get("winnow", set()) - apis
    while leaves := {name for name, targets in after.items() if not targets & after.keys()}:
        after = {name: targets for name, targets in after.items() if name not in leaves}
    # What is left imports a circle, or lies in one.
    while tops := after.keys() - {target for targets in after.values() for target in targets}:
        after = {name: targets for name, targets in after.items() if name not in tops}
    if after:
        yield f"these import one another: {', '.join(sorted(after))}"


def heavy_imports(modules: list[Module]) -> Iterator[str]:
    """torch and transformers where they may not be imported while the module loads."""
    for module in modules:
        light = module.name in LIGHT_TO_IMPORT or module.within(*LIGHT_TO_IMPORT[1:])
        for imported in module.imports:
            if imported.package in HEAVY and light and imported.runs_on_import:
                yield f"{module.name}:{imported.line} imports {imported.package}"


def impure_algorithms(modules: list[Module]) -> Iterator[str]:
    """What `winnow.algorithms` imports besides torch, the standard library and ours."""
    for module in modules:
        for imported in module.imports if module.within("winnow.algorithms") else ():
            if imported.package not in ALGORITHMS_MAY_IMPORT:
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
        for node in module.nodes:
            if isinstance(node, ast.ExceptHandler):
                swallows = bool(broad & names(node.type)) and all(map(is_idle, node.body))
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                swallows = called == "suppress" and any(broad & names(a) for a in node.args)
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
        for node in module.nodes:
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
    (many_parameters, "types.py", "def f(a, b, c, d, e, f, *, g, h, i): ...", "def f(*a): ..."),
    (
        many_parameters,
        "types.py",
        "class A:\n  async def f(self, a, b, c, d, e, f, g, h, i): ...",
        "class A:\n  def __init__(self, a, b, c, d, e, f, g, h, i): ...",
    ),
    (heavy_imports, "http/client.py", "from torch import Tensor", "import torchlight"),
    (heavy_imports, "cli/a.py", "try: import transformers\nfinally: 0", "def f(): import torch"),
    (heavy_imports, "cli/a.py", "if a:\n  import torch", "if TYPE_CHECKING:\n  import torch"),
    (heavy_imports, "observe/sinks.py", "import torch.utils", "class A:\n  def f(s): import torch"),
    (impure_algorithms, "algorithms/kl.py", "import numpy", "import math, torch"),
    (impure_algorithms, "algorithms/__init__.py", "from jax import jit", "from . import kl"),
    (swallowed_errors, "cli.py", "try: x\nexcept Exception: pass", "try: x\nexcept OSError: pass"),
    (swallowed_errors, "cli.py", "try: x\nexcept: ...", "try: x\nexcept Exception: raise"),
    (swallowed_errors, "cli.py", "try: x\nexcept (OSError, BaseException) as e: 'no'", "x"),
    (swallowed_errors, "cli.py", "with contextlib.suppress(Exception): x", "suppress(OSError)"),
    (unfinished_lines, "cli.py", "x = 1  # TODO: later", "todo = 1"),
    (unfinished_lines, "cli.py", "# FIXME", "# fixed"),
    (shared_names, "types.py", "class A: ...\nclass A: ...", "class A: ...\nclass B: ..."),
    (riddles, "types.py", '"""Who may ask."""', '"""The callers that may ask."""'),
    (riddles, "types.py", 'class A:\n  x = 1\n  """Of k1."""', 'class A:\n  """Offers."""'),
    (undocumented, "cli.py", "_x = 1", DOC + "def _f(): ..."),
    (undocumented, "cli.py", DOC + "class A: ...", DOC + "class A:\n  '''a'''"),
    (undocumented, "cli.py", DOC + "def f(): ...", DOC + "@overload\ndef f(): ..."),
]
RULES = [*dict.fromkeys(rule for rule, *_ in CASES), circular_imports]
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


def test_files_that_import_one_another_are_named(tmp_path: Path) -> None:
    texts: dict[str, Any] = {
        "a": "def f(): from winnow import b",
        "b": "if TYPE_CHECKING: from winnow.c import C",
        "c": "from winnow.a import f",
        "d": "import winnow.a",
        "e": "import winnow.d",
    }
    for name, text in texts.items():
        modules = package_with(tmp_path / name, f"{name}.py", text)
        texts[name] = modules[0]
    found = list(circular_imports([*texts.values()]))
    assert found == ["these import one another: winnow.a, winnow.b, winnow.c"]
    assert list(circular_imports([texts["a"], texts["b"], texts["d"], texts["e"]])) == []


def test_the_help_of_the_command_line_imports_nothing_that_only_commands_need() -> None:
    code = "import sys\nfrom winnow.cli import main\nsys.argv[1:] = ['--help']\ntry: main()\n"
    code += "finally: print(*sys.modules, file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    heavy = {"torch", "transformers", "numpy", "pyarrow", "yaml", "winnow.config"}
    assert "Usage: winnow" in run.stdout
    assert "winnow.cli.main" in run.stderr
    assert not (heavy | {"pydantic", "hydra", "omegaconf"}) & {*run.stderr.split()}


def test_the_picture_of_the_packages_has_all_of_them() -> None:
    picture = (REPOSITORY / "docs" / "architecture_rooms.svg").read_text()
    packages = {path.parent.name for path in (REPOSITORY / "src" / "winnow").glob("*/__init__.py")}
    assert packages <= {*re.findall(r">(\w+)</text>", picture)}


def test_names_are_words_of_the_field() -> None:
    by_word, by_file, total = house_words([REPOSITORY / "src" / "winnow"])
    assert by_word.total() <= 0.01 * total, (by_word.most_common(5), by_file.most_common(5))


def test_every_package_keeps_its_budget() -> None:
    allowed, found = budget(), sizes()
    over = {name: size.code for name, size in found.items() if size.code > allowed.get(name, 0)}
    assert not over, "make it smaller, or raise its number in tests/budget.toml"
    assert sum(size.code for size in found.values()) <= allowed["total"]
    assert sum(size.files for size in found.values()) <= allowed["files"]


def test_every_mutant_has_its_text_and_its_tests() -> None:
    mutants = read(REPOSITORY / "benchmarks" / "mutants")
    faults = {f"{m.room}: {m.name}": stale(m, REPOSITORY) for m in mutants}
    assert len(faults) == len(mutants)
    assert {name: fault for name, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("its text stands 0 times in tests/bombs.py", {"find": "no such line"}),
        ("its text stands 2 times in tests/bombs.py", {"find": "_mark"}),
        ("no file tests/test_gone.py", {"tests": ["tests/test_gone.py"]}),
        ("no test tests/recipes.py::test_gone", {"tests": ["tests/recipes.py::test_gone"]}),
        ("no test is selected by gone", {"tests": ["tests/recipes.py", "-k", "not gone"]}),
    ],
)
def test_a_mutant_that_cannot_be_tried_is_seen(fault: str, change: dict[str, Any]) -> None:
    entry = {"file": "tests/bombs.py", "find": "class Bomb", "tests": ["tests/recipes.py"]}
    assert stale(Mutant("room", "name", replace="", **{**entry, **change}), REPOSITORY) == fault
