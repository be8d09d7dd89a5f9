"""What all tests share: few threads, one way to ask for outside parts, and skips that show.

Each skip is listed with its reason at the end. With WINNOW_STRICT=1 a skip fails the run,
unless its reason begins with one of `EXEMPT_REASONS`: those name what no install can bring.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests.examples import QUICK, THOROUGH
from tests.hubs import Hub, serve_hub
from tests.ranks import Ranks

if TYPE_CHECKING:
    from benchmarks.kill import Lab
    from tests.forked import Server

    from winnow.data.prepare import Prepared

# Set before torch is imported: the run is parallel already, one process a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Ray settles for a process's life whether its clusters ask for a token, by these and by whether its
# user has one: without them that depends on which test is first.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

collect_ignore = [] if getattr(importlib.util.find_spec("vllm"), "origin", None) else ["vllm"]
"""Tests of the vLLM engine run in `.venv-vllm` (`make test-vllm`)."""
NO_GPU = "needs a GPU"
NO_SHARED_DATA = "shared data absent"
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
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


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
def prepare_file(tmp_path: Path) -> Callable[..., Prepared]:
    """What `winnow data prepare` does, into `out.parquet` of the test's folder."""
    from winnow.data.prepare import Request, prepare

    def make(name: str, *files: str, **options: Any) -> Prepared:
        out = str(tmp_path / "out.parquet")
        return prepare(Request(name, files=files, **{"out": out, **options}))

    return make


@pytest.fixture(scope="session")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of trackio's runs: one a process, since trackio reads it while it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes in one gloo group, started when they are first asked."""
    with Ranks(4) as made:
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


@pytest.fixture(scope="session")
def warm_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of warm starts for all files, of all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm-starts"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, server: Server, warm_starts: Path) -> Lab:
    """A small run of the quickstart's task, undisturbed, that others are compared with."""
    from benchmarks.kill import LONGEST_S, Lab
    from tests.fault.quick_lab import QuickLab

    fresh = Lab(tmp_path_factory.mktemp("lab"))
    (fresh.folder / "cache").symlink_to(warm_starts)
    quick = QuickLab(fresh.folder, server=server)
    assert quick.start("warm-up", "trainer.steps=1").wait(LONGEST_S) == 0
    # How long a run takes tells when to kill it; a forked one does not import.
    return replace(quick, seconds=fresh.timed().seconds)


LONGEST_FIRST = (
    "tests/fault/test_kill.py",
    "tests/fault/test_signals.py",
    "tests/fault",
    "tests/e2e/test_quickstart.py",
    "tests/e2e",
    "tests/contract",
    "tests/integration/rewards/test_pool.py",
    "tests/integration/rewards/test_code_real.py",
    "tests/integration",
)
"""So that of several processes none is left with a long file when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files by what they take; within a file nothing changes."""

    def rank(item: pytest.Item) -> int:
        places = (i for i, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
        return next(places, len(LONGEST_FIRST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over the 400,000 objects that imports made."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"{NO_GPU}: torch sees no CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List each skip on one line; in strict mode say which of them fail the run."""
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
