"""The tests' process, and the beginning of both: the end of `main.py` in the sandbox."""

from __future__ import annotations

import builtins
import os
import select
import sys
import time

from winnow.sandbox.harness.solution import (
    MODULES,
    REPLIES,
    REQUESTS,
    describe,
    helpers_of,
    imports_of,
    provide,
    serve,
    words_of,
)
from winnow.sandbox.harness.values import READ_BYTES, reader, scan, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


_NEVER_RAISED = (AssertionError, StopIteration, StopAsyncIteration)
"""In the tests for the solution: the first is theirs, the others end loops of theirs in silence."""


class Failed(Exception):
    """A case is lost: how, and a word on it."""

    def __init__(self, outcome: str, text: str = "") -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text


class Solution:
    """The other process, as the tests call it."""

    def __init__(self, requests: int, replies: int, call_s: float) -> None:
        self.requests, self.replies, self.call_s = requests, replies, call_s
        self.read = reader(replies, self.wait)
        self.until = time.monotonic() + call_s
        ready = self.receive()
        if "failed" in ready:
            # The solution may have written this message itself.
            kind = "compile_error" if ready["failed"] == "compile_error" else "runtime_error"
            raise Failed(kind, str(ready.get("text", ""))[:200])
        self.names = [str(name) for name in ready["names"]]

    def wait(self) -> None:
        """Wait for bytes of the solution's, as long as its call may take."""
        left = self.until - time.monotonic()
        if left <= 0 or not select.select([self.replies], [], [], left)[0]:
            raise Failed("time_limit", f"no result within {self.call_s:g} s")

    def receive(self) -> dict[str, Any]:
        """The next message."""
        reply = next(self.read, None)
        if not isinstance(reply, dict):
            raise Failed("runtime_error", "the solution ended its process")
        return reply

    def call(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of the solution's."""
        self.until = time.monotonic() + self.call_s
        try:
            send(self.requests, {"name": name, "args": list(args), "kwargs": kwargs})
        except BrokenPipeError:
            raise Failed("runtime_error", "the solution ended its process") from None
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
                return Failed("runtime_error", text)
            error.of_solution = text  # type: ignore[attr-defined]
            return error
        return Failed("runtime_error", text)

    def function(self, name: str) -> Callable[..., Any]:
        """A function that calls the solution's of this name."""
        return lambda *args, **kwargs: self.call(name, args, kwargs)


def judge(solution: Solution, tests: dict[str, Any]) -> dict[str, Any]:
    """Run the cases; how many passed, and what became of the first that did not."""
    try:
        cases = list(prepared(solution, tests))
    except Exception as error:  # nothing of the solution's has been called
        return {"broken": describe(error)}
    passed, first, text = 0, None, ""
    for number, case in enumerate(cases):
        outcome = "pass"
        try:
            case()
        except Failed as failed:
            outcome, said = failed.outcome, failed.text
        except Exception as error:
            if isinstance(error, ImportError) and not hasattr(error, "of_solution"):
                return {"broken": describe(error)}
            outcome = "runtime_error" if hasattr(error, "of_solution") else "wrong"
            said = getattr(error, "of_solution", None) or describe(error)
            said += line_of(error, number, tests["cases"][number])
        if outcome == "pass":
            passed += 1
            continue
        if first is None:
            first, text = outcome, said
        # After a time limit the solution still works on an old call.
        if tests["stop_early"] or outcome == "time_limit":
            break
    return {"passed": passed, "of": len(cases), "outcome": first or "pass", "text": text}


def line_of(error: BaseException, number: int, case: Any) -> str:
    """The line of a case's text that an error came through, for people."""
    lines: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file_of(number):
            lines = case.splitlines()[trace.tb_lineno - 1 : trace.tb_lineno]
        trace = trace.tb_next
    return f" in {lines[0].strip()[:200]}" if lines else ""


def file_of(number: int) -> str:
    """The name under which a case is compiled."""
    return f"test {number + 1}"


def prepared(solution: Solution, tests: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Each case as a function that raises."""
    if tests["kind"] == "calls":
        for args, expected in tests["cases"]:
            yield later(call_once, solution, tests["entry_point"], args, expected)
        return
    text = "\n".join(tests["cases"])
    words = words_of(text)
    space: dict[str, Any] = {"__name__": "tests"}
    provide(text, space)
    exec(imports_of(tests["prompt"]), space)
    for helper in helpers_of(tests["prompt"], tests["entry_point"]):
        try:
            exec(helper, space)
        except NameError:
            continue  # it wants a class of the prompt's, say: only the solution has that
    given = frozenset(space)
    for name in solution.names:
        # A solution must not lend the tests its own idea of `set`, `Counter` or a prompt's helper.
        usual = hasattr(builtins, name) or name in MODULES or name in given
        if name == tests["entry_point"] or (name in words and not usual):
            space[name] = solution.function(name)
    for number, case in enumerate(tests["cases"]):
        code = compile(case, file_of(number), "exec")
        yield later(run, code, space, solution, tests["kind"], tests["entry_point"])


def later(function: Callable[..., None], *args: Any) -> Callable[[], None]:
    """A call to be made later (functools draws in much)."""
    return lambda: function(*args)


def call_once(solution: Solution, name: str, args: Any, expected: Any) -> None:
    """Call a function and look at its result."""
    compare(solution.call(name, args, {}), expected)


def run(code: Any, space: dict[str, Any], solution: Solution, kind: str, name: str) -> None:
    """Execute a test's text; of one that defines `check`, the check."""
    exec(code, space)
    if kind == "check":
        check = space["check"]
        if "check" in solution.names:  # whose calls in the test mean the solution's own
            space["check"] = solution.function("check")
        check(solution.function(name))


def compare(value: Any, expected: Any) -> None:
    """Equal as JSON, or equal to the only element of what is expected (as APPS writes it)."""
    value = plain(value)
    expected = plain(expected)
    alone = isinstance(expected, list) and len(expected) == 1 and value == expected[0]
    if value != expected and not alone:
        raise AssertionError(f"got {str(value)[:80]}, expected {str(expected)[:80]}")


def plain(value: Any) -> Any:
    """With lists for tuples, and texts for keys: what JSON tells apart."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): plain(v) for key, v in value.items()}
    return value


def exactly(size: int) -> bytes:
    """So many bytes of standard input, and not one more: the tests come behind."""
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data))
    return data


def main() -> None:
    """Start the solution's process, then read the tests and print the verdict."""
    # Before the solution runs: it may write modules of its own to this folder.
    del sys.path[0]
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    solution = scan(exactly(int(exactly(10))).decode())
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
    tests = scan(b"".join(iter(lambda: os.read(0, READ_BYTES), b"")).decode())
    verdict = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 1)  # tests may print
    try:
        report = judge(Solution(requests, replies, tests["call_s"]), tests)
    except Failed as failed:
        report = {"passed": 0, "of": 0, "outcome": failed.outcome, "text": failed.text}
        try:  # what the prompt wants and this machine lacks is no fault of the solution's
            exec(imports_of(tests["prompt"]), {})
        except Exception as error:
            report = {"broken": describe(error)}
    send(verdict, report)
    os._exit(0)
