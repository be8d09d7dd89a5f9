"""One model in one process, on the CPU or one CUDA device: the plain strategy.

Weights and activations have the model's dtype. A bf16 model is stepped on fp32 master weights:
gradients of micro-batches are summed in fp32, AdamW works in fp32, and the result is rounded to
bf16 after each step, so that updates smaller than a bf16 step are not lost.

Shapes: `T` packed tokens of a micro-batch, `H` width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.learning.batch import MicroBatch
from winnow.learning.readout import readout_of
from winnow.learning.strategy import LossFn, Output, Stats
from winnow.models import lora
from winnow.models.causal_lm import hidden_states
from winnow.models.fused_layers import fuse
from winnow.models.packed_attention import PackedLayout
from winnow.models.parameters import (
    HALF,
    check_state,
    enable_checkpointing,
    in_training,
    tensors_of,
)


class SingleStrategy:
    """Holds a model of `winnow.models`, and AdamW for what it trains.

    That is what requires gradients; a frozen model has no optimizer state. The model stays in
    evaluation mode (no dropout but an adapter's own) and is changed in place, so that an engine
    in this process may share it. On the CPU its norms and feed-forward layers are fused.

    A causal LM offers `logprob` and `entropy`, a value model `value`, a reward model `score`.

    Args:
        temperature: of the policy whose log-probs are asked for.
        betas, eps, weight_decay: AdamW's; every trained parameter decays, as in torch.
        grad_clip: bound on the norm of the whole gradient; None leaves it.
        vocab_size: ids the tokenizer has, the rest of the head gets no probability; None means all.
        logprob_chunk_tokens: tokens whose logits exist at once; None chooses by the vocabulary.
        gradient_checkpointing: recompute activations in the backward pass.
        fp32_head: compute a half-precision model's logits in fp32.
    """

    def __init__(
        self,
        model: nn.Module,
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
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._grad_clip = grad_clip
        self._readout = readout_of(model, temperature, vocab_size, logprob_chunk_tokens, fp32_head)
        if self.device.type == "cpu":
            fuse(model)
        self._training_only = lora.adapter_dropouts(model)
        if gradient_checkpointing:
            self._training_only += enable_checkpointing(model)
        self._masters = {
            name: _master(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = torch.optim.AdamW(
            # An optimizer of nothing wants a group, and steps it in vain.
            [{"params": list(self._masters.values())}],
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
            ValueError: an output that this kind of model does not have.
        """
        with torch.no_grad():
            return [self._run(micro.to(self.device), outputs) for micro in microbatches]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        """Accumulate gradients of the summed losses; returns `loss`, sums and maxima.

        Raises:
            ValueError: an output that this kind of model does not have.
        """
        totals: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for micro in microbatches:
            here = micro.to(self.device)
            with in_training(self._training_only):
                result = loss_fn(here, self._run(here, outputs))
                result.loss.backward()  # type: ignore[no-untyped-call]
            for name, value in {"loss": result.loss, **result.sums}.items():
                held = totals.get(name)
                value = value.detach().double()
                totals[name] = value if held is None else held + value
            for name, value in result.maxima.items():
                maxima[name] = torch.maximum(maxima.get(name, value), value)
        return {name: float(value) for name, value in (totals | maxima).items()}

    def optimizer_step(self, lr: float) -> Stats:
        """Clip, step, clear the gradients. A non-finite gradient norm changes nothing.

        Returns:
            `grad_norm` (before clipping) and `skipped` (0 or 1).
        """
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        skipped = not math.isfinite(norm)
        if not skipped:
            if self._grad_clip is not None and norm > self._grad_clip:
                torch._foreach_mul_(gradients, self._grad_clip / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._round_masters()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "skipped": float(skipped)}

    def export_weights(
        self, dtype: torch.dtype | None = None, adapter_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors, tied ones once; without a cast they are live.

        An adapter is merged into copies of the weights it belongs to; alone it has PEFT's names.

        Raises:
            ModelError: an adapter is asked for, and the model has none.
        """
        if adapter_only and not self.has_adapter:
            raise ModelError("the adapter alone was asked for, but the model has none; export all")
        if adapter_only:
            found = lora.adapter_weights(self.model)
        else:
            found = lora.merged_weights(tensors_of(self.model), self.model)
        for name, tensor in found:
            cast_ = dtype if tensor.is_floating_point() else None
            yield name, tensor.to(cast_ or tensor.dtype)

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
        """Weights (fp32 masters where there are any) and optimizer state, by parameter name.

        Of an adapted model the adapter's weights alone. The tensors are live: write or copy them
        before the next step. Hyperparameters are not in it; they come from the recipe.
        """
        masters = self._masters
        weights = {
            name: masters.get(name, tensor).detach()
            for name, tensor in tensors_of(self.model).items()
            if not self.has_adapter or lora.is_adapters(name)
        }
        states = self._optimizer.state
        return {
            "weights": weights,
            "optimizer": {n: dict(states[m]) for n, m in masters.items() if m in states},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; gradients gathered so far are dropped.

        Raises:
            CheckpointError: names, shapes or dtypes are not those of this model.
        """
        own = self.state_dict()["weights"]
        check_state(state, own, set(self._masters))
        for name, tensor in own.items():
            tensor.copy_(state["weights"][name])
        self._round_masters()
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        for name, moments in state["optimizer"].items():
            master = self._masters[name]
            self._optimizer.state[master] = {
                key: value.to(master.device, copy=True) for key, value in moments.items()
            }

    def _run(self, micro: MicroBatch, outputs: frozenset[Output]) -> dict[Output, Tensor]:
        layout = PackedLayout(micro.lengths, self.device)
        hidden = hidden_states(self.model, micro.token_ids, micro.positions, layout)
        return self._readout(hidden, micro, outputs)

    def _round_masters(self) -> None:
        """Bring what the optimizer changed into the model, where the two are not the same."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                master = self._masters.get(name, parameter)
                if master is not parameter:
                    parameter.copy_(master)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """What the optimizer steps: the parameter itself, or for half precision an fp32 copy.

    The copy takes over each gradient as soon as backward has it.
    """
    if parameter.dtype not in HALF:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def take_over(owner: Tensor) -> None:
        assert owner.grad is not None
        gradient = owner.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        owner.grad = None

    cast(Any, parameter).register_post_accumulate_grad_hook(take_over)
    return master
