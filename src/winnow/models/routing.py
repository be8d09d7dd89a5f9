"""The routers of a mixture of experts: their choices are recorded, counted, or replayed.

An engine and a trainer compute a router's logits by other kernels, in other batches, so that near a
tie they send a token to other experts, and its log-prob jumps. Replay has the trainer use the
engine's choice (rollout routing replay: W. Ma et al., Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers, arXiv 2510.11370). The weights of the chosen experts still
come from the trainer's own logits, so that the router learns.

Shapes: `T` tokens of a forward call, `L` layers that are mixtures, in their order, `E` experts of a
layer, `k` experts a token goes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from winnow.errors import ModelError

FIELD = "rollout.routing_replay"
_MOST_IN_A_BYTE = 128
_PROBES = 64
"""Tokens of the probe that tells routers from other modules."""


@dataclass(frozen=True)
class RouteShape:
    """The shape of a token's routes [L, k], and the type they are kept in."""

    layers: int
    choices: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """int8 of up to 128 experts, else int16; -1 stands for no choice."""
        return torch.int8 if self.experts <= _MOST_IN_A_BYTE else torch.int16


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """The number of tokens that went to each expert."""

    tokens: Tensor
    """[L, E] int64, on the CPU."""
    rerouted: int
    """Replayed choices that are not among those that the router would have made for the token."""
    replayed: int
    """Choices that were replayed."""

    @classmethod
    def of(cls, counts: Tensor) -> ExpertLoad:
        """Read the counts of a `LoadCounter`, or the sum of several."""
        counts = counts.cpu()
        rerouted, replayed = counts[:, -2:].sum(0).tolist()
        return cls(counts[:, :-2], rerouted, replayed)


class LoadCounter:
    """Counts the choices of routers on their device, without waiting for it."""

    def __init__(self, shape: RouteShape, device: torch.device) -> None:
        size = shape.layers, shape.experts + 2
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        """[L, E + 2] tokens of each expert; then choices that were rerouted, and replayed."""

    def add(
        self, layer: int, topk: Tensor, chosen: Tensor, replayed: Tensor | None, tokens: int
    ) -> None:
        """Count the choices [T, k] of a layer.

        Args:
            topk: those that the router makes itself.
            chosen: those that are used.
            replayed: those of a replay, -1 where there are none.
            tokens: the first so many of T are counted.
        """
        counts, places = self.counts[layer], chosen[:tokens].flatten()
        counts.scatter_add_(0, places, torch.ones_like(places))
        if replayed is not None:
            topk, replayed = topk[:tokens], replayed[:tokens]
            in_topk = (replayed[:, :, None] == topk[:, None, :]).any(-1)
            counts[-2] += ((replayed >= 0) & ~in_topk).sum()
            counts[-1] += (replayed >= 0).sum()


@dataclass(eq=False)
class _Pass:
    """The orders of routers for a forward pass, and for its recomputation."""

    replayed: Tensor | None = None
    """[T, L, k] choices to use, -1 where the router chooses."""
    counted_tokens: int = 0
    """The first so many of T are counted; behind them is padding."""
    counted_layers: int = 0
    """Layers that have run; one that runs again is recomputed, and was counted."""
    chosen: list[Tensor] | None = None
    """Takes the choices [T, k] of each layer."""


class RouterHooks:
    """Hooks on the routers of a mixture, which do something within its blocks alone.

    Args:
        replays: routers will replay choices.

    Raises:
        ModelError: they will, and do not weigh the experts by the softmax of their logits.
    """

    def __init__(self, model: nn.Module, replays: bool = False) -> None:
        routers = routers_of(model)
        self.shape = route_shape(model)
        self._sums_to_one = [_sums_to_one(router) for router in routers] if replays else []
        self._counter: LoadCounter | None = None
        self._now: _Pass | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._on_router_output, layer))

    @contextlib.contextmanager
    def replaying(self, replayed: Tensor | None, counted_tokens: int = 0) -> Iterator[None]:
        """Replay choices in the routers, for a forward pass and the backward pass behind it.

        Args:
            replayed: [T, L, k], -1 where a router is to choose; None: everywhere.
            counted_tokens: the number of T whose experts are counted; behind them is padding.
        """
        self._now = _Pass(replayed, counted_tokens)
        try:
            yield
        finally:
            self._now = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Fill a list with the choices [T, k] of each layer, in the one forward pass within."""
        chosen: list[Tensor] = []
        self._now = _Pass(chosen=chosen)
        try:
            yield chosen
        finally:
            self._now = None

    def take_counts(self, device: torch.device) -> Tensor:
        """Return the counts of a `LoadCounter` since the last call, on a device."""
        counter, self._counter = self._counter, None
        if counter is None:
            counter = LoadCounter(self.shape, device)
        return counter.counts.to(device)

    def _on_router_output(self, layer: int, router: nn.Module, _: Any, output: Any) -> Any:
        """Run behind a router: [T, E] logits, [T, k] weights and the experts that they are of."""
        now = self._now
        if now is None:
            return None
        logits, weights, topk = output
        replayed, chosen = None, topk
        if now.replayed is not None:
            replayed = now.replayed[:, layer].long()
            chosen = torch.where(replayed < 0, topk, replayed)
            weights = _weights(logits, chosen, self._sums_to_one[layer]).to(weights.dtype)
        if now.chosen is not None:
            now.chosen.append(chosen)
        if now.counted_tokens and layer >= now.counted_layers:
            now.counted_layers = layer + 1
            if self._counter is None:
                self._counter = LoadCounter(self.shape, topk.device)
            self._counter.add(layer, topk, chosen, replayed, now.counted_tokens)
        return logits, weights, chosen


def routing_of(model: nn.Module, replays: bool = False) -> RouterHooks | None:
    """Return hooks on the routers of a model; None of a dense one.

    Raises:
        ModelError: they are to replay choices, and cannot.
    """
    if replays:
        check_replay(model)
    return RouterHooks(model, replays) if routers_of(model) else None


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model's layers, in order; none of a dense model.

    They are modules of transformers that return logits, weights and indices of the experts chosen:
    those of Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE and others; not those of DeepSeek-V3, whose layers
    choose, nor of Granite, which return other things.
    """
    probed: dict[type, bool] = {}

    def is_router(module: nn.Module) -> bool:
        kind, weight = type(module), getattr(module, "weight", None)
        is_named = kind.__name__.endswith("TopKRouter") and hasattr(module, "top_k")
        if not is_named or not isinstance(weight, Tensor):
            return False
        if kind not in probed:
            probed[kind] = (
                _probe_router(module, torch.zeros, torch.zeros(1, weight.shape[-1])) is not None
            )
        return probed[kind]

    return [module for module in model.modules() if is_router(module)]


