"""The engine over vLLM: its scheduler's steps are our ticks, its tokens our draws.

    submit ──► queue ──free slots──► LLMEngine.step(), one tick ──► finished answers
                                       ▲ draws: plugin.HashSampler
    take_bucket ──whole tensors──► plugin.TensorTransfer, in each of vLLM's workers

vLLM seeds global generators, binds memory and takes `torch.set_num_threads` out of use: it belongs
in a process of its own, which `VllmEngineWorker` sets up. Its prefix cache knows no versions of
weights, and cannot be emptied while answers run: each version has a salt of its own instead, which
takes part in the keys of that cache.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import AutoModelForImageTextToText

# Read when vLLM is imported. The scheduler stays in this process, where a step is a call: in one of
# its own it would run on between them.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Of these a user's own value stands.
for _name, _value in {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second one is asked for where it is needed
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or all engines of a machine share its first cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

from vllm import EngineArgs, envs  # noqa: E402
from vllm import SamplingParams as RequestParams  # noqa: E402
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.config.lora import MaxLoRARanks  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from winnow.config.model import LoraAdapter  # noqa: E402
from winnow.errors import PublicationError, WorkerError  # noqa: E402
from winnow.models.causal_lm import find_model  # noqa: E402
from winnow.models.folders import ModelRef, has_adapter  # noqa: E402
from winnow.models.lora import adapted_layers, adapter_weights, adapter_writer, add_lora  # noqa: E402
from winnow.models.routing import route_shape, router_layers  # noqa: E402
from winnow.models.vision import has_vision, load_image_processor  # noqa: E402
from winnow.observe.profile import StepProfiler  # noqa: E402
from winnow.rollout.draw import draw_arguments  # noqa: E402
from winnow.rollout.engine import (  # noqa: E402
    CompletionEvent,
    GroupRequest,
    ImageLists,
    MemoryPart,
    SamplingParams,
    check_may_sleep,
)
from winnow.rollout.remote_engine import EngineWorker, load_decoder  # noqa: E402
from winnow.rollout.tick_engine import TickEngine, WrittenAnswer, WrittenRows  # noqa: E402
from winnow.rollout.vllm import plugin  # noqa: E402
from winnow.rollout.vllm.refusals import (  # noqa: E402
    check_adapted,
    check_extra,
    check_head_size,
    explain_start_error,
)
from winnow.rollout.vllm.worker import VllmOptions, memory_share, read_gpu_memory_gib  # noqa: E402
from winnow.rollout.weights import (  # noqa: E402
    Named,
    WeightReceiver,
    WeightUpdate,
    WholeTensorReceiver,
    pack_buckets,
)
from winnow.types import PROMPT_ROUTES, ROUTES, FinishReason, FloatArray, Image, IntArray  # noqa: E402

log = logging.getLogger(__name__)

_LONGEST_SCORED = 512
"""Tokens of the longest sequence that a publication is checked with."""
_SCORED_AT_ONCE = 4
"""Places in vLLM's batch beyond the slots: sequences are scored beside answers in all slots."""
_SALTS = count()
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Folder of an adapter's files while vLLM's workers read them, where it has room; None: the
system's own choice."""


@dataclass(eq=False)
class VllmAnswer(WrittenAnswer):
    """A written answer that vLLM has, or will have."""

    name: str = ""
    """Its request's at vLLM, while it has one."""
    routes: NDArray[Any] | None = None
    """The experts of its tokens as vLLM tells them, once vLLM has ended it."""


