"""What this machine has for Winnow, what is missing, and how to get it: `winnow doctor`.

Everything is tried rather than asked: torch multiplies, a program runs in each sandbox, a file is
written where runs go. A fault keeps every run from starting; a note is about something that only
some recipes need.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from winnow import __version__
from winnow.config.reward import SandboxConfig
from winnow.errors import RewardError

State = Literal["ok", "note", "fault"]
_GIB = 1 << 30
_LEAST_FREE = 2 * _GIB
"""Of a disk: a few checkpoints of a small model."""
_LEAST_MEMORY = 2 * _GIB
_NOT_FOR_USERS = {"all", "dev", "browser"}
_PURPOSE = {
    "ray": "many machines",
    "vllm": "rollouts on GPUs",
    "megatron": "very large models",
    "peft": "LoRA",
    "loggers": "metrics elsewhere",
    "reasoning-gym": "procedural tasks",
    "dashboard": "the dashboard",
    "serve": "winnow sandbox serve, winnow reward serve",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    text: str
    remedy: str = ""
    """What to do, in one line; empty where nothing is to be done."""


def examine(runs: str) -> Iterator[Finding]:
    """Look at everything, one finding after the other.

    Args:
        runs: the folder of runs.
    """
    yield _python()
    yield from _packages()
    yield from _torch()
    yield _cores()
    yield _memory()
    yield from _sandboxes()
    yield from _extras()
    yield _runs_folder(Path(runs))
    yield from _caches()


def _python() -> Finding:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, on {system}")


def _packages() -> Iterator[Finding]:
    """Winnow and what it always needs."""
    yield Finding("winnow", "ok", f"{__version__} at {Path(__file__).parent}")
    try:
        needed = list(_requirements(""))
    except metadata.PackageNotFoundError:
        text = "winnow is on the path but not installed, so its needs are not known"
        yield Finding("packages", "note", text, "pip install -e . in its folder")
        return
    unmet = [reason for requirement in needed if (reason := _unmet(requirement))]
    if unmet:
        remedy = "pip install -c constraints.txt -e . in Winnow's folder, or pip install -U winnow"
        yield Finding("packages", "fault", "; ".join(unmet), remedy)
        return
    yield Finding("packages", "ok", f"all {len(needed)} that every run needs")


def _requirements(extra: str) -> Iterator[Any]:
    """What Winnow itself asks for, or what an extra adds."""
    from packaging.requirements import Requirement

    for line in metadata.requires("winnow") or ():
        requirement = Requirement(line)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always != bool(extra) and (always or (marker and marker.evaluate({"extra": extra}))):
            yield requirement


def _unmet(requirement: Any) -> str:
    """Why a requirement is not met; empty where it is."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} is {version}, needed is {requirement.specifier}"


def _torch() -> Iterator[Finding]:
    """Whether it computes, and on what."""
    try:
        import torch

        ones = torch.ones(64, 64)
        assert float((ones @ ones).sum()) == 64**3
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = "install it anew: pip install --force-reinstall -c constraints.txt torch"
        yield Finding("torch", "fault", f"does not work: {reason}", remedy)
        return
    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built for CPUs"
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    text = f"{torch.__version__}, {build}; {capability}, {threads} threads"
    yield Finding("torch", "ok", text)
    yield from _devices(torch)


def _devices(torch: Any) -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding(f"gpu {number}", "ok", f"{name}, {_size(free)} of {_size(total)} free")
    if count:
        return
    has_driver = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None
    if not has_driver:
        yield Finding("gpu", "ok", "none: models run on the CPU (run.device=auto)")
    elif torch.version.cuda is None:
        text = "this machine has an NVIDIA driver, but torch is built for CPUs"
        remedy = "install torch from the index for your CUDA: https://pytorch.org/get-started"
        yield Finding("gpu", "note", text, remedy)
    else:
        text = f"torch is built for CUDA {torch.version.cuda} and finds no GPU"
        yield Finding("gpu", "note", text, "see nvidia-smi; in a container, start it with --gpus")


def _cores() -> Finding:
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{own} of {os.cpu_count()}"
    quota = _cgroup_cores()
    if quota is not None and quota < own:
        text += f", and this container may use {quota:g} of them"
        return Finding("cores", "note", text, f"set run.threads={max(1, int(quota))}")
    return Finding("cores", "ok", f"{text}, load {os.getloadavg()[0]:.1f}")


