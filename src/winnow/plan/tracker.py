"""Track the tensors that a program holds on its device, and what its operations move.

A dispatch mode sees each operation below autograd. It writes down when each storage comes, changes
its size and goes. What a storage is for may become known later: the peak is searched for at the
end. It is for fake tensors, which have shapes and no numbers.
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
_READ_BY_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.allclose.default}
Work = tuple[int, int, bool]
"""FLOP, bytes read and written, and whether in half precision: of one operation."""


@dataclass(eq=False)
class Held:
    """A storage: what made it, and what it is for."""

    role: str
    """weights, gradients, optimizer state, gathered weights, activations; backward for what
    a backward pass makes."""
    made_by: str
    """Module and operation; the parameter's name for what belongs to one."""
    shape: tuple[int, ...]
    bytes: int = 0
    """Size at this moment; 0 once it is freed."""
    storage: Callable[[], Any] = lambda: None
    """Returns the storage; None once it is freed."""


@dataclass
class Phase:
    """Work and traffic of one phase of a step."""

    first: int
    """Place of its first event."""
    work: Counter[Work] = field(default_factory=Counter)
    """Number of operations of each kind."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of the whole tensor that ranks gather, scatter or reduce, by operation."""


@dataclass(frozen=True)
class Peak:
    """The most that is held at once."""

    bytes: int
    held: list[tuple[Held, int]]
    """The storages at that moment, with their bytes."""


class DeviceTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Track what is held, and what is done, while it is active.

    A number that the host reads off a tensor is 1, and a mask takes all.

    Args:
        attention_flop: FLOP of a call of packed attention with so many query heads x size of a
            head, which depend on lengths that are on the device.
    """

    def __init__(self, attention_flop: Callable[[int], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, Phase] = {}
        self.chosen_experts = 0
        """Experts that a token goes to: as many of each row [T] a mask [E, T] takes in the mean."""
        self._attention_flop = attention_flop
        self._events: list[tuple[Held, int, int]] = []
        """The storage that changes, its bytes before and after."""
        self._now: dict[int, Held] = {}
        self._modules: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._hooks = contextlib.ExitStack()
        self.begin("start")

    def begin(self, phase: str) -> None:
        """Book what follows under a phase's name."""
        self._phase = self.phases[phase] = Phase(len(self._events))

    def know(self, model: nn.Module, role: str) -> None:
        """Take the names of a model's modules and weights."""
        self._names.update({module: name for name, module in model.named_modules()})
        self.assign("weights", ((f"{role} {name}", p) for name, p in model.named_parameters()))

    def assign(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Say what storages that are held are for."""
        for name, tensor in named:
            if (held := self._now.get(_local(tensor).untyped_storage()._cdata)) is not None:
                held.role, held.made_by = role, name

    def peak(self, phase: str, without: Collection[str] = ()) -> Peak:
        """Return the peak of a phase, without the storages of some roles."""
        first, starts = self.phases[phase].first, [each.first for each in self.phases.values()]
        end = next((start for start in starts if start > first), len(self._events))
        changes = (0 if h.role in without else after - b for h, b, after in self._events[:end])
        totals = list(itertools.accumulate(changes))
        place = max(range(first, end), key=totals.__getitem__)
        left = {h: size for h, _, size in self._events[: place + 1] if h.role not in without}
        return Peak(totals[place], [(h, size) for h, size in left.items() if size])

    def held_at_end(self, roles: Collection[str]) -> int:
        """Return the bytes that are held now for some purposes."""
        return sum(held.bytes for held in self._now.values() if held.role in roles)

    def __enter__(self) -> Any:
        plain: Any = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            # No operation: FSDP2 frees gathered weights so.
            out = plain(storage, size)
            if (held := self._now.get(storage._cdata)) is not None:
                held.role = "gathered weights" if size else held.role
                self._resize(held, storage.nbytes())
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
        is_fake = bool(args) and isinstance(args[0], FakeTensor)  # a mesh of ranks is real
        if func in _READ_BY_HOST and is_fake:
            return 1
        if func is torch.ops.aten.nonzero.default and is_fake and args[0].ndim == 1:
            return torch.arange(len(args[0]))[:, None]
        if func is torch.ops.aten.masked_select.default and is_fake and args[0].ndim == 2:
            return args[0].new_empty(args[1].shape[-1] * self.chosen_experts)
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [_all_of(index) for index in args[1]]
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # Its fake kernel knows bfloat16 alone.
            out = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).float()
        else:
            out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta]
        for tensor in made:
            self._see(tensor, func)
        # Asking for a device, or for memory, moves nothing.
        if not func.is_view and func.namespace != "prim" and "empty" not in func.__name__:
            self._count(func, args, kwargs or {}, out, made)
        return out

    def _see(self, tensor: Tensor, func: Any) -> None:
        storage = _local(tensor).untyped_storage()
        key = storage._cdata
        held = self._now.get(key)
        if held is None or held.storage() is None:
            # In a backward pass, what a module makes is computed again.
            is_gradient = torch._C._current_graph_task_id() != -1 and not self._modules
            role = "backward" if is_gradient else "activations"
            role = "gathered weights" if func.namespace == "fsdp" else role
            made_by = f"{''.join(self._modules[-1:])} {func._overloadpacket.__name__}".strip()
            held = self._now[key] = Held(role, made_by, tuple(tensor.shape))
            held.storage = weakref.ref(storage, partial(self._free, key, held))
        self._resize(held, storage.nbytes())

    def _free(self, key: int, held: Held, _: object) -> None:
        if self._now.get(key) is held:
            self._resize(self._now.pop(key), 0)

    def _resize(self, held: Held, size: int) -> None:
        """Book a storage's bytes, in whole blocks."""
        size = -(-size // BLOCK) * BLOCK
        if size != held.bytes:
            self._events.append((held, held.bytes, size))
            held.bytes = size

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__.strip("_")
        if func.namespace == "c10d":
            # Of what is gathered or scattered a rank has one part, and the other side is the whole.
            self._collective(name, max(map(local_bytes, given), default=0))
            return
        flop = 0
        if name.startswith(("varlen_attn", "scaled_dot_product_flash")):  # the latter of float32
            q = next(t for t in given if t.ndim > 2).shape  # [T, N, D], or [B, N, T, D]
            once = self._attention_flop(q[1] * q[2]) if len(q) < 4 else 2 * q.numel() * (q[2] + 1)
            flop = int(once * (2.5 if "backward" in name else 1))
        elif name == "grouped_mm":  # of experts; torch counts none
            flop = 2 * args[0].numel() * args[1].shape[-1]
        # What works in place, such as `addmm_`, is counted as what does not.
        elif counted := flop_registry.get(getattr(torch.ops.aten, name, func._overloadpacket)):
            flop = counted(*args, **kwargs, out_val=out)
        moved = sum(map(local_bytes, {id(t): t for t in (*given, *made)}.values()))
        self._phase.work[flop, moved, any(t.dtype in HALF for t in given)] += 1

    def _collective(self, name: str, size: int) -> None:
        self._phase.sent[name] += size


def _all_of(index: Tensor | None) -> Tensor | None:
    """Return indices of all places in the place of a mask [T]."""
    is_mask = index is not None and index.dtype == torch.bool and index.ndim == 1
    return torch.arange(len(index)) if is_mask and index is not None else index


def _local(tensor: Tensor) -> Tensor:
    # Without the view of `to_local`, an operation more, which took a fourth of a plan's time.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank."""
    return _local(tensor).numel() * tensor.element_size()
