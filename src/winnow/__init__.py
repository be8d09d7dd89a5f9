"""Winnow trains language models by reinforcement learning from verifiable rewards.

Nothing is imported here: `import winnow` stays instant, and each module imports what it needs. The
names of `winnow.api` and `winnow.trainer` are found when they are asked for.
"""

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
    from winnow.trainer import Trainer
    from winnow.version import __version__ as __version__

__all__ = [
    "LLM",
    "Completion",
    "RunRecord",
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
    if name == "Trainer":
        from winnow import trainer

        return trainer.Trainer
    from winnow import api

    return getattr(api, name)
