"""The engine that writes answers, and dynamic sampling: the groups that are started and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from winnow.config.base import (
    ADDRESS,
    PLACE,
    TEMPERATURES,
    Change,
    EnvironmentName,
    Reach,
    Section,
    UserCode,
    web_address,
)


class TorchEngineConfig(Section):
    """The embedded engine: static KV cache, continuous batching, weights shared in process."""

    name: Literal["torch"] = "torch"
    processes: int | None = Field(None, ge=0)
    """Engines in processes of their own; 0 writes in the run's process, with its own weights. null:
    0 where that is possible, else 1."""
    slots: int = Field(256, ge=1)
    """Answers that an engine writes at once."""
    prefill_tokens: int = Field(8192, ge=1)
    """Most prompt tokens prefilled between two decode ticks."""
    cache_gib: float | None = Field(None, gt=0)
    """Most GiB of keys and values an engine holds; where `slots` answers of the longest prompt and
    response need more, it writes fewer at once. null sets no bound on a CPU; on a GPU it is what
    memory_share says."""
    memory_share: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory for keys and values where cache_gib is null. null: of what is free
    at the start, nine tenths where the engine sleeps or learning is elsewhere, else half."""
    sleep: bool | None = None
    """Drop keys and values while a step is learnt; answers under way are prefilled again after it.
    Takes trainer/mode=sync. null: where cluster.share_devices=true."""


