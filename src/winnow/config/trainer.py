"""The course of a run: steps, updates, sharding, optimizers, critic, evaluation and processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

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
    """Whole models, in the process that runs them."""

    name: Literal["single"] = "single"
    compile: bool | None = None
    """Run the models' blocks through torch.compile while they learn; starts later, needs a C++
    compiler (and Triton on GPUs). Bits differ. null compiles dense models on GPUs, if it can."""


class Sharded(Section):
    """A model sharded over processes that do nothing else (PyTorch's `fully_shard`); see
    docs/ranks.md."""

    at: ClassVar[str]
    """Key of the section."""
    name: Literal["fsdp2"] = "fsdp2"
    ranks: int = Field(2, ge=1)
    """Processes, each with its share of the weights and of the work."""
    replicas: int = Field(1, ge=1)
    """Groups of ranks that hold all weights each (HSDP); a divisor of ranks."""
    offload: bool = False
    """Keep what a rank holds (weights, gradients, optimizer state) in the host's memory, and step
    there."""

    def conflicts(self) -> Iterator[str]:
        if self.ranks % self.replicas:
            yield (
                f"{self.at}.ranks={self.ranks} cannot be cut into {self.at}.replicas="
                f"{self.replicas} groups of ranks; use a divisor of ranks"
            )


class WithPolicy(Section):
    """Beside the policy: on its ranks, or in the run's process."""

    name: Literal["policy"] = "policy"


class Fsdp2(Sharded):
    """Models sharded over several processes (PyTorch's `fully_shard`); see docs/ranks.md."""

    at: ClassVar[str] = "trainer.strategy"
    compile: bool | None = None
    """Run the models' blocks through torch.compile while they learn; starts later, needs a C++
    compiler (and Triton on GPUs). Bits differ. null compiles dense models on GPUs, if it can."""
    sequence: int = Field(1, ge=1)
    """Neighbouring ranks that run each micro-batch together, a part of its tokens each (Ulysses
    sequence parallelism); a divisor of ranks and of the attention heads."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights after its forward pass and gather them again for the backward
    pass; false keeps them: faster, more memory."""
    prefetch: int = Field(0, ge=0)
    """Layers whose weights are gathered ahead while one runs, which takes their memory; 0 leaves it
    to PyTorch, which gathers the next one in the backward pass."""
    bucket_mb: int = Field(64, ge=1)
    """MiB of a bucket, in which weights travel to the engine, at most 64. A tensor is gathered
    whole before it is packed, and two buckets are on their way at once."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.ranks % self.sequence:
            yield (
                f"trainer.strategy.ranks={self.ranks} cannot be cut into groups of "
                f"trainer.strategy.sequence={self.sequence} ranks; use a divisor of ranks"
            )


class Megatron(Section):
    """Models cut by Megatron's tensor, pipeline and expert parallelism over several processes
    (winnow-rl[megatron]); see docs/megatron.md."""

    name: Literal["megatron"] = "megatron"
    ranks: int = Field(2, ge=1)
    """Processes: a multiple of tensor x pipeline, which run a share of the samples together."""
    tensor: int = Field(1, ge=1)
    """Ranks that each matrix is cut over; a divisor of the attention heads, and of those for keys
    and values."""
    pipeline: int = Field(1, ge=1)
    """Stages that the layers are cut into, which micro-batches pass through one by one."""
    expert: int = Field(1, ge=1)
    """Ranks that the experts of a layer are spread over, across those of tensor and of other
    shares; a divisor of the experts and of ranks / pipeline."""
    sequence_parallel: bool = True
    """With tensor > 1, keep a part of the tokens on each rank between the matrices, where false
    keeps all of them on each; mixtures of experts need it."""
    bucket_mb: int = Field(64, ge=1)
    """MiB of a bucket, in which weights travel to the engine, at most 64. A tensor is gathered
    whole before it is packed, and two buckets are on their way at once."""

    @property
    def share_ranks(self) -> int:
        """The number of ranks that run the same samples together."""
        return self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """The number of shares that the samples are dealt to."""
        return self.ranks // self.share_ranks

    def conflicts(self) -> Iterator[str]:
        at = "trainer.strategy"
        if self.ranks % self.share_ranks:
            yield (
                f"{at}.ranks={self.ranks} cannot be cut into groups of {at}.tensor={self.tensor} "
                f"x {at}.pipeline={self.pipeline} ranks; use a multiple of {self.share_ranks}"
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
                "sequence_parallel=true, as experts take other tokens from each rank; set that, "
                f"or {at}.tensor=1"
            )


Strategy = Annotated[WholeModels | Fsdp2 | Megatron, Field(discriminator="name")]


class SyncMode(Section):
    """Sample a step, learn it, publish its weights; then the next."""

    name: Literal["sync"] = "sync"


class OneStepOffMode(Section):
    """Sample a step while the one before is learnt, with the weights before that; see
    docs/async.md."""

    name: Literal["one_step_off"] = "one_step_off"


class AsyncMode(Section):
    """Sample without a pause; new weights come while answers are written. Needs
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
    """Steps that follow each other share a file; false: each has its own."""
    roles: tuple[ProfileRole, ...] = ("driver", "learner", "engine")
    """Processes: the run's own, ranks that learn, engines in processes of their own."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = (0,)
    """Ranks that learn, and engines, by number; null: all."""
    save_path: Annotated[str | None, PLACE] = None
    """Folder of the files; null: RUN/profile."""


def epoch_seconds(value: str | float) -> float:
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


class TrainerConfig(Section):
    """Number of steps, the updates of each, memory bounds and checkpoints."""

    steps: Annotated[int, Change.ON_RESUME] = Field(100, ge=1)
    """Steps to train; each ends with new weights in the engine."""
    data_epochs: Annotated[float | None, Change.ON_RESUME] = Field(None, gt=0)
    """Passes over the training data after which the run ends, in the place of trainer.steps, which
    then becomes the most steps that they can fill; null: trainer.steps."""
    mode: Annotated[Mode, Change.BETWEEN_GROUPS] = SyncMode()
    """Order of sampling, learning and publishing: one after the other, or side by side."""
    mini_batch_groups: int | None = Field(None, ge=1)
    """Groups an update (one optimizer step), at most those of a step; null: one update a step."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's groups; trainer.data_epochs counts those over the data."""
    strategy: Annotated[Strategy, Change.ON_RESUME, {"name": Change.NEVER}] = WholeModels()
    """Placement of the models' weights."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Packed tokens run at once, by one rank or by those that share sequences; bounds memory, never
    changes what is learnt."""
    logprob_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens whose logits exist at once; null chooses by the vocabulary, 128 MiB of them, 512 on a
    GPU."""
    profile: Annotated[ProfileConfig, Change.ON_RESUME] = ProfileConfig()
    """Profiles of chosen steps."""
    save_every: Annotated[int | None, Change.ON_RESUME] = Field(10, ge=1)
    """Steps between checkpoints, of which a crash costs what came after the last; null saves
    only at the end."""
    keep_last: Annotated[int | None, Change.ON_RESUME] = Field(2, ge=1)
    """Number of newest checkpoints kept; null keeps all."""
    keep_every: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=1)
    """Keep the checkpoints of every so many steps as well."""
    keep_best: Annotated[str | None, Change.ON_RESUME] = None
    """Keep the checkpoint with the largest value of this figure as well, such as
    eval/SOURCE/pass@1, or with the smallest sft/held_out_loss."""
    checkpoint_url: Annotated[str | None, ADDRESS, Change.ON_RESUME] = None
    """Address to which the run's folder is copied after each checkpoint, and from which it is
    fetched when it is not here: s3://BUCKET/PATH, gs://, hdfs://, file://."""
    expires_at: Annotated[str | float | None, Change.ON_RESUME] = None
    """End of the machine, an ISO 8601 time or seconds since 1970: the run saves and ends before it,
    as at SIGTERM. null: what Slurm, SageMaker or veMLP announce in variables; never: no end."""
    expiry_margin_s: Annotated[float | None, Change.ON_RESUME] = Field(None, gt=0)
    """Seconds before that end at which the run stops; null: as long as a step and a checkpoint took
    so far, and a minute."""
    max_restarts: Annotated[int, Change.ON_RESUME] = Field(0, ge=0)
    """Times a run that was killed, crashed or hung is started again; 0 runs it unsupervised."""
    stall_timeout_s: Annotated[float, Change.ON_RESUME] = Field(1800.0, gt=0)
    """Seconds without a token, an update, a step or a byte of a fetched model, after which a
    supervised run has hung; loading models and starting processes must take less."""

    @field_validator("expires_at")
    @classmethod
    def _is_time(cls, value: str | float | None) -> str | float | None:
        try:
            if value not in (None, "never"):
                epoch_seconds(value)
        except ValueError:
            example = "2026-11-23T07:05:00+00:00"
            raise ValueError(f"must be a time such as {example}, or in seconds, or never") from None
        return value


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
    """Bound on the gradient's norm; null leaves it as it is."""
    max_skipped_updates: int = Field(5, ge=1)
    """Non-finite gradients in a row after which the run stops."""


class ValueLossConfig(Section):
    """Half the squared error of the values, clipped around those before the step."""

    clip: float | None = Field(0.5, gt=0)
    """Distance from its old value within which a value may still lower the loss; null: any."""
    aggregation: Aggregation = "token-mean"
    """Meaning of "mean" in the loss."""


class ShardedCritic(Sharded):
    """The critic sharded over processes of its own (PyTorch's `fully_shard`); see docs/ranks.md."""

    at: ClassVar[str] = "critic.strategy"


Critic = Annotated[WithPolicy | ShardedCritic, Field(discriminator="name")]


class CriticConfig(Section):
    """A value head on a model of its own; unused unless algorithm/advantage needs values."""

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
    """First steps of the run, in which only the critic learns; the last step is always the
    policy's."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Packed tokens run at once; null is trainer.microbatch_tokens."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    strategy: Annotated[Critic, Change.ON_RESUME, {"name": Change.NEVER}] = WithPolicy()
    """Placement of the model's weights."""


class EvaluationConfig(Section):
    """Times of the evaluations on held-out prompts, and sampling for them."""

    before: bool = True
    """Evaluate the start."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations; the end is always evaluated. null: only there."""
    n: int = Field(1, ge=1)
    """Answers a prompt: avg@n, pass@k for k up to n, maj@k."""
    temperature: float = Field(1.0, ge=0, le=TEMPERATURES[1])
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus: share of the probability that the kept tokens have."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens kept; 0 keeps all."""
    greedy: bool = False
    """Report one greedy answer a prompt as well."""
    max_prompts: int | None = Field(None, ge=1)
    """Take only the first so many prompts."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Response limit; null takes the rollout's."""
    data_set: str | None = None
    """Name of the held-out data for `winnow data prepare`; said where its file is missing."""

    def conflicts(self) -> Iterator[str]:
        if 0 < self.temperature < TEMPERATURES[0]:
            yield (
                f"evaluation.temperature={self.temperature:g} divides logits until they overflow; "
                f"set it to 0, which is greedy, or to {TEMPERATURES[0]:g} and more"
            )


class LocalCluster(Section):
    """All processes on this machine; of several GPUs each process has one of its own."""

    name: Literal["local"] = "local"


class PoolConfig(Section):
    """A pool of slots; each has one worker of every role of the pool, and on GPUs one GPU where one
    of them has a model."""

    nodes: int = Field(1, ge=1)
    """Parts of the pool; each lies on one node."""
    per_node: int = Field(1, ge=1)
    """Slots of each part."""
    cpus: float | None = Field(None, gt=0)
    """Cores that each worker takes; null is cluster.cpus."""


class RolesConfig(Section):
    """The pool of each role that has workers. Roles of one pool are colocated, slot by slot."""

    policy: str | None = None
    """Pool of the ranks (trainer/strategy=fsdp2 or megatron), which hold critic and reference, too,
    where these have none of their own."""
    rollout: str | None = None
    """Pool of the engines (rollout.engine.processes)."""
    reward: str | None = None
    """Pool of the processes that score (reward.processes)."""
    reward_model: str | None = None
    """Pool of the reward model's own ranks (reward/model/strategy=fsdp2)."""
    judge: str | None = None
    """Pool of a judge's engines (reward/judge=engine)."""
    reference: str | None = None
    """Pool of the reference's own ranks (reference/strategy=fsdp2)."""
    critic: str | None = None
    """Pool of the critic's own ranks (critic/strategy=fsdp2)."""


Packages = str | tuple[str, ...] | dict[str, Any] | None
"""Requirements as Ray takes them: a file, a list, or a table of options."""


class RuntimeEnvConfig(Section):
    """Ray's `runtime_env` of the actors, beside what the run gives them by itself."""

    working_dir: str | None = None
    """Folder that Ray copies to each node, or URI of an archive; its modules can be imported."""
    py_modules: tuple[str, ...] = ()
    """Folders or URIs of modules that are copied likewise."""
    excludes: tuple[str, ...] = ()
    """Files of working_dir that stay behind, by patterns of .gitignore; run.dir always does."""
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
    """The instance of Ray that a run starts where cluster.address is null."""

    num_cpus: int | None = Field(None, ge=1)
    """Cores that it says it has; null: all of the machine, also where a batch system gives less."""
    object_store_mb: int = Field(512, ge=80)
    """MiB of shared memory for what is passed around; Ray puts the rest on disk."""
    temp_dir: Annotated[str | None, PLACE] = Field(None, min_length=1)
    """Folder for Ray's sockets and logs while it runs; null is TMPDIR, or /tmp if that is long."""


class RayCluster(Section):
    """Actors on a Ray cluster (winnow-rl[ray]); see docs/cluster.md."""

    name: Literal["ray"] = "ray"
    address: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """auto (this machine's cluster, or the job's), or HOST:PORT; null starts one for the run."""
    nodes: int = Field(1, ge=1)
    """Nodes that the ranks are spread over, as many on each; pools say that themselves."""
    cpus: float = Field(1.0, gt=0)
    """Cores that each worker takes."""
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
    """File for Ray's timeline of all tasks, for chrome://tracing, written at the run's end."""

    def conflicts(self) -> Iterator[str]:
        if self.address is not None and self.init != RayInitConfig():
            yield (
                f"cluster.init is for an instance that the run starts, and cluster.address="
                f"{self.address} is there already; leave cluster.init out, or set the address null"
            )
        ours, env = self.environment, self.runtime_env.env_vars
        for name in sorted(name for name in {*ours} & {*env} if ours[name] != env[name]):
            yield (
                f"cluster.environment.{name}={ours[name]} and cluster.runtime_env.env_vars.{name}="
                f"{env[name]} differ; leave one out"
            )


Cluster = Annotated[LocalCluster | RayCluster, Field(discriminator="name")]
