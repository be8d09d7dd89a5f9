"""The reference policy, from which a KL term measures."""

from __future__ import annotations

from winnow.config.base import Section
from winnow.config.model import Dtype


class ReferenceConfig(Section):
    """A frozen model; unused unless something asks for its log-probs.

    With an adapter it is the policy's own model with the adapter switched off, unless a path is
    given.
    """

    path: str | None = None
    """Folder of the model; null is the policy's start."""
    dtype: Dtype | None = None
    """Type of weights and activations; null is model.dtype."""
