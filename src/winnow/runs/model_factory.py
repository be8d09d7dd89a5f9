"""Who loads the models of the roles, and in what strategy each is held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, OptimConfig
from winnow.learning.data_parallel import NO_SHARDING, MicroBatchSharder, RankSharding
from winnow.learning.fsdp2 import FSDP2Strategy
from winnow.learning.shards import local
from winnow.learning.single import SingleStrategy
from winnow.learning.strategy import Strategy
from winnow.learning.units import Sharding
from winnow.models.causal_lm import load_causal_lm, torch_dtype
from winnow.models.sharded_loading import SavedWeights, hollow_causal_lm, hollow_value_model
from winnow.models.value import load_value_model
from winnow.runs.loading import check_finite, load_policy_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelFactory(Protocol):
    """Makes the roles' strategies. Folders are Hugging Face models."""

    @property
    def dealer(self) -> MicroBatchSharder:
        """Who runs which samples."""
        ...

    def policy(self) -> Strategy:
        """The policy's.

        Raises:
            ModelError: its model cannot be loaded, as with the others.
        """
        ...

    def critic(self, path: str) -> Strategy:
        """A value model's that begins with the model in `path`."""
        ...

    def reference(self, path: str) -> Strategy:
        """That of a frozen copy of the model in `path`."""
        ...


class LocalModels:
    """Whole models in this process.

    Args:
        model: the policy's, which an engine may share.
        vocabulary: ids that the tokenizer has.
    """

    def __init__(self, config: Config, model: nn.Module, vocabulary: int) -> None:
        self._config, self._model, self._vocabulary = config, model, vocabulary
        self._device = next(model.parameters()).device

    @property
    def dealer(self) -> MicroBatchSharder:
        """See `ModelFactory.dealer`."""
        return NO_SHARDING

    def policy(self) -> SingleStrategy:
        """See `ModelFactory.policy`."""
        return SingleStrategy(self._model, **_policy_options(self._config, self._vocabulary))

    def critic(self, path: str) -> SingleStrategy:
        """See `ModelFactory.critic`."""
        dtype, trusted, field = _critic_model(self._config)
        model = load_value_model(path, dtype, self._device, trusted, field)
        return SingleStrategy(model, **_critic_options(self._config))

    def reference(self, path: str) -> SingleStrategy:
        """See `ModelFactory.reference`."""
        dtype, trusted, field = _reference_model(self._config)
        model = load_causal_lm(path, dtype, self._device, trusted, field)
        options = _readout_options(self._config, self._vocabulary)
        return SingleStrategy(model.requires_grad_(False), **options)


class ShardedModels:
    """Models sharded over a mesh; each rank reads its own rows of the folders.

    Args:
        path: the policy's folder, a model's or a checkpoint's with an adapter.
        start: where the model lies now that an adapter in `path` belongs to, if that has moved.
        vocabulary: ids that the tokenizer has.
    """

    def __init__(
        self, config: Config, path: str, start: str | None, mesh: DeviceMesh, vocabulary: int
    ) -> None:
        assert isinstance(config.trainer.strategy, Fsdp2)
        self._config, self._path, self._start = config, path, start
        self._mesh, self._vocabulary = mesh, vocabulary
        chosen = config.trainer.strategy
        self._sharding = Sharding(
            chosen.reshard_after_forward, chosen.offload, chosen.bucket_mb << 20
        )
        self._width = 0

    @property
    def dealer(self) -> MicroBatchSharder:
        """See `ModelFactory.dealer`; the policy must be held."""
        assert self._width, "the policy comes first"
        return RankSharding(self._mesh, self._width)

    def policy(self) -> FSDP2Strategy:
        """See `ModelFactory.policy`."""
        saved: list[SavedWeights] = []

        def read(
            path: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
        ) -> PreTrainedModel:
            model, weights = hollow_causal_lm(path, dtype, trust_remote_code)
            saved.append(weights)
            return model

        config = self._config
        device = torch.device("cpu")
        model = load_policy_model(
            config.model, self._path, device, config.run.seed, self._start, read
        )
        self._width = int(model.config.hidden_size)
        policy = self._held(model, saved[0], _policy_options(config, self._vocabulary))
        own = ((name, local(weight)) for name, weight in model.named_parameters())
        check_finite(self._path, own)
        return policy

    def critic(self, path: str) -> FSDP2Strategy:
        """See `ModelFactory.critic`."""
        model, saved = hollow_value_model(path, *_critic_model(self._config))
        return self._held(model, saved, _critic_options(self._config))

    def reference(self, path: str) -> FSDP2Strategy:
        """See `ModelFactory.reference`."""
        model, saved = hollow_causal_lm(path, *_reference_model(self._config))
        options = _readout_options(self._config, self._vocabulary)
        return self._held(model.requires_grad_(False), saved, options)

    def _held(
        self, model: nn.Module, saved: SavedWeights, options: dict[str, Any]
    ) -> FSDP2Strategy:
        return FSDP2Strategy(model, self._mesh, self._sharding, weights=saved, **options)


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
    return {
        "betas": optim.betas,
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "grad_clip": optim.grad_clip,
    }


def _critic_model(config: Config) -> tuple[torch.dtype, bool, str]:
    """How its folder is read: type, trust, and the field that names it."""
    critic = config.critic
    field = "model.path" if critic.path is None else "critic.path"
    dtype = torch_dtype(critic.dtype or config.model.dtype)
    return dtype, config.model.trust_remote_code, field


def _reference_model(config: Config) -> tuple[torch.dtype, bool, str]:
    own = config.reference
    field = "model.path" if own.path is None else "reference.path"
    dtype = torch_dtype(own.dtype or config.model.dtype)
    return dtype, config.model.trust_remote_code, field
