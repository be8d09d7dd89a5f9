"""The garbage collector is as it was found, and ends are quick."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from winnow import gc_tuning

LEAVES = """
import gc
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
