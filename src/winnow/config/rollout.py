"""The engine that writes answers, and dynamic sampling: the groups that are started and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from winnow.config.base import (
    ADDRESS,
    PLACE,
    TEMPERATURES,
    Change,
    EnvironmentName,
    Section,
    SideEffect,
    UserCode,
    http_url,
)


class TorchEngineConfig(Section):
    """The embedded engine: static KV cache, continuous batching, weights shared in process."""

    name: Literal["torch"] = "torch"
    processes: int | None = Field(None, ge=0)
    """Number of engines in separate processes; 0 generates in the run's process with its weights.
    null: 0 where that is possible, else 1."""
    slots: int = Field(256, ge=1)
    """Maximum number of answers that an engine generates at once."""
    prefill_tokens: int = Field(8192, ge=1)
    """Most prompt tokens prefilled between two decode ticks."""
    cache_gib: float | None = Field(None, gt=0)
    """Maximum GiB of KV cache per engine; if `slots` answers of the longest prompt and response
    need more, fewer are generated at once. null: no limit on a CPU, `memory_share` on a GPU."""
    memory_share: Annotated[float | None, Change.ON_RESUME] = Field(None, gt=0, le=1)
    """Share of a GPU's memory for the KV cache where cache_gib is null. null: of the memory that is
    free at the start, 0.9 where the engine sleeps or learning is elsewhere, else 0.5."""
    sleep: Annotated[bool | None, Change.ON_RESUME] = None
    """Free the KV cache while a step is learned; running answers are prefilled again afterwards.
    Needs trainer/mode=sync. null: true where engines and what trains share GPUs in that mode."""


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
VLLM_MAX_RANK = 512
"""The largest rank of an adapter that vLLM applies by itself."""
_RESERVED_OPTIONS = {
    *("additional_config", "async_scheduling", "logits_processors", "logprobs_mode"),
    *("max_logprobs", "scheduling_policy", "skip_tokenizer_init", "tokenizer"),
    *("weight_transfer_config", "worker_extension_cls"),
    *("data_parallel_size", "distributed_executor_backend"),
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
    """vLLM in separate processes (winnow-rl[vllm]): its scheduler and kernels, Winnow's
    sampling."""

    name: Literal["vllm"] = "vllm"
    processes: int | None = Field(None, ge=0)
    """Number of engines, each in a separate process; null: 1. 0 is refused, because vLLM changes
    the RNG, threads and memory of its whole process."""
    slots: int = Field(256, ge=1)
    """Maximum number of answers that an engine generates at once, as far as its cache holds
    them."""
    prefill_tokens: int = Field(8192, ge=1)
    """Most tokens of a step of vLLM's scheduler, prompts and answers together."""
    cache_gib: float | None = Field(None, gt=0)
    """GiB of KV cache of an engine on each of its GPUs. null: 2 on a CPU; on GPUs what memory_share
    leaves next to the weights."""
    memory_share: Annotated[float | None, Change.ON_RESUME] = Field(None, gt=0, le=1)
    """Share of each GPU's memory for vLLM, weights included (its gpu_memory_utilization). null:
    0.92 of the memory that is free when it starts, after the ranks on the same GPU."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one node, or processes of a CPU, that an engine is split over; a divisor of the
    model's attention heads."""
    prefix_caching: bool = True
    """Cache the KV of prompts, so that answers to a prompt share one prefill."""
    chunked_prefill: bool = True
    """Split long prompts, so that decoding continues during their prefill."""
    sleep: Annotated[bool | None, Change.ON_RESUME] = None
    """Free GPU memory while a step is learned, for engines that share GPUs with ranks: weights and
    cache are dropped, and the next publication loads the weights again. Needs trainer/mode=sync.
    null: true where engines and ranks share GPUs in that mode."""
    extra: Annotated[dict[str, Any], SideEffect("gives vLLM options, which may name code")] = Field(
        default_factory=dict
    )
    """Further options of vLLM's `EngineArgs`, by its names, such as
    {enforce_eager: true, block_size: 32}."""

    def conflicts(self) -> Iterator[str]:
        if self.processes == 0:
            yield (
                "rollout/engine=vllm does not support rollout.engine.processes=0; set "
                "rollout.engine.processes=1 or more (null is 1), or choose rollout/engine=torch"
            )
        below = [f"{n}.{key}" for n, v in self.extra.items() if isinstance(v, dict) for key in v]
        for name in (*self.extra, *below):
            if name in _ENGINE_KEYS:
                yield f"rollout.engine.extra.{name} has its own key: set {_ENGINE_KEYS[name]}"
            elif name in _RESERVED_OPTIONS:
                yield f"rollout.engine.extra.{name} is reserved by Winnow; leave it out"


def _check_servers(urls: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(urls)) < len(urls):
        raise ValueError("names a server twice")
    return urls


ServerUrls = Annotated[
    tuple[Annotated[str, http_url("use rollout.engine.token_env")], ...],
    BeforeValidator(lambda urls: (urls,) if isinstance(urls, str) else urls),
    AfterValidator(_check_servers),
]


