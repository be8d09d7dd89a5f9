"""Short runs of the quickstart, in this process and with a rank and an engine on the same GPU."""

from __future__ import annotations

import time

from benchmarks.gpu.harness import Bench
from benchmarks.kill import SETTINGS

from winnow.api import open_run
from winnow.builders import processes
from winnow.cli.main import app
from winnow.config.roles import Roles
from winnow.observe.files import unused_path

FIGURES = (
    *("sampling/accuracy", "mismatch/max_delta", "publish/max_delta", "time/step_s"),
    *("memory/peak_gib", "ranks/peak_gib", "throughput/mfu"),
)
TIMES = "time/", "throughput/", "memory/", "ranks/", "scoring/"
"""Beginnings of the metrics that two runs need not have in common."""


def train(bench: Bench, *settings: str) -> list[dict[str, float]]:
    """Train the quickstart for some steps, and report figures of the first and the last."""
    folder = unused_path(bench.out / "runs", bench.check)
    size = bench.pick(["trainer.steps=12"], [*SETTINGS, "trainer.steps=2"])
    place = f"run.device={bench.device.type}", f"run.dir={folder.parent}", f"run.name={folder.name}"
    words = [*size, *place, "observe.console=off", *settings]
    if bench.on_gpu:
        vars(processes)["assign_local_gpus"] = first_gpu
    start = time.perf_counter()
    code = app(["train", "quickstart", *words], standalone_mode=False)
    bench.failures += bool(code)
    steps = open_run(folder).metrics[1:]
    ends = {name: [steps[0].get(name), steps[-1].get(name)] for name in FIGURES}
    bench.report("run", exit_code=code, s=time.perf_counter() - start, steps=len(steps), **ends)
    return steps


def repeat(bench: Bench, *settings: str) -> None:
    """Train the quickstart twice, and report which metrics differ in bits, times aside."""
    first, second = train(bench, *settings), train(bench, *settings)
    pairs = zip(first, second, strict=True)
    differ = {name for a, b in pairs for name in a if a[name] != b.get(name)}
    bench.report("two runs", differ=sorted(name for name in differ if not name.startswith(TIMES)))


def first_gpu(roles: Roles, device: str, trains: bool = True) -> dict[str, list[int]]:
    """Give all processes the first GPU, which `winnow train` refuses: models so small fit."""
    return {role.name: [0] * role.gpus for role in roles}
