"""Load the policy's model and tokenizer as a recipe asks: base, adapter, frozen weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from winnow.config.data import DataConfig, Demonstrations, NoTask, Sft
from winnow.config.judge import EngineJudge, SequenceClassifier
from winnow.config.model import LoraAdapter, ModelConfig, ReferenceConfig
from winnow.config.reward import RewardConfig
from winnow.config.rollout import RolloutConfig, VllmEngineConfig
from winnow.config.root import Config
from winnow.config.rules import max_sequence_tokens
from winnow.config.trainer import CriticConfig, Fsdp2, LocalCluster, Megatron
from winnow.data.images import VisionInput
from winnow.data.prompts import PromptSet
from winnow.data.tokenizer import has_tokenizer, load_tokenizer, make_decoder, stop_token_ids
from winnow.errors import ModelError, TrainingError, WinnowError, WorkerError
from winnow.models.causal_lm import freeze, load_causal_lm
from winnow.models.fetch import local_folder
from winnow.models.folders import ADAPTER_CONFIG, check_vocabulary, torch_dtype
from winnow.models.gguf import DEQUANTISED
from winnow.models.lora import adapter_base, add_lora, load_lora
from winnow.models.routing import check_replay
from winnow.models.vision import refuse_vision
from winnow.observe.files import one_line
from winnow.observe.rollouts import Decode
from winnow.rollout.embedded.cache_room import cache_bytes_per_slot

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from winnow.models.sharded_loading import Hollow

_NO_MEMORY = "MemoryError|out of memory|can't allocate memory"
_NO_ORDER = re.compile(r"(\S+) does not have a deterministic implementation")
CUBLAS_VARIABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Makes products of cuBLAS the same each time; read when CUDA starts in a process."""


def use_deterministic_kernels() -> None:
    """Have this process run no kernel of CUDA that sums in any order; call it before CUDA starts.

    A kernel without another form raises, which `explain_oom` words.
    """
    for name, value in CUBLAS_VARIABLE.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Nothing reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def fetch_models(
    model: ModelConfig,
    reference: ReferenceConfig,
    critic: CriticConfig,
    reward: RewardConfig,
    tell: Callable[[str], None],
) -> None:
    """Fetch every model of a recipe that lies elsewhere, and say so, before anything is loaded.

    Raises:
        ModelError: one cannot be fetched.
    """
    named = {
        "model.path": model.source,
        "model.tokenizer": model.tokenizer,
        "reference.path": reference.path,
        "critic.path": critic.path,
    }
    if isinstance(reward.model, SequenceClassifier):
        named["reward.model.path"] = reward.model.path
        named["reward.model.tokenizer"] = reward.model.tokenizer
    if isinstance(reward.judge, EngineJudge):
        named["reward.judge.path"] = reward.judge.path
    for field, path in named.items():
        if path is not None:
            local_folder(path, field, tell)


def load_policy_model(
    config: ModelConfig,
    path: str,
    device: torch.device,
    seed: int,
    start: str | None = None,
    hollow: Hollow = False,
) -> PreTrainedModel:
    """Load the model to train, from a model's folder or from a checkpoint's with an adapter.

    Args:
        path: not `config.path` where a warm start or a checkpoint gives the model.
        seed: of a new adapter.
        start: where the model lies now that an adapter belongs to, if that has moved.
        hollow: leave the weights in their folder, for each rank to read its own rows; or take
            their shapes alone, for a plan.

    Raises:
        ModelError: model, adapter or frozen weights are not what the recipe says.
    """
    folder = Path(local_folder(path)).expanduser()
    base = None  # of an adapter that is trained on; else it is merged
    if isinstance(config.adapter, LoraAdapter) and is_adapter(path):
        base = adapter_base(folder, _whole(start or config.source))
    dtype = torch_dtype(config.dtype)
    model = load_causal_lm(base or path, dtype, device, config.trust_remote_code, hollow=hollow)
    if base is not None:
        load_lora(model, folder)
    elif isinstance(config.adapter, LoraAdapter):
        add_lora(model, config.adapter, seed)
    if config.freeze:
        freeze(model, config.freeze)
    return model


