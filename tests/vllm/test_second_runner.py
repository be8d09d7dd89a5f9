"""vLLM's second model runner, which alone tells routes, on the interpreter of Triton."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fault.quick_lab import SPARES
from tests.forked import Server
from tests.small_models import digits_folder

from winnow.observe.jsonl import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN = (
    *("model.path=model", "warm_start=none", "rollout.routing_replay=true", "run.name=mine"),
    *("rollout/engine=vllm", "rollout.engine.slots=4", "rollout.n=2", "run.threads=1"),
    *("rollout.max_response_tokens=6", "data.max_prompt_tokens=16", "observe.console=plain"),
    *("data.task.min_digits=2", "data.task.max_digits=4", "reward.overlong.enabled=false"),
    *("sampling/filter=none", "sampling.groups_per_step=2", "trainer.mini_batch_groups=null"),
    *("trainer.steps=1", "evaluation.before=false", "data.task.eval_problems=2"),
)


@pytest.fixture(scope="module")
def second() -> Iterator[Server]:
    """Starts processes in which kernels of Triton run on a CPU."""
    preloaded = "tests.triton_on_cpu", "winnow.rollout.vllm.engine"
    server = Server(environment={"TRITON_INTERPRET": "1"}, preloaded=preloaded)
    yield server
    server.close()


def test_it_draws_the_same_tokens_and_tells_the_models_routes(
    second: Server, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    words = (
        *("-q", "-p", "no:cacheprovider", "-k", "vllm or second_runner or prefix"),
        *("tests/vllm/second_runner.py", "tests/contract/test_routing.py"),
        "tests/vllm/test_answers.py::test_tokens_behind_a_prefix_are_those_of_the_torch_engine",
    )
    assert second.start("tests.triton_on_cpu", words, out=said).wait() == 0, said.read_text()


def test_a_run_trains_with_the_experts_that_vllm_chose(second: Server, tmp_path: Path) -> None:
    digits_folder(
        tmp_path / "model",
        experts=True,
        **{"num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 32, "hidden_size": 32},
        initializer_range=0.3,
    )
    asked = ["train", "quickstart", *RUN]
    run = second.start("winnow.cli.main", asked, folder=tmp_path, spares=SPARES)
    assert run.wait() == 0
    lines = read_metrics(tmp_path / "runs" / "mine" / "metrics.jsonl")
    (line,) = [line for line in lines if "actor/loss" in line]
    assert line["experts/rerouted"] == 0
    assert line["mismatch/abs_delta"] < 1e-5
