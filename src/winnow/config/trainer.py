"""The course of a run: steps, updates, sharding, optimizers, critic, evaluation and processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from winnow.config.base import (
    ADDRESS,
    PLACE,
    PROGRAM,
    TEMPERATURES,
    Aggregation,
    Change,
    Decay,
    Dtype,
    Section,
)


class WholeModels(Section):
    """Unsharded models, in the process that runs them."""

    name: Literal["single"] = "single"
    compile: bool | None = None
    """Run the models' blocks through torch.compile while they learn; starts later, needs a C++
    compiler (and Triton on GPUs). Bits differ. null compiles dense models on GPUs, if it can."""


class Sharded(Section):
    """A model sharded over dedicated processes (PyTorch's `fully_shard`); see docs/ranks.md."""

    section_key: ClassVar[str]
    """Key of the section."""
    name: Literal["fsdp2"] = "fsdp2"
    ranks: int = Field(2, ge=1)
    """Processes, each with its share of the weights and of the work."""
    replicas: int = Field(1, ge=1)
    """Groups of ranks with a full copy of the weights each (HSDP); a divisor of ranks."""
    offload: bool = False
    """Keep a rank's weights, gradients and optimizer state in host memory, and run the optimizer
    there."""

    def conflicts(self) -> Iterator[str]:
        if self.ranks % self.replicas:
            key = self.section_key
            sizes = f"{key}.ranks={self.ranks} is not a multiple of {key}.replicas={self.replicas}"
            yield f"{sizes}; use a divisor of ranks"


class WithPolicy(Section):
    """With the policy: on its ranks, or in the run's process."""

    name: Literal["policy"] = "policy"


class Fsdp2(Sharded):
    """Models sharded over several processes (PyTorch's `fully_shard`); see docs/ranks.md."""

    section_key: ClassVar[str] = "trainer.strategy"
    compile: bool | None = None
    """Run the models' blocks through torch.compile while they learn; starts later, needs a C++
    compiler (and Triton on GPUs). Bits differ. null compiles dense models on GPUs, if it can."""
    sequence: int = Field(1, ge=1)
    """Ranks that share each micro-batch, a part of its tokens each (Ulysses sequence parallelism);
    a divisor of ranks and of the attention heads."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights after its forward pass and gather them again for the backward
    pass; false keeps them: faster, more memory."""
    prefetch: int = Field(0, ge=0)
    """Layers gathered ahead of the running one, at the cost of their memory; 0 is PyTorch's
    default, which gathers the next one in the backward pass."""
    bucket_mb: int = Field(64, ge=1)
    """MiB per bucket of weights sent to the engine, at most 64. Tensors are gathered before they
    are packed; two buckets are in flight."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.ranks % self.sequence:
            yield (
                f"trainer.strategy.ranks={self.ranks} is not a multiple of "
                f"trainer.strategy.sequence={self.sequence}; use a divisor of ranks"
            )


class Megatron(Section):
    """Megatron's tensor, pipeline and expert parallelism (winnow-rl[megatron]); see
    docs/megatron.md."""

    name: Literal["megatron"] = "megatron"
    ranks: int = Field(2, ge=1)
    """Number of processes: a multiple of tensor x pipeline."""
    tensor: int = Field(1, ge=1)
    """Tensor-parallel size; a divisor of the attention heads and of the KV heads."""
    pipeline: int = Field(1, ge=1)
    """Pipeline-parallel size."""
    expert: int = Field(1, ge=1)
    """Expert-parallel size, over tensor-parallel and data-parallel ranks; a divisor of the experts
    and of ranks / pipeline."""
    sequence_parallel: bool = True
    """With tensor > 1, split the tokens over tensor-parallel ranks between the matrices; false
    keeps all tokens on each rank. Mixtures of experts need it."""
    bucket_mb: int = Field(64, ge=1)
    """MiB per bucket of weights sent to the engine, at most 64. Tensors are gathered before they
    are packed; two buckets are in flight."""

    @property
    def model_parallel_ranks(self) -> int:
        """The number of ranks that run the same samples together."""
        return self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """The number of shares that the samples are dealt to."""
        return self.ranks // self.model_parallel_ranks

    def conflicts(self) -> Iterator[str]:
        at = "trainer.strategy"
        if self.ranks % self.model_parallel_ranks:
            yield (
                f"{at}.ranks={self.ranks} is not a multiple of {at}.tensor={self.tensor} x "
                f"{at}.pipeline={self.pipeline}; use a multiple of {self.model_parallel_ranks}"
            )
        elif (self.tensor * self.data) % self.expert:
            yield (
                f"{at}.expert={self.expert} does not divide the {self.tensor * self.data} ranks of "
                f"a stage ({at}.ranks={self.ranks}, {at}.pipeline={self.pipeline}); use a divisor "
                "of that"
            )
        if self.expert > 1 and self.tensor > 1 and not self.sequence_parallel:
            yield (
                f"{at}.expert={self.expert} and {at}.tensor={self.tensor} need {at}."
                f"sequence_parallel=true; set that, or {at}.tensor=1"
            )


Strategy = Annotated[WholeModels | Fsdp2 | Megatron, Field(discriminator="name")]


class SyncMode(Section):
    """Sample a step, train on it, publish the weights; then the next step."""

    name: Literal["sync"] = "sync"


class OneStepOffMode(Section):
    """Sample a step while the trainer runs the one before, one version behind; see
    docs/async.md."""

    name: Literal["one_step_off"] = "one_step_off"


class AsyncMode(Section):
    """Sample continuously; new weights are loaded while answers are generated. Needs
    run.deterministic=false; see docs/async.md."""

    name: Literal["async"] = "async"


Mode = Annotated[SyncMode | OneStepOffMode | AsyncMode, Field(discriminator="name")]


ProfileRole = Literal["driver", "learner", "engine"]


class ProfileConfig(Section):
    """Profiles of chosen steps; see docs/profiling.md."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps to profile."""
    tool: Literal["torch", "nsight", "memory"] = "torch"
    """torch.profiler's trace; on GPUs also Nsight Systems, or snapshots of their memory."""
    continuous: bool = False
    """Consecutive steps share a file; false: one file per step."""
    roles: tuple[ProfileRole, ...] = ("driver", "learner", "engine")
    """Processes to profile: the run's process, learner ranks, engines in separate processes."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = (0,)
    """Numbers of the learner ranks and engines to profile; null: all."""
    save_path: Annotated[str | None, PLACE] = None
    """Folder of the files; null: RUN/profile."""


def to_epoch_seconds(value: str | float) -> float:
    """Return a time as seconds since 1970; one without a time zone is local.

    Raises:
        ValueError: it is neither a number nor an ISO 8601 time.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = datetime.fromisoformat(str(value)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"{value} is no time")
    return seconds


def _check_time(value: str | float | None) -> str | float | None:
    try:
        if value is not None and value != "never":
            to_epoch_seconds(value)
    except ValueError:
        example = "2026-11-23T07:05:00+00:00"
        raise ValueError(f"must be a time such as {example}, or in seconds, or never") from None
    return value


CPU_MICROBATCH_TOKENS = 1024
"""Default of trainer.microbatch_tokens on a CPU, where more takes memory and no less time."""
GPU_MICROBATCH_TOKENS = 16384


class TrainerConfig(Section):
    """Number of steps, the updates of each, memory bounds and checkpoints."""

    steps: Annotated[int, Change.ON_RESUME] = Field(100, ge=1)
    """Number of training steps; each publishes new weights to the engine."""
    data_epochs: Annotated[float | None, Change.ON_RESUME] = Field(None, gt=0)
    """Passes over the training data after which the run ends, instead of trainer.steps, which then
    becomes the maximum number of steps; null: trainer.steps."""
    mode: Annotated[Mode, Change.BETWEEN_GROUPS] = SyncMode()
    """Order of sampling, training and publishing: sequential or overlapped."""
    mini_batch_groups: int | None = Field(None, ge=1)
    """Groups an update (one optimizer step), at most those of a step; null: one update a step."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's groups; trainer.data_epochs counts those over the data."""
    strategy: Annotated[Strategy, Change.ON_RESUME, {"name": Change.NEVER}] = WholeModels()
    """Placement of the models' weights."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Maximum packed tokens per micro-batch, of one rank or of the ranks that share sequences;
    limits memory and changes only rounding. null: 16,384, or 1,024 where the learner is on a CPU,
    as fixed when a run starts."""
    logprob_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens whose logits are in memory at once; null depends on the vocabulary, 128 MiB of them,
    512 on a GPU."""
    profile: Annotated[ProfileConfig, Change.ON_RESUME] = ProfileConfig()
    """Profiles of chosen steps."""
    save_every: Annotated[int | None, Change.ON_RESUME] = Field(10, ge=1)
    """Steps between checkpoints; null saves only at the end."""
    keep_last: Annotated[int | None, Change.ON_RESUME] = Field(2, ge=1)
    """Number of newest checkpoints kept; null keeps all."""
    keep_every: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_best: Annotated[str | None, Change.ON_RESUME] = None
    """Also keep the checkpoint with the largest value of this metric, such as eval/SOURCE/pass@1,
    or with the smallest sft/held_out_loss."""
    checkpoint_url: Annotated[str | None, ADDRESS, Change.ON_RESUME] = None
    """URL to which the run's folder is uploaded after each checkpoint, and from which it is
    downloaded if it is missing: s3://BUCKET/PATH, gs://, hdfs://, file://."""
    expires_at: Annotated[str | float | None, AfterValidator(_check_time), Change.ON_RESUME] = None
    """End of the allocation, an ISO 8601 time or seconds since 1970: the run saves and stops before
    it, as at SIGTERM. null: the time from Slurm, SageMaker or veMLP variables; never: no end."""
    expiry_margin_s: Annotated[float | None, Change.ON_RESUME] = Field(None, gt=0)
    """Seconds before expires_at at which the run stops; null: the longest step and checkpoint so
    far, plus a minute."""
    max_restarts: Annotated[int, Change.ON_RESUME] = Field(0, ge=0)
    """Number of restarts after a kill, crash or hang; 0 disables supervision."""
    stall_timeout_s: Annotated[float, Change.ON_RESUME] = Field(1800.0, gt=0)
    """Seconds without progress (a token, an update, a step, a downloaded byte) after which a
    supervised run counts as hung; loading models and starting processes must take less."""

    @property
    def token_budget(self) -> int:
        """Return microbatch_tokens, or its default on a GPU."""
        return self.microbatch_tokens or GPU_MICROBATCH_TOKENS

    def groups_per_update(self, groups_per_step: int) -> int:
        """Return the groups of an update, which are at most those of a step."""
        return min(self.mini_batch_groups or groups_per_step, groups_per_step)


class OptimConfig(Section):
    """AdamW. Schedules count steps (rollout steps), never updates."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up; step k of them runs at lr*k/warmup_steps. A shorter run warms up
    over all of its steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after warm-up; linear and cosine end at `final_lr_ratio`."""
    final_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of lr at the end of linear and cosine."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """The two decay rates of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Maximum gradient norm; null disables clipping."""
    max_skipped_updates: int = Field(5, ge=1)
    """Consecutive non-finite gradients after which the run stops."""


class ValueLossConfig(Section):
    """Half the squared error of the values, clipped around those before the step."""

    clip: float | None = Field(0.5, gt=0)
    """Distance from its old value within which a value may still lower the loss; null: any."""
    aggregation: Aggregation = "token-mean"
    """Meaning of "mean" in the loss."""


class ShardedCritic(Sharded):
    """The critic sharded over dedicated processes (PyTorch's `fully_shard`); see docs/ranks.md."""

    section_key: ClassVar[str] = "critic.strategy"


CriticStrategy = Annotated[WithPolicy | ShardedCritic, Field(discriminator="name")]


class CriticConfig(Section):
    """A separate value model; unused unless algorithm/advantage needs values."""

    path: str | None = None
    """Folder of the model it starts from, a causal LM or a token classifier with one label; null
    is the policy's start."""
    dtype: Annotated[Dtype | None, Change.NEVER] = None
    """Type of weights and activations; null is model.dtype. The head is always float32."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer of the critic."""
    value_loss: ValueLossConfig = ValueLossConfig()
    """Loss of the critic."""
    warmup_steps: int = Field(0, ge=0)
    """First steps of the run, in which only the critic is trained; the last step always trains the
    policy."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Maximum packed tokens per micro-batch; null is trainer.microbatch_tokens."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    strategy: Annotated[CriticStrategy, Change.ON_RESUME, {"name": Change.NEVER}] = WithPolicy()
    """Placement of the model's weights."""


class EvaluationConfig(Section):
    """Schedule and sampling of the evaluations on held-out prompts."""

    before: bool = True
    """Evaluate before the first step."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations; the last step is always evaluated. null: only that."""
    n: int = Field(1, ge=1)
    """Answers a prompt: avg@n, pass@k for k up to n, maj@k."""
    temperature: float = Field(1.0, ge=0, le=TEMPERATURES[1])
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus: share of the probability that the kept tokens have."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens kept; 0 keeps all."""
    greedy: bool = False
    """Also report one greedy answer per prompt."""
    max_prompts: int | None = Field(None, ge=1)
    """Maximum number of prompts; the first ones are used."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Response limit; null takes the rollout's."""
    data_set: str | None = None
    """Name of the held-out data for `winnow data prepare`; said where its file is missing."""

    def conflicts(self) -> Iterator[str]:
        if 0 < self.temperature < TEMPERATURES[0]:
            yield (
                f"evaluation.temperature={self.temperature:g} overflows the logits; set it to 0 "
                f"(greedy), or to {TEMPERATURES[0]:g} or more"
            )


class LocalCluster(Section):
    """All processes on this machine; with several GPUs, one GPU per process."""

    name: Literal["local"] = "local"
    share_devices: bool = False
    """Put engines on the GPUs of what trains, which take turns (docs/cluster.md): an engine of
    tensor_parallel=N on N of them. One GPU is enough for a run."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds in which processes must have loaded their models."""


class PoolConfig(Section):
    """A pool of slots; each has one worker of every role of the pool, and on GPUs one GPU where one
    of them has a model."""

    nodes: int = Field(1, ge=1)
    """Number of parts of the pool; each lies on one node."""
    per_node: int = Field(1, ge=1)
    """Slots of each part."""
    cpus: float | None = Field(None, gt=0)
    """Cores per worker; null is cluster.cpus."""


class RolesConfig(Section):
    """The pool of each role that has workers. Roles of one pool are colocated, slot by slot."""

    policy: str | None = None
    """Pool of the policy's ranks (trainer/strategy=fsdp2 or megatron), which also run critic and
    reference unless these have their own ranks."""
    rollout: str | None = None
    """Pool of the engines (rollout.engine.processes)."""
    reward: str | None = None
    """Pool of the reward processes (reward.processes)."""
    environment: str | None = None
    """Pool of the environment processes (environment.processes)."""
    reward_model: str | None = None
    """Pool of the reward model's ranks (reward/model/strategy=fsdp2)."""
    judge: str | None = None
    """Pool of the judge's engines (reward/judge=engine)."""
    reference: str | None = None
    """Pool of the reference's ranks (reference/strategy=fsdp2)."""
    critic: str | None = None
    """Pool of the critic's ranks (critic/strategy=fsdp2)."""


Packages = str | tuple[str, ...] | dict[str, Any] | None
"""Requirements as Ray takes them: a file, a list, or a table of options."""


class RuntimeEnvConfig(Section):
    """Ray's `runtime_env` of the actors, in addition to Winnow's."""

    working_dir: str | None = None
    """Folder that Ray copies to each node, or URI of an archive; its modules can be imported."""
    py_modules: tuple[str, ...] = ()
    """Folders or URIs of modules that are copied likewise."""
    excludes: tuple[str, ...] = ()
    """Files of working_dir to skip, as .gitignore patterns; run.dir is always skipped."""
    pip: Packages = None
    """Packages to install for the actors: a list, a file, or Ray's table of options."""
    uv: Packages = None
    """The same by uv."""
    conda: str | dict[str, Any] | None = None
    """Conda environment of the actors: its name, its YAML file, or its table."""
    py_executable: str | None = None
    """Command that starts the actors' Python, with its options; null is the nodes' own."""
    image_uri: str | None = None
    """Container image of the actors."""
    env_vars: dict[str, str] = Field({})
    """Environment variables, as in cluster.environment."""
    worker_process_setup_hook: str | None = None
    """Function that each actor's process calls first, as package.module.name."""
    config: dict[str, Any] = Field({})
    """Ray's options for all this, such as {setup_timeout_seconds: 600}."""

    def conflicts(self) -> Iterator[str]:
        managers = [name for name in ("pip", "uv", "conda") if getattr(self, name)]
        if len(managers) > 1:
            keys = " and ".join(f"cluster.runtime_env.{name}" for name in managers)
            yield f"{keys} exclude each other; leave {managers[1]} out"


class RayInitConfig(Section):
    """The Ray instance that a run starts if cluster.address is null."""

    num_cpus: int | None = Field(None, ge=1)
    """Number of cores it reports; null: all of the machine, even if a batch system allots fewer."""
    object_store_mb: int = Field(512, ge=80)
    """MiB of shared memory of the object store; Ray spills the rest to disk."""
    temp_dir: Annotated[str | None, PLACE] = Field(None, min_length=1)
    """Folder for Ray's sockets and logs while it runs; null is TMPDIR, or /tmp if that is long."""


class RayCluster(Section):
    """Actors on a Ray cluster (winnow-rl[ray]); see docs/cluster.md."""

    name: Literal["ray"] = "ray"
    address: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """auto (this machine's cluster, or the job's), or HOST:PORT; null starts one for the run."""
    nodes: int = Field(1, ge=1)
    """Number of nodes to spread the ranks over evenly; unused with pools."""
    share_devices: bool = False
    """Put engines on the GPUs of the ranks, which take turns: an engine of tensor_parallel=N on
    those of N ranks of one node. Pools say that themselves, by roles of one pool."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds in which processes must have loaded their models, once Ray has placed them, and in
    which a node that Ray has lost must be back where the others do not suffice (max_restarts)."""
    cpus: float = Field(1.0, gt=0)
    """Cores per worker."""
    pools: dict[str, PoolConfig] = Field({})
    """Pools of slots by name; empty gives the ranks one of cluster.nodes, and each engine and each
    process that scores a slot anywhere."""
    roles: RolesConfig = RolesConfig()
    """The pool of each role; all null without pools."""
    environment: Annotated[dict[str, str], PROGRAM] = Field({})
    """Environment variables of the processes, such as NCCL_DEBUG."""
    runtime_env: Annotated[RuntimeEnvConfig, PROGRAM] = RuntimeEnvConfig()
    """Files, packages and interpreter of the actors."""
    init: RayInitConfig = RayInitConfig()
    """The instance that the run starts."""
    timeline_file: Annotated[str | None, PLACE] = Field(None, min_length=1)
    """File for Ray's timeline of all tasks, for chrome://tracing, written when the run ends."""

    def conflicts(self) -> Iterator[str]:
        if self.address is not None and self.init != RayInitConfig():
            yield (
                f"cluster.init applies to a Ray instance that the run starts, got cluster.address="
                f"{self.address}; leave cluster.init out, or set cluster.address=null"
            )
        ours, env = self.environment, self.runtime_env.env_vars
        for name in sorted(name for name in {*ours} & {*env} if ours[name] != env[name]):
            yield (
                f"cluster.environment.{name}={ours[name]} and cluster.runtime_env.env_vars.{name}="
                f"{env[name]} differ; leave one out"
            )


Cluster = Annotated[LocalCluster | RayCluster, Field(discriminator="name")]
