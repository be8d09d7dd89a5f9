"""One model in one process, on the CPU or one CUDA device: the plain strategy.

Weights and activations have the model's dtype. A bf16 model is stepped on fp32 master weights:
gradients of micro-batches are summed in fp32, AdamW works in fp32, and the result is rounded to
bf16 after each step, so that updates smaller than a bf16 step are not lost.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from winnow.learning.base_strategy import HALF, BaseStrategy


class SingleStrategy(BaseStrategy):
    """Hold a whole model in this process; an engine beside it may share the weights.

    Args:
        options: as `BaseStrategy` takes them.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, next(model.parameters()).device, **options)

    def _hold(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {name: _master(p) for name, p in named if p.requires_grad}


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """Return what the optimizer steps: the parameter itself, or for half precision an fp32 copy.

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
