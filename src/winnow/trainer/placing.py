"""Where the parts of a run live that hold models: in its own process, or in others.

The learning side is in the run's process, or sharded over ranks; answers are written by an engine
in the run's process, or by several in processes of their own. Where neither is in the run's
process, it holds no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from winnow.checkpoint import this_machine
from winnow.cluster.local import start_local
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.data.text import decoder
from winnow.models import model_writer
from winnow.rollout.engine import Engine
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import RemoteEngine
from winnow.rollout.torch_engine import TorchEngine
from winnow.trainer.build_learner import make_learner
from winnow.trainer.crew import Crew
from winnow.trainer.holders import InProcess
from winnow.trainer.learner import AnyLearner
from winnow.trainer.loading import Policies
from winnow.trainer.loop import Publish
from winnow.trainer.publishing import Sending, Sharing
from winnow.trainer.ranked import RankedLearner, RankedTensors
from winnow.trainer.tensors import LocalTensors, Tensors
from winnow.trainer.throughput import Passes
from winnow.workers.lora import adapter_base, adapter_writer, has_adapter
from winnow.workers.weights import Canary


@dataclass(frozen=True)
class Placed:
    """What holds models."""

    engine: Engine
    learner: AnyLearner
    tensors: Tensors
    publish: Publish
    passes: Passes
    device: torch.device
    """Of this process."""
    ranks: int
    notes: tuple[str, ...]
    """What the user should know before it starts."""
    close: Callable[[], None]


def place(config: Config, policy: Policies, start: str | None) -> Placed:
    """Build engine and learner, and start their processes if they have any; close it.

    Args:
        start: folder of the model that the run began with, where `needs_start` asks for it.

    Raises:
        WinnowError: a model of the recipe cannot be loaded, or a process cannot be started.
    """
    crew = Crew()
    try:
        return _placed(config, policy, start, crew)
    except BaseException:
        crew.close()
        raise


def _placed(config: Config, policy: Policies, start: str | None, crew: Crew) -> Placed:
    remote = config.rollout.engine.processes > 0
    strategy = config.trainer.strategy
    engine = _engines(config, policy, start, crew) if remote else make_engine(config, policy)
    common: dict[str, Any] = {"engine": engine, "device": policy.device, "close": crew.close}
    canary = Canary.drawn(
        policy.vocabulary,
        getattr(policy.model.config, "max_position_embeddings", None) or _POSITIONS,
        policy.model.dtype,
        config.rollout.temperature,
    )
    if isinstance(strategy, Fsdp2):
        made = {"config": config, "path": policy.path, "start": start}
        made |= {"vocabulary": policy.vocabulary, "tokenizer": policy.tokenizer_folder}
        limit = config.trainer.stall_timeout_s
        (group,) = crew.start(
            start_local(
                *("learner", "winnow.trainer.rank:LearnerRank", made, strategy.ranks),
                stall_timeout_s=limit,
                devices=_devices(policy.device, strategy.ranks, 0),
            )
        )
        ranked = RankedLearner(crew, group)
        return Placed(
            learner=ranked,
            tensors=RankedTensors(ranked),
            publish=Sending(engine, partial(ranked.weights, remote), canary, ranked.canary),
            passes=ranked.facts.passes,
            ranks=strategy.ranks,
            notes=ranked.facts.notes,
            **common,
        )
    learning = make_learner(config, InProcess(config, policy.model, policy.vocabulary), start)
    writer = adapter_writer if has_adapter(policy.model) else model_writer
    save_model = writer(policy.model, policy.tokenizer)
    own = learning.policy
    sending = Sending(engine, own.export_weights, canary, lambda c: c.expected(own))
    return Placed(
        learner=learning.learner,
        tensors=LocalTensors(own, learning.others, save_model),
        publish=sending if remote else Sharing(engine),
        passes=learning.passes,
        ranks=1,
        notes=learning.notes,
        **common,
    )


_POSITIONS = 1024
"""Where a model does not say how many it has."""


def make_engine(config: Config, policy: Policies) -> TorchEngine:
    """The embedded engine over the policy's own weights."""
    # A stop string may be a special token, such as a chat template's end of a turn.
    decode = decoder(policy.tokenizer, special_tokens=True)
    return TorchEngine(policy.model, decode=decode, **_engine_options(config, policy))


def _engine_options(config: Config, policy: Policies) -> dict[str, Any]:
    engine = config.rollout.engine
    return {
        "slots": engine.slots,
        "prefill_tokens": engine.prefill_tokens,
        "vocab_size": policy.vocabulary,
        "live_updates": not config.run.deterministic,
        "fp32_head": config.model.fp32_head,
    }


def _engines(config: Config, policy: Policies, start: str | None, crew: Crew) -> Engine:
    """Engines in processes of their own, each a group: one may die and leave the others."""
    count = config.rollout.engine.processes
    base = adapter_base(Path(policy.path), start or config.model.path)
    made = {
        "model": base or policy.path,
        "dtype": config.model.dtype,
        "tokenizer": policy.tokenizer_folder if config.rollout.stop else None,
        "trust_remote_code": config.model.trust_remote_code,
        **_engine_options(config, policy),
    }
    strategy = config.trainer.strategy
    taken = strategy.ranks if isinstance(strategy, Fsdp2) else 1
    devices = _devices(policy.device, count, taken)
    groups = crew.start(
        *(
            start_local(
                *(f"engine {i}", "winnow.rollout.engine_worker:TorchEngineWorker", made, 1),
                {} if config.run.threads is None else {"OMP_NUM_THREADS": str(config.run.threads)},
                stall_timeout_s=config.trainer.stall_timeout_s,
                devices=devices and devices[i : i + 1],
            )
            for i in range(count)
        )
    )
    engines = [
        RemoteEngine(crew.reached(group), 0, crew.call(group, "ask", "").status) for group in groups
    ]
    return engines[0] if count == 1 else EngineGroup(engines, config.run.deterministic)


def _devices(device: torch.device, count: int, first: int) -> list[int | None] | None:
    """A GPU for each process, behind those that others have; None: the CPU."""
    return None if device.type == "cpu" else [first + i for i in range(count)]


def holds_no_weights(config: Config) -> bool:
    """Whether other processes train the policy and write its answers."""
    return isinstance(config.trainer.strategy, Fsdp2) and config.rollout.engine.processes > 0


def machine_of(config: Config, device: torch.device) -> dict[str, str | int]:
    """What the bits of a run depend on beside its recipe."""
    strategy = config.trainer.strategy
    ranks = {"ranks": strategy.ranks} if isinstance(strategy, Fsdp2) else {}
    return {**this_machine(device), **ranks}