def _cgroup_cores(file: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """Cores' worth of time that a container has; None without a limit."""
    words = _first_line(file).split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{_size(total)} in all"
    available = total
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            text += f", {_size(available)} free"
    limit = _first_line("/sys/fs/cgroup/memory.max")
    if limit.isdigit() and int(limit) < total:
        text += f", this container may use {_size(int(limit))}"
        available = min(available, int(limit))
    if available < _LEAST_MEMORY:
        return Finding(
            "memory", "note", text, "end other programs; the quickstart takes about 1 GiB"
        )
    return Finding("memory", "ok", text)


def _sandboxes() -> Iterator[Finding]:
    """Try each way to confine the programs that models write."""
    from winnow.sandbox.local import KINDS, LocalSandbox, NoSandboxError

    in_force = ""
    for name in KINDS:
        label = f"sandbox {name}"
        try:
            sandbox = LocalSandbox(SandboxConfig.model_validate({"backend": name}))
        except NoSandboxError as error:
            yield Finding(label, "note", error.reasons[name], _sandbox_remedy(name))
            continue
        except RewardError as error:  # no Linux, or no Python for the programs
            yield Finding("sandbox", "note", str(error), "apt-get install python3")
            return
        sandbox.close()
        if in_force:
            text = f"holds, and is not used while {in_force} does (reward.sandbox.backend={name})"
        else:
            in_force, text = name, f"in force: {sandbox.description.partition(', ')[2]}"
        yield Finding(label, "ok", text)
    if not in_force:
        text = "none: recipes whose rewards run code are refused"
        yield Finding("sandbox", "note", text, "one of the two above is enough")


# What keeps user namespaces from ordinary users: file, value that blocks, remedy.
_BLOCKS = (
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "sysctl kernel.unprivileged_userns_clone=1",
    ),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "give bwrap an AppArmor profile, or sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def _sandbox_remedy(name: str) -> str:
    if not sys.platform.startswith("linux"):
        return "run on Linux, or score with reward.function.path"
    if name == "landlock":
        return "Linux 6.2 or newer with landlock in /sys/kernel/security/lsm (boot with lsm=…)"
    if shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin") is None:
        return "apt-get install bubblewrap"
    blocks = [remedy for file, value, remedy in _BLOCKS if _first_line(file) == value]
    return "; ".join(blocks) or "allow user namespaces; in a container, ask for seccomp=unconfined"


def _extras() -> Iterator[Finding]:
    """Optional parts: present, or how to get them."""
    try:
        names = metadata.metadata("winnow").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return
    for extra in names:
        if extra in _NOT_FOR_USERS:
            continue
        needed = list(_requirements(extra))
        unmet = [reason for requirement in needed if (reason := _unmet(requirement))]
        purpose = f" ({_PURPOSE[extra]})" if extra in _PURPOSE else ""
        if not unmet:
            versions = ", ".join(f"{r.name} {metadata.version(r.name)}" for r in needed)
            yield Finding(f"extra {extra}", "ok", f"{versions}{purpose}")
        else:
            remedy = f"pip install 'winnow[{extra}]'"
            yield Finding(f"extra {extra}", "note", f"{'; '.join(unmet)}{purpose}", remedy)


def _runs_folder(folder: Path) -> Finding:
    """Write a file where runs go, or where their folder would be made."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        if place.exists():
            remedy = "move the file away, or set run.dir"
            return Finding("runs", "fault", f"{place} is a file, not a folder", remedy)
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".winnow-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        text = f"{place} cannot be written: {error.strerror}"
        return Finding("runs", "fault", text, "set run.dir to a folder of yours")
    free = shutil.disk_usage(place).free
    text = f"{folder.absolute()}{'' if folder.is_dir() else ' (not made yet)'}, {_size(free)} free"
    if free < _LEAST_FREE:
        return Finding("runs", "note", text, "make room, or set run.dir to another disk")
    return Finding("runs", "ok", text)


def _caches() -> Iterator[Finding]:
    """What is kept between runs, and how large it has become."""
    own = os.environ.get("WINNOW_CACHE") or Path.home() / ".cache" / "winnow"
    hub = (
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    )
    for name, folder in (("cache", Path(own)), ("model cache", Path(hub))):
        if not folder.is_dir():
            yield Finding(name, "ok", f"{folder}, empty")
            continue
        size = sum(_sizes(folder))
        state: State = "ok" if os.access(folder, os.W_OK | os.X_OK) else "note"
        text = f"{folder}, {_size(size)}; may be deleted, and is made again"
        remedy = "" if state == "ok" else "it cannot be written: set WINNOW_CACHE or HF_HOME"
        yield Finding(name, state, text, remedy)


def _sizes(folder: Path) -> Iterator[int]:
    """Bytes of each file below, links not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue  # it has just gone


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _first_line(path: str) -> str:
    return next(iter(_lines(path)), "").strip()


def _size(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB / 10 else f"{size / (1 << 20):,.0f} MiB"


class Health:
    """Counts what is found while it is told."""

    def __init__(self) -> None:
        self.faults = self.notes = 0

    def report(self, runs: str) -> Iterator[str]:
        """The lines to print, each as soon as it is known."""
        for finding in examine(runs):
            self.faults += finding.state == "fault"
            self.notes += finding.state == "note"
            mark = finding.state.upper() if finding.state == "fault" else finding.state
            yield f"{mark:<5}  {finding.name:<19}  {finding.text}"
            if finding.remedy:
                yield f"{'':<5}  {'':<19}  -> {finding.remedy}"
        yield ""
        if self.faults:
            yield f"Mend what is marked FAULT ({self.faults}), then ask again."
        else:
            notes = "; the notes are about what only some recipes need" if self.notes else ""
            yield f"Nothing stands in the way of training{notes}."
