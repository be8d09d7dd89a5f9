"""Track the tensors that a program holds on its device, and what its operations move.

A dispatch mode sees each operation below autograd and logs every allocation, resize and release of
a storage. The purpose of a storage may be set after its allocation, since peaks are computed at the
end. The tracker is for fake tensors, which have shapes but no values.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from winnow.learning.strategy import HALF

BLOCK = 512
"""Bytes that sizes are rounded up to, as PyTorch's allocator for CUDA does."""
_HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.allclose.default}
Work = tuple[int, int, str]
"""FLOP, bytes read and written, and unit of one operation: float32, bfloat16 or attention (which
is in half precision, too)."""


@dataclass(eq=False)
class TrackedStorage:
    """A storage: the operation that allocated it, its purpose and its size."""

    role: str
    """Purpose: weights, gradients, optimizer state, gathered weights, activations, or backward for
    intermediates of a backward pass."""
    made_by: str
    """Module and operation, or the name of the parameter that it belongs to."""
    shape: tuple[int, ...]
    bytes: int = 0
    """Current size; 0 after release."""
    reference: Callable[[], Any] = lambda: None
    """Weak reference to the storage; returns None after release."""


@dataclass
class Phase:
    """Operations and collectives of one phase of a step."""

    start: int
    """Index of its first allocation event."""
    work: Counter[Work] = field(default_factory=Counter)
    """Number of operations of each cost."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of the full tensors in collectives, by operation."""


@dataclass(frozen=True)
class Peak:
    """Peak memory of a phase."""

    bytes: int
    storages: list[tuple[TrackedStorage, int]]
    """Storages that are live at the peak, with their bytes."""


class DeviceTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks storages and counts operations.

    Values read by the host are 1, and masks select every element.

    Args:
        attention_flop: returns the FLOP of a call of packed attention for a number of query heads
            x head size; they depend on sequence lengths, which are device values.
    """

    def __init__(self, attention_flop: Callable[[int], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, Phase] = {}
        self.chosen_experts = 0
        """Experts per token: a routing mask [E, T] selects this many elements per column."""
        self._attention_flop = attention_flop
        self._events: list[tuple[TrackedStorage, int, int]] = []
        """Storage, bytes before, bytes after."""
        self._live: dict[int, TrackedStorage] = {}
        self._modules: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._hooks = contextlib.ExitStack()
        self.begin("start")

    def begin(self, phase: str) -> None:
        """Start a phase: the following operations are counted in it."""
        self._phase = self.phases[phase] = Phase(len(self._events))

    def register_model(self, model: nn.Module, role: str) -> None:
        """Register the names of a model's modules and weights."""
        self._names.update({module: name for name, module in model.named_modules()})
        self.assign_role("weights", ((f"{role} {name}", p) for name, p in model.named_parameters()))

    def assign_role(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set the purpose and name of live storages."""
        for name, tensor in named:
            if (entry := self._live.get(_local(tensor).untyped_storage()._cdata)) is not None:
                entry.role, entry.made_by = role, name

    def peak(self, phase: str, without: Collection[str] = ()) -> Peak:
        """Return the peak memory of a phase, excluding storages of the roles in `without`."""
        first, starts = self.phases[phase].start, [each.start for each in self.phases.values()]
        end = min((start for start in starts if start > first), default=len(self._events))
        changes = (0 if h.role in without else after - b for h, b, after in self._events[:end])
        totals = list(itertools.accumulate(changes))
        place = max(range(first, end), key=totals.__getitem__)
        left = {h: size for h, _, size in self._events[: place + 1] if h.role not in without}
        return Peak(totals[place], [(h, size) for h, size in left.items() if size])

    def live_bytes(self, roles: Collection[str]) -> int:
        """Return the current bytes of the storages of some roles."""
        return sum(entry.bytes for entry in self._live.values() if entry.role in roles)

    def __enter__(self) -> Any:
        plain: Any = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            # FSDP2 frees gathered weights with this call, which is not a dispatched operation.
            out = plain(storage, size)
            if (entry := self._live.get(storage._cdata)) is not None:
                entry.role = "gathered weights" if size else entry.role
                self._resize(entry, storage.nbytes())
            return out

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(self._names.get(module, ""))

        def leave(*_: Any) -> None:
            self._modules.pop()

        self._hooks.callback(register_module_forward_pre_hook(enter).remove)
        self._hooks.callback(register_module_forward_hook(leave, always_call=True).remove)
        self._hooks.callback(setattr, torch.UntypedStorage, "resize_", plain)
        setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> Any:
        self._hooks.close()
        return super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = bool(args) and isinstance(args[0], FakeTensor)  # device mesh tensors are real
        if func in _HOST_READS and is_fake:
            return 1
        if func is torch.ops.aten.nonzero.default and is_fake and args[0].ndim == 1:
            return torch.arange(len(args[0]))[:, None]
        if func is torch.ops.aten.masked_select.default and is_fake and args[0].ndim == 2:
            return args[0].new_empty(args[1].shape[-1] * self.chosen_experts)
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [_replace_mask(index) for index in args[1]]
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # The fake kernel supports bfloat16 only.
            out = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).float()
        else:
            out = func(*args, **(kwargs or {}))
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta]
        for tensor in outputs:
            self._track_storage(tensor, func)
        # Views, device queries and empty allocations move no bytes.
        if not func.is_view and func.namespace != "prim" and "empty" not in func.__name__:
            self._count(func, args, kwargs or {}, out, outputs)
        return out

    def _track_storage(self, tensor: Tensor, func: Any) -> None:
        storage = _local(tensor).untyped_storage()
        key = storage._cdata
        entry = self._live.get(key)
        if entry is None or entry.reference() is None:
            # Inside a module, a backward pass recomputes activations.
            is_gradient = torch._C._current_graph_task_id() != -1 and not self._modules
            role = "backward" if is_gradient else "activations"
            role = "gathered weights" if func.namespace == "fsdp" else role
            made_by = f"{''.join(self._modules[-1:])} {func._overloadpacket.__name__}".strip()
            entry = self._live[key] = TrackedStorage(role, made_by, tuple(tensor.shape))
            entry.reference = weakref.ref(storage, partial(self._free, key, entry))
        self._resize(entry, storage.nbytes())

    def _free(self, key: int, entry: TrackedStorage, _: object) -> None:
        if self._live.get(key) is entry:
            self._resize(self._live.pop(key), 0)

    def _resize(self, entry: TrackedStorage, size: int) -> None:
        """Record a new size, rounded up to whole blocks."""
        size = -(-size // BLOCK) * BLOCK
        if size != entry.bytes:
            self._events.append((entry, entry.bytes, size))
            entry.bytes = size

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__.strip("_")
        if func.namespace == "c10d":
            # The larger of input and output is the full tensor; the other is this rank's shard.
            self._count_collective(name, max(map(local_bytes, inputs), default=0))
            return
        flop = 0
        if name.startswith(("varlen_attn", "scaled_dot_product_flash")):  # the latter for float32
            q = next(t for t in inputs if t.ndim > 2).shape  # [T, N, D], or [B, N, T, D]
            once = self._attention_flop(q[1] * q[2]) if len(q) < 4 else 2 * q.numel() * (q[2] + 1)
            if len(q) > 3 and not any(each is True for each in args):  # not causal: a vision tower
                once *= 2
            flop = int(once * (2.5 if "backward" in name else 1))
        elif name == "grouped_mm":  # experts, which torch does not count
            flop = 2 * args[0].numel() * args[1].shape[-1]
        # In-place variants such as `addmm_` have the count of the plain operation.
        elif counted := flop_registry.get(getattr(torch.ops.aten, name, func._overloadpacket)):
            flop = counted(*args, **kwargs, out_val=out)
        moved = sum(map(local_bytes, {id(t): t for t in (*inputs, *outputs)}.values()))
        unit = "bfloat16" if any(t.dtype in HALF for t in inputs) else "float32"
        is_attention = unit == "bfloat16" and ("attn" in name or "attention" in name)
        self._phase.work[flop, moved, "attention" if is_attention else unit] += 1

    def _count_collective(self, name: str, size: int) -> None:
        self._phase.sent[name] += size


def _replace_mask(index: Tensor | None) -> Tensor | None:
    """Return the indices of all elements if `index` is a mask [T]."""
    is_mask = index is not None and index.dtype == torch.bool and index.ndim == 1
    return torch.arange(len(index)) if is_mask and index is not None else index


def _local(tensor: Tensor) -> Tensor:
    # `to_local` adds a view operation, which cost a quarter of the time of a plan.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank."""
    return _local(tensor).numel() * tensor.element_size()