class HttpEngineConfig(Section):
    """External servers with the API /inference/v1/generate, such as vLLM's (docs/http_engine.md).
    They are not deterministic, so run.deterministic must be false."""

    name: Literal["http"] = "http"
    processes: ClassVar[int] = 0
    """The servers are not processes of the run."""
    url: Annotated[ServerUrls, ADDRESS, Change.ON_RESUME] = Field(min_length=1)
    """Address of each server, such as [http://127.0.0.1:8000]; all serve the same model."""
    token_env: Annotated[EnvironmentName, Change.ON_RESUME] = None
    """Environment variable with the servers' key (--api-key), sent as a bearer token."""
    slots: int = Field(64, ge=1)
    """Concurrent answers per server; more than it generates at once (--max-num-seqs) wait."""
    exact_draws: bool = False
    """Winnow's sampling, on servers that load its logits processor (docs/http_engine.md): an
    answer's tokens depend on its seed alone, however often it is interrupted. false: the server's
    sampling."""
    weights_folder: Annotated[str | None, PLACE, Change.ON_RESUME] = None
    """Folder with the same path on the run's machine and on all servers, for new weights. null
    creates one in this machine's temporary folder."""
    timeout_s: Annotated[float, Change.ON_RESUME] = Field(600.0, gt=0)
    """Longest wait for the next token of an answer."""
    reload_timeout_s: Annotated[float, Change.ON_RESUME] = Field(600.0, gt=0)
    """Longest time in which a server loads new weights."""
    restart_timeout_s: Annotated[float, Change.ON_RESUME] = Field(300.0, gt=0)
    """Longest time without any server that answers; then the run ends."""


class CustomEngine(UserCode):
    """A custom engine, given by its import path; docs/rollouts.md shows its protocol."""

    processes: ClassVar[int] = 0
    """It runs in the run's process."""


Engine = Annotated[
    TorchEngineConfig | VllmEngineConfig | HttpEngineConfig | CustomEngine,
    Field(discriminator="name"),
]


class RolloutConfig(Section):
    """Sampling of answers for training. Evaluation has its own settings."""

    engine: Engine = TorchEngineConfig()
    """Engine that generates the answers."""
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
    """Strings that end an answer, special tokens included, in addition to the tokenizer's EOS."""
    support: Literal["error", "ignore"] = "error"
    """Refuse top_p, top_k and min_p that truncate the sampler's support (error), or train on
    although old and behaviour policies then differ (ignore)."""

    routing_replay: Annotated[bool, Change.BETWEEN_GROUPS] = False
    """Train a mixture of experts with the engine's expert choice for each token, weighted by the
    trained router's logits (rollout routing replay, R3; see docs/ranks.md)."""

    def conflicts(self) -> Iterator[str]:
        cuts = [f"rollout.top_p={self.top_p:g}"] if self.top_p < 1 else []
        cuts += [f"rollout.top_k={self.top_k}"] if self.top_k > 0 else []
        cuts += [f"rollout.min_p={self.min_p:g}"] if self.min_p > 0 else []
        if cuts and self.support == "error":
            yield (
                f"{' and '.join(cuts)} with rollout.support=error: the sampler's support differs "
                "from the policy's; set rollout.support=ignore to train anyway, or sample from the "
                "full vocabulary (top_p=1, top_k=0, min_p=0)"
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
        yield from self.order_conflicts("sampling.filter", "low", "high", equal=True)


class CustomFilter(UserCode):
    """A custom filter, given by its import path; docs/extending.md shows one."""


Filter = Annotated[
    NoFilter | VarianceFilter | BandFilter | CustomFilter, Field(discriminator="name")
]


class SamplingConfig(Section):
    """Rules of the dynamic sampler (see docs/sampling.md)."""

    groups_per_step: int = Field(64, ge=1)
    """N: qualified groups trained a step."""
    filter: Filter = VarianceFilter()
    """Rule that decides which groups are trained on."""
    lookahead: float = Field(0.0, ge=0)
    """Further steps for which groups are admitted while waiting; at most max_staleness."""
    max_staleness: int = Field(1, ge=0)
    """Maximum number of steps a group may wait to be trained on. 0 drops groups after the cut."""
    max_groups_per_step: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=1)
    """Bound on the groups inspected for one step; null is 10*N."""
    on_bound: Annotated[Literal["short", "stop"], Change.ON_RESUME] = "short"
    """At that bound: train what qualified, or stop with the accepted groups saved."""
    max_empty_steps: int = Field(3, ge=1)
    """Bounds in a row without a qualified group after which the run stops."""
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
    """Deterministic mode: decode ticks between the end of an answer and its score taking effect
    (with several engines, at the next look at them: docs/rollouts.md). Scorers have that long
    before generation waits for them. null: 16 if they run asynchronously (workers, async
    functions), else 0; a resumed run keeps its value."""
    rate_decay: float = Field(0.98, gt=0, lt=1)
    """Decay per group of the estimated chance to qualify."""
