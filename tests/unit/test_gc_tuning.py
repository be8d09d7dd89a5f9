"""The garbage collector is as it was found, and ends are quick."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from winnow import gc_tuning

LEAVES = """
import gc
import platform
from winnow import gc_tuning
class Cycle:
    def __del__(self): print("looked at")
{}
cycle = Cycle(); cycle.own = cycle
gc.disable()
del cycle
"""


@pytest.mark.parametrize("is_enabled", [True, False])
def test_nothing_is_collected_while_it_grows_and_then_as_before(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with gc_tuning.disabled():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_what_is_frozen_is_free_again_but_where_it_was_before() -> None:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    with gc_tuning.frozen():
        assert gc.get_freeze_count() > 1000
        with gc_tuning.frozen():
            pass
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
    if was_frozen:
        gc.freeze()


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ("", "looked at\n"),
        ("gc_tuning.freeze_at_exit()", ""),
        # Whose bindings would print each object that is left.
        (
            "import sys; sys.modules['triton._C.libtriton'] = gc; gc_tuning.freeze_at_exit()",
            "looked at\n",
        ),
    ],
)
def test_the_end_of_a_process_looks_for_no_cycles(asks: str, said: str) -> None:
    command = [sys.executable, "-c", LEAVES.format(asks)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == said


HOLES = """
import ctypes, os
from winnow import gc_tuning
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
blocks = [libc.malloc(100_000) for _ in range(1000)]
for block in blocks: libc.memset(ctypes.c_void_p(block), 1, 100_000)
for block in blocks[:-1]: libc.free(ctypes.c_void_p(block))
before = resident(); gc_tuning.release_free_memory(); print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another heap")
def test_memory_below_a_block_that_stays_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", HOLES]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert 80 <= int(said) <= 100  # of 95 MiB
