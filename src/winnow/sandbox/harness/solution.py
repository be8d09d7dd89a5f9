"""The solution's process: loads what a model wrote, and answers the tests' calls."""

from __future__ import annotations

from winnow.sandbox.harness.values import encode, reader, send, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

REQUESTS, REPLIES = 3, 4
"""Its descriptors; it has no others but for three of /dev/null."""
_ONLY_AST = 0x400  # compile() to a tree, without the module ast

# What a solution may use without importing it, if the word occurs in it.
_USUAL = """
array bisect cmath collections copy datetime decimal fractions functools heapq io itertools json
math operator os random re statistics string sys time typing
"""
MODULES = frozenset(_USUAL.split())
_NAMES_OF = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort",
    "itertools": "accumulate chain combinations groupby permutations product zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt log log2 sqrt",
    "typing": "Any Callable Dict Generator Iterable Iterator List Optional Set Tuple Union",
}
NAMES = frozenset(" ".join(_NAMES_OF.values()).split())


def serve(solution: dict[str, Any]) -> None:
    """Load the solution, then answer calls until the tests end."""
    try:
        space = load(solution)
    except SyntaxError as error:
        send(REPLIES, {"failed": "compile_error", "text": f"{type(error).__name__}: {error}"})
        return
    except BaseException as error:
        send(REPLIES, {"failed": "runtime_error", "text": describe(error)})
        return
    send(REPLIES, {"names": [name for name, value in space.items() if callable(value)]})
    read = reader(REQUESTS)
    while True:
        request = next(read)
        args = request["args"]
        try:
            value = find(space, request["name"])(*args, **request["kwargs"])
            # What it did to its arguments must be seen by the tests.
            changed = [each if isinstance(each, (list, dict, set)) else None for each in args]
            reply = encode({"value": value, "args": changed})
        except BaseException as error:
            reply = encode({"error": type(error).__name__, "text": describe(error)})
        write(REPLIES, reply)


def find(space: dict[str, Any], name: str) -> Any:
    """A function of the solution's, or a method of its class Solution."""
    if name not in space and "Solution" in space:
        return getattr(space["Solution"](), name)
    return space[name]


def load(solution: dict[str, Any]) -> dict[str, Any]:
    """Run the solution's text as a module; its names."""
    last = SyntaxError("no code")
    for text in versions(solution):
        try:
            code = compile(text, "solution.py", "exec")
        except (SyntaxError, ValueError) as error:
            last = error if isinstance(error, SyntaxError) else SyntaxError(str(error))
            continue
        space = {"__name__": "solution"}
        provide(text, space)
        exec(code, space)
        return space
    raise last


def versions(solution: dict[str, Any]) -> list[str]:
    """Ways to read an answer: whole code behind the prompt's, or the rest of the prompt."""
    prompt, code = solution["prompt"], solution["code"]
    if not prompt or defines(code, solution["entry_point"]):
        return [f"{prompt}\n{code}", code]
    return [prompt + code, without_docstring(prompt) + code, code]


def defines(code: str, name: str | None) -> bool:
    """Return whether a text is whole code that defines a name."""
    try:
        tree = compile(code, "solution.py", "exec", _ONLY_AST)
    except (SyntaxError, ValueError):
        return False
    names = set()
    for node in tree.body:
        names.add(getattr(node, "name", None))
        names.update(getattr(target, "id", None) for target in getattr(node, "targets", ()))
    return name in names if name else bool(tree.body)


def without_docstring(prompt: str) -> str:
    """The prompt without the docstring of its last function: its indentation binds the rest."""
    try:
        function = compile(prompt, "prompt.py", "exec", _ONLY_AST).body[-1]
        docstring = function.body[0]
    except (SyntaxError, ValueError, IndexError, AttributeError):
        return prompt
    lines = prompt.splitlines(keepends=True)
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "".join(lines)


def imports_of(prompt: str) -> Any:
    """The imports at the top of a prompt, compiled; none of one that is no code."""
    return _compiled(node for node in _parsed(prompt) if _kind(node).startswith("Import"))


def helpers_of(prompt: str, entry_point: str | None) -> list[Any]:
    """The constants of a prompt and the functions it has whole, compiled; not the entry point."""
    return [
        _compiled([node])
        for node in _parsed(prompt)
        if _kind(node) in ("Assign", "AnnAssign")
        or (_kind(node) == "FunctionDef" and node.name != entry_point and _has_body(node))
    ]


def _parsed(prompt: str) -> list[Any]:
    """The statements of a prompt, which may end with the head of a function."""
    for text in (prompt, prompt.rstrip() + " pass"):
        try:
            return list(compile(text, "prompt.py", "exec", _ONLY_AST).body)
        except (SyntaxError, ValueError):
            continue
    return []


def _compiled(nodes: Iterable[Any]) -> Any:
    tree = compile("", "prompt.py", "exec", _ONLY_AST)
    tree.body = list(nodes)
    return compile(tree, "prompt.py", "exec")


def _kind(node: Any) -> str:
    return type(node).__name__


def _has_body(function: Any) -> bool:
    """Return whether it does anything: a docstring, `...` or `pass` alone is to be filled in."""
    return any(
        not (_kind(node) == "Pass" or (_kind(node) == "Expr" and _kind(node.value) == "Constant"))
        for node in function.body
    )


def provide(text: str, space: dict[str, Any]) -> None:
    """Import what a text uses of the usual modules."""
    words = words_of(text)
    for module in MODULES:
        if module in words:
            exec(f"import {module}", space)
    for module, names in _NAMES_OF.items():
        used = [name for name in names.split() if name in words]
        if used:
            exec(f"from {module} import {', '.join(used)}", space)


def words_of(text: str) -> set[str]:
    """Its names, and whatever else of letters and digits."""
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def describe(error: BaseException) -> str:
    """An exception in one short line."""
    try:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:
        text = type(error).__name__
    return " ".join(text.split())[:200]
