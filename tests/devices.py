"""The device that contract tests compute on: `WINNOW_TEST_DEVICE`, and the CPU by default.

A test follows it where its module has `DEVICE` and no mark `host`; with `cuda` such tests are
marked `gpu`, and the other ones of `tests/contract` are skipped.
"""

from __future__ import annotations

import os

import torch

from winnow.models.causal_lm import use_fp32_sums

DEVICE = torch.device(os.environ.get("WINNOW_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":  # as `run.deterministic`, and kernels that cannot warn
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    use_fp32_sums()
