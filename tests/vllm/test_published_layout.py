"""The published DAPO layout in small: ranks and engines over several GPUs on the same slots."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.kill import LONGEST_S, differences, wait_for
from tests.forked import Forked, Server
from tests.small_models import save
from transformers import Qwen2Config, Qwen2ForCausalLM

from winnow.data.sort_digits import build_tokenizer
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]
STEPS = 3
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(map(ord, solution_str)) % 2 == 0
    return {"score": 1.0 if right else -1.0, "acc": float(right)}
"""
SIZES = (
    *("model.path=model", "data.train_files=[train.jsonl]", "data.eval_files=[eval.jsonl]"),
    *("reward.function.path=score.py", "reward.workers=0", "model.dtype=float32"),
    *("data.max_prompt_tokens=32", "rollout.max_response_tokens=16", "data.chat_template=none"),
    *("reward.overlong.buffer_tokens=4", "rollout.n=4", "sampling.groups_per_step=4"),
    *("trainer.mini_batch_groups=2", "sampling.max_groups_per_step=48", f"trainer.steps={STEPS}"),
    *("evaluation.every=3", "optim.lr=1e-3", "optim.warmup_steps=0", "trainer.save_every=1"),
    *("rollout.engine.prefill_tokens=256", "rollout.engine.cache_gib=0.1", "run.threads=1"),
    *("observe.console=off", "run.device=cpu"),
)
ALONE = (
    *("cluster=local", "trainer.strategy.ranks=1", "trainer.strategy.sequence=1"),
    *("trainer.strategy.offload=false", "rollout.engine.tensor_parallel=1"),
    *("trainer.microbatch_tokens=256", "rollout.engine.slots=16"),
)
TOGETHER = (
    *("cluster.nodes=2", "cluster.cpus=0.5", "trainer.strategy.ranks=4"),
    *("trainer.strategy.sequence=2", "rollout.engine.tensor_parallel=2"),
    *("trainer.microbatch_tokens=512", "rollout.engine.slots=8"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        **{"vocab_size": 29, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"tie_word_embeddings": False, "initializer_range": 0.3},
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None},
    }
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    # Nothing ends an answer but its limit: the ticks at which groups come to their end, and others
    # are admitted in their place, are then those of the engines' quanta with one engine, too.
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)[1] = 0.0
    save(model, build_tokenizer(), folder / "model")
    (folder / "score.py").write_text(SCORER)
    for name, count in (("train", 40), ("eval", 4)):
        rows = [
            {"prompt": f"sort: {3 + i} {i % 7} =", "data_source": "digits",
             "reward_model": {"ground_truth": str(i)}}
            for i in range(count)
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Ray on two nodes, for two ranks and an engine each; its workers import what they need."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=4, object_store_memory=100 << 20)
    yield nodes.address
    nodes.shutdown()


def start(server: Server, home: Path, name: str, *settings: str) -> Forked:
    words = "train", "dapo_qwen2.5_32b", *SIZES, *settings, f"run.name={name}"
    return server.start("winnow.cli.main", words, folder=home, spares=6)


def trained_answers(run: Path) -> list[list[Any]]:
    """Group, ids and versions of the answers that were trained on, by step."""
    tables = [read_rollouts(run / "rollouts" / f"step-{n}.parquet") for n in range(1, STEPS + 1)]
    return [
        [
            (row["group"], row["answer"], row["token_ids"], row["versions"])
            for row in table.to_pylist()
            if row["outcome"] == "trained"
        ]
        for table in tables
    ]


def test_ranks_and_wide_engines_on_the_same_slots_learn_what_one_of_each_does(
    server: Server, home: Path, cluster: str
) -> None:
    assert start(server, home, "alone", *ALONE).wait(LONGEST_S) == 0
    there = *TOGETHER, f"cluster.address={cluster}"
    assert start(server, home, "together", *there).wait(LONGEST_S) == 0
    alone, together = home / "runs/alone", home / "runs/together"
    assert trained_answers(alone) == trained_answers(together)
    for one, other in zip(
        *(read_metrics(run / "metrics.jsonl") for run in (alone, together)), strict=True
    ):
        for key in [k for k in one if k.startswith(("actor/", "reward/", "eval/", "length/"))]:
            np.testing.assert_allclose(other[key], one[key], rtol=1e-5, atol=1e-5, err_msg=key)
    killed = start(server, home, "killed", *there)
    assert wait_for(killed, (home / "runs/killed/checkpoints/step-1").exists)  # type: ignore[arg-type]
    time.sleep(0.1)
    killed.kill()
    assert killed.wait(60) == -9
    assert start(server, home, "killed", *there).wait(LONGEST_S) == 0
    assert differences(together, home / "runs/killed", STEPS) == []
