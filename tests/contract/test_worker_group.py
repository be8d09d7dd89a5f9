"""Every group of workers does this, in processes of this machine and on Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.processes import children, descendants
from tests.ray_nodes import RayWorkers

from winnow.errors import ConfigError, RewardError, WinnowError, WorkerError
from winnow.workers.array_refs import ArrayRef, SplitResult
from winnow.workers.group import WorkerGroup, WorkerGroups, start_local
from winnow.workers.ray.actors import interface_of, start_ray
from winnow.workers.ray.session import Placement, Pool, node_resources, ray_session, reserve

PATH = "tests.workers:Probe"
ENVIRONMENT = {"WINNOW_TEST_WORD": "chaff"}
PATIENCE_S = 60.0
"""For what should come at once, on a machine with other work."""
PLACES: list[Placement] = []
"""Where groups go on Ray, while it is there."""

Start = Callable[..., Coroutine[Any, Any, WorkerGroup]]


async def local(kwargs: dict[str, Any], stall_timeout_s: float = 100.0) -> WorkerGroup:
    return await start_local("policy", PATH, kwargs, 2, ENVIRONMENT, stall_timeout_s)


async def on_ray(kwargs: dict[str, Any], stall_timeout_s: float = 100.0) -> WorkerGroup:
    return await start_ray("policy", PATH, kwargs, PLACES[-1], ENVIRONMENT, stall_timeout_s)


STARTS: dict[str, Start] = {"local": local, "ray": on_ray}


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines, all in one loop, with a limit; workers log as in a run."""
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("winnow"), "level", logging.INFO)
        yield lambda work: runner.run(asyncio.wait_for(work, 2 * PATIENCE_S))


@contextmanager
def ray_for_tests(address: str | None = None) -> Iterator[None]:
    """A cluster of two cores, or a private instance of Ray, with room for two groups."""
    own: dict[str, Any] = {"cpus": 2, "devices": 0, "store_bytes": 200 << 20}
    with ray_session(address, **({} if address else own)):
        pool = Pool("all", {"policy": 1, "another": 1}, per_node=2, cpus=0.5)
        PLACES.append(asyncio.run(reserve([pool])).placement("policy"))
        yield
        PLACES.pop()


@pytest.fixture(scope="module")
def ray(ray_workers: RayWorkers) -> Iterator[ExitStack]:
    """Ray for this module; closing it ends it early."""
    with ExitStack() as stack:
        address = stack.enter_context(ray_workers.nodes({"num_cpus": 2}))
        stack.enter_context(ray_for_tests(address))
        yield stack


@pytest.fixture(scope="module", params=list(STARTS))
def group(request: pytest.FixtureRequest, run: Any) -> Iterator[Any]:
    """A group for tests in which nothing fails."""
    if request.param == "ray":
        request.getfixturevalue("ray")
    made = run(STARTS[request.param]({"start": 3}))
    yield made
    run(made.close())


@pytest.fixture(params=list(STARTS))
def start(request: pytest.FixtureRequest) -> Start:
    """Starts a group of two processes."""
    if request.param == "ray":
        request.getfixturevalue("ray")
    return STARTS[request.param]


def cases(every: list[Any], on_ray: list[Any]) -> Any:
    """Parameters `start` and `case`: all on this machine, some on Ray, which takes seconds each."""
    pairs = [("local", case) for case in every] + [("ray", case) for case in on_ray]
    return pytest.mark.parametrize(("start", "case"), pairs, indirect=["start"])


@asynccontextmanager
async def started(
    start: Start, stall_timeout_s: float = 100.0, **kwargs: Any
) -> AsyncIterator[WorkerGroup]:
    """A group of a test's own, of which no process is left."""
    group = await start(kwargs, stall_timeout_s=stall_timeout_s)
    pids = group.pids()
    try:
        yield group
    finally:
        await group.close()
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Whether a process is there; one of ours that is dead and not waited for counts as there."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" or int(parent) == os.getpid()


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that is to become true."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "did not come true in time"
        await asyncio.sleep(0.01)


