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
from winnow.models import Source, check_weights, checked_folder, load_pretrained, settled

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
    architecture = (model.config.architectures or [""])[0]
    missing = set(loading["missing_keys"])
    head_is_new = {f"{_HEAD}.weight", f"{_HEAD}.bias"} <= missing
    is_classifier = "Classification" in architecture
    has_no_bias = "SequenceClassification" in architecture and missing == {f"{_HEAD}.bias"}
    if has_no_bias or (head_is_new and not is_classifier):
        for name, parameter in _head(model).named_parameters():
            if f"{_HEAD}.{name}" in missing:
                nn.init.zeros_(parameter)
        missing -= {f"{_HEAD}.weight", f"{_HEAD}.bias"}
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
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(where.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{where}: cannot read its config: {str(error).splitlines()[0]}; "
            "give a complete Hugging Face folder"
        ) from error
    if "Classification" not in (config.architectures or [""])[0]:
        config.num_labels = 1
    elif config.num_labels != 1:
        raise ModelError(
            f"{where}: its head has {config.num_labels} labels, where one number is needed; "
            "give a model whose config.json has one label"
        )
    made = _with_head(where, config, generic)
    model, loading = load_pretrained(
        made, where, "a model with a head of one number", config=config, dtype=dtype
    )
    # A head that was loaded has fp32 already (see `_with_head`), one that is new has not.
    _head(model).to(torch.promote_types(dtype, torch.float32))
    return model, loading


def _with_head(where: Source, config: Any, generic: type) -> type[PreTrainedModel]:
    """The class of this architecture with transformers' generic head, under transformers' name."""
    from transformers import MODEL_MAPPING, PreTrainedModel

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
    return cast("type[PreTrainedModel]", type(name, (generic, family), own))


def _head(model: nn.Module) -> nn.Linear:
    return cast(nn.Linear, getattr(model, _HEAD))


def _without_lm_head(loading: Any) -> set[str]:
    return {name for name in loading["unexpected_keys"] if not name.startswith("lm_head.")}
