"""GPUs and nodes that a plan is for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from winnow.errors import ConfigError
from winnow.plan.tracker import Phase
from winnow.runs.metrics import GPUS, Gpu

RESERVED_GIB = 2.0
"""What a CUDA context, NCCL's buffers and kernels' workspace take beside tensors; not measured."""
USABLE = 0.95
"""Share of a GPU's memory that tensors can fill before fragments of free memory are too small."""


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind."""

    name: str
    gpu: Gpu
    nodes: int
    per_node: int
    network_gb_s: float
    """Between nodes, for each GPU, one way."""
    disk_gb_s: float
    """Writing of one node."""

    @property
    def devices(self) -> int:
        """GPUs in all."""
        return self.nodes * self.per_node

    @property
    def limit_gib(self) -> float:
        """What a process's tensors may take on a GPU."""
        return self.gpu.memory_gib * USABLE - RESERVED_GIB

    def seconds(self, phase: Phase) -> float:
        """Return the roofline of a phase: of each operation its FLOP or its bytes, at peak."""
        gpu, total = self.gpu, 0.0
        for (flop, moved, is_half), times in phase.work.items():
            peak = (gpu.bfloat16 if is_half else gpu.float32) * 1e12
            total += times * max(flop / peak, moved / (gpu.memory_gb_s * 1e9))
        return total

    def rate(self, ranks: int) -> float:
        """Return the bytes that a rank sends in a second to some neighbours, itself included."""
        return 1e9 * (self.gpu.link_gb_s if ranks <= self.per_node else self.network_gb_s)


def find_gpu(given: str) -> tuple[str, Gpu]:
    """Find a GPU by its name, such as `h100-80`, `a100-40` (GiB) or `rtx-4090`.

    Raises:
        ConfigError: no such GPU is known.
    """
    known = {name.lower().replace(" ", "-"): name for name in GPUS}
    found = re.fullmatch(r"(.+?)(?:-(\d+)(?:gb)?)?", given.lower())
    name, memory = (known.get(given.lower()), None) if given.lower() in known else (None, None)
    if name is None and found is not None:
        name, memory = known.get(found[1]), found[2]
    if name is None:
        raise ConfigError(f"--gpu {given} is not known; choose from {', '.join(known)}")
    gpu = GPUS[name]
    return name, gpu._replace(memory_gib=float(memory)) if memory else gpu