def said(log: pytest.LogCaptureFixture, rank: int) -> list[str]:
    """What a worker logged or printed, as it comes to this process's log."""
    heard = [each for each in log.records if each.msg == "%s[%d]: %s"]
    return [text for each in heard for _, who, text in [cast(Any, each.args)] if who == rank]


def test_workers_know_their_rank_and_run_in_one_thread(group: WorkerGroup, run: Any) -> None:
    found = run(group.call("about"))
    assert [info.rank for info, _, _ in found] == list(range(group.size))
    assert all(info.size == group.size and info.device_index is None for info, _, _ in found)
    assert len({(info.master_address, info.master_port) for info, _, _ in found}) == 1
    assert all(is_maker for _, _, is_maker in found)
    pids = [pid for _, pid, _ in found]
    assert pids == group.pids()
    assert len({*pids, os.getpid()}) == 3


def test_calls_begin_in_order(group: WorkerGroup, run: Any) -> None:
    async def work() -> list[list[Any]]:
        same = [group.call("add", n, times=2) for n in range(50)]
        return [*await asyncio.gather(*same), [await group.call_rank(0, "add", 100)]]

    *same, one = run(work())
    before = 3  # what the worker was made with
    assert same == [[before + n * (n + 1)] * group.size for n in range(50)]
    assert one == [same[-1][0] + 100]


def test_a_call_that_waits_lets_others_in(group: WorkerGroup, run: Any) -> None:
    async def work() -> list[Any]:
        waiting = [asyncio.ensure_future(group.call("wait", name)) for name in ("a", "b")]
        await asyncio.sleep(0)
        await group.call("add", 0)
        assert not any(each.done() for each in waiting)
        await group.call("release")
        return await asyncio.gather(*waiting)

    assert run(work()) == [[["a", "b", "release"]] * group.size] * 2


def test_a_cancelled_call_goes_on_in_the_worker(group: WorkerGroup, run: Any) -> None:
    async def work() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.call("sleep", 0.5), 0.2)
        while await group.call("rested") != [1] * group.size:
            await asyncio.sleep(0.01)

    run(work())


def test_large_arrays_arrive_unchanged_and_once(group: WorkerGroup, run: Any) -> None:
    array = np.random.default_rng(0).random(2_500_000)
    found = run(group.call("checks", array))
    assert [total for total, _, _ in found] == [float(array.sum())] * group.size
    small = run(group.call("checks", array[:5].copy()))
    assert [(total, writable) for total, writable, _ in small] == [
        (float(array[:5].sum()), False)
    ] * group.size
    assert not any(is_writable for _, is_writable, _ in found)
    places = {place for _, _, place in found}
    assert len(places) == 1, "each rank has a copy of its own"
    assert places != {0}
    back = run(group.call("array", 2_500_000, 5))
    for rank, each in enumerate(back):
        np.testing.assert_array_equal(each, np.random.default_rng([5, rank]).random(2_500_000))


@pytest.mark.parametrize("count", [3, 200_000], ids=["small", "large"])
def test_what_is_kept_goes_to_whoever_reads_it(group: WorkerGroup, run: Any, count: int) -> None:
    kept: list[SplitResult] = run(group.call("keep", count, 4))
    assert [each.inline for each in kept] == [{"count": count}] * group.size
    on_a_cluster = kept[0].block.handle is not None
    for rank, each in enumerate(kept):
        rng = np.random.default_rng([4, rank])
        ids, numbers, more = rng.integers(9, size=count), rng.random(count), rng.random(count)
        block, apart = each.block, each.extras
        assert apart is not None
        stored = [
            ArrayRef(block, 0, 1, count, np.int32),
            ArrayRef(block, 1, 0, 2, np.float64),
        ]
        for found in run(group.call("read", *stored)):
            assert found[0].dtype == np.int32
            np.testing.assert_array_equal(found[0], ids[1:])
            np.testing.assert_array_equal(found[1], numbers[:2])
        assert not (on_a_cluster and block.is_fetched), "it came by the driver"
        np.testing.assert_array_equal(stored[0], ids[1:])
        assert block.is_fetched
        assert not (on_a_cluster and apart.is_fetched), "it came with what was read"
        np.testing.assert_array_equal(ArrayRef(apart, 0, 0, count, np.float64), more)


