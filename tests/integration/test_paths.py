"""A run imports the variants that its recipe names and no others, so that it starts quickly."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    *("ray", "vllm", "peft", "httpx", "starlette", "uvicorn", "scipy", "matplotlib", "datasets"),
    *("sympy", "reasoning_gym", "winnow.http", "winnow.sandbox", "winnow.workers.group"),
    *(
        "winnow.workers.child",
        "winnow.workers.ray",
        "winnow.rewards.judge",
        "winnow.rewards.model_scorer",
    ),
    *("winnow.rewards.pool", "winnow.rewards.remote_pipeline", "winnow.rewards.serve"),
    *("winnow.rollout.engine_group", "winnow.rollout.remote_engine", "winnow.rollout.http"),
    *("winnow.learning.canary", "winnow.learning.custom", "winnow.learning.fsdp2"),
    *("winnow.evaluation.report", "winnow.checkpoints.upload", "winnow.ranks.workers"),
    *("winnow.builders.warm_start", "winnow.views.summary"),
)
"""Variants that a run may do without, and what they import; a package stands for what is below."""

PROGRAM = """
import sys
import winnow.commands.train
for name in sorted(sys.modules):
    print(name)
"""


def test_the_trainer_imports_no_variant_before_a_recipe_names_it() -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    imported = said.stdout.split()
    assert "winnow.commands.train" in imported
    heavy = [n for n in imported if any(n == h or n.startswith(f"{h}.") for h in HEAVY)]
    assert heavy == [], "import it in the branch that the recipe chooses"
