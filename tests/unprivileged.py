"""Permissions that hold for root as well, so that tests of them are the same for everybody."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import pytest

_VERSION = 0x20080522
"""`_LINUX_CAPABILITY_VERSION_3`: two words a set."""
_IGNORING_MODES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Word(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextlib.contextmanager
def permissions_apply() -> Iterator[None]:
    """The mode of a file binds this thread while the block runs, even if it is root's."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root ignores permissions, and only Linux lets it put that aside")
    words = (_Word * 2)()
    _call("capget", words)
    before = words[0].effective
    words[0].effective = before & ~_IGNORING_MODES
    _call("capset", words)
    try:
        yield
    finally:
        words[0].effective = before
        _call("capset", words)


def _call(name: str, words: ctypes.Array[_Word]) -> None:
    header = _Header(_VERSION, 0)
    if getattr(ctypes.CDLL(None, use_errno=True), name)(ctypes.byref(header), words) != 0:
        raise OSError(ctypes.get_errno(), name)