def test_what_is_kept_outlives_its_worker(start: Start, run: Any) -> None:
    count = 200_000

    async def work() -> SplitResult:
        async with started(start) as group:
            kept: SplitResult = await group.call_rank(1, "keep", count, 4)
            os.kill(group.pids()[1], signal.SIGKILL)
            with pytest.raises(WorkerError, match=r"policy\[1\]"):
                await group.call("wait", "for ever")
        return kept

    block = run(work()).block
    expected = np.random.default_rng([4, 1]).integers(9, size=count)
    np.testing.assert_array_equal(ArrayRef(block, 0, 0, count, np.int64), expected)


def test_a_restart_under_way_ends_with_the_groups(run: Any) -> None:
    async def work() -> None:
        groups = WorkerGroups()
        (group,) = groups.start(partial(local, {}))
        first = {*group.pids()}
        assert group.restart is not None
        restarting = asyncio.ensure_future(group.restart())
        await until(lambda: bool(children() - before - first))
        await asyncio.to_thread(groups.close)
        with pytest.raises(asyncio.CancelledError):
            await restarting

    before = children()
    run(work())
    assert children() <= before


def test_variables_of_the_environment_arrive(group: WorkerGroup, run: Any) -> None:
    names = "WINNOW_TEST_WORD", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"
    found = run(group.call("environment", *names))
    assert found == [["chaff", "false", os.environ["OMP_NUM_THREADS"]]] * group.size


@pytest.mark.parametrize("group", ["ray"], indirect=True)
def test_gloo_on_ray_listens_where_the_ranks_reach_each_other(group: WorkerGroup, run: Any) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    address = run(group.call("about"))[0][0].master_address
    found = run(group.call("environment", "GLOO_SOCKET_IFNAME"))
    assert found == [[interface_of(address)]] * group.size


def test_workers_reach_each_other_through_torch(group: WorkerGroup, run: Any) -> None:
    for times in (1.0, 2.0):
        assert run(group.call("all_reduce", times)) == [times * 3.0] * group.size


