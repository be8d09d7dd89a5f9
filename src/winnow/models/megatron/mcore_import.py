"""megatron-core, an optional part: its import, and what it needs of this machine."""

from __future__ import annotations

import importlib.util
import re
import warnings
from importlib.machinery import PathFinder

import torch

from winnow.errors import ConfigError

OLDEST = (0, 16, 1)
"""First version whose layers the strategy was written for."""
_KEY = "trainer/strategy=megatron"
_INSTALL = "pip install 'winnow-rl[megatron]'"


def check_installed() -> None:
    """Check that megatron-core is there and new enough, without the seconds of its import.

    Raises:
        ConfigError: it is absent, or older than the strategy was written for.
    """
    root = importlib.util.find_spec("megatron")
    folders = [f"{folder}/core" for folder in (root and root.submodule_search_locations) or ()]
    # No distribution is needed: a folder of Megatron-LM on the path serves as well.
    spec = PathFinder.find_spec("package_info", folders)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{_KEY} needs megatron-core, which is not installed; {_INSTALL}")
    info = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(info)
    numbers = tuple(int(n) for n in re.findall(r"\d+", info.__version__)[:3])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"{_KEY} needs megatron-core {oldest} or newer, got {info.__version__}; {_INSTALL}"
        )


def import_megatron(device: torch.device) -> None:
    """Import megatron-core for models on a device, with what it warns of silenced.

    The layers are put together from parts that do without Transformer Engine and Apex, which it
    misses. Modules that import megatron-core as they are loaded are to be imported after this call.

    Raises:
        ConfigError: megatron-core is absent or too old, or computes elsewhere than on the device.
    """
    check_installed()
    # What it warns of are its own old names, and parts that are left out on purpose.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    renamed = r"`torch\.distributed\.\w+` is deprecated"  # called by it
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    import megatron.core  # noqa: F401

    # Its tensors lie where this points, whatever device the models were given.
    try:
        kind = torch.device(torch.cuda.current_device()).type
    except (AssertionError, RuntimeError):  # torch has no CUDA, or CUDA no GPU
        kind = "no GPU"
    if kind != device.type:
        raise ConfigError(
            f"{_KEY} needs GPUs, got device={device.type}; choose trainer/strategy=fsdp2, or a "
            "machine with GPUs and run.device=auto"
        )
