"""Answers to what megatron-core asks of torch.cuda, for processes on a CPU with gloo.

megatron-core 0.16 never looks for another device than CUDA: it allocates what it receives on
`torch.cuda.current_device()`, synchronizes, keeps states of CUDA's random numbers and copies on
streams. `install` gives each of these names an answer on the CPU, so that its layers, pipelines and
dispatchers of experts run in tests as they are. All else of torch.cuda stays as it is:
`is_available()` is false, and Winnow itself computes on the CPU without any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
_random = torch.Generator()
"""In the place of the CUDA device's generator. It lies apart from the CPU's, as that does."""


class Stream:
    """A queue of work that is done at once: nothing is left to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, _: Stream) -> None:
        """Wait for another stream."""

    def record_event(self) -> Stream:
        """Return what `synchronize` can be asked of."""
        return self

    def synchronize(self) -> None:
        """Wait for the work."""


_stream = Stream()


def _current_device() -> torch.device:
    return CPU


def _synchronize(_: Any = None) -> None:
    pass


def _current_stream(_: Any = None) -> Stream:
    return _stream


def _stream_context(stream: Stream) -> Stream:
    return stream


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return _random.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    _random.set_state(new_state)


def _manual_seed(seed: int) -> None:
    _random.manual_seed(seed)


def _zeros_on_cpu(zeros: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `torch.zeros`, which the pipeline's schedules call with the word "cuda"."""

    def cpu_zeros(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = CPU
        return zeros(*size, **options)

    return cpu_zeros


def _on_the_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return numbers of tokens as what all-to-all takes, though they need not leave a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install() -> None:
    """Give torch.cuda its answers. The second call in a process does nothing."""
    # As it is imported megatron-core looks at torch.cuda, too, and takes from it what it finds.
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    if torch.cuda.current_device is _current_device:
        return
    torch.cuda.current_device = _current_device
    torch.cuda.synchronize = _synchronize
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = _current_stream
    torch.cuda.stream = _stream_context
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = _get_rng_state
    torch.cuda.manual_seed = _manual_seed
    megatron_random._set_cuda_rng_state = _set_rng_state
    dispatcher.maybe_move_tensor_to_cpu = _on_the_cpu
    torch.zeros = _zeros_on_cpu(torch.zeros)
