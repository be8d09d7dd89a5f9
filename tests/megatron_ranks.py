"""Environment of processes in which megatron-core computes on a CPU.

A test's own ranks call `tests.megatron_on_cpu.cuda_answers.install()`. A process of Winnow's
(`winnow train`, workers, Ray's actors) gets this environment, and installs the same by itself.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "megatron_on_cpu"


def megatron_environment() -> dict[str, str]:
    """Variables over those of this process, for one that it starts."""
    path = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
