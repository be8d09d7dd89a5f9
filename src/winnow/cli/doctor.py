"""`winnow doctor`: what this machine has for Winnow, what is missing, and how to get it; and
`winnow doctor RUN`: what is wrong with a run.

Everything is tried rather than asked: torch multiplies, a program runs in each sandbox, a file is
written where runs go. A fault keeps every run from starting; a note is about something that only
some recipes need.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import typer

from winnow.config.reward import SandboxConfig
from winnow.config.root import TrackerName
from winnow.errors import ConfigError, RewardError
from winnow.observe.format import printable
from winnow.version import __version__

_GIB = 1 << 30
_LEAST_FREE = 2 * _GIB
"""Bytes of disk for a few checkpoints of a small model."""
_LEAST_MEMORY = 2 * _GIB
_DISTRIBUTION = "winnow-rl"
"""Name on the package index, where `winnow` is another project."""
_NOT_FOR_USERS = {"all", "dev", "browser", "trackers", "serve", "dashboard"}
_GPU_CHECKS = (
    *("machine", "gradients", "mismatch", "update", "head"),
    *("fp32", "bf16", "publish", "decode"),
)
_GPU_LIMIT_S = 65
"""Most seconds of each of them: all take less than ten minutes."""
_PURPOSE = {
    "ray": "many machines",
    "peft": "LoRA",
    "megatron": "trainer/strategy=megatron on GPUs",
    "reasoning-gym": "procedural tasks",
    "gguf": "model.path=FILE.gguf, winnow train smollm2",
    "vllm": "rollout/engine=vllm on GPUs",
    **{name: f"observe.trackers=[{name}]" for name in get_args(TrackerName)},
}


@dataclass(frozen=True)
class Finding:
    """One line of the report; without a remedy it is ok."""

    name: str
    text: str
    remedy: str = ""
    is_fault: bool = False
    """No run can start before the remedy."""

    @property
    def state(self) -> str:
        """The finding's mark in the report: ok, note or FAULT."""
        return "FAULT" if self.is_fault else "note" if self.remedy else "ok"


def print_report(runs: str) -> bool:
    """Check this machine, print each finding at once, and return whether any is a fault.

    Args:
        runs: the folder of runs.
    """
    states = []
    for finding in _run_checks(Path(runs)):
        states.append(finding.state)
        typer.echo(f"{finding.state:<5}  {finding.name:<19}  {finding.text}")
        if finding.remedy:
            typer.echo(f"{'':<5}  {'':<19}  -> {finding.remedy}")
    if faults := states.count("FAULT"):
        typer.echo(f"\nFix what is marked FAULT ({faults}), then run winnow doctor again.")
    else:
        notes = "; notes concern optional features" if "note" in states else ""
        typer.echo(f"\nReady to train{notes}.")
    return bool(faults)