def test_what_workers_say_arrives_whole_and_in_order(
    group: WorkerGroup, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run(group.call("say", "one"))
    run(group.call("say", "two"))
    ranks = range(group.size)
    run(until(lambda: all(any("two\nlong" in text for text in said(caplog, r)) for r in ranks)))
    for rank in ranks:
        texts = [text for text in said(caplog, rank) if "one" in text or "two" in text]
        for word in ("one", "two"):
            printed, logged, error, warned, child, long = texts[:6]
            del texts[:6]
            assert (printed, logged) == (f"{word} printed", f"{word} logged")
            assert (error, child) == (f"{word} to stderr", f"{word} from a child")
            assert f"UserWarning: {word} warned" in warned
            assert long == f"{word}\n{'long ' * 2000}".rstrip()
    levels = {each.getMessage(): each.levelname for each in caplog.records}
    assert levels["policy[1]: one logged"] == "INFO"
    assert levels[f"policy[1]: {long}"] == "ERROR"


@cases(["bug", "exit", "unpicklable"], on_ray=["bug"])
def test_an_exception_names_rank_and_has_its_traceback_in_the_log_once(
    start: Start, case: str, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"bug": "KeyError: 'only rank 1'", "exit": "SystemExit: enough", "unpicklable": "pickle"}

    async def work() -> None:
        async with started(start) as group:
            with pytest.raises(WorkerError, match=r"policy\[1\] failed in raise_on") as caught:
                await group.call("raise_on", 1, case)
            assert told[case] in str(caught.value)
            assert (caught.value.role, caught.value.rank) == ("policy", 1)
            assert caught.value.exit_code == 1
            with pytest.raises(WorkerError, match=r"policy\[1\] failed in raise_on"):
                await group.call_rank(0, "about")

    run(work())
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert text.count("cannot pickle" if case == "unpicklable" else "Traceback (most") == 1
    if case == "bug":
        assert 'raise KeyError(f"only rank {rank}")' in text


async def call_alone(start: Start, *call: Any) -> None:
    """A call to a group of its own."""
    async with started(start) as group:
        await group.call(*call)


def test_a_mistake_of_the_users_keeps_its_class(start: Start, run: Any) -> None:
    with pytest.raises(RewardError, match=r"^the scorer is missing$") as caught:
        run(call_alone(start, "raise_on", 1, "reward"))
    assert caught.value.exit_code == 2


@cases(["config", "bug"], on_ray=["config"])
def test_a_worker_that_cannot_be_made_says_why(start: Start, case: str, run: Any) -> None:
    error: type[WinnowError] = ConfigError
    told = r"^policy\.size must be even, got 3$"
    if case == "bug":
        error, told = WorkerError, r"policy\[\d\] failed in __init__: KeyError: 'start'"
    with pytest.raises(error, match=told):
        run(start({"refuse": case}))


@cases(["kill", "exit", "segfault"], on_ray=["segfault"])
def test_a_death_is_told_at_once_with_the_last_words(
    start: Start, case: str, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with started(start) as group:
            other = asyncio.ensure_future(group.call_rank(0, "wait", "for ever"))
            with pytest.raises(WorkerError, match=r"policy\[1\] .* in die_on") as caught:
                await group.call("die_on", 1, case)
            assert caught.value.rank == 1
            assert any(text.startswith("last words") for text in said(caplog, 1))
            if start is local:
                told = {"kill": "SIGKILL", "exit": "exit code 3", "segfault": "SIGSEGV"}
                assert told[case] in str(caught.value)
            with pytest.raises(WorkerError, match=r"policy\[1\]"):
                await other

    run(work())
    (words,) = [text for text in said(caplog, 1) if text.startswith("last words")]
    if case == "segfault":
        assert "Fatal Python error: Segmentation fault" in "\n".join(said(caplog, 1))
    else:
        assert words == "last words"


def test_the_rank_that_died_is_named_not_the_one_that_noticed(start: Start, run: Any) -> None:
    with pytest.raises(WorkerError, match=r"policy\[1\] .* in lose_peer"):
        run(call_alone(start, "lose_peer", 1))


def test_a_worker_that_dies_while_idle_is_met_by_the_next_call(start: Start, run: Any) -> None:
    async def work() -> None:
        async with started(start) as group:
            os.kill(group.pids()[0], 9)
            with pytest.raises(WorkerError, match=r"policy\[0\]"):
                await asyncio.wait_for(group.call("wait", "for ever"), PATIENCE_S)

    run(work())


@cases([False, True], on_ray=[True])
def test_a_hung_worker_meets_the_limit_and_shows_its_stack(
    start: Start, case: bool, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with started(start, 4.0) as group:
            with pytest.raises(WorkerError, match=r"policy\[1\] hung in hang_on") as caught:
                await asyncio.wait_for(group.call("hang_on", 1, case), PATIENCE_S)
            assert "policy[0]" not in str(caught.value)

    run(work())
    assert any("in hang_on" in text for text in said(caplog, 1))


def test_a_long_call_that_gets_on_is_left_alone(start: Start, run: Any) -> None:
    async def work() -> list[Any]:
        async with started(start, 2.5) as group:
            await group.call("work", 12, 0.25)  # 3 s
            await asyncio.sleep(2.7)  # and what is idle does not hang
            return await group.call("work", 1, 0.0)

    assert run(work()) == [13, 13]


def test_close_lets_workers_close_and_leaves_no_process(
    start: Start, run: Any, tmp_path: Path
) -> None:
    async def work() -> tuple[list[int], int]:
        group = await start({"mark": str(tmp_path / "mark")})
        pids = group.pids()
        if start is local:
            pids.append(await group.call_rank(0, "start_child"))
        await asyncio.gather(group.close(), group.close())
        await group.close()
        with pytest.raises(WorkerError, match="were closed by this run"):
            await group.call("about")
        return pids, group.size

    pids, size = run(work())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"mark.{r}" for r in range(size)]
    run(until(lambda: not any(map(is_running, pids))))


def test_close_does_not_wait_for_a_call_under_way(start: Start, run: Any) -> None:
    async def work() -> list[int]:
        group = await start({}, stall_timeout_s=2.0)
        pids = group.pids()
        hung = asyncio.ensure_future(group.call("hang_on", 0, True))
        await asyncio.sleep(0)
        await group.close()
        with pytest.raises(WorkerError):
            await hung
        return pids

    assert not any(map(is_running, run(work())))


def test_a_session_leaves_signals_and_an_outer_session_alone(ray: Any) -> None:
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with ray_session(None):
            assert node_resources()
        assert [node["CPU"] for node in node_resources().values()] == [2.0]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert before == signal.SIG_DFL  # Ray had one of its own, put back when it had started


def test_pools_that_a_cluster_lacks_are_refused(ray: Any, run: Any) -> None:
    large = [Pool("all", {"policy": 1}, devices=1)]
    with pytest.raises(ConfigError, match=r"they need all 1 x \(1 device and 1 core\); it has 1 x"):
        run(reserve(large))
    taken = [Pool("all", {"policy": 1}, per_node=2)]
    with pytest.raises(ConfigError, match=r"not enough free for the pools within 0\.5 s"):
        run(reserve(taken, timeout_s=0.5))


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", r"^cluster\.address: no Ray at 127\.0\.0\.1:1: .*refused"),
        (
            "127.0.0.1:65536",
            r"^cluster\.address must be auto or HOST:PORT, got '127\.0\.0\.1:65536'",
        ),
        ("head", r"^cluster\.address must be auto or HOST:PORT, got 'head'$"),
        ("ray://head:10001", r"^cluster\.address must be auto or HOST:PORT"),
    ],
)
def test_an_address_without_ray_is_told_at_once(address: str, told: str) -> None:
    with pytest.raises(WinnowError, match=told):
        ray_session(address).__enter__()


def test_without_ray_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^cluster=ray needs Ray; install it: pip install"):
        ray_session(None).__enter__()


DRIVER = """
import asyncio, sys
from contextlib import nullcontext
from tests.contract.test_worker_group import STARTS, ray_for_tests

async def main():
    group = await STARTS[sys.argv[1]]({})
    hung = asyncio.ensure_future(group.call("hang_on", 0, True))
    await asyncio.sleep(0.5)  # now one holds Python's lock, and the other sleeps and works
    print(*group.pids(), flush=True)
    await hung

with ray_for_tests() if sys.argv[1] == "ray" else nullcontext():
    asyncio.run(main())
"""


@pytest.mark.parametrize("kind", list(STARTS))
def test_a_driver_that_is_killed_leaves_no_process(
    kind: str, request: pytest.FixtureRequest, run: Any
) -> None:
    if kind == "ray":  # one instance at a time
        request.getfixturevalue("ray").close()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, kind], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        workers = [int(word) for word in driver.stdout.readline().split()]
        assert len(workers) == 2
        started = {*descendants(driver.pid)}
        assert started >= set(workers)
        assert all(map(is_running, started))
    finally:
        driver.kill()
        driver.communicate()
    run(until(lambda: not any(map(is_running, started))))
