"""Tests a solution by calling it, inside the sandbox.

    solution.json, and the tests (JSON) on standard input  ─►  a verdict (JSON) on standard output

The solution runs in one process, and the tests in another, which calls it over a pipe:
values go there and come back as plain data. So a solution can neither read the tests nor reach
what writes the verdict: `sys.exit(0)`, an object that equals everything, a patched builtin or a
forged output pass nothing.

The text of this module goes into the sandbox as it stands, and Winnow is not there: any Python
from 3.8 on must run it. What it imports is most of the time that a run takes: no typing, no re,
and of json the core in C.
"""

from __future__ import annotations

import builtins
import itertools
import os
import select
import sys
import time

try:
    from _json import encode_basestring_ascii as quoted
    from _json import make_scanner
except ImportError:  # a Python without the core in C
    from json.encoder import encode_basestring_ascii as quoted
    from json.scanner import make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

SOLUTION = "solution.json"
READ_BYTES = 1 << 16
_LONGEST_ITERATION = 1_000_000
_VIEWS = ("dict_keys", "dict_values", "dict_items", "deque")


class Opaque:
    """Stands for an object of the solution's that is no plain data; equal to nothing else."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class _Plain:
    """Settings that the scanner of JSON asks for."""

    strict = False
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = float  # NaN, Infinity, -Infinity
    memo: dict[str, str] = {}  # noqa: RUF012  the scanner's own


_SEQUENCES: tuple[tuple[str, Any], ...] = (("t", tuple), ("s", set), ("z", frozenset))
_scan: Any = make_scanner(_Plain())  # type: ignore[arg-type]


def encode(value: Any) -> str:
    """Plain data as JSON, tagged where JSON has no such kind; subclasses become their base."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return _encode_items(list.__iter__(value))
    for tag, kind in _SEQUENCES:
        if isinstance(value, kind):
            return _tag(tag, _encode_items(kind.__iter__(value)))
    if isinstance(value, dict):
        return _tag("d", _encode_items(map(list, dict.items(value))))
    if isinstance(value, (bytes, bytearray)):
        return _tag("b", quoted(bytes(value).hex()))
    if isinstance(value, complex):
        return _tag("c", _encode_items((value.real, value.imag)))
    if isinstance(value, range):
        return _tag("r", _encode_items((value.start, value.stop, value.step)))
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist())
    if hasattr(value, "__next__") or type(value).__name__ in _VIEWS:
        some = list(itertools.islice(value, _LONGEST_ITERATION + 1))
        if len(some) <= _LONGEST_ITERATION:
            return _tag("i" if hasattr(value, "__next__") else "l", _encode_items(some))
    return _tag("o", quoted(str(type(value).__name__)))


def _encode_items(values: Iterable[Any]) -> str:
    return "[" + ",".join([encode(each) for each in values]) + "]"


def _tag(tag: str, text: str) -> str:
    return '{"' + tag + '":' + text + "}"