def check_gpu(report: Path, *options: str) -> int:
    """Run the checks of `benchmarks/gpu` that fit into ten minutes; return the runner's exit code.

    Args:
        report: file for all that the checks print.
        options: further ones of `python -m benchmarks.gpu`, such as `--cpu` and other checks.

    Raises:
        ConfigError: this is no checkout, or torch sees no GPU.
    """
    import torch

    from winnow.observe.files import explain_write_errors

    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "gpu").is_dir():
        raise ConfigError(
            "--gpu runs benchmarks/gpu, which an installed wheel does not contain; run winnow "
            "doctor --gpu from a checkout (pip install -e .)"
        )
    if not (torch.cuda.is_available() or "--cpu" in options):
        raise ConfigError("--gpu needs a GPU, and torch sees none; winnow doctor says why")
    checks = () if set(options) - {"--cpu"} else _GPU_CHECKS
    command = [sys.executable, "-m", "benchmarks.gpu", *checks, *options]
    path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    with (
        explain_write_errors(report),
        report.open("w", encoding="utf-8") as file,
        tempfile.TemporaryDirectory() as scratch,
    ):
        process = subprocess.Popen(
            [*command, "--out", scratch, "--limit-s", str(_GPU_LIMIT_S)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            typer.echo(line, nl=False)
    typer.echo(f"\nAll of it is in {report}: send that file back.")
    return process.wait()


def print_diagnosis(run: str, as_json: bool) -> bool:
    """Print what the rules find in a run, and return whether any of it is critical.

    Raises:
        WinnowError: there is no such run, or its record is damaged.
    """
    from winnow.observe.files import RunFolder
    from winnow.observe.metrics import grouped
    from winnow.views.diagnosis import RULES
    from winnow.views.doctor import diagnose_run

    folder = RunFolder.open(run)
    steps, findings, needs = diagnose_run(folder)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        typer.echo(
            f"{printable(str(folder.path))}: {steps} steps, {len(findings) or 'nothing'} found"
        )
        if needs:
            typer.echo(f"{len(needs)} of {len(RULES)} rules could not be checked:")
        for need, names in grouped((need, name) for name, need in needs.items()).items():
            typer.echo(f"  {', '.join(names)}: {need}")
        for each in findings:
            typer.echo(
                f"\n{each.severity}: {each.name}, steps {each.first_step} to {each.last_step}"
            )
            for title in ("evidence", "cause", "remedy"):
                typer.echo(f"  {title:<9} {printable(getattr(each, title))}")
    return any(finding.severity == "critical" for finding in findings)


def _run_checks(runs: Path) -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding("python", f"{platform.python_version()} at {sys.executable}, on {system}")
    yield Finding("winnow", f"{__version__} at {Path(__file__).parent}")
    yield from _check_packages()
    yield from _check_torch()
    yield _check_cores()
    yield _check_memory()
    yield from _check_sandboxes()
    yield _check_runs_folder(runs)
    yield from _check_caches()


def _check_packages() -> Iterator[Finding]:
    """Check required packages and extras."""
    try:
        extras = metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        text = "winnow is importable but not installed, so its requirements cannot be checked"
        yield Finding("packages", text, "pip install -e . in its folder")
        return
    needed = list(_requirements(""))
    if unmet := "; ".join(filter(None, map(_unmet_reason, needed))):
        remedy = "pip install -c constraints.txt -e . in Winnow's folder, or pip install -U "
        yield Finding("packages", unmet, remedy + _DISTRIBUTION, is_fault=True)
    else:
        yield Finding("packages", f"all {len(needed)} required packages")
    for extra in (name for name in extras if name not in _NOT_FOR_USERS):
        needed = list(_requirements(extra))
        purpose = f" ({_PURPOSE[extra]})" if extra in _PURPOSE else ""
        if unmet := "; ".join(filter(None, map(_unmet_reason, needed))):
            remedy = f"pip install '{_DISTRIBUTION}[{extra}]'"
            yield Finding(f"extra {extra}", f"{unmet}{purpose}", remedy)
        else:
            versions = ", ".join(f"{r.name} {metadata.version(r.name)}" for r in needed)
            yield Finding(f"extra {extra}", f"{versions}{purpose}")


def _requirements(extra: str) -> Iterator[Any]:
    """Yield the requirements of Winnow itself, or those that an extra adds."""
    from packaging.requirements import Requirement

    for line in metadata.requires(_DISTRIBUTION) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always != bool(extra) and (always or (marker and marker.evaluate({"extra": extra}))):
            yield requirement


def _unmet_reason(requirement: Any) -> str:
    """Return why a requirement is not met, or an empty string."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} is {version}, requires {requirement.specifier}"


def _check_torch() -> Iterator[Finding]:
    """Check that torch works, and list its devices."""
    try:
        import torch

        ones = torch.ones(64, 64)
        assert float((ones @ ones).sum()) == 64**3
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = "reinstall it: pip install --force-reinstall -c constraints.txt torch"
        yield Finding("torch", f"does not work: {reason}", remedy, is_fault=True)
        return
    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built for CPUs"
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{torch.__version__}, {build}; {capability}, {torch.get_num_threads()} threads"
    yield Finding("torch", text)
    from winnow.builders.preflight import NO_BFLOAT16, has_bfloat16

    if not (has_bfloat16() or torch.cuda.is_available()):
        yield Finding("bfloat16", f"the CPU {NO_BFLOAT16}", "set model.dtype=float32")
    yield from _check_devices(torch)


def _check_devices(torch: Any) -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding(
            f"gpu {number}", f"{name}, {_format_bytes(free)} of {_format_bytes(total)} free"
        )
    has_driver = os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None
    if not count and not has_driver:
        yield Finding("gpu", "none: models run on the CPU (run.device=auto)")
    elif not count and torch.version.cuda is None:
        text = "this machine has an NVIDIA driver, but torch is built for CPUs"
        remedy = "install torch from the index for your CUDA: https://pytorch.org/get-started"
        yield Finding("gpu", text, remedy)
    elif not count:
        text = f"torch is built for CUDA {torch.version.cuda} but finds no GPU"
        yield Finding("gpu", text, "see nvidia-smi; in a container, start it with --gpus")


def _check_cores() -> Finding:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_cores()
    if quota is not None and quota < cores:
        text = f"{cores} of {os.cpu_count()}, limited to {quota:g} by the container"
        return Finding("cores", text, f"set run.threads={max(1, int(quota))}")
    return Finding("cores", f"{cores} of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")


def _cgroup_cores(file: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """Return the container's CPU limit in cores; None without one."""
    fields = _read_first_line(file).split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _check_memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{_format_bytes(total)} in all"
    available = total
    for line in _read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            text += f", {_format_bytes(available)} free"
    limit = _read_first_line("/sys/fs/cgroup/memory.max")
    if limit.isdigit() and int(limit) < total:
        text += f", limited to {_format_bytes(int(limit))} by the container"
        available = min(available, int(limit))
    remedy = "free some memory; the quickstart needs about 1 GiB"
    return Finding("memory", text, remedy if available < _LEAST_MEMORY else "")


def _check_sandboxes() -> Iterator[Finding]:
    """Try each sandbox for programs written by models."""
    from winnow.sandbox.local import KINDS, LocalSandbox, NoSandboxError

    in_force = ""
    for name in KINDS:
        label = f"sandbox {name}"
        try:
            sandbox = LocalSandbox(SandboxConfig.model_validate({"backend": name}))
        except NoSandboxError as error:
            yield Finding(label, error.reasons[name], _sandbox_remedy(name))
            continue
        except RewardError as error:  # no Linux, or no Python for the programs
            yield Finding("sandbox", str(error), "apt-get install python3")
            return
        sandbox.close()
        if in_force:
            text = f"works, unused because {in_force} does, too (reward.sandbox.backend={name})"
        else:
            in_force, text = name, f"in use: {sandbox.description.partition(', ')[2]}"
        yield Finding(label, text)
    if not in_force:
        text = "none: recipes whose rewards run code are refused"
        yield Finding("sandbox", text, "install one of the two above")


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
    blocks = [remedy for file, value, remedy in _BLOCKS if _read_first_line(file) == value]
    return "; ".join(blocks) or "allow user namespaces; in a container, ask for seccomp=unconfined"


def _check_runs_folder(folder: Path) -> Finding:
    """Check that the runs folder, or its parent, is writable."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".winnow-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        text = f"{place} cannot be written: {error.strerror}"
        return Finding("runs", text, "set run.dir to a writable folder", is_fault=True)
    free = shutil.disk_usage(place).free
    pending = "" if folder.is_dir() else " (not created yet)"
    text = f"{folder.absolute()}{pending}, {_format_bytes(free)} free"
    remedy = "free some space, or set run.dir to another disk" if free < _LEAST_FREE else ""
    return Finding("runs", text, remedy)


def _check_caches() -> Iterator[Finding]:
    """Report the size of caches."""
    caches = Path.home() / ".cache"
    hub = Path(os.environ.get("HF_HOME") or caches / "huggingface") / "hub"
    places = {
        "cache": Path(os.environ.get("WINNOW_CACHE") or caches / "winnow"),
        "model cache": Path(os.environ.get("HF_HUB_CACHE") or hub),
    }
    for name, folder in places.items():
        if not folder.is_dir():
            yield Finding(name, f"{folder}, empty")
            continue
        files = [os.path.join(where, file) for where, _, names in os.walk(folder) for file in names]
        size = sum(os.lstat(file).st_size for file in files if os.path.lexists(file))
        can_write = os.access(folder, os.W_OK | os.X_OK)
        remedy = "" if can_write else "not writable: set WINNOW_CACHE or HF_HOME"
        yield Finding(name, f"{folder}, {_format_bytes(size)}; safe to delete", remedy)


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _read_first_line(path: str) -> str:
    return next(iter(_read_lines(path)), "").strip()


def _format_bytes(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB / 10 else f"{size / (1 << 20):,.0f} MiB"
