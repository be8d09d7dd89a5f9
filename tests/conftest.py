"""What all tests share: few threads, one way to ask for outside parts, and skips that show.

Each skip is listed with its reason at the end. With WINNOW_STRICT=1 a skip fails the run,
unless its reason begins with one of `EXEMPT_REASONS`: those name what no install can bring.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import itertools
import math
import os
import secrets
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from tests.examples import QUICK, THOROUGH
from tests.hubs import Hub, serve_hub
from tests.ranks import Ranks

if TYPE_CHECKING:
    from benchmarks.kill import Lab
    from tests.forked import Server
    from tests.ray_nodes import RayWorkers

    from winnow.data.prepare import PrepareReport

# While tests are collected: to walk what imports leave for good is a sixth of the time they take.
gc.disable()
# Set before torch is imported: the run is parallel already, one process a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# The key by which runs are known as begun here; all processes of a test run share it.
os.environ["XDG_STATE_HOME"] = f"{tempfile.gettempdir()}/winnow-tests-{os.getuid()}"
# Ray settles for a process's life whether its clusters ask for a token, by these and by whether its
# user has one: without them that depends on which test is first.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

collect_ignore = [] if getattr(importlib.util.find_spec("vllm"), "origin", None) else ["vllm"]
"""Tests of the vLLM engine run in `.venv-vllm` (`make test-vllm`)."""
NO_GPU = "needs a GPU"
NO_SHARED_DATA = "shared data absent"
ON_HOST = "computes on the CPU alone: unset WINNOW_TEST_DEVICE"
EXEMPT_REASONS = (NO_GPU, NO_SHARED_DATA)

# No time limits for examples: on a machine that others use too they would say nothing. The strict
# run gives one verdict for one commit; other runs go on looking for new examples.
settings.register_profile(
    "quick", max_examples=QUICK, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
_quick = settings.get_profile("quick")
settings.register_profile("strict", _quick, derandomize=True, print_blob=True)
settings.register_profile("thorough", _quick, max_examples=QUICK * THOROUGH, print_blob=True)
settings.load_profile("strict" if os.environ.get("WINNOW_STRICT") == "1" else "quick")
SLOWEST_FILES = 10
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def signals_arrive() -> Iterator[None]:
    """A test run that a shell started in the background ignores Ctrl-C, or nohup hang-ups.

    So would every process that a test starts and sends signals to; a handler, even one that does
    nothing, is not inherited.
    """
    numbers = (signal.SIGINT, signal.SIGHUP)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process, and those it starts, take for the real one."""
    with serve_hub(tmp_path, monkeypatch) as held:
        yield held


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data files beside the repository; without it the test is skipped."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"{NO_SHARED_DATA}: {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture
def prepare_file(tmp_path: Path) -> Callable[..., PrepareReport]:
    """What `winnow data prepare` does, into `out.parquet` of the test's folder."""
    from winnow.data.prepare import PrepareRequest, prepare

    def make(name: str, *files: str, **options: Any) -> PrepareReport:
        out = str(tmp_path / "out.parquet")
        return prepare(PrepareRequest(name, files=files, **{"out": out, **options}))

    return make


@pytest.fixture(scope="session")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of trackio's runs: one a process, since trackio reads it while it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def ranks(server: Server) -> Iterator[Ranks]:
    """Four processes in one gloo group, started when they are first asked."""
    with Ranks(4, server) as made:
        yield made


@pytest.fixture(scope="session")
def mounting() -> Iterator[Server]:
    """Starts processes that have imported everything, and see mounts of their own."""
    from tests.fault.small_disk import namespace
    from tests.forked import Server

    server = Server(*namespace())
    yield server
    server.close()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Starts processes that have imported everything."""
    from tests.fault.small_disk import why_not
    from tests.forked import Server

    if os.geteuid() == 0 and why_not() is None:  # whoever may mount is the same user there
        yield request.getfixturevalue("mounting")
        return
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_workers(server: Server) -> Iterator[None]:
    """Workers that are started in a module's tests are forked, and need not import."""
    from tests.spares import popen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen(server.adopt))
        yield


@pytest.fixture(scope="session")
def ray_workers(server: Server) -> Iterator[RayWorkers]:
    """Starts clusters of Ray, whose workers are forked, and need not import."""
    from tests.ray_nodes import RayWorkers

    with tempfile.TemporaryDirectory(prefix="w-", dir="/tmp") as folder:
        yield RayWorkers(server, Path(folder))


@pytest.fixture(scope="session")
def warm_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of warm starts for all files, of all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm-starts"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, server: Server, warm_starts: Path) -> Lab:
    """A folder for runs of the quickstart's task, of which one is there: `undisturbed`.

    That one is shared by all processes of this test run; the others are compared with it.
    """
    from benchmarks.kill import LONGEST_S, Lab
    from tests.fault.quick_lab import QuickLab

    lab = QuickLab(tmp_path_factory.mktemp("lab"), server=server)
    (lab.folder / "cache").symlink_to(warm_starts)
    shared = Lab(warm_starts.parent / "undisturbed")
    with FileLock(f"{shared.folder}.lock"):
        if not shared.folder.exists():
            shared.folder.mkdir()
            (shared.folder / "cache").symlink_to(warm_starts)
            # How long a run takes tells when to kill it; a forked one does not import.
            assert lab.start("warm-up", "trainer.steps=1").wait(LONGEST_S) == 0
            (shared.folder / "seconds").write_text(str(shared.timed().seconds))
    lab.run("undisturbed").parent.mkdir(exist_ok=True)
    lab.run("undisturbed").symlink_to(shared.run("undisturbed"))
    return replace(lab, seconds=float((shared.folder / "seconds").read_text()))


