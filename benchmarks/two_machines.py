"""A run on two machines: two network namespaces, each with a Ray node, and a link that can fail.

    python -m benchmarks.two_machines [--link down] [--delay-ms 2] [--out FOLDER]

As root on Linux with iproute2 and util-linux. A machine has its own network, processes, hostname,
/etc/hosts (with Debian's 127.0.1.1 for its name) and shared memory; only files are common. The link
is a veth pair, or with --delay-ms a tun device on each side and a process that passes packets on
after that time. The run is the one of `benchmarks.published_layout`, 2 x 2 slots, and --link says
how the link is:

- up: ids and figures are compared with those of one rank and one vLLM engine (in `.venv-vllm`);
- short: down for 20 s after the first step; with torch engines, as in the next two, and compared by
  bits with an undisturbed run;
- down: until the run has ended, and its workers beyond the link, too; the same command follows;
- restart: until the supervisor's new run waits for the lost node.

Machines, processes and link end with this process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import secrets
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from functools import partial
from pathlib import Path

from benchmarks.kill import differences
from benchmarks.published_layout import (
    ALONE,
    SIZES,
    STEPS,
    largest_difference,
    layout,
    trained_answers,
    write_home,
)

from winnow.workers.child import die_with_parent

ADDRESSES = "10.77.0.1", "10.77.0.2"
WIRE = "wire0"
PORT = 6379
ADDRESSED = (f"cluster.address={ADDRESSES[0]}:{PORT}",)
LONGEST_S = 600.0
SHORT_S = 20.0
DIES_WITH_THIS = partial(die_with_parent, os.getpid())
_TUN, _NO_HEADER, _SET_NAME = 0x0001, 0x1000, 0x400454CA
_NEW_NETWORK = 0x40000000


@dataclass(frozen=True)
class Machine:
    """A machine: the first process of its namespaces, which all others end with."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The first process, as this one's namespace counts."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def command(self, *words: str) -> list[str]:
        """Return the words that run a command on this machine."""
        into = ["nsenter", f"--target={self.pid}", "-n", "-m", "-u", "-i", "-p", "--"]
        return [*into, "env", f"--chdir={os.getcwd()}", *words]

    def run(self, script: str) -> str:
        """Run a shell script on this machine; return its output."""
        words = self.command("sh", "-ec", script)
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def connect(self) -> None:
        """Set this side of the link up, with the routes that a machine has."""
        gateway = ADDRESSES[1 - self.number]
        self.run(f"ip link set {WIRE} up && ip route replace default via {gateway}")


