"""How much work a step was for the seconds it took: tokens, FLOP and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from winnow.observe.names import Number

_GIB = 2**30
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Passes:
    """How often a step runs over the tokens that it packs, by model.

    Counts 2 FLOP a parameter and token forwards, 4 backwards (arXiv 2001.08361, section 2.1). The
    embedding counts once, as the output layer; attention scores are left out, so the figure is a
    lower bound.
    """

    parameters: int
    """Of the policy."""
    epochs: int
    """Updates that see a token."""
    forwards: int = 1
    """Of a model as large as the policy, beside the updates: old log-probs, reference."""
    critic_parameters: int = 0
    """Of the critic, which runs forwards once and then takes part in each update."""

    def flop(self, generated_tokens: int, packed_tokens: int) -> float:
        """Of a step, rollout included."""
        updates = 6 * self.epochs
        policy = self.parameters * (
            2 * generated_tokens + (2 * self.forwards + updates) * packed_tokens
        )
        return policy + self.critic_parameters * (2 + updates) * packed_tokens


@dataclass(frozen=True)
class Throughput:
    """A step's tokens and FLOP over its seconds."""

    passes: Passes
    device: torch.device
    peak_tflops: float | None
    """Of one device."""
    devices: int = 1

    def figures(
        self, generated_tokens: int, packed_tokens: int, times: Mapping[str, Number]
    ) -> dict[str, Number]:
        """Figures `throughput/…`, `memory/…` and `time/PHASE_us_per_token` of a step.

        Args:
            generated_tokens: written by the policy in the step.
            packed_tokens: prompts and answers trained on.
            times: as `Stopwatch.lap` gives them.
        """
        busy = times["time/step_s"] - times.get("time/evaluate_s", 0.0)
        if busy <= 0 or not packed_tokens:  # resumed for an evaluation only
            return {}
        tflops = self.passes.flop(generated_tokens, packed_tokens) / busy / 1e12
        record: dict[str, Number] = {
            "throughput/tokens_per_s": generated_tokens / busy,
            "throughput/tokens_per_s_per_device": generated_tokens / busy / self.devices,
            "throughput/tflops": tflops,
            "memory/peak_gib": self._peak_gib(),
        }
        if self.peak_tflops is not None:
            record["throughput/mfu"] = tflops / self.peak_tflops / self.devices
        per_token = {
            "rollout": generated_tokens,
            "old_logprobs": packed_tokens,
            "reference": packed_tokens,
            "values": packed_tokens,
            "update": packed_tokens * self.passes.epochs,
        }
        for phase, tokens in per_token.items():
            seconds = times.get(f"time/{phase}_s")
            if tokens and seconds is not None:
                record[f"time/{phase}_us_per_token"] = seconds * 1e6 / tokens
        return record

    def _peak_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / _GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / _GIB
