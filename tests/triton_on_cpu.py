"""Triton's kernels on a CPU, in a process that began with `TRITON_INTERPRET=1`.

vLLM's second model runner is written in Triton, which vLLM takes on a CPU where Triton has a
backend of that name; what is installed has none. Triton's interpreter asks none for more than its
name: it runs kernels as they are written, block after block, on numpy's arrays. So this module,
imported before vLLM, gives it one.
"""

from __future__ import annotations

import os
import sys

import pytest
from triton.backends import backends

backends.setdefault("cpu", next(iter(backends.values())))


def main() -> None:
    """Run pytest with vLLM's second model runner, by the words of the command line."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    raise SystemExit(pytest.main(sys.argv[1:]))
