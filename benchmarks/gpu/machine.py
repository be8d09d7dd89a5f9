"""What a machine has, and whether what Winnow does on GPUs alone runs on it at all."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata

import torch
from benchmarks.gpu.harness import GIB, ROOT, Bench

OPTIONAL = (
    *("pytest", "pytest-timeout", "hypothesis", "triton", "vllm", "ray", "peft", "megatron-core"),
    *("flash-attn", "flash-attn-3", "liger-kernel"),
)


def machine(bench: Bench) -> None:
    """Report versions, packages, and the first attention of packed sequences in bf16."""
    gib = torch.cuda.get_device_properties(0).total_memory / GIB if bench.on_gpu else None
    bench.report("machine", gib=gib, cuda=torch.version.cuda, python=sys.version.split()[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [re.split(r"[^\w-]", each)[0] for each in project["dependencies"]]
    packages = reversed([*metadata.distributions()])  # the first of a name is imported
    versions = {each.name.lower().replace("_", "-"): each.version for each in packages}
    for kind, names in (("required", required), ("optional", OPTIONAL)):
        bench.report(kind, **{name: versions.get(name) for name in names})
    with bench.guard("attention in bf16"):
        from winnow.models.packed_attention import PackedLayout

        q = torch.randn(100, 4, 64, device=bench.device, dtype=torch.bfloat16)
        k = q[:, :2].contiguous()
        out = PackedLayout([60, 40], bench.device).attend(0, q, k, k, 0.125, None)
        bench.report("attention in bf16", finite=bool(out.isfinite().all()))


def gpu_tests(bench: Bench) -> None:
    """Run the tests that are marked `gpu`, and those of `tests/contract` that follow a device."""
    every = [*(ROOT / "tests/unit").rglob("test_*.py"), *(ROOT / "tests/contract").glob("*.py")]
    files = [str(each) for each in every if re.search("mark.gpu|tests.devices", each.read_text())]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        bench.failures += 1
        print(done.stdout, file=sys.stderr)
    last = done.stdout.splitlines()[-1:]
    bench.report("tests", exit_code=done.returncode, summary="".join(last).strip("= "))
