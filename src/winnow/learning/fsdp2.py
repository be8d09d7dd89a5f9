"""One model on several ranks, each holding a part of every weight (FSDP2, `fully_shard`).

A unit's weights (`winnow.learning.units`) are gathered when it runs and dropped after, and its
gradients are added up over the ranks as soon as they are whole. The log-prob kernel reads
the head's weight, so it runs inside the root unit's forward pass, where the weight is gathered.

Weights are held as masters (fp32 where a model computes in half precision), sharded by rows, with
gradients and AdamW's state. On a mesh of two axes they are replicated along the first (HSDP).

Ranks run in step: each brings the same number of micro-batches, of which any may be empty. Counts
come in over all ranks and losses are divided by them, so gradients are sums, never means.

Shapes: `T` packed tokens of a micro-batch, `B` its samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from winnow.errors import ModelError
from winnow.learning.batch import Counts, MicroBatch
from winnow.learning.readout import Found, readout_of
from winnow.learning.shards import copy_into, gather_values, gathered, global_norm, local
from winnow.learning.strategy import LossFn, Output, Stats
from winnow.learning.units import (
    Root,
    Sharding,
    device_of,
    empty,
    fill,
    sharded,
    to_masters,
)
from winnow.models import lora
from winnow.models.fused_layers import fuse
from winnow.models.parameters import (
    check_state,
    enable_checkpointing,
    in_training,
    tensors_of,
)
from winnow.models.sharded_loading import SavedWeights


class FSDP2Strategy:
    """Holds a model of `winnow.models`, sharded over a device mesh.

    It offers what `SingleStrategy` does, with the same settings. Every method is collective: all
    ranks of the mesh call it, in the same order. An adapter of a half-precision model is held in
    fp32 and computes in half precision, as everything but a value head does.

    Args:
        model: whole on every rank, or hollow.
        mesh: of one axis, or of two: replicas, shards.
        temperature, betas, …: as `SingleStrategy`'s.
        weights: of a hollow model.

    Raises:
        ModelError: the weights cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        sharding: Sharding,
        *,
        temperature: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        vocab_size: int | None = None,
        logprob_chunk_tokens: int | None = None,
        gradient_checkpointing: bool = False,
        fp32_head: bool = False,
        weights: SavedWeights | None = None,
    ) -> None:
        self.model, self.mesh = model, mesh
        self.device = device_of(mesh)
        self._bucket_bytes, self._grad_clip = sharding.bucket_bytes, grad_clip
        self._readout = readout_of(model, temperature, vocab_size, logprob_chunk_tokens, fp32_head)
        if self.device.type == "cpu":
            fuse(model)
        self._training_only = lora.adapter_dropouts(model)
        if gradient_checkpointing:
            self._training_only += enable_checkpointing(model)
        compute = next(cast(Any, model).base_model.parameters()).dtype
        if weights is not None:
            empty(model, weights)
        self._half = to_masters(model)
        self._root = sharded(Root(model, self._readout), compute, mesh, sharding)
        if weights is not None:
            home = torch.device("cpu") if sharding.offload else self.device
            fill(model, weights, home)
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            # An optimizer of nothing wants a group, and steps it in vain.
            [{"params": list(self._trained.values())}],
            lr=0.0,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )

    def forward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output]
    ) -> list[dict[Output, Tensor]]:
        """Outputs without gradient, one dict a micro-batch, each value [T]; see `Strategy.forward`.

        Raises:
            ValueError: an output that this kind of model does not have, or ranks that bring
                different numbers of micro-batches.
        """
        self._check(microbatches, outputs)
        found = []
        with torch.no_grad(), self._keptsharded():
            for micro in microbatches:
                values = self._run(micro, outputs)
                found.append(values if micro.lengths else {n: v[:0] for n, v in values.items()})
        return found

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        """Accumulate gradients of the summed losses; returns `loss`, sums and maxima of all ranks.

        After a loss that raises, only forward passes and `state_dict` are sure: replicas may hold
        a part of the gradient that nothing clears, so training goes on with a new strategy.

        Raises:
            ValueError: an output that this kind of model does not have, or ranks that bring
                different numbers of micro-batches.
        """
        self._check(microbatches, outputs)
        totals: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        with self._keptsharded():
            for number, micro in enumerate(microbatches, start=1):
                # Replicas add up what their shards have gathered, once.
                cast(FSDPModule, self._root).set_requires_all_reduce(number == len(microbatches))
                with in_training(self._training_only):
                    values = self._run(micro, outputs)
                    if not micro.lengths:
                        _nothing(values).backward()  # type: ignore[no-untyped-call]
                        continue
                    result = loss_fn(micro.to(self.device), values)
                    result.loss.backward()  # type: ignore[no-untyped-call]
                for name, value in {"loss": result.loss, **result.sums}.items():
                    value = value.detach().double()
                    totals[name] = totals[name] + value if name in totals else value
                for name, value in result.maxima.items():
                    maxima[name] = torch.maximum(maxima.get(name, value), value)
        return self._over_ranks(totals, maxima)

    def optimizer_step(self, lr: float) -> Stats:
        """Clip, step, clear the gradients. A non-finite gradient norm changes nothing on any rank.

        Returns:
            `grad_norm` (before clipping, of the whole gradient) and `skipped` (0 or 1).
        """
        gradients = [p.grad for p in self._trained.values() if p.grad is not None]
        norm = global_norm(gradients, self.mesh, self.device)
        skipped = not math.isfinite(norm)
        if not skipped:
            if self._grad_clip is not None and norm > self._grad_clip:
                torch._foreach_mul_([local(g) for g in gradients], self._grad_clip / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "skipped": float(skipped)}

    def export_weights(
        self, dtype: torch.dtype | None = None, adapter_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, tied ones once, on every rank.

        Masters are rounded to the type the model computes in. An adapter is merged; alone it has
        PEFT's names. All ranks must take all of them.

        Raises:
            ModelError: an adapter is asked for, and the model has none.
        """
        if adapter_only and not self.has_adapter:
            raise ModelError("the adapter alone was asked for, but the model has none; export all")
        if adapter_only:
            found = lora.adapter_weights(self.model)
        else:
            found = lora.merged_weights(tensors_of(self.model), self.model)
        return gathered(self._cast(found, dtype), self._bucket_bytes, self.device)

    def export_trained(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, by the names of parameters: for a copy of the model that has the rest.

        Whole, on every rank, rounded to the type the model computes in; all must take all of them.
        """
        return gathered(
            self._cast(((n, p.detach()) for n, p in self._trained.items()), None),
            self._bucket_bytes,
            self.device,
        )

    @property
    def parameters(self) -> int:
        """See `Strategy.parameters`."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained in the place of the model's own weights."""
        return lora.has_adapter(self.model)

    def adapter_off(self) -> contextlib.AbstractContextManager[None]:
        """The model answers as it did before training, within the block.

        Raises:
            ModelError: it has no adapter.
        """
        return lora.adapter_off(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Sharded masters and optimizer state, by parameter name, as `SingleStrategy` has them.

        The tensors are live DTensors: what `torch.distributed.checkpoint` saves.
        """
        weights = {
            name: tensor.detach()
            for name, tensor in tensors_of(self.model).items()
            if not self.has_adapter or lora.is_adapters(name)
        }
        states = self._optimizer.state
        return {
            "weights": weights,
            "optimizer": {n: dict(states[p]) for n, p in self._trained.items() if p in states},
        }

    def blank_state(self) -> dict[str, Any]:
        """Room for what `state_dict` gives after a step: what a checkpoint is read into."""
        return {
            "weights": {n: torch.zeros_like(t) for n, t in self.state_dict()["weights"].items()},
            "optimizer": {
                name: {
                    "step": torch.zeros((), dtype=torch.float32, device=local(p).device),
                    "exp_avg": torch.zeros_like(p.detach()),
                    "exp_avg_sq": torch.zeros_like(p.detach()),
                }
                for name, p in self._trained.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; gradients gathered so far are dropped.

        Tensors may be whole or sharded in another way.

        Raises:
            CheckpointError: names, shapes or dtypes are not those of this model.
        """
        own = self.state_dict()["weights"]
        check_state(state, own, set(self._trained))
        for name, tensor in own.items():
            copy_into(tensor, state["weights"][name])
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        for name, moments in state["optimizer"].items():
            parameter = self._trained[name]
            taken = {}
            for key, value in moments.items():
                if key == "step":
                    taken[key] = value.to(local(parameter).device, copy=True)
                else:
                    taken[key] = torch.zeros_like(parameter.detach())
                    copy_into(taken[key], value)
            self._optimizer.state[parameter] = taken

    def _run(self, micro: MicroBatch, outputs: frozenset[Output]) -> Found:
        """Of an empty micro-batch, what is said of a few tokens in its place."""
        here = micro.to(self.device) if micro.lengths else _filler(self.device)
        return cast(Found, self._root(here, outputs))

    def _check(self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output]) -> None:
        """Before the first collective, which would wait for ever for a rank that does not come."""
        self._readout.check(outputs)
        numbers = gather_values(len(microbatches), self.mesh)
        if len(set(numbers)) > 1:
            raise ValueError(
                f"ranks must bring the same number of micro-batches, got {numbers}; add empty ones"
            )

    @contextlib.contextmanager
    def _keptsharded(self) -> Iterator[None]:
        """Nothing stays gathered after the block, to be used again when weights have changed.

        Nor after a loss that raises: what is asked next would be of the old weights.
        """
        try:
            yield
        finally:
            for module in self._root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _over_ranks(self, totals: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> Stats:
        own = (
            {name: float(value) for name, value in totals.items()},
            {name: float(value) for name, value in maxima.items()},
        )
        stats: Stats = {}
        # A rank of empty micro-batches knows no names.
        for sums, largest in gather_values(own, self.mesh):
            for name, value in sums.items():
                stats[name] = stats.get(name, 0.0) + value
            for name, value in largest.items():
                # As torch.maximum: NaN is passed on.
                held = stats.get(name, value)
                stats[name] = value if math.isnan(value) or value > held else held
        return stats

    def _cast(
        self, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            wanted = dtype if tensor.is_floating_point() else None
            yield name, tensor.to(wanted or self._half.get(name, tensor.dtype))


def _nothing(values: Found) -> Tensor:
    """A loss of 0 that reaches every weight, for the sums over ranks to have all their parts."""
    learnt = [value.sum() for value in values.values() if value.requires_grad]
    return torch.stack(learnt).sum() * 0.0


def _filler(device: torch.device) -> MicroBatch:
    """Two tokens, to keep in step with ranks that have more to do."""
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    written = torch.tensor([False, True], device=device)
    return MicroBatch(
        token_ids=zeros,
        positions=torch.arange(2, device=device),
        offsets=torch.tensor([0, 2], device=device),
        sample_index=zeros,
        gen_mask=written,
        loss_mask=torch.zeros_like(written),
        scored_positions=torch.ones(1, dtype=torch.int64, device=device),
        behav=torch.zeros(2, device=device),
        columns={},
        group_tokens=zeros[:1],
        samples=zeros[:1],
        source=zeros,
        lengths=(2,),
        extras=({},),
        counts=Counts(0, 0, 0),
    )