VLLM_CPU_CACHE_GIB = 2.0
"""Cache of a vLLM engine on a CPU where the recipe names none: vLLM itself would take half of the
machine's memory, for each engine."""
_ENGINE_KEYS = {
    "tensor_parallel_size": "rollout.engine.tensor_parallel",
    "max_num_seqs": "rollout.engine.slots",
    "max_num_batched_tokens": "rollout.engine.prefill_tokens",
    "kv_cache_memory_bytes": "rollout.engine.cache_gib",
    "gpu_memory_utilization": "rollout.engine.memory_share",
    "enable_prefix_caching": "rollout.engine.prefix_caching",
    "enable_chunked_prefill": "rollout.engine.chunked_prefill",
    "enable_sleep_mode": "rollout.engine.sleep",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "enable_return_routed_experts": "rollout.routing_replay",
}
"""Keys of a recipe that set an option of vLLM's."""
VLLM_ADAPTER_RANK = 512
"""The largest rank of an adapter that vLLM applies by itself."""
_FIXED = {
    *("additional_config", "async_scheduling", "logits_processors", "logprobs_mode"),
    *("max_logprobs", "scheduling_policy", "skip_tokenizer_init", "tokenizer"),
    *(
        "weight_transfer_config",
        "worker_extension_cls",
        "data_parallel_size",
        "distributed_executor_backend",
    ),
    *("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
    *("lora_dtype", "lora_target_modules"),
    # They name Python code, which the run of a stranger could bring along.
    *("worker_cls", "scheduler_cls", "reasoning_parser_plugin", "io_processor_plugin"),
    *("structured_outputs_config", "kv_transfer_config", "ec_transfer_config"),
    *("ec_manager_config", "model_class_overrides", "speculative_config", "spec_model"),
    *("log_config_file", "logging_config"),
    *("compilation_config.backend", "compilation_config.inductor_passes"),
}
"""Options of vLLM's on which the engine's draws, its weights or trust in a run rest."""


class VllmEngineConfig(Section):
    """vLLM in processes of its own (winnow-rl[vllm]): its scheduler and kernels, Winnow's draws."""

    name: Literal["vllm"] = "vllm"
    processes: int | None = Field(None, ge=0)
    """Engines, each in a process of its own; null: 1. 0 is refused, because vLLM sets random
    numbers, threads and memory of the whole process it is in."""
    slots: int = Field(256, ge=1)
    """Answers that an engine writes at once, as far as its cache holds them."""
    prefill_tokens: int = Field(8192, ge=1)
    """Most tokens of a step of vLLM's scheduler, prompts and answers together."""
    cache_gib: float | None = Field(None, gt=0)
    """GiB of keys and values of an engine, on each of its GPUs. null: 2 on a CPU; on GPUs what
    memory_share leaves beside weights."""
    memory_share: float | None = Field(None, gt=0, le=1)
    """Share of each GPU's memory that vLLM may take, weights included. null: 0.92 of what is free
    when it starts; ranks on the same GPU start before it."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one node, or processes of a CPU, that an engine is split over; a divisor of the
    model's attention heads."""
    prefix_caching: bool = True
    """Keep the keys and values of prompts: the answers to a prompt share one prefill."""
    chunked_prefill: bool = True
    """Cut long prompts, so that answers under way go on while one is prefilled."""
    sleep: bool | None = None
    """Give GPU memory back while a step is learnt, for engines that share GPUs with ranks: weights
    and cache are dropped; the next publication brings the weights. Takes GPUs and
    trainer/mode=sync. null: where ranks and engines share GPUs in that mode."""
    extra: Annotated[dict[str, Any], Reach("gives vLLM options, which may name code")] = Field(
        default_factory=dict
    )
    """Further options of vLLM's `EngineArgs`, by its names, such as
    {enforce_eager: true, block_size: 32}."""

    def conflicts(self) -> Iterator[str]:
        if self.processes == 0:
            yield (
                "rollout.engine.processes=0 and rollout/engine=vllm exclude each other, as vLLM "
                "sets random numbers, threads and memory of the run's process; set "
                "rollout.engine.processes=1 or more (null is 1), or choose rollout/engine=torch"
            )
        below = [f"{n}.{key}" for n, v in self.extra.items() if isinstance(v, dict) for key in v]
        for name in (*self.extra, *below):
            if name in _ENGINE_KEYS:
                yield f"rollout.engine.extra.{name} has a key of its own: set {_ENGINE_KEYS[name]}"
            elif name in _FIXED:
                yield (
                    f"rollout.engine.extra.{name} is not free, as Winnow's draws, weights or trust "
                    "rest on it; leave it out"
                )


class HttpEngineConfig(Section):
    """Servers of your own that speak /inference/v1/generate, such as vLLM's (docs/http_engine.md).
    They write free of ticks, so run.deterministic must be false."""

    name: Literal["http"] = "http"
    processes: ClassVar[int] = 0
    """They are no processes of the run's."""
    url: Annotated[tuple[str, ...], ADDRESS, Change.ON_RESUME] = Field(min_length=1)
    """Address of each server, such as [http://127.0.0.1:8000]; all hold the same model."""
    token_env: Annotated[EnvironmentName, Change.ON_RESUME] = None
    """Environment variable that holds the servers' key (--api-key), which is sent as a bearer."""
    slots: int = Field(64, ge=1)
    """Answers under way at each server; more than it writes at once (--max-num-seqs) only wait."""
    exact_draws: bool = False
    """Winnow's draws, on servers that have its logits processor (docs/http_engine.md): an answer's
    tokens follow from its seed, however often it is interrupted. false: the server's draws."""
    weights_folder: Annotated[str | None, PLACE, Change.ON_RESUME] = None
    """Folder that the run and all servers see by the same path; new weights are written there. null
    makes one among this machine's temporary files."""
    timeout_s: Annotated[float, Change.ON_RESUME] = Field(600.0, gt=0)
    """Longest wait for the next token of an answer."""
    reload_timeout_s: Annotated[float, Change.ON_RESUME] = Field(600.0, gt=0)
    """Longest time in which a server loads new weights."""
    restart_timeout_s: Annotated[float, Change.ON_RESUME] = Field(300.0, gt=0)
    """Longest time without any server that answers; then the run ends."""

    @field_validator("url", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            url = web_address(each, "rollout.engine.token_env is for keys")
            if url.query or url.fragment:
                raise ValueError("must end before ? and #")
        if len(set(value)) < len(value):
            raise ValueError("names a server twice")
        return value


class CustomEngine(UserCode):
    """An engine of your own, given by its place; docs/rollouts.md shows its protocol."""

    processes: ClassVar[int] = 0
    """It runs in the run's process."""


Engine = Annotated[
    TorchEngineConfig | VllmEngineConfig | HttpEngineConfig | CustomEngine,
    Field(discriminator="name"),
]


class RolloutConfig(Section):
    """Sampling of answers for training. Evaluation has its own settings."""

    engine: Engine = TorchEngineConfig()
    """Engine that writes the tokens."""
    n: Annotated[int, Change.BETWEEN_GROUPS] = Field(8, ge=1)
    """Answers a prompt (the group's size)."""
    max_response_tokens: Annotated[int, Change.BETWEEN_GROUPS] = Field(1024, ge=1)
    """Response limit; a longer answer is truncated."""
    temperature: float = Field(1.0, ge=TEMPERATURES[0], le=TEMPERATURES[1])
    """Sampling temperature; every policy is softmax(logits / temperature), in the loss too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; below 1 the sampler's support differs from the policy's."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens kept; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Least probability of a token, relative to the likeliest one."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Change.BETWEEN_GROUPS] = ()
    """Strings that end an answer, special tokens too, beside the tokenizer's EOS."""
    support: Literal["error", "ignore"] = "error"
    """Refuse top_p, top_k and min_p that truncate the sampler's support (error), or train on
    although old and behaviour policies then differ (ignore)."""

    routing_replay: Annotated[bool, Change.BETWEEN_GROUPS] = False
    """Train a mixture with the experts that the engine sent each token to, while its routers' own
    logits weigh them (rollout routing replay, R3; see docs/ranks.md)."""

    def conflicts(self) -> Iterator[str]:
        cuts = [f"rollout.top_p={self.top_p:g}"] if self.top_p < 1 else []
        cuts += [f"rollout.top_k={self.top_k}"] if self.top_k > 0 else []
        cuts += [f"rollout.min_p={self.min_p:g}"] if self.min_p > 0 else []
        if cuts and self.support == "error":
            yield (
                f"{' and '.join(cuts)} cut tokens that the trained policy still counts, and "
                "rollout.support=error refuses that; set rollout.support=ignore to train all the "
                "same, or sample from the whole vocabulary (top_p=1, top_k=0, min_p=0)"
            )


class NoFilter(Section):
    """Every scored group qualifies."""

    name: Literal["none"] = "none"


class VarianceFilter(Section):
    """A group qualifies when its answers differ in a metric; groups of one pass."""

    name: Literal["variance"] = "variance"
    metric: str = "accuracy"
    """accuracy, task_reward, reward (shaped), or a number that the scorer gives."""


class BandFilter(Section):
    """A group qualifies when the mean of a metric lies within a band, bounds included."""

    name: Literal["band"] = "band"
    metric: str = "accuracy"
    """accuracy, task_reward, reward (shaped), or a number that the scorer gives."""
    low: float = 0.0
    """Lowest mean that passes."""
    high: float = 1.0
    """Highest mean that passes."""

    def conflicts(self) -> Iterator[str]:
        yield from self.out_of_order("sampling.filter", "low", "high", equal=True)


class CustomFilter(UserCode):
    """A filter of your own, given by its place; docs/extending.md shows one."""


Filter = Annotated[
    NoFilter | VarianceFilter | BandFilter | CustomFilter, Field(discriminator="name")
]


class SamplingConfig(Section):
    """Rules of the dynamic sampler (see docs/sampling.md)."""

    groups_per_step: int = Field(64, ge=1)
    """N: qualified groups trained a step."""
    filter: Filter = VarianceFilter()
    """Rule that says which groups carry signal."""
    lookahead: float = Field(0.0, ge=0)
    """Further steps for which groups are admitted while waiting; at most max_staleness."""
    max_staleness: int = Field(1, ge=0)
    """Steps a group may wait for its training. 0 drops what is later than the cut."""
    max_groups_per_step: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=1)
    """Groups looked at for one step; null is 10*N."""
    on_bound: Annotated[Literal["short", "stop"], Change.ON_RESUME] = "short"
    """At that bound: train what qualified, or stop with the accepted groups saved."""
    max_empty_steps: int = Field(3, ge=1)
    """Bounds met in a row without one qualified group after which the run stops."""
    commit: Annotated[Literal["admission_order", "completion_order"], Change.NEVER] = (
        "admission_order"
    )
    """Order in which a step takes qualified groups. completion_order favours short answers:
    biased."""
    max_attempts: int = Field(3, ge=1)
    """Times an answer is retried after an engine failure before its group counts as failed."""
    stall_timeout_s: Annotated[float, Change.ON_RESUME] = Field(300.0, gt=0)
    """Seconds without any progress of the engine after which its answers are re-dispatched."""
    score_lag_ticks: int | None = Field(None, ge=0)
    """Deterministic mode: decode ticks from an answer's end to the moment its score is seen (with
    several engines, when they are next looked at: docs/rollouts.md). Scorers have that long before
    anything waits for them. null: 16 where they run beside the engine (workers, async functions),
    else 0; a resumed run keeps what it began with."""
    rate_decay: float = Field(0.98, gt=0, lt=1)
    """Memory of the estimated chance that a group qualifies, for each group seen."""