def is_adapter(path: str | None) -> bool:
    """Return whether a model's place holds an adapter alone, as a PEFT folder."""
    return path is not None and (Path(local_folder(path)).expanduser() / ADAPTER_CONFIG).is_file()


def start_notes(config: ModelConfig, start: str) -> list[str]:
    """Say what becomes of an adapter that a run starts from."""
    if not is_adapter(start):
        return []
    of = f"{start} is an adapter of {adapter_base(Path(local_folder(start)))}"
    if isinstance(config.adapter, LoraAdapter):
        return [f"{of}: it is trained on with its own rank and scale, not those of model.adapter"]
    return [f"{of}: it is merged into a copy of that (model/adapter=lora would train it on)"]


def _whole(path: str | None) -> str | None:
    """Return the base of an adapter's folder; any other path as it is."""
    if path is None or not is_adapter(path):
        return path
    return adapter_base(Path(local_folder(path)))


@dataclass(frozen=True)
class LoadedPolicy:
    """A model in memory, with its tokenizer and what follows from it."""

    path: str
    device: torch.device
    model: PreTrainedModel
    """Hollow where other processes hold the weights."""
    tokenizer: PreTrainedTokenizerBase
    decode: Decode
    vocabulary: int
    """Ids below it are the tokenizer's; the embedding may be padded beyond."""
    stop_ids: tuple[int, ...]
    tokenizer_folder: str

    @property
    def dequantised_from(self) -> str | None:
        """The types that a GGUF file's weights were quantized to; None for any other model."""
        return getattr(self.model.config, DEQUANTISED, None)

    @property
    def notes(self) -> list[str]:
        """A line for the user where the weights were quantized."""
        types = self.dequantised_from
        return [] if types is None else [f"{self.path}: weights dequantised from {types}"]

    @property
    def vision(self) -> VisionInput | None:
        """The processor and config of its images; None for a model of text alone."""
        processor = getattr(self.model, "image_processor", None)
        return None if processor is None else VisionInput(processor, self.model.config)