def boot(number: int, folder: Path) -> Machine:
    """Start a machine without a link; its Ray starts once the file `ray` is in its folder.

    A Ray node that ends is started again, as a machine's service manager does.
    """
    own, shared = folder / f"machine-{number}", folder / "ray"
    own.mkdir()
    shared.mkdir(exist_ok=True)
    name = f"machine-{number}"
    (own / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    place = (
        f"--head --port={PORT} --temp-dir={shared} --include-dashboard=false"
        if number == 0
        else f"--address={ADDRESSES[0]}:{PORT}"
    )
    ray = f"{sys.executable} -m ray.scripts.scripts start --block --num-cpus=2 {place}"
    script = (
        f"set -e; hostname {name}; mount --bind {own}/hosts /etc/hosts; "
        f"mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs {shared}; ip link set lo up; "
        f"touch {own}/booted; set +e; while [ ! -e {own}/ray ]; do sleep 0.05; done; while :; do "
        f"{ray} --object-store-memory={100 << 20} --disable-usage-stats >>{own}/ray.txt 2>&1; "
        f"sleep 1; done"
    )
    words = ["--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc", "--fork"]
    unshare = ["unshare", *words, "--kill-child", "sh", "-c", script]
    process = subprocess.Popen(unshare, preexec_fn=DIES_WITH_THIS)
    wait_until((own / "booted").exists, process)
    return Machine(number, own, process)


def wait_until(
    sign: Callable[[], bool], process: subprocess.Popen[bytes], longest_s: float = 60.0
) -> None:
    """Wait for a sign, while a process runs."""
    give_up = time.monotonic() + longest_s
    while not sign():
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        if time.monotonic() > give_up:
            raise SystemExit(f"{process.args!r}: no sign within {longest_s:g} s")
        time.sleep(0.02)


@contextlib.contextmanager
def two_machines(folder: Path, delay_ms: float | None) -> Iterator[list[Machine]]:
    """Boot two machines with a link, and a Ray node on each; end them with the block."""
    machines: list[Machine] = []
    relay = None
    try:
        for number in (0, 1):
            machines.append(boot(number, folder))
        pids = [machine.pid for machine in machines]
        if delay_ms is None:
            peer = f"type veth peer name {WIRE} netns {pids[1]}"
            subprocess.run(
                ["ip", "link", "add", WIRE, "netns", str(pids[0]), *peer.split()], check=True
            )
        else:
            words = ["-m", "benchmarks.two_machines", "--relay", *map(str, pids)]
            words = [sys.executable, *words, "--delay-ms", str(delay_ms)]
            relay = subprocess.Popen(words, preexec_fn=DIES_WITH_THIS)
        for machine in machines:
            there = f"ip link show {WIRE} >/dev/null 2>&1"
            machine.run(f"until {there}; do sleep 0.05; done")
            machine.run(f"ip address add {ADDRESSES[machine.number]}/24 dev {WIRE}")
            machine.connect()
        for machine in machines:
            (machine.folder / "ray").touch()
        wait_for_nodes(machines[0])
        yield machines
    finally:
        for process in [m.process for m in machines] + ([relay] if relay else []):
            process.kill()  # the first process of the namespaces ends with `unshare`
            process.wait()


def wait_for_nodes(head: Machine) -> None:
    """Wait until Ray has two live nodes."""
    began = time.monotonic()
    program = (
        "import ray, sys; ray.init(address='auto', logging_level='ERROR', log_to_driver=False); "
        "sys.exit(sum(node['Alive'] for node in ray.nodes()) != 2)"
    )
    while True:
        words = head.command(sys.executable, "-c", program)
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if time.monotonic() - began > LONGEST_S:
            raise SystemExit(f"Ray has not two nodes: {done.stderr[-500:]}")
        time.sleep(1)


def pass_packets(pids: Sequence[int], delay_s: float) -> None:
    """Be the link: a tun device on each machine, whose packets reach the other after a delay."""
    libc, ends = ctypes.CDLL(None, use_errno=True), []
    for pid in pids:
        with open(f"/proc/{pid}/ns/net") as network:
            if libc.setns(network.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        ioctl(ends[-1], _SET_NAME, struct.pack("16sH22x", WIRE.encode(), _TUN | _NO_HEADER))
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, end, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # a device that is down, or has a full queue
                os.write(end, packet)
        wait_s = max(0.0, under_way[0][0] - now) if under_way else None
        for end in select.select(ends, [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(end, 1 << 16)
                due = time.monotonic() + delay_s
                under_way.append((due, ends[end == ends[0]], packet))


@dataclass
class Drive:
    """A run whose driver is on the first machine."""

    machine: Machine
    home: Path
    name: str
    settings: Sequence[str]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.home / "runs" / self.name

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command, whose last lines are in `said`."""
        words = [sys.executable, "-m", "winnow.cli.main", "train", "dapo_qwen2.5_32b", *SIZES]
        words += [*self.settings, f"run.name={self.name}"]
        with (self.home / f"{self.name}.txt").open("ab") as out:
            into = self.machine.command("env", f"--chdir={self.home}", *words)
            return subprocess.Popen(into, stdout=out, stderr=subprocess.STDOUT)

    def said(self) -> str:
        """Return the last line of its output."""
        lines = (self.home / f"{self.name}.txt").read_text().splitlines()
        return lines[-1] if lines else ""

    def finish(self) -> float:
        """Run to the end, which is to be a good one; return the seconds."""
        began = time.monotonic()
        code = self.start().wait(LONGEST_S)
        if code:
            raise SystemExit(f"{self.name} ended with exit code {code}: {self.said()}")
        return time.monotonic() - began


def places(run: Path) -> str:
    """Return which workers each machine had, by the run's log."""
    ready = r"(\w+(?: \d+)?\[\d+\]): ready: process \d+ on (\S+)"
    found = re.findall(ready, (run / "log.txt").read_text())
    lists = {place: sorted(name for name, on in found if on == place) for _, place in found}
    return "; ".join(f"{place}: {', '.join(names)}" for place, names in sorted(lists.items()))


def compare(machine: Machine, home: Path) -> list[str]:
    """Compare a run on two machines with one rank and one engine; return lines of a report."""
    alone = Drive(machine, home, "alone", ALONE)
    lines = [f"alone: {alone.finish():.0f} s"]
    both = Drive(machine, home, "both", [*ADDRESSED, *layout(2, 2)])
    lines.append(f"two machines: {both.finish():.0f} s")
    lines.append(places(both.folder))
    same = trained_answers(alone.folder) == trained_answers(both.folder)
    differs, name = largest_difference(alone.folder, both.folder)
    return [*lines, f"equal ids: {same}; largest difference of a figure: {differs:.1e} ({name})"]


def cut(machines: Sequence[Machine], home: Path, link: str) -> list[str]:
    """Fail the link after a run's first step, and say what becomes of the run."""
    settings = [*ADDRESSED, "rollout/engine=torch", *layout(2, 2, 1)]
    calm = Drive(machines[0], home, "calm", settings)
    lines = [f"undisturbed: {calm.finish():.0f} s", places(calm.folder)]
    restarts = ["trainer.max_restarts=1"] if link == "restart" else []
    run = Drive(machines[0], home, link, [*settings, *restarts])
    process, log = run.start(), run.folder / "log.txt"
    wait_until((run.folder / "checkpoints/step-1").exists, process, LONGEST_S)
    machines[1].run(f"ip link set {WIRE} down")
    began = time.monotonic()
    lines.append("link down after step 1")

    def note(event: str) -> None:
        lines.append(f"after {time.monotonic() - began:.0f} s: {event}")

    if link == "short":
        time.sleep(SHORT_S)
    elif link == "restart":
        wait_until(lambda: "Waiting at most" in log.read_text(), process, LONGEST_S)
        note(log.read_text().splitlines()[-1].partition(": ")[2])
    else:
        note(f"exit code {process.wait(LONGEST_S)}: {run.said()}")
        busy = "ps -eo args | grep -c '^ray::RayWorker' || true"
        while machines[1].run(busy).strip() != "0":
            time.sleep(1)
        note("no worker on the second machine")
    machines[1].connect()
    note("link up")
    if link == "down":
        wait_for_nodes(machines[0])
        note("Ray has two nodes; the same command is given again")
        process = run.start()
    note(f"exit code {process.wait(LONGEST_S)}")
    differs = differences(calm.folder, run.folder, STEPS)
    return [*lines, f"differs from the undisturbed run in: {', '.join(differs) or 'nothing'}"]


def main() -> None:
    """Boot the machines, run, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--delay-ms", type=float)
    parser.add_argument("--link", choices=["up", "short", "down", "restart"], default="up")
    parser.add_argument("--out", type=Path, help="folder to keep; a temporary one by default")
    parser.add_argument("--relay", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.relay:
        pass_packets(given.relay, (given.delay_ms or 0.0) / 1e3)
        return
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with contextlib.ExitStack() as after:
        folder = Path(given.out or after.enter_context(tempfile.TemporaryDirectory(prefix="w-")))
        home = folder.resolve() / "home"
        home.mkdir(parents=True)
        write_home(home)
        machines = after.enter_context(two_machines(folder.resolve(), given.delay_ms))
        if given.link == "up":
            lines = compare(machines[0], home)
        else:
            lines = cut(machines, home, given.link)
        print("\n".join(lines))


if __name__ == "__main__":
    main()