class VllmEngine(WrittenRows[VllmAnswer], TickEngine[VllmAnswer]):
    """Implements `PublishedEngine` over a vLLM in this process.

    A publication that fails once vLLM has begun with it cannot be repeated: every later call that
    would draw or publish raises WorkerError, and the engine has to be replaced.

    Args:
        llm: made by `start_vllm`.
        model: of the same shapes, on the meta device; where it has an adapter, that alone comes.
        slots: answers written at once; fewer while the cache holds no more.
        vocab_size: ids at or beyond it are never drawn (padding of the embedding).
        decode: token ids to text; needed only where requests carry stop strings.
        live_updates: take new weights while answers run.
        staging_engines: as `can_stage` takes `engines`, of the host's memory.

    Raises:
        ConfigError: vLLM does not apply an adapter to all layers that have one.
    """

    def __init__(
        self,
        llm: LLMEngine,
        model: nn.Module,
        slots: int,
        vocab_size: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        live_updates: bool = False,
        staging_engines: int = 0,
    ) -> None:
        super().__init__(VllmAnswer, slots, decode, live_updates)
        self._llm, self._model, self._vocab_size = llm, model, vocab_size
        self._scored: dict[str, FloatArray | None] = {}
        self._numbers, self._staging = count(), staging_engines
        self._broken: str | None = None
        self._expected: dict[str, Tensor] | None = None  # of an adapter
        self._lora: LoRARequest | None = None
        self._tells_routes = llm.vllm_config.aux_output_config.enabled
        self._route_shape, self._route_layers = route_shape(model), router_layers(model)
        if has_adapter(model):
            self._expected = dict(adapter_weights(model))
            for taken in llm.collective_rpc("adapted_layers"):
                check_adapted(adapted_layers(model), taken)
            # Before the first publication it answers as the base does.
            self._load_adapter(
                [(n, torch.zeros_like(t, device="cpu")) for n, t in self._expected.items()]
            )
        self._reset_caches()

    def _check(self, group: GroupRequest) -> None:
        super()._check(group)
        self._check_health()
        longest = self._llm.model_config.max_model_len
        needs = len(group.prompt_ids) + group.sampling.max_tokens
        if needs > longest:
            raise ValueError(
                f"group {group.group_id}: a prompt of {len(group.prompt_ids)} tokens and an answer "
                f"of {group.sampling.max_tokens} exceed the {longest} that vLLM was started for"
            )

    def _check_health(self) -> None:
        if self._broken is not None:
            raise WorkerError(self._broken, "engine", 0)

    # -- weights ------------------------------------------------------------------------------

    def _check_update_allowed(self) -> None:
        self._check_health()
        super()._check_update_allowed()

    def _make_receiver(self, version: int) -> WeightReceiver:
        if self._expected is not None:
            return self._adapter_receiver(version)

        def load(named: Named) -> None:
            self._call_workers("update_weights", update_info={"named": named})

        def mark(end: str) -> None:
            self._call_workers(f"{end}_weight_update")

        return WholeTensorReceiver(self._model, version, load, mark, None, self._may_stage)

    def _adapter_receiver(self, version: int) -> WeightReceiver:
        """Gather an adapter, which vLLM takes as a whole."""
        named, only = Named(), self._expected

        def mark(end: str) -> None:
            if end == "finish":
                with self._break_on_error("add_lora"):
                    self._load_adapter(named)

        return WholeTensorReceiver(self._model, version, named.extend, mark, only, self._may_stage)

    def _load_adapter(self, named: Named) -> None:
        """Have vLLM apply an adapter from its next step on, in the place of the one before."""
        write = adapter_writer(cast(PreTrainedModel, self._model), None)
        size = sum(tensor.nbytes for _, tensor in named)
        has_room = _MEMORY is not None and shutil.disk_usage(_MEMORY).free > 2 * size
        place = _MEMORY if has_room else None
        with TemporaryDirectory(prefix="winnow-adapter-", dir=place) as folder:
            write(dict(named), Path(folder))
            # Requests name the adapter by its number; those of a new version find the new one.
            self._llm.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        self._lora = LoRARequest("policy", 1, folder)

    async def _load_tensors(self, update: WeightUpdate) -> None:
        dtype = next(self._model.parameters()).dtype
        if self._expected is not None:
            dtype = next(iter(self._expected.values())).dtype
        rounded = ((name, tensor.to(dtype)) for name, tensor in update.tensors or ())
        for bucket in pack_buckets(WeightUpdate(update.version, rounded)):
            await self.take_bucket(bucket)

    def _abort_update(self, version: int, error: PublicationError) -> None:
        if self._receiving is None or not self._receiving.is_staged:
            self._mark_broken(f"weights of version {version} came in part: {error}")
        super()._abort_update(version, error)

    def _call_workers(self, method: str, **kwargs: Any) -> None:
        with self._break_on_error(method):
            self._llm.collective_rpc(method, kwargs=kwargs)

    @contextmanager
    def _break_on_error(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._mark_broken(f"vLLM's {method} failed with {reason}")
            log.exception("vLLM's %s failed", method)
            self._check_health()

    def _mark_broken(self, reason: str) -> None:
        """Raise from now on, and wake those that wait for the end of the update."""
        self._broken = f"{reason}; vLLM cannot take weights again, so the engine must be replaced"
        arriving, self._receiving = self._receiving, None
        if arriving is not None and not arriving.ready.done():
            arriving.ready.set_result(None)

    def _reset_caches(self) -> None:
        self._salt = str(next(_SALTS))
        # Those that still wait for memory, or of which not all is prefilled, begin anew: the old
        # salt would give them a prompt's keys of the old weights.
        rows = [row for row, a in enumerate(self._rows) if len(a.ids) == len(a.prefix)]
        for row in rows:
            insort(self._queue, self._rows[row], key=attrgetter("order"))
        self._free_rows(rows)

    async def sleep(self) -> None:
        """Give GPU memory back until `wake`; has not been run on one. On a CPU vLLM only pauses.

        Weights are dropped, but under an adapter that is published alone: those would not come
        again.

        Raises:
            ValueError: answers are under way, of which the keys would be lost.
        """
        self._check_health()
        check_may_sleep(bool(self._rows or self._queue))
        self._llm.sleep(level=2 if self._expected is None else 1)

    async def wake(self, part: MemoryPart) -> None:
        self._check_health()
        self._llm.wake_up(["weights" if part == "weights" else "kv_cache"])

    # -- one tick -----------------------------------------------------------------------------

    def _advance(self) -> list[CompletionEvent]:
        self._check_health()
        while self._queue and len(self._rows) < self._slot_count:
            self._submit_answer(self._queue.pop(0))
        reasons = self._run_step()
        rows = list(reasons)
        events = self._make_events(rows, "finished", reasons) if rows else []
        self._free_rows(rows)
        return events

    def _submit_answer(self, answer: VllmAnswer) -> None:
        group, request = answer.group, answer.request
        sampling = group.sampling_of(request)
        start = len(group.prompt_ids)
        own = draw_arguments(sampling, request.seed, start, self._vocab_size)
        # What goes on and what is older keeps its memory when the cache is full.
        priority = 0 if len(answer.prefix) else 1 + max(group.priority, 0)
        params = _request_params(
            sampling.max_tokens - len(answer.prefix), own, sampling.stop_token_ids
        )
        answer.name = self._add_request(answer.context, params, priority, answer.images)
        self._rows.append(answer)

    def _add_request(
        self, context: IntArray, params: RequestParams, priority: int, images: Sequence[Image] = ()
    ) -> str:
        number = next(self._numbers)
        prompt: dict[str, Any] = {"prompt_token_ids": context.tolist(), "cache_salt": self._salt}
        if images:
            from winnow.rollout.vllm.vision import image_inputs

            prompt |= image_inputs(images, self._model.image_processor, self._salt)
        # Of the same priority the older goes first, by numbers: a clock may be set back.
        kwargs = {"priority": priority, "arrival_time": float(number), "lora_request": self._lora}
        self._llm.add_request(str(number), prompt, params, **kwargs)
        return str(number)

    def _run_step(self) -> dict[int, FinishReason]:
        """Run a step of vLLM's scheduler; returns rows whose newest token ended them."""
        found = {output.request_id: output for output in self._llm.step()}
        for name in self._scored.keys() & found.keys():
            self._scored[name] = _logprobs_of(found[name])
        self._tick += bool(self._rows)
        reasons: dict[int, FinishReason] = {}
        with_stops: list[int] = []
        for row, answer in enumerate(self._rows):
            output = found.get(answer.name)
            if output is None:  # its prompt is not prefilled yet, or it waits for memory
                continue
            got = output.outputs[0]
            answer.ids += got.token_ids
            answer.logprobs += _logprobs_of(output).tolist()
            self._generated += len(got.token_ids)
            if output.finished:
                reasons[row] = "length" if got.finish_reason == "length" else "stop"
                answer.routes = got.routed_experts
            if answer.group.sampling.stop:
                with_stops.append(row)
        return reasons | dict.fromkeys(self._rows_at_stop(with_stops), "stop")

    def _extras(self, row: int) -> Mapping[str, NDArray[Any]]:
        answer = self._rows[row]
        if not (self._tells_routes and answer.request.trained):
            return {}
        told = answer.routes
        if told is None:  # ended by a stop string, of which vLLM knows nothing
            known = self._llm.output_processor
            (name,) = known.external_req_ids[answer.name]
            told = np.concatenate(known.request_states[name].routed_experts_chunks)
        prompt, shape = len(answer.group.prompt_ids), self._route_shape
        size = prompt + len(answer.ids) - 1, self._llm.model_config.get_total_num_hidden_layers()
        if told.shape != (*size, shape.choices) or int(told.max()) >= shape.experts:
            raise WorkerError(
                f"vLLM tells experts up to {told.max()} in {told.shape} of {size[0]} tokens, "
                f"{size[1]} layers and {shape.choices} of {shape.experts} experts",
                "engine",
                0,
            )
        # Layers that are no mixtures have rows there, too.
        here = told[:, self._route_layers].astype(np.int16)
        routes = torch.from_numpy(here).to(shape.dtype).numpy()
        return {PROMPT_ROUTES: routes[: prompt - 1], ROUTES: routes[prompt - 1 :]}

    def _free_rows(self, rows: Sequence[int]) -> None:
        gone = set(rows)
        if gone:  # those that are finished vLLM knows no more
            self._llm.abort_request([self._rows[row].name for row in rows])
            self._rows = [answer for row, answer in enumerate(self._rows) if row not in gone]

    # -- scoring ------------------------------------------------------------------------------

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float, last: int, images: ImageLists = ()
    ) -> list[FloatArray]:
        """Score the last tokens of sequences by having vLLM decode them, whatever it would draw.

        Its own log-probs of prompts know neither temperature nor vocabulary.
        """
        self._check_health()
        sampling = SamplingParams(0, temperature)
        nothing = np.zeros(0, np.float32)
        found: list[FloatArray] = [nothing] * len(sequences)
        names: dict[str, int] = {}
        for place, ids in enumerate(sequences):
            start = len(ids) - min(last, len(ids) - 1)
            if start == len(ids):  # a single token has none before it
                continue
            forced = ids[start:].tolist()
            own = draw_arguments(sampling, 0, start, self._vocab_size, forced)
            params = _request_params(len(forced), own, kind=RequestOutputKind.FINAL_ONLY)
            names[self._add_request(ids[:start], params, -1, *images[place : place + 1])] = place
        self._scored |= dict.fromkeys(names)
        while any(self._scored[name] is None for name in names):
            if self._rows:
                self._events += self._advance()
            else:
                self._run_step()
            await asyncio.sleep(0)
        for name, place in names.items():
            scored = self._scored.pop(name)
            assert scored is not None
            found[place] = scored
        return found


