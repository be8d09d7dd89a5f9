"""What workers find in their environment: defaults, this process's values, the user's."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping

DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",  # its threads and forks do not get on
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # sets of strings are in one order on all ranks
    "PYTHONUNBUFFERED": "1",  # what was printed is read even when the process was killed
}
_PORTS = range(20000, 32000)
"""Below those that systems hand out to whoever asks for any."""


def merged(user: Mapping[str, str]) -> dict[str, str]:
    """Variables to set: the user's, then what this process has, then the defaults."""
    return {**{name: os.environ.get(name, value) for name, value in DEFAULTS.items()}, **user}


def free_port(address: str = "") -> int:
    """A port of this machine that nobody listens at now.

    Another program may take it before its user does; ports that systems hand out by themselves
    are left out, so that this is rare.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
