"""Limits over a whole run, cut into equal parts for the processes that score."""

from __future__ import annotations

import pytest
from tests.recipes import recipe

from winnow.config.reward import config_per_process, shared_limits

ASKED = [
    *("reward/judge=openai", "reward.judge.base_url=http://127.0.0.1:1/v1", "reward.judge.model=m"),
    *("reward.judge.max_concurrent=7", "reward.judge.tokens_per_minute=1000"),
    *("reward/manager=remote", "reward.manager.url=http://127.0.0.1:1/score"),
    *("reward/sandbox=fusion", "reward.sandbox.url=http://127.0.0.1:1"),
]


@pytest.mark.parametrize("processes", [1, 3])
def test_processes_together_keep_within_the_limits_of_the_run(processes: int) -> None:
    config = recipe("quickstart", *ASKED, f"reward.processes={processes}").reward
    whole, share = shared_limits(config), shared_limits(config_per_process(config))
    assert whole == {
        ("judge", "max_concurrent"): 7,
        ("judge", "tokens_per_minute"): 1000,
        ("manager", "max_concurrent"): 64,
        ("sandbox", "max_concurrent"): 64,
    }
    assert share == {place: limit // processes for place, limit in whole.items()}
    assert config_per_process(config).judge.model_dump(
        exclude={"max_concurrent", "tokens_per_minute"}
    ) == (config.judge.model_dump(exclude={"max_concurrent", "tokens_per_minute"}))


def test_what_has_no_limit_has_no_share() -> None:
    config = recipe("quickstart", "reward.processes=2").reward
    assert shared_limits(config) == {}
    assert config_per_process(config) == config