def parse_json(text: str) -> Any:
    """JSON as it stands."""
    try:
        return _scan(text, 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def decode(value: Any) -> Any:
    """Restore encoded values from scanned JSON: plain data and nothing else."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((tag, rest),) = value.items()
    if tag == "d":
        return {decode(key): decode(each) for key, each in rest}
    if tag == "b":
        return bytes.fromhex(rest)
    if tag == "c":
        return complex(*rest)
    if tag == "r":
        return range(*rest)
    if tag == "o":
        return Opaque(rest)
    kinds: dict[str, Any] = {"t": tuple, "s": set, "z": frozenset, "i": iter, "l": list}
    return kinds[tag]([decode(each) for each in rest])


def send(descriptor: int, message: Any) -> None:
    """Write a message."""
    write(descriptor, encode(message))


def write(descriptor: int, text: str) -> None:
    """Write an encoded message and its end."""
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def read_messages(descriptor: int, wait: Callable[[], None] | None = None) -> Iterator[Any]:
    """Messages as they come, to the end of the pipe."""
    rest = bytearray()
    while True:
        if wait is not None:
            wait()
        data = os.read(descriptor, READ_BYTES)
        if not data:
            return
        start = len(rest)
        rest += data
        while (end := rest.find(b"\n", start)) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            start = 0
            yield decode(parse_json(line.decode()))


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
    """Load the solution once the tests are out of its reach, then answer calls until they end."""
    read = read_messages(REQUESTS)
    next(read)
    try:
        space = load(solution)
    except SyntaxError as error:
        send(REPLIES, {"failed": "compile_error", "text": f"{type(error).__name__}: {error}"})
        return
    except BaseException as error:
        send(REPLIES, {"failed": "runtime_error", "text": describe(error)})
        return
    send(REPLIES, {"names": [name for name, value in space.items() if callable(value)]})
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
    for text in candidate_codes(solution):
        try:
            code = compile(text, "solution.py", "exec")
        except (SyntaxError, ValueError) as error:
            last = error if isinstance(error, SyntaxError) else SyntaxError(str(error))
            continue
        space = {"__name__": "solution"}
        import_used_modules(text, space)
        exec(code, space)
        return space
    raise last


def candidate_codes(solution: dict[str, Any]) -> list[str]:
    """Ways to read an answer: whole code behind the prompt's, or the rest of the prompt."""
    prompt, code = solution["prompt"], solution["code"]
    if not prompt or defines(code, solution["entry_point"]):
        return [f"{prompt}\n{code}", code]
    return [prompt + code, without_docstring(prompt) + code, code]


def parse_statements(text: str) -> list[Any] | None:
    """The statements of a text, as trees; None where it is no code."""
    try:
        return list(compile(text, "prompt.py", "exec", _ONLY_AST).body)
    except (SyntaxError, ValueError):
        return None


def defines(code: str, name: str | None) -> bool:
    """Return whether a text is whole code that defines a name."""
    names = set()
    nodes = parse_statements(code) or []
    for node in nodes:
        names.add(getattr(node, "name", None))
        names.update(getattr(target, "id", None) for target in getattr(node, "targets", ()))
    return name in names if name else bool(nodes)


def without_docstring(prompt: str) -> str:
    """The prompt without the docstring of its last function: its indentation binds the rest."""
    try:
        docstring = (parse_statements(prompt) or [])[-1].body[0]
    except (IndexError, AttributeError):
        return prompt
    lines = prompt.splitlines(keepends=True)
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "".join(lines)


def compile_imports(prompt: str) -> Any:
    """The imports at the top of a prompt, compiled; none of one that is no code."""
    return _compile(node for node in _parse_prompt(prompt) if _kind(node).startswith("Import"))


def compile_helpers(prompt: str, entry_point: str | None) -> list[Any]:
    """The constants of a prompt and the functions it has whole, compiled; not the entry point."""
    return [
        _compile([node])
        for node in _parse_prompt(prompt)
        if _kind(node) in ("Assign", "AnnAssign")
        or (_kind(node) == "FunctionDef" and node.name != entry_point and _has_body(node))
    ]


def _parse_prompt(prompt: str) -> list[Any]:
    """The statements of a prompt, which may end with the head of a function."""
    return parse_statements(prompt) or parse_statements(prompt.rstrip() + " pass") or []


def _compile(nodes: Iterable[Any]) -> Any:
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


def import_used_modules(text: str, space: dict[str, Any]) -> None:
    """Import what a text uses of the usual modules."""
    tokens = find_words(text)
    for module in MODULES:
        if module in tokens:
            exec(f"import {module}", space)
    for module, names in _NAMES_OF.items():
        used = [name for name in names.split() if name in tokens]
        if used:
            exec(f"from {module} import {', '.join(used)}", space)


def find_words(text: str) -> set[str]:
    """Return its names, and all other tokens of letters and digits."""
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def describe(error: BaseException) -> str:
    """An exception in one short line."""
    try:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:
        text = type(error).__name__
    return " ".join(text.split())[:200]


_NEVER_RAISED = (AssertionError, StopIteration, StopAsyncIteration)
"""In the tests for the solution: the first is theirs, the others end loops of theirs in silence."""


class CaseFailed(Exception):
    """A case that failed; its arguments are the outcome and an explanation."""


class Solution:
    """The process of the solution, as the tests call it."""

    def __init__(self, requests: int, replies: int, call_s: float) -> None:
        self.requests, self.replies, self.call_s = requests, replies, call_s
        self.read = read_messages(replies, self.wait)
        self.until = time.monotonic() + call_s
        ready = self.receive()
        if "failed" in ready:
            # The solution may have written this message itself.
            kind = "compile_error" if ready["failed"] == "compile_error" else "runtime_error"
            raise CaseFailed(kind, str(ready.get("text", ""))[:200])
        self.names = [str(name) for name in ready["names"]]

    def wait(self) -> None:
        """Wait for bytes of the solution's, as long as its call may take."""
        remaining = self.until - time.monotonic()
        if remaining <= 0 or not select.select([self.replies], [], [], remaining)[0]:
            raise CaseFailed("time_limit", f"no result within {self.call_s:g} s")

    def receive(self) -> dict[str, Any]:
        """The next message."""
        reply = next(self.read, None)
        if not isinstance(reply, dict):
            raise CaseFailed("runtime_error", "the solution ended its process")
        return reply

    def call(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of the solution's."""
        self.until = time.monotonic() + self.call_s
        try:
            send(self.requests, {"name": name, "args": list(args), "kwargs": kwargs})
        except BrokenPipeError:
            raise CaseFailed("runtime_error", "the solution ended its process") from None
        reply = self.receive()
        if "error" in reply:
            raise self.error(str(reply["error"]), str(reply.get("text", "")))
        for ours, theirs in zip(args, reply["args"]):  # noqa: B905  Python 3.8 knows no strict
            if type(ours) is type(theirs) and isinstance(ours, (list, dict, set)):
                ours.clear()
                (ours.extend if isinstance(ours, list) else ours.update)(theirs)
        return reply["value"]

    def error(self, name: str, text: str) -> Exception:
        """The solution's exception, as the tests may expect it."""
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _NEVER_RAISED:
            try:
                error = kind(text)
            except TypeError:  # it wants other arguments
                return CaseFailed("runtime_error", text)
            error.of_solution = text  # type: ignore[attr-defined]
            return error
        return CaseFailed("runtime_error", text)

    def function(self, name: str) -> Callable[..., Any]:
        """A function that calls the solution's of this name."""
        return lambda *args, **kwargs: self.call(name, args, kwargs)


def run_cases(solution: Solution, tests: dict[str, Any]) -> dict[str, Any]:
    """Run the cases; how many passed, and what became of the first that did not."""
    try:
        cases = list(prepare_cases(solution, tests))
    except Exception as error:  # nothing of the solution's has been called
        return {"broken": describe(error)}
    passed, first, text = 0, None, ""
    for number, (case, *args) in enumerate(cases):
        outcome = "pass"
        try:
            case(*args)
        except CaseFailed as failed:
            outcome, detail = failed.args
        except Exception as error:
            if isinstance(error, ImportError) and not hasattr(error, "of_solution"):
                return {"broken": describe(error)}
            outcome = "runtime_error" if hasattr(error, "of_solution") else "wrong"
            detail = getattr(error, "of_solution", None) or describe(error)
            detail += failing_line(error, number, tests["cases"][number])
        if outcome == "pass":
            passed += 1
            continue
        if first is None:
            first, text = outcome, detail
        # After a time limit the solution still works on an old call.
        if tests["stop_early"] or outcome == "time_limit":
            break
    return {"passed": passed, "of": len(cases), "outcome": first or "pass", "text": text}


def failing_line(error: BaseException, number: int, case: Any) -> str:
    """The line of a case's text that an error came through, for people."""
    lines: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == case_filename(number):
            lines = case.splitlines()[trace.tb_lineno - 1 : trace.tb_lineno]
        trace = trace.tb_next
    return f" in {lines[0].strip()[:200]}" if lines else ""


def case_filename(number: int) -> str:
    """The name under which a case is compiled."""
    return f"test {number + 1}"


def prepare_cases(solution: Solution, tests: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Each case as a function that raises, and its arguments."""
    if tests["kind"] == "calls":
        for args, expected in tests["cases"]:
            yield check_call, solution, tests["entry_point"], args, expected
        return
    text = "\n".join(tests["cases"])
    tokens = find_words(text)
    space: dict[str, Any] = {"__name__": "tests"}
    import_used_modules(text, space)
    exec(compile_imports(tests["prompt"]), space)
    for helper in compile_helpers(tests["prompt"], tests["entry_point"]):
        try:
            exec(helper, space)
        except NameError:
            continue  # it wants a class of the prompt's, say: only the solution has that
    defined = frozenset(space)
    for name in solution.names:
        # A solution must not lend the tests its own idea of `set`, `Counter` or a prompt's helper.
        usual = hasattr(builtins, name) or name in MODULES or name in defined
        if name == tests["entry_point"] or (name in tokens and not usual):
            space[name] = solution.function(name)
    for number, case in enumerate(tests["cases"]):
        code = compile(case, case_filename(number), "exec")
        yield run, code, space, solution, tests["kind"], tests["entry_point"]


def check_call(solution: Solution, name: str, args: Any, expected: Any) -> None:
    """Call a function and look at its result."""
    check_equal(solution.call(name, args, {}), expected)


def run(code: Any, space: dict[str, Any], solution: Solution, kind: str, name: str) -> None:
    """Execute a test's text; of one that defines `check`, the check."""
    exec(code, space)
    if kind == "check":
        check = space["check"]
        if "check" in solution.names:  # whose calls in the test mean the solution's own
            space["check"] = solution.function("check")
        check(solution.function(name))


def check_equal(value: Any, expected: Any) -> None:
    """Equal as JSON, or equal to the only element of what is expected (as APPS writes it)."""
    value = plain(value)
    expected = plain(expected)
    alone = isinstance(expected, list) and len(expected) == 1 and value == expected[0]
    if value != expected and not alone:
        raise AssertionError(f"got {str(value)[:80]}, expected {str(expected)[:80]}")


def plain(value: Any) -> Any:
    """With lists for tuples, and texts for keys: what JSON distinguishes."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): plain(v) for key, v in value.items()}
    return value


def main() -> None:
    """Start the solution's process, then read the tests and print the verdict."""
    # Before the solution runs: it may write modules to this folder.
    del sys.path[0]
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    with open(SOLUTION, "rb") as file:
        solution = parse_json(file.read().decode())
    their_requests, requests = os.pipe()
    replies, their_replies = os.pipe()
    if os.fork() == 0:
        nothing = os.open("/dev/null", os.O_RDWR)
        for old, new in ((nothing, 0), (nothing, 1), (nothing, 2)):
            os.dup2(old, new)
        # Beyond what pipes have as numbers already, then down to the agreed ones.
        keep = [os.dup2(their_requests, 20), os.dup2(their_replies, 21)]
        os.dup2(keep[0], REQUESTS)
        os.dup2(keep[1], REPLIES)
        os.closerange(REPLIES + 1, 1024)
        try:
            serve(solution)
        finally:
            os._exit(0)
    os.close(their_requests)
    os.close(their_replies)
    tests = parse_json(b"".join(iter(lambda: os.read(0, READ_BYTES), b"")).decode())
    verdict = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 1)  # tests may print
    # Where /proc is in view, a solution could open this process's standard input anew.
    os.dup2(nothing, 0)
    send(requests, None)
    try:
        report = run_cases(Solution(requests, replies, tests["call_s"]), tests)
    except CaseFailed as failed:
        report = {"passed": 0, "of": 0, "outcome": failed.args[0], "text": failed.args[1]}
        try:  # what the prompt wants and this machine lacks is no fault of the solution's
            exec(compile_imports(tests["prompt"]), {})
        except Exception as error:
            report = {"broken": describe(error)}
    send(verdict, report)
    os._exit(0)


if __name__ == "__main__":
    main()
