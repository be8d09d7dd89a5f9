"""Load the models of the roles, and hold each in a strategy: whole, or sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from winnow.config.optim import OptimConfig
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.learning.data_parallel import NO_SHARDING, MicroBatchSharder, RankSharding
from winnow.learning.single import SingleStrategy
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import load_causal_lm, torch_dtype
from winnow.models.value import load_value_model
from winnow.runs.loading import check_finite, load_policy_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from winnow.learning.fsdp2 import FSDP2Strategy


class ModelFactory(Protocol):
    """Makes the roles' strategies. Folders are Hugging Face models.

    Each method raises a ModelError where its model cannot be loaded.
    """

    @property
    def sharder(self) -> MicroBatchSharder:
        """The split of samples over ranks; ask for the policy first."""
        ...

    def policy(self) -> Strategy:
        """Hold the policy."""
        ...

    def critic(self, path: str) -> Strategy:
        """Hold a value model that begins with the model in `path`."""
        ...

    def reference(self, path: str) -> Strategy:
        """Hold a frozen copy of the model in `path`."""
        ...


class LocalModels:
    """The `ModelFactory` of whole models in this process.

    Args:
        model: the policy's, which an engine may share.
        vocabulary: ids that the tokenizer has.
    """

    sharder = NO_SHARDING

    def __init__(self, config: Config, model: nn.Module, vocabulary: int) -> None:
        self._config, self._model, self._vocabulary = config, model, vocabulary
        self._device = next(model.parameters()).device

    def policy(self) -> SingleStrategy:
        return SingleStrategy(self._model, **_policy_options(self._config, self._vocabulary))

    def critic(self, path: str) -> SingleStrategy:
        model = _critic_model(self._config, path, self._device)
        return SingleStrategy(model, **_critic_options(self._config))

    def reference(self, path: str) -> SingleStrategy:
        model = _reference_model(self._config, path, self._device)
        return SingleStrategy(model, **_readout_options(self._config, self._vocabulary))


class ShardedModels:
    """The `ModelFactory` of models sharded over a mesh; each rank reads its own rows.

    Args:
        path: the policy's folder, a model's or a checkpoint's with an adapter.
        start: where the model lies now that an adapter in `path` belongs to, if that has moved.
        vocabulary: ids that the tokenizer has.
    """

    def __init__(
        self, config: Config, path: str, start: str | None, mesh: DeviceMesh, vocabulary: int
    ) -> None:
        self._config, self._path, self._start = config, path, start
        self._mesh, self._vocabulary = mesh, vocabulary
        self._width = 0

    @property
    def sharder(self) -> RankSharding:
        assert self._width, "the policy comes first"
        return RankSharding(self._mesh, self._width)

    def policy(self) -> FSDP2Strategy:
        from winnow.learning.base_strategy import local

        config = self._config
        model = load_policy_model(
            config.model, self._path, _CPU, config.run.seed, self._start, hollow=True
        )
        self._width = int(model.config.hidden_size)
        policy = self._held(model, _policy_options(config, self._vocabulary))
        check_finite(self._path, ((n, local(weight)) for n, weight in model.named_parameters()))
        return policy

    def critic(self, path: str) -> FSDP2Strategy:
        model = _critic_model(self._config, path, _CPU, hollow=True)
        return self._held(model, _critic_options(self._config))

    def reference(self, path: str) -> FSDP2Strategy:
        model = _reference_model(self._config, path, _CPU, hollow=True)
        return self._held(model, _readout_options(self._config, self._vocabulary))

    def _held(self, model: nn.Module, options: dict[str, Any]) -> FSDP2Strategy:
        from winnow.learning.fsdp2 import FSDP2Strategy, Sharding

        chosen = self._config.trainer.strategy
        assert isinstance(chosen, Fsdp2)
        bucket_bytes = chosen.bucket_mb << 20
        sharding = Sharding(chosen.reshard_after_forward, chosen.offload, bucket_bytes)
        return FSDP2Strategy(model, self._mesh, sharding, **options)


_CPU = torch.device("cpu")


def _critic_model(
    config: Config, path: str, device: torch.device, hollow: bool = False
) -> PreTrainedModel:
    critic = config.critic
    field = "model.path" if critic.path is None else "critic.path"
    dtype = torch_dtype(critic.dtype or config.model.dtype)
    return load_value_model(
        path, dtype, device, config.model.trust_remote_code, field, hollow=hollow
    )


def _reference_model(
    config: Config, path: str, device: torch.device, hollow: bool = False
) -> PreTrainedModel:
    own = config.reference
    field = "model.path" if own.path is None else "reference.path"
    dtype = torch_dtype(own.dtype or config.model.dtype)
    model = load_causal_lm(
        path, dtype, device, config.model.trust_remote_code, field, hollow=hollow
    )
    return cast("PreTrainedModel", model.requires_grad_(False))


def _policy_options(config: Config, vocabulary: int) -> dict[str, Any]:
    return {
        **_adamw(config.optim),
        **_readout_options(config, vocabulary),
        "gradient_checkpointing": config.model.gradient_checkpointing,
    }


def _critic_options(config: Config) -> dict[str, Any]:
    critic = config.critic
    return {**_adamw(critic.optim), "gradient_checkpointing": critic.gradient_checkpointing}


def _readout_options(config: Config, vocabulary: int) -> dict[str, Any]:
    return {
        "temperature": config.rollout.temperature,
        "vocab_size": vocabulary,
        "logprob_chunk_tokens": config.trainer.logprob_chunk_tokens,
        "fp32_head": config.model.fp32_head,
    }


def _adamw(optim: OptimConfig) -> dict[str, Any]:
    return optim.model_dump(include={"betas", "eps", "weight_decay", "grad_clip"})
