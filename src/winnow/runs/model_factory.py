"""Load the models of the roles, and hold each in a strategy: whole, or sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, OptimConfig
from winnow.learning.strategy import Strategy, local
from winnow.models.causal_lm import load_causal_lm, torch_dtype
from winnow.runs.loading import check_finite, load_policy_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ModelFactory:
    """Make the roles' strategies; a method raises a ModelError where its model cannot be loaded.

    A subclass holds models in strategies of its kind, and begins with the policy.

    Args:
        vocabulary: ids that the tokenizer has.
        hollow: whether ranks read their own rows of the models' folders.
    """

    def __init__(self, config: Config, vocabulary: int, device: torch.device, hollow: bool) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._device, self._hollow = device, hollow

    def policy(self) -> Strategy:
        """Hold the policy."""
        raise NotImplementedError

    def critic(self, path: str) -> Strategy:
        """Hold a value model that begins with the model in the folder `path`."""
        from winnow.models.value import load_value_model

        critic, model = self._config.critic, self._config.model
        loaded = load_value_model(
            path,
            torch_dtype(critic.dtype or model.dtype),
            self._device,
            model.trust_remote_code,
            "model.path" if critic.path is None else "critic.path",
            self._hollow,
        )
        checkpointing = critic.gradient_checkpointing
        return self._hold(loaded, gradient_checkpointing=checkpointing, **_adamw(critic.optim))

    def reference(self, path: str) -> Strategy:
        """Hold a frozen copy of the model in the folder `path`."""
        reference, model = self._config.reference, self._config.model
        loaded = load_causal_lm(
            path,
            torch_dtype(reference.dtype or model.dtype),
            self._device,
            model.trust_remote_code,
            "model.path" if reference.path is None else "reference.path",
            self._hollow,
        )
        return self._hold(loaded.requires_grad_(False), **self._readout_options())

    def _hold(self, model: nn.Module, **options: Any) -> Strategy:
        raise NotImplementedError

    def _hold_policy(self, model: nn.Module) -> Strategy:
        checkpointing = self._config.model.gradient_checkpointing
        options = self._readout_options() | _adamw(self._config.optim)
        return self._hold(model, gradient_checkpointing=checkpointing, **options)

    def _readout_options(self) -> dict[str, Any]:
        config = self._config
        return {
            "temperature": config.rollout.temperature,
            "vocab_size": self._vocabulary,
            "logprob_chunk_tokens": config.trainer.logprob_chunk_tokens,
            "fp32_head": config.model.fp32_head,
        }


class LocalModels(ModelFactory):
    """Hold whole models in this process.

    Args:
        model: the policy's, which an engine may share.
        vocabulary: as for `ModelFactory`.
    """

    def __init__(self, config: Config, model: nn.Module, vocabulary: int) -> None:
        super().__init__(config, vocabulary, next(model.parameters()).device, hollow=False)
        self._model = model

    def policy(self) -> Strategy:
        return self._hold_policy(self._model)

    def _hold(self, model: nn.Module, **options: Any) -> Strategy:
        return Strategy(model, **options)


class ShardedModels(ModelFactory):
    """Hold models sharded over a mesh; each rank reads its own rows of the folders.

    Args:
        path: the policy's folder, a model's or a checkpoint's with an adapter.
        start: where the model lies now that an adapter in `path` belongs to, if that has moved.
        vocabulary: as for `ModelFactory`.
    """

    def __init__(
        self, config: Config, path: str, start: str | None, mesh: DeviceMesh, vocabulary: int
    ) -> None:
        super().__init__(config, vocabulary, torch.device("cpu"), hollow=True)
        self._path, self._start, self._mesh = path, start, mesh

    def policy(self) -> Strategy:
        config = self._config
        model = load_policy_model(
            config.model, self._path, self._device, config.run.seed, self._start, hollow=True
        )
        policy = self._hold_policy(model)
        check_finite(self._path, ((n, local(weight)) for n, weight in model.named_parameters()))
        return policy

    def _hold(self, model: nn.Module, **options: Any) -> Strategy:
        from winnow.learning.fsdp2 import FSDP2Strategy, Sharding

        chosen = self._config.trainer.strategy
        assert isinstance(chosen, Fsdp2)
        sharding = Sharding(chosen.reshard_after_forward, chosen.offload)
        return FSDP2Strategy(model, self._mesh, sharding, **options)


def _adamw(optim: OptimConfig) -> dict[str, Any]:
    return optim.model_dump(include={"betas", "eps", "weight_decay", "grad_clip"})