def _request_params(
    max_tokens: int,
    own: Mapping[str, Any],
    stop_token_ids: Sequence[int] = (),
    kind: RequestOutputKind = RequestOutputKind.DELTA,
) -> RequestParams:
    """Return vLLM's settings of a request, whose draws are `plugin`'s."""
    return RequestParams(
        max_tokens=max_tokens,
        temperature=0.0,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=list(stop_token_ids),
        output_kind=kind,
        extra_args=dict(own),
    )


def _logprobs_of(output: Any) -> FloatArray:
    """Return log-probs of the new tokens of a vLLM output."""
    got = output.outputs[0]
    rows = zip(got.logprobs, got.token_ids, strict=True)
    return np.array([row[token].logprob for row, token in rows], np.float32)


_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "async_scheduling": False,
    "scheduling_policy": "priority",
    "logprobs_mode": "processed_logits",
    "worker_extension_cls": "winnow.rollout.vllm.plugin.WorkerExtension",
}
"""vLLM's options that are the same for every model."""


def start_vllm(model: str, options: VllmOptions) -> LLMEngine:
    """Start a vLLM in this process as `VllmEngine` needs it.

    Args:
        model: a Hugging Face folder.

    Raises:
        ConfigError: vLLM has no such option, or memory holds not one answer.
        ModelError: vLLM refuses the model.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=options.trust_remote_code)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = options.longest
    if longest is not None:
        longest = max(longest, min(_LONGEST_SCORED, positions or _LONGEST_SCORED))
    batch = options.slots + _SCORED_AT_ONCE
    # vLLM asks for steps that hold the longest sequence where it may not cut one.
    uncut = 0 if options.chunked_prefill else longest or positions or 0
    step_tokens = max(options.prefill_tokens, batch, uncut)
    cache_gib, routes, share = options.cache_gib, options.routes, options.memory_share
    has_gpu = torch.cuda.is_available()
    if has_gpu and share is None:
        memory = read_gpu_memory_gib(options.tensor_parallel)
        share = memory_share(*memory, None, options.reserved_gib)
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code,
        "max_model_len": longest,
        "max_num_seqs": batch,
        "max_num_batched_tokens": step_tokens,
        "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        "tensor_parallel_size": options.tensor_parallel,
        # In an actor of Ray's vLLM would ask Ray for further ones.
        "distributed_executor_backend": "mp" if options.tensor_parallel > 1 else "uni",
        "enable_prefix_caching": options.prefix_caching,
        "enable_chunked_prefill": options.chunked_prefill,
        "enable_sleep_mode": options.sleep,
        **({} if share is None else {"gpu_memory_utilization": share}),
        "enforce_eager": not has_gpu,
        "logits_processors": [_select_draw_processor(routes)],
        "weight_transfer_config": WeightTransferConfig(backend=plugin.BACKEND),
        "enable_return_routed_experts": routes,
        **(options.lora or {}),
    }
    if has_vision(config):
        from winnow.rollout.vllm import vision

        arguments["worker_extension_cls"] = f"{vision.__name__}.WorkerExtension"
        arguments["mm_device_do_normalize"] = False  # of pixels that are normalized
    own = dict(options.extra or {})
    check_extra(own, {field.name for field in fields(EngineArgs)})
    if options.fp32_head:
        arguments["hf_overrides"] = own.pop("hf_overrides", {}) | {"head_dtype": "float32"}
    try:
        llm = LLMEngine.from_engine_args(EngineArgs(**_OPTIONS | arguments | own))
        llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    except Exception as error:
        raise explain_start_error(error, model, cache_gib) from error
    if llm.vllm_config.device_config.device_type == "cpu" and not llm.model_config.use_mla:
        taken = CPUAttentionBackend.get_supported_head_sizes()
        check_head_size(model, llm.model_config.get_head_size(), taken)
    return llm


def _select_draw_processor(routes: bool) -> type[Any]:
    """Return the processor for vLLM's model runner; routes take the second one."""
    if routes:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    is_second = envs.VLLM_USE_V2_MODEL_RUNNER
    return plugin.HashSamplerV2 if is_second else plugin.HashSampler


