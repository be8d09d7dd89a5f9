"""Winnow trains language models by reinforcement learning from verifiable rewards.

Nothing is imported here: `import winnow` stays instant, and each module imports what it needs. The
names of `winnow.api`, `winnow.session` and `winnow.trainer` are found when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
    from winnow.session import Session
    from winnow.trainer import Trainer
    from winnow.version import __version__ as __version__

__all__ = [
    "LLM",
    "Completion",
    "RunRecord",
    "Session",
    "Trainer",
    "advantages",
    "load_config",
    "open_run",
    "score",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from winnow import version

        return version.__version__
    if name not in __all__:
        raise AttributeError(f"module 'winnow' has no attribute {name!r}")
    modules = {"Session": "winnow.session", "Trainer": "winnow.trainer"}
    return getattr(importlib.import_module(modules.get(name, "winnow.api")), name)
