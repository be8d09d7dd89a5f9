"""Critics and reward models, whose head gives one number a token or a sequence.

Both are a Hugging Face backbone with a linear layer `score`, as transformers' own classes for
token and sequence classification are, so what is saved here loads there. Any architecture of a
causal LM will do, whether transformers has such a class for it or not. The head keeps fp32
where the backbone has half precision.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from winnow.errors import ModelError
from winnow.models.causal_lm import check_weights, find_model, load_model, prepare
from winnow.models.folders import Loaded, ModelRef, read_config
from winnow.models.vision import refuse_vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from winnow.models.sharded_loading import Hollow

_HEAD = "score"


def load_value_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    field: str = "critic.path",
    hollow: Hollow = False,
) -> PreTrainedModel:
    """Load a backbone with a value head in evaluation mode, with Winnow's attention.

    A causal LM's folder gives the backbone; its head starts at zero: every value is 0, the
    middle of rewards of +-1, whatever the seed, and the backbone first moves once the head has
    found a direction. The head of a folder that has one is taken: of a token classifier with one
    label, such as a checkpoint of a critic, or of a reward model (which has no bias: it is 0).

    Args:
        field, hollow: as `load_causal_lm` takes them.

    Raises:
        ModelError: no such folder, no usable or not all weights, several labels, or an
            architecture that this program cannot run.
    """
    from transformers.modeling_layers import GenericForTokenClassification

    where = find_model(path, field, dtype, trust_remote_code)
    model, loading = _load(where, GenericForTokenClassification, dtype, trust_remote_code, hollow)
    missing = set(loading["missing_keys"])
    architecture = (model.config.architectures or [""])[0]
    head = {f"{_HEAD}.weight", f"{_HEAD}.bias"}
    head_is_new = head <= missing and "Classification" not in architecture
    if head_is_new or ("SequenceClassification" in architecture and missing == {f"{_HEAD}.bias"}):
        for name, parameter in scalar_head(model).named_parameters():
            if f"{_HEAD}.{name}" in missing:
                parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype)
        missing -= head
    unused = {name for name in loading["unexpected_keys"] if not name.startswith("lm_head.")}
    check_weights(where, {**loading, "missing_keys": missing, "unexpected_keys": unused})
    return prepare(model, where, device)


def load_reward_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    field: str = "reward.model.path",
    hollow: Hollow = False,
) -> PreTrainedModel:
    """Load a sequence classifier with one label, frozen, with Winnow's attention.

    Args:
        field, hollow: as `load_causal_lm` takes them.

    Raises:
        ModelError: no such folder, no usable or not all weights (the head is one of them),
            several labels, or an architecture that this program cannot run.
    """
    from transformers.modeling_layers import GenericForSequenceClassification

    where = find_model(path, field, dtype, trust_remote_code)
    kind = GenericForSequenceClassification
    model, loading = _load(where, kind, dtype, trust_remote_code, hollow)
    check_weights(where, loading)
    return cast("PreTrainedModel", prepare(model, where, device).requires_grad_(False))


def scalar_head(model: nn.Module) -> nn.Linear:
    """Return the layer from hidden states to the one number."""
    return cast(nn.Linear, getattr(model, _HEAD))


def _load(
    where: ModelRef,
    generic: type,
    dtype: torch.dtype,
    trust_remote_code: bool,
    hollow: Hollow = False,
) -> Loaded:
    model_class, config = _with_head(where, generic, trust_remote_code)
    build = partial(cast(Any, model_class), config)
    model, loading = load_model(model_class, build, where, config, dtype, hollow)
    # A head that was loaded has fp32 already (by `_with_head`), one that is new has not.
    scalar_head(model).to(torch.promote_types(dtype, torch.float32))
    return model, loading


def _with_head(
    where: ModelRef, generic: type, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], Any]:
    """Make the class of a folder's architecture with transformers' generic head; and its config.

    The class has transformers' name.

    Raises:
        ModelError: no usable config, several labels, or an architecture without a backbone.
    """
    from transformers import MODEL_MAPPING, PreTrainedModel

    config = read_config(where, trust_remote_code)
    refuse_vision(config, where.field, "give a language model")
    if "Classification" not in (config.architectures or [""])[0]:
        config.num_labels = 1
    elif config.num_labels != 1:
        raise ModelError(
            f"{where}: its head has {config.num_labels} labels, expected 1; give a model whose "
            "config.json has one label"
        )
    backbone = MODEL_MAPPING.get(type(config), None)
    if backbone is None or isinstance(backbone, tuple):
        raise ModelError(
            f"{where}: transformers has no backbone for model type {config.model_type}; use a "
            "model of another architecture"
        )
    family = next(c for c in backbone.__mro__ if PreTrainedModel in c.__bases__)
    name = backbone.__name__.removesuffix("Model") + generic.__name__.removeprefix("Generic")
    namespace = {
        "base_model_prefix": family.base_model_prefix,
        "_keep_in_fp32_modules_strict": {_HEAD},
        "config_class": type(config),
        "__module__": __name__,
    }
    return cast("type[PreTrainedModel]", type(name, (generic, family), namespace)), config
