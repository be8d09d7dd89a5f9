"""The parts of Winnow that run inside vLLM's workers: drawing tokens, and taking weights.

Both use extension points that vLLM documents, a custom logits processor and a weight transfer
engine. A request's `extra_args` say how its tokens are drawn (`draw_arguments`).

vLLM itself samples greedily: the row of logits that goes on holds the drawn token's log-prob at its
place and -inf elsewhere, so that with `logprobs_mode=processed_logits` the token that is returned
and its "logit" are our draw and its log-prob.

Shapes: `R` rows of a step, `V` vocabulary of the model.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from winnow.rollout.draw import DRAWS, RowParams, draw, uniform
from winnow.rollout.engine import SamplingParams
from winnow.workers.child import die_with_parent

BACKEND = "winnow"


@dataclass(frozen=True, eq=False)
class _DrawArguments:
    """The arguments of a request."""

    sampling: SamplingParams
    seed: int
    start: int
    vocabulary: int
    forced: Sequence[int]
    context: int = 0
    """Tokens of its prompt, where the batch says so."""
    written: Sequence[int] = ()
    """Its output, to which vLLM appends."""

    @classmethod
    def of(
        cls, extra: Mapping[str, Any] | None, context: int, written: Sequence[int]
    ) -> _DrawArguments:
        own = (extra or {})[DRAWS]
        temperature, top_p, top_k, min_p = own["numbers"]
        sampling = SamplingParams(0, temperature, top_p, top_k, min_p)
        numbers = own["seed"], own["start"], own["vocabulary"], own.get("forced", ())
        return cls(sampling, *numbers, context, written)

    @classmethod
    def validate(cls, params: Any) -> None:
        """Refuse a request of somebody else, at which the whole engine would end.

        Raises:
            ValueError: it does not say how its tokens are drawn.
        """
        try:
            row = cls.of(params.extra_args, 0, ())
            _BatchDraw([row], torch.device("cpu"))
        except Exception as error:
            raise ValueError(
                "this server draws by winnow's logits processor, for runs with "
                f"rollout.engine.exact_draws=true; the request lacks its arguments ({error!r})"
            ) from error


class _BatchDraw:
    """Draws the tokens of a batch; what follows from its rows alone is computed once for them."""

    def __init__(self, rows: Sequence[_DrawArguments], device: torch.device) -> None:
        self._rows = rows
        kinds = list(dict.fromkeys(row.sampling for row in rows))
        kind = torch.tensor([kinds.index(row.sampling) for row in rows], device=device)
        self._params = RowParams(kinds, kind)
        self._seeds = torch.tensor([row.seed for row in rows], device=device)
        self.starts = torch.tensor([row.start for row in rows], device=device)
        """[R] the answers' places in their sequences."""
        self._vocabulary = min(row.vocabulary for row in rows)
        self._has_forced = any(row.forced for row in rows)

    def __call__(
        self, logits: Tensor, positions: Sequence[int], on_device: Tensor | None = None
    ) -> Tensor:
        """Return logits [R, V] that are -inf but for the drawn token's log-prob.

        Args:
            logits: [R, V] fp32.
            positions: of the tokens in their answers, [R]; below 0 in a prompt that is not yet
                prefilled to its end, of which vLLM drops the draw.
            on_device: the same where the logits are; None copies them there.
        """
        valid = logits[:, : self._vocabulary]
        if on_device is None:
            on_device = torch.tensor(positions, device=logits.device)
        u = uniform(self._seeds, on_device)
        ids, logprobs = draw(valid, u, self._params)
        if self._has_forced:
            for row, (own, position) in enumerate(zip(self._rows, positions, strict=True)):
                if 0 <= position < len(own.forced):
                    ids[row] = own.forced[position]
                    scaled = valid[row] / (own.sampling.temperature or 1)
                    logprobs[row] = scaled.log_softmax(-1)[ids[row]]
        return torch.full_like(logits, -torch.inf).scatter_(1, ids[:, None], logprobs[:, None])


class HashSampler(LogitsProcessor):  # type: ignore[misc]
    """Draws tokens in vLLM's first model runner."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _DrawArguments] = {}
        self._draws: _BatchDraw | None = None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        _DrawArguments.validate(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self._draws = None
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, written in batch_update.added:
            self._rows[index] = _DrawArguments.of(params.extra_args, len(prompt or ()), written)
        for one, two, direction in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(two, None)
            if first is not None:
                self._rows[two] = first
            if direction == MoveDirectionality.SWAP and second is not None:
                self._rows[one] = second

    def apply(self, logits: Tensor) -> Tensor:
        rows = [self._rows[index] for index in range(len(logits))]
        if self._draws is None:
            self._draws = _BatchDraw(rows, logits.device)
        return self._draws(logits, [r.context + len(r.written) - r.start for r in rows])


class HashSamplerV2(LogitsProcessorV2):  # type: ignore[misc]
    """Draws tokens in vLLM's second model runner."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._rows: dict[int, _DrawArguments] = {}
        self._drawn: tuple[list[_DrawArguments], _BatchDraw] | None = None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        _DrawArguments.validate(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._rows[req_idx] = _DrawArguments.of(sampling_params.extra_args, 0, ())
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        rows = [self._rows[slot] for slot in ctx.idx_mapping_np.tolist()]
        assert len(rows) == len(logits), "speculative decoding draws several tokens a row"
        if self._drawn is None or self._drawn[0] != rows:
            self._drawn = rows, _BatchDraw(rows, logits.device)
        # Exact without speculative decoding: the tokens before the one that is drawn.
        lengths, draws = ctx.seq_lens_upper_bound_np.tolist(), self._drawn[1]
        positions = [n - row.start for n, row in zip(lengths, rows, strict=True)]
        return draws(logits, positions, ctx.pos.long() + 1 - draws.starts)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is to be set up: tensors come with the calls."""


@dataclass
class NamedTensors(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Whole tensors by Hugging Face's names."""

    named: list[tuple[str, Tensor]] = field(default_factory=list)


class TensorTransfer(WeightTransferEngine[NoInit, NamedTensors]):  # type: ignore[misc]
    """Loads whole tensors into a running model as a checkpoint's are, layer by layer."""

    init_info_cls, update_info_cls = NoInit, NamedTensors

    def init_transfer_engine(self, init_info: NoInit) -> None:
        # Not where this module is imported: a forked worker has it from the process that forks.
        if multiprocessing.parent_process() is not None:  # of tensor parallelism
            die_with_parent(os.getppid())

    def start_weight_update(self) -> None:
        reset_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: NamedTensors) -> None:
        self.model.load_weights(iter(update_info.named))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_head(self.model)

    def shutdown(self) -> None:
        pass


def repack_head(model: nn.Module) -> None:
    """Pack a model's output layer again after an update.

    vLLM repacks layers for its CPU kernels, but not a tied head, which would go on with the old
    weights while every call reports success.
    """
    text = getattr(model, "language_model", model)  # in a vision-language model
    head = getattr(text, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def reset_expert_kernels(model: nn.Module) -> None:
    """Have vLLM pack the experts of an update for its CPU kernels, as it does when it starts.

    With a kernel at hand it takes the weights for those of a GPU, which are copied as they are.
    """
    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


class WorkerExtension:
    """Has vLLM import this module in each of its workers, before it looks for `BACKEND`."""

    def adapted_layers(self) -> list[str]:
        """Name the layers to which this worker applies an adapter, as Hugging Face names them."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        packed = manager.packed_modules
        layers = [part for name in manager.modules for part in packed.get(name, [name])]
        return [name.replace("language_model.model.", "model.language_model.") for name in layers]


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, TensorTransfer)