def load_policy(
    config: Config, path: str, device: torch.device, start: str | None = None, hollow: bool = False
) -> LoadedPolicy:
    """Load the model and tokenizer of a folder.

    Args:
        hollow: leave the model's weights in their folder.
        start: where the model lies now that an adapter in `path` belongs to, if that has moved.

    Raises:
        ModelError: one of them is missing, broken, or they do not fit each other.
    """
    folder = config.model.tokenizer
    field = "model.tokenizer" if folder else "model.path"
    source = folder or path
    if not folder and is_adapter(path) and not has_tokenizer(local_folder(path)):
        source = _whole(path) or path
    tokenizer = load_tokenizer(source, config.model.trust_remote_code, field)
    with explain_oom(config):
        model = load_policy_model(config.model, path, device, config.run.seed, start, hollow)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    shape = model.config.get_text_config()
    remedy = "give the tokenizer that belongs to the model in model.tokenizer"
    check_vocabulary(f"model.path {path}", vocabulary, cast(int, shape.vocab_size), remedy)
    if not hollow:
        check_finite(f"model.path {path}", model.named_parameters())
    check_positions(config.data, config.sft, config.rollout, path, model)
    engine = config.rollout.engine
    if config.algorithm.advantage.name == "gae":
        refuse_vision(model.config, "algorithm/advantage=gae", "choose algorithm/advantage=grpo")
    # Options of the user's own may change what vLLM makes of a model; it checks that itself.
    if isinstance(engine, VllmEngineConfig) and not engine.extra:
        from winnow.rollout.vllm.refusals import check_vllm_model

        is_local = isinstance(config.cluster, LocalCluster)
        on_cpu = is_local and device.type == "cpu" and not torch.cuda.is_available()
        check_vllm_model(path, shape, max_sequence_tokens(config), on_cpu)
    strategy = config.trainer.strategy
    if isinstance(strategy, Fsdp2):
        from winnow.learning.sequence import check_model

        check_model(model, strategy.sequence)
    if isinstance(strategy, Megatron):
        from winnow.models.megatron.weights import RankPlace, check_layout

        place = RankPlace(strategy.tensor, strategy.pipeline, strategy.expert)
        check_layout(model, place, strategy.sequence_parallel)
    if config.rollout.routing_replay:
        check_replay(model)
    generation = getattr(model, "generation_config", None)
    stop_ids = stop_token_ids(tokenizer, path, getattr(generation, "eos_token_id", None))
    decode = make_decoder(tokenizer)
    return LoadedPolicy(path, device, model, tokenizer, decode, vocabulary, stop_ids, source)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, here or in a worker, says that memory was refused."""
    match = re.search(_NO_MEMORY, f"{type(error).__name__}: {error}")
    return isinstance(error, MemoryError | RuntimeError | WorkerError) and match is not None


@contextlib.contextmanager
def explain_oom(
    config: Config, model: PreTrainedModel | None = None, save: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Tell what took the memory where it ends within the block, and how to take less.

    Args:
        model: the policy's; None while models are loaded.
        save: saves what can be, before; ranks that have failed cannot.

    Raises:
        TrainingError: instead of the errors of allocators, and of a kernel that
            run.deterministic does not allow.
    """
    try:
        yield
    except Exception as error:
        if (kernel := _NO_ORDER.search(str(error))) is not None:
            raise TrainingError(
                f"run.deterministic=true: {kernel[1]} has no deterministic form on this device; "
                "set run.deterministic=false"
            ) from error
        if not is_out_of_memory(error):
            raise
        if model is None:
            raise TrainingError(
                f"out of memory while models are loaded: {one_line(error)[:200]}; choose a smaller "
                "model.path or model.dtype=bfloat16, share it out with trainer/strategy=fsdp2 and "
                "trainer.strategy.ranks, or lower rollout.engine.slots or rollout.engine.cache_gib"
            ) from error
        with contextlib.suppress(MemoryError, RuntimeError, WinnowError):
            save()
        answers, engine = config.sampling.groups_per_step * config.rollout.n, ""
        longest = max_sequence_tokens(config)
        if slots := getattr(config.rollout.engine, "slots", 0):
            dtype = torch_dtype(config.model.dtype)
            size = slots * cache_bytes_per_slot(model.config, dtype, longest)
            engine = (
                f"an engine writes up to {slots:,} answers of {longest:,} tokens at once (keys and "
                f"values of {size / 2**30:.3g} GiB): lower rollout.engine.slots or "
                "rollout.engine.cache_gib; "
            )
        raise TrainingError(
            f"out of memory: {one_line(error)[:200]}; {engine}learning runs "
            f"{config.trainer.token_budget:,} tokens of {answers:,} answers at once: lower "
            "trainer.microbatch_tokens, or set model.gradient_checkpointing=true; with run.fork "
            "a run goes on from its last checkpoint with other settings"
        ) from error


def check_finite(where: str, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are NaN or infinite; `where` is the key of a model, and its path."""
    for name, parameter in parameters:
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"{where}: {name} holds NaN or infinity; use another model")


def check_positions(
    data: DataConfig,
    sft: Sft,
    rollout: RolloutConfig,
    path: str,
    model: PreTrainedModel,
    prompts: object = None,
) -> None:
    """Refuse answers that cannot fit: alone, or, with learned positions, after a prompt.

    Args:
        prompts: those that answers follow; generated ones, which never end, count by the limit.
    """
    shape = model.config.get_text_config()
    positions, answer = getattr(shape, "max_position_embeddings", None), rollout.max_response_tokens
    asks = data.eval_files or not isinstance(data.task, NoTask)
    if not isinstance(positions, int) or (isinstance(sft, Demonstrations) and not asks):
        return
    is_rotary = getattr(shape, "rope_parameters", None) is not None
    sizes = [] if prompts is None or is_rotary else [data.max_prompt_tokens]
    if sizes and isinstance(prompts, PromptSet):
        sizes = [len(prompt.token_ids) for prompt in prompts.prompts]
    prompt = max(sizes, default=0)
    if answer + prompt >= positions:
        after = f" after the longest prompt's {prompt} tokens" if prompt else ""
        remedy = "it, or data.max_prompt_tokens," if prompt else "it,"
        raise ModelError(
            f"rollout.max_response_tokens {answer}{after} does not fit the model's {positions} "
            f"positions ({path}); lower {remedy} or use a model with a longer context"
        )