def router_layers(model: nn.Module) -> list[int]:
    """Return the numbers of a model's layers that are mixtures, in order."""
    routers = {*routers_of(model)}
    names = [name for name, module in model.named_modules() if module in routers]
    return [next(int(part) for part in name.split(".") if part.isdigit()) for name in names]


def route_shape(model: nn.Module) -> RouteShape:
    """Return the shape of a model's routes; no layers of a dense one."""
    routers = cast("list[Any]", routers_of(model))
    choices = max((router.top_k for router in routers), default=0)
    experts = max((router.weight.shape[0] for router in routers), default=0)
    return RouteShape(len(routers), choices, experts)


def check_replay(model: nn.Module) -> None:
    """Refuse a model whose routers cannot be given their choices.

    Raises:
        ModelError: it has none, or they weigh the experts otherwise.
    """
    routers = routers_of(model)
    if not routers:
        raise ModelError(
            f"{FIELD}=true needs routers whose choice of experts can be replaced, and "
            f"{type(model).__name__} has none; set it to false"
        )
    for router in routers:
        _sums_to_one(router)


def _sums_to_one(router: Any) -> bool:
    """Return whether the weights of a token's experts are scaled to a sum of 1, by a probe.

    Raises:
        ModelError: they are not the softmax of the logits, scaled or not.
    """
    generator = torch.Generator().manual_seed(0)
    H, E = router.weight.shape[-1], router.weight.shape[0]

    def drawn(shape: torch.Size) -> Tensor:
        # Logits of size 1: with larger ones the best weights add up to 1 of themselves.
        return torch.randn(shape, generator=generator).mul_(H**-0.5)

    probe = torch.randn(_PROBES, H, generator=generator)
    if (answers := _probe_router(router, drawn, probe)) is not None:
        logits, weights, chosen = answers
        fitting = [
            scaled
            for scaled in (True, False)
            if torch.equal(_weights(logits, chosen, scaled).to(weights.dtype), weights)
        ]
        if len(fitting) == 1 or (fitting and router.top_k == E):
            return fitting[0]
    raise ModelError(
        f"{FIELD}=true needs routers that weigh experts by the softmax of their logits, as "
        f"Qwen3-MoE's do, and {type(router).__name__} does not; set it to false"
    )


def _probe_router(
    router: nn.Module, make: Callable[[torch.Size], Tensor], probe: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return a router's logits [T, E], weights and choices [T, k] of a probe [T, H].

    Args:
        make: makes weights of a shape. Its own may be on another device, on other ranks or in
            files.

    Returns:
        None of a module that does not take a probe, or returns other things.
    """
    tensors = {**dict(router.named_parameters()), **dict(router.named_buffers())}
    stand_ins = {name: make(tensor.shape) for name, tensor in tensors.items()}
    failures = TypeError, ValueError, AttributeError, RuntimeError, IndexError
    with torch.no_grad(), contextlib.suppress(*failures):
        logits, weights, chosen = functional_call(router, stand_ins, (probe,))
        shapes = [each.shape for each in (logits, weights, chosen)]
        one = (len(probe), cast(int, router.top_k))
        is_whole = not chosen.is_floating_point() and logits.is_floating_point()
        if is_whole and shapes == [(len(probe), stand_ins["weight"].shape[0]), one, one]:
            return logits, weights, chosen
    return None


def _weights(logits: Tensor, chosen: Tensor, sums_to_one: bool) -> Tensor:
    """Return the weights [T, k] of chosen experts in fp32, as Qwen3-MoE has those of the k best."""
    weights = F.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    if sums_to_one:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights
