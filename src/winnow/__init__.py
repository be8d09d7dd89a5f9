"""Winnow trains language models by reinforcement learning from verifiable rewards.

`import winnow` stays instant: each module imports what it needs, and the names of `winnow.api` are
resolved on first use.
"""

from typing import TYPE_CHECKING, Any

from winnow.version import __version__ as __version__

if TYPE_CHECKING:
    from winnow.api import (
        LLM,
        Completion,
        RunRecord,
        advantages,
        load_config,
        open_run,
        score,
        train,
    )

__all__ = [
    "LLM",
    "Completion",
    "RunRecord",
    "advantages",
    "load_config",
    "open_run",
    "score",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'winnow' has no attribute {name!r}")
    from winnow import api

    return getattr(api, name)
