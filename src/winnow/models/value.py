"""Models with one number a token or a sequence for a head: critics and reward models.

Both are a Hugging Face backbone with a linear layer `score`, as transformers' own classes for
token and sequence classification are, so what is saved here loads there. Any architecture of a
causal LM will do, whether transformers has such a class for it or not. The head keeps fp32
where the backbone has half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from winnow.errors import ModelError
from winnow.models.causal_lm import (
    Source,
    check_weights,
    checked_folder,
    load_pretrained,
    read_config,
    settled,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD = "score"


def load_value_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    field: str = "critic.path",
) -> PreTrainedModel:
    """A backbone with a value head, in evaluation mode, with our attention.

    A causal LM's folder gives the backbone; its head starts at zero: every value is 0, the
    middle of rewards of +-1, whatever the seed, and the backbone first moves once the head has
    found a direction. The head of a folder that has one is taken: of a token classifier with one
    label, such as a checkpoint of a critic, or of a reward model (which has no bias: it is 0).

    Raises:
        ModelError: no such folder, no usable or not all weights, several labels, or an
            architecture that this program cannot run.
    """
    from transformers.modeling_layers import GenericForTokenClassification

    where = checked_folder(path, field)
    model, loading = _load(where, GenericForTokenClassification, dtype, trust_remote_code)
    missing = set(loading["missing_keys"])
    new = new_head(model.config, missing)
    for name, parameter in _head(model).named_parameters():
        if f"{_HEAD}.{name}" in new:
            nn.init.zeros_(parameter)
    missing -= new
    unused = _without_lm_head(loading)
    check_weights(where, {**loading, "missing_keys": missing, "unexpected_keys": unused})
    return settled(model, where, device)


def load_reward_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    field: str = "reward.model.path",
) -> PreTrainedModel:
    """A sequence classifier with one label, in evaluation mode, with our attention, frozen.

    Raises:
        ModelError: no such folder, no usable or not all weights (the head is one of them),
            several labels, or an architecture that this program cannot run.
    """
    from transformers.modeling_layers import GenericForSequenceClassification

    where = checked_folder(path, field)
    model, loading = _load(where, GenericForSequenceClassification, dtype, trust_remote_code)
    check_weights(where, loading)
    return cast("PreTrainedModel", settled(model, where, device).requires_grad_(False))


def new_head(config: Any, missing: set[str]) -> set[str]:
    """Of the weights that a folder lacks those of a value head that start at zero."""
    architecture = (config.architectures or [""])[0]
    head = {f"{_HEAD}.weight", f"{_HEAD}.bias"}
    head_is_new = head <= missing and "Classification" not in architecture
    has_no_bias = "SequenceClassification" in architecture and missing == {f"{_HEAD}.bias"}
    return head & missing if head_is_new or has_no_bias else set()


def is_value_model(model: nn.Module) -> bool:
    """Whether the head gives a value a token."""
    from transformers.modeling_layers import GenericForTokenClassification

    return isinstance(model, GenericForTokenClassification)


def is_reward_model(model: nn.Module) -> bool:
    """Whether the head gives a score a sequence."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(model, GenericForSequenceClassification)


def scalar_head(model: nn.Module) -> nn.Linear:
    """The layer from hidden states to the one number."""
    return _head(model)


def _load(
    where: Source, generic: type, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, Any]:
    made, config = with_head(where, generic, trust_remote_code)
    model, loading = load_pretrained(
        made, where, "a model with a head of one number", config=config, dtype=dtype
    )
    # A head that was loaded has fp32 already (see `with_head`), one that is new has not.
    _head(model).to(torch.promote_types(dtype, torch.float32))
    return model, loading


def with_head(
    where: Source, generic: type, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], Any]:
    """The class of a folder's architecture with transformers' generic head, and its config.

    The class has transformers' name.

    Raises:
        ModelError: no usable config, several labels, or an architecture without a backbone.
    """
    from transformers import MODEL_MAPPING, PreTrainedModel

    config = read_config(where, trust_remote_code)
    if "Classification" not in (config.architectures or [""])[0]:
        config.num_labels = 1
    elif config.num_labels != 1:
        raise ModelError(
            f"{where}: its head has {config.num_labels} labels, where one number is needed; "
            "give a model whose config.json has one label"
        )
    backbone = MODEL_MAPPING.get(type(config), None)
    if backbone is None or isinstance(backbone, tuple):
        raise ModelError(
            f"{where}: transformers knows no backbone of model type {config.model_type}; "
            "use a model of another architecture"
        )
    family = next(c for c in backbone.__mro__ if PreTrainedModel in c.__bases__)
    name = backbone.__name__.removesuffix("Model") + generic.__name__.removeprefix("Generic")
    own = {
        "base_model_prefix": family.base_model_prefix,
        "_keep_in_fp32_modules_strict": {_HEAD},
        "config_class": type(config),
        "__module__": __name__,
    }
    return cast("type[PreTrainedModel]", type(name, (generic, family), own)), config


def _head(model: nn.Module) -> nn.Linear:
    return cast(nn.Linear, getattr(model, _HEAD))


def _without_lm_head(loading: Any) -> set[str]:
    return {name for name in loading["unexpected_keys"] if not name.startswith("lm_head.")}