LONGEST_FIRST = (
    "tests/fault/test_ranks.py",  # makes the `lab`; others wait for it
    "tests/e2e/test_pages.py",
    "tests/e2e/test_bad_input.py",
    "tests/e2e/test_megatron.py",
    "tests/e2e/test_support.py",
    "tests/contract/test_fsdp2.py",
    "tests/contract/test_worker_group.py",
    "tests/e2e/test_pools.py",
    "tests/fault/test_signals.py",
    "tests/fault",
    "tests/e2e/test_quickstart.py",
    "tests/e2e",
    "tests/contract",
    "tests/integration/rewards/test_pool.py",
    "tests/integration/rewards/test_code.py",
    "tests/integration",
)
"""So that of several processes none is left with a long file when the others have ended."""


def pytest_configure(config: pytest.Config) -> None:
    """Have `-m gpu` choose the contract tests that follow `tests.devices`, too."""
    if config.option.markexpr == "gpu":
        os.environ.setdefault("WINNOW_TEST_DEVICE", "cuda")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `real` unless `-m` names them; order the files by what they take."""
    if os.environ.get("WINNOW_TEST_DEVICE", "cpu") != "cpu":
        for item in items:
            if item.nodeid.startswith("tests/contract/"):
                module = getattr(item, "module", None)
                follows = hasattr(module, "DEVICE") and not item.get_closest_marker("host")
                item.add_marker(pytest.mark.gpu if follows else pytest.mark.skip(reason=ON_HOST))
    if "real" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("real")])
        items[:] = [i for i in items if not i.get_closest_marker("real")]

    def rank(item: pytest.Item) -> int:
        places = (i for i, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
        return next(places, len(LONGEST_FIRST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over the 400,000 objects that imports made.

    What is garbage among them stays: to look for it takes more than a second of each process.
    """
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"{NO_GPU}: torch sees no CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slowest files, and each skip; in strict mode say which of these fail the run."""
    seconds: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds:
        terminalreporter.section(f"the {SLOWEST_FILES} slowest files")
    for file, total in seconds.most_common(SLOWEST_FILES):
        terminalreporter.line(f"{total:7.1f} s {file}")
    skips = list(_skips(terminalreporter))
    if not skips:
        return
    terminalreporter.section(f"{len(skips)} skipped")
    for test, reason in skips:
        verdict = "FAILS THE RUN " if _fails_the_run(reason) else ""
        terminalreporter.line(f"{verdict}{test}: {reason}")
    failing = sum(_fails_the_run(reason) for _, reason in skips)
    if failing:
        terminalreporter.line(
            f"Strict mode: {failing} skipped test(s) count as failures. "
            "Install what they ask for, or run without STRICT=1.",
            red=True,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn a strict run with skips into a failed one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return
    if any(_fails_the_run(reason) for _, reason in _skips(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skips(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str]]:
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.longrepr else ""
        yield report.nodeid, " ".join(reason.split()) or "no reason given"


def _fails_the_run(reason: str) -> bool:
    return os.environ.get("WINNOW_STRICT") == "1" and not reason.startswith(EXEMPT_REASONS)


@pytest.fixture
def quickstart_records() -> list[dict[str, float]]:
    """What a run of 80 steps writes, evaluated every 20."""

    def held_out(step: int) -> dict[str, float]:
        gain = 1 - math.exp(-step / 25)
        return {
            "eval/sort_digits/avg@16": 0.3 + 0.6 * gain,
            "eval/sort_digits/pass@1": 0.3 + 0.6 * gain,
            "eval/sort_digits/pass@16": 0.95 + 0.04 * gain,
            "eval/sort_digits/greedy": 0.57 + 0.4 * gain,
            "eval/sort_digits/length": 52 - 6 * gain,
            "eval/sort_digits/truncated": 0.1 * (1 - gain),
            "eval/sort_digits/prompts": 2000,
        }

    records: list[dict[str, float]] = [{"step": 0, **held_out(0)}]
    for step in range(1, 81):
        gain = 1 - math.exp(-step / 25)
        record = {
            "step": step,
            "sampling/accuracy": 0.3 + 0.6 * gain,
            "score/reward/mean": -0.4 + 1.1 * gain,
            "sampling/keep_rate": 0.6 - 0.2 * gain,
            "length/response/mean": 52 - 6 * gain,
            "length/truncated": 0.1 * math.exp(-step / 8),
            "actor/entropy": 0.5 - 0.3 * gain,
            "throughput/tokens_per_s": 23456.0,
            "time/generate_s": 0.7,
            "time/update_s": 0.5,
            "time/other_s": 0.1,
            "time/step_s": 1.3,
            "sampling/tokens/generated": 36000,
            "sampling/tokens/trained": 24000,
            "sampling/tokens/all_right": 9000,
            "sampling/tokens/all_wrong": 2300,
            "sampling/tokens/surplus": 700,
            "sampling/tokens/in_progress": 1234,
        }
        records.append(record | (held_out(step) if step % 20 == 0 else {}))
    return records