def lora_options(model: nn.Module, rank: int) -> dict[str, Any]:
    """Return vLLM's options for the adapter of a model (`meta_model`), whose rank it pads."""
    names = sorted({name.rpartition(".")[2] for name in adapted_layers(model)})
    room = min(each for each in get_args(MaxLoRARanks) if each >= rank)
    return {"enable_lora": True, "max_lora_rank": room, "lora_target_modules": names}


def meta_model(
    model: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    adapter: LoraAdapter | None = None,
) -> nn.Module:
    """Return the model of a folder without memory: it names the tensors of a publication."""
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    kind: Any = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    with torch.device("meta"):
        made = kind.from_config(config, trust_remote_code=trust_remote_code)
    found: nn.Module = made.to(dtype)
    if has_vision(config):
        found.image_processor = load_image_processor(ModelRef(model, "model.path", model))
    if adapter is not None:
        add_lora(found, adapter, seed=0)
    return found


class VllmEngineWorker(EngineWorker):
    """An `EngineWorker` with a `VllmEngine`.

    Args:
        rank: a `workers.RankInfo`; vLLM takes the first GPUs that its process sees.
        model: a Hugging Face folder.
        dtype: of the weights; must be that of published ones.
        tokenizer: its folder, where requests carry stop strings.
        vocab_size, live_updates, staging_engines: of `VllmEngine`.
        adapter: to be put beside the model's weights; publications then are of it alone.
        profiler: of this process; vLLM's own processes, which tensor_parallel has, are not in it.
        options: of `VllmOptions`.

    Raises:
        ConfigError, ModelError: as for `start_vllm`.
    """

    def __init__(
        self,
        rank: Any,
        *,
        model: str,
        dtype: Literal["float32", "bfloat16"],
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        slots: int,
        vocab_size: int,
        live_updates: bool = False,
        staging_engines: int = 0,
        adapter: LoraAdapter | None = None,
        profiler: StepProfiler | None = None,
        **options: Any,
    ) -> None:
        code = trust_remote_code
        model = find_model(model, "model.path", getattr(torch, dtype), code).path
        shapes = meta_model(model, getattr(torch, dtype), code, adapter)
        if adapter is not None:
            options["lora"] = lora_options(shapes, adapter.rank)
        llm = start_vllm(
            model, VllmOptions(dtype=dtype, slots=slots, trust_remote_code=code, **options)
        )
        decode = None if tokenizer is None else load_decoder(tokenizer, code)
        engine = VllmEngine(llm, shapes, slots, vocab_size, decode, live_updates, staging_engines)
        super().__init__(engine, profiler)
