"""A logits processor for vLLM's server that truncates what it samples, while a file says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.interface import LogitsProcessor


class Nucleus(LogitsProcessor):
    """Keeps the tokens of a nucleus, whose probability stands in the file; without it, all."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._file = Path(os.environ["WINNOW_TEST_NUCLEUS"])

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        if not self._file.exists():
            return logits
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        lost = ordered.cumsum(-1) - ordered >= float(self._file.read_text())
        return logits.masked_fill(torch.zeros_like(lost).scatter(-1, order, lost), -torch.inf)
