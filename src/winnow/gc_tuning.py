"""Python's garbage collector, kept from looking again and again at what is there to stay.

torch, transformers and their like make a million objects that live as long as the process. The
collector walks them while they are imported, at each step of a run, and once more at its end: one
of the four and a half seconds of CPU that it takes to import the trainer and end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Disable the collector while the block runs, as for imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Freeze the existing objects while the block runs."""
    is_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


def freeze_at_exit() -> None:
    """Freeze all objects when the process ends; the system frees the memory."""
    atexit.unregister(_freeze)
    atexit.register(_freeze)


def _freeze() -> None:
    # Triton's bindings print a page about objects that are left.
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()
