"""Megatron's process groups, made once for each layout in a process that runs many tests.

Megatron holds one set of them in a module's globals. A set that is let go stays: gloo keeps three
threads for each of its groups, and dozens of sets make hundreds that take turns.
"""

from __future__ import annotations

from typing import Any

_joined: dict[tuple[int, int, int], dict[str, Any]] = {}


def use(layout: Any) -> None:
    """Have Megatron hold the groups of a `RankLayout`; all ranks call this."""
    from tests.megatron_on_cpu.cuda_answers import install

    install()
    from megatron.core import parallel_state

    key = layout.tensor, layout.pipeline, layout.expert
    if key not in _joined:
        parallel_state.destroy_model_parallel()
        layout.init_groups()
        held = vars(parallel_state).items()
        _joined[key] = {name: value for name, value in held if name.isupper()}
    vars(parallel_state).update(_joined[key])
