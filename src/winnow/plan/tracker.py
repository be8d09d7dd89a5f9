"""See what a program holds on its device and what its operations move, tensor by tensor.

A dispatch mode sees each operation below autograd, on real tensors as on fake ones (which have
shapes and no memory). It writes down when each storage comes, changes its size and goes. What a
storage is for may become known later: the peak is searched for at the end.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from winnow.learning.strategy import local

BLOCK = 512
"""Bytes that sizes are rounded up to, as PyTorch's allocator for CUDA does."""
Work = tuple[int, int, bool]
"""FLOP, bytes read and written, and whether in half precision: of one operation."""


@dataclass(eq=False)
class Held:
    """A storage: what made it, and what it is for."""

    role: str
    """weights, gradients, optimizer state, gathered weights, micro-batch, or activations; and
    backward for what a backward pass makes."""
    made_by: str
    """Module and operation; the parameter's name for what belongs to one."""
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Phase:
    """What is done within one phase of a step."""

    first: int
    """Place of its first event."""
    work: Counter[Work] = field(default_factory=Counter)
    """How often each kind of work is done."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes that a rank sends, by collective operation."""


@dataclass(frozen=True)
class Peak:
    """The most that is held at once."""

    bytes: int
    phase: str
    held: list[tuple[Held, int]]
    """The storages at that moment, with their bytes."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Track what is held, and what is done, while it is active.

    A number that the host reads off a fake tensor is 1, and a fake mask takes all.

    Args:
        attention_flop: FLOP of a call of packed attention with so many query heads x size of a
            head, which depend on lengths that are on the device.
        copies: collectives gather and scatter by way of a copy of the whole, as gloo does.
    """

    def __init__(
        self,
        attention_flop: Callable[[int], float] = lambda width: 0.0,
        copies: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies = copies
        self.phases: dict[str, Phase] = {}
        self._attention_flop = attention_flop
        self._events: list[tuple[Held, int, int]] = []
        """What changes, its bytes before and after."""
        self._now: dict[int, tuple[Held, int, weakref.ref[Any]]] = {}
        self._modules: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._phase = self.begin("start")
        self._hooks = contextlib.ExitStack()

    def begin(self, phase: str) -> Phase:
        """Book what follows under a phase's name."""
        self._phase = self.phases[phase] = Phase(len(self._events))
        return self._phase

    def know(self, model: nn.Module) -> None:
        """Take the names of a model's modules."""
        for name, module in model.named_modules():
            self._names[module] = name

    def assign(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Say what storages that are held are for."""
        for name, tensor in named:
            found = self._now.get(local(tensor).untyped_storage()._cdata)
            if found is not None:
                found[0].role, found[0].made_by = role, name

    def peak(self, without: Collection[str] = (), phases: Collection[str] | None = None) -> Peak:
        """Return the peak of all phases, or of some, without the storages of some roles."""
        names = list(self.phases)
        starts = [self.phases[name].first for name in names]
        now = most = place = 0
        at = ""
        current = -1
        for index, (held, before, after) in enumerate(self._events):
            while current + 1 < len(starts) and index >= starts[current + 1]:
                current += 1
            if held.role not in without:
                now += after - before
            if now > most and (phases is None or names[current] in phases):
                most, place, at = now, index, names[current]
        left: dict[int, tuple[Held, int]] = {}
        for held, _, after in self._events[: place + 1]:
            left[id(held)] = held, after
        parts = [each for each in left.values() if each[1] and each[0].role not in without]
        return Peak(most, at, parts)

    def held_at_end(self, roles: Collection[str]) -> int:
        """Return the bytes that are held now for some purposes."""
        return sum(size for held, size, _ in self._now.values() if held.role in roles)

    def see(self, tensor: Tensor, op: str, role: str = "") -> None:
        """Book a tensor's storage as it now is."""
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        known = self._now.get(key)
        if known is None or known[2]() is None:
            # In a backward pass, what a module makes is computed again.
            is_gradient = _in_backward() and not self._modules
            role = role or ("backward" if is_gradient else "activations")
            name = f"{self._modules[-1]} {op}" if self._modules else op
            held = Held(role, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            ref = weakref.ref(storage, lambda _: self._gone(key, held))
            known = held, 0, ref
        self._set(key, known, size)

    def __enter__(self) -> Any:
        pre = register_module_forward_pre_hook(self._enter_module)
        post = register_module_forward_hook(self._leave_module, always_call=True)
        self._hooks.callback(pre.remove)
        self._hooks.callback(post.remove)
        self._hooks.enter_context(self._resizes())
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> Any:
        self._hooks.close()
        return super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_BY_HOST and _is_fake(args[0]):
            return 1
        if func is torch.ops.aten.nonzero.default and _is_fake(args[0]) and args[0].ndim == 1:
            return torch.arange(len(args[0]))[:, None]
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [_all_of(index) for index in args[1]]
        out = func(*args, **(kwargs or {}))
        op = str(func._overloadpacket).replace(".", "::", 1).partition("::")[2]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.device.type != "meta"]
        role = "gathered weights" if str(func).startswith("fsdp.") else ""
        for tensor in made:
            self.see(tensor, op, role)
        if not getattr(func, "is_view", False):
            self._count(func, args, kwargs or {}, out, made)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        packet, name = func._overloadpacket, str(func)
        moved = sum(_bytes(t) for t in {id(t): t for t in (*given, *made)}.values())
        if name.startswith(("c10d.", "_c10d")):
            # The larger side of a gathering or scattering one, of which a rank has one part.
            size = max((_bytes(t) for t in given), default=0)
            kind = name.partition(".")[2].partition(".")[0].strip("_")
            self._phase.sent[kind] += size
            if self._copies and kind.startswith(("allgather", "reduce_scatter")):
                buffer = Held("buffers of gloo", kind, (size,), "uint8")
                self._events += [(buffer, 0, size), (buffer, size, 0)]
            return
        flop = 0
        if "_varlen_attn" in name:
            query = next(t for t in given if t.ndim == 3)
            flop = int(self._attention_flop(query.shape[1] * query.shape[2]))
            flop = flop * 5 // 2 if "backward" in name else flop
        elif packet in flop_registry:
            flop = flop_registry[packet](*args, **kwargs, out_val=out)
        is_half = any(t.dtype in (torch.bfloat16, torch.float16) for t in given)
        self._phase.work[flop, moved, is_half] += 1

    def _set(self, key: int, known: tuple[Held, int, Any], size: int) -> None:
        held, before, ref = known
        if size != before:
            self._events.append((held, before, size))
        self._now[key] = held, size, ref

    def _gone(self, key: int, held: Held) -> None:
        known = self._now.get(key)
        if known is not None and known[0] is held:
            self._set(key, known, 0)
            del self._now[key]

    @contextlib.contextmanager
    def _resizes(self) -> Iterator[None]:
        """See storages that are resized, which is no operation: FSDP2 frees weights so."""
        plain: Any = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = plain(storage, size)
            known = self._now.get(storage._cdata)
            if known is not None:
                known[0].role = "gathered weights"
                self._set(storage._cdata, known, -(-storage.nbytes() // BLOCK) * BLOCK)
            return out

        cast(Any, torch.UntypedStorage).resize_ = resize_
        try:
            yield
        finally:
            cast(Any, torch.UntypedStorage).resize_ = plain

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(self._names.get(module, ""))

    def _leave_module(self, *_: Any) -> None:
        self._modules.pop()


_READ_BY_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.allclose.default}


def _all_of(index: Tensor | None) -> Tensor | None:
    """Return indices of all places in the place of a fake mask."""
    if index is None or index.dtype != torch.bool or index.ndim != 1 or not _is_fake(index):
        return index
    return torch.arange(len(index))


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _bytes(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()
