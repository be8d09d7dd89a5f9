"""What every section shares: frozen, no unknown keys, docstrings of fields as their help."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Decay = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of AdamW."""


class Section(BaseModel):
    """A section of a recipe. Its fields' docstrings are what `--help-config` prints."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )


class SecretError(ValueError):
    """What a validator raises where the value itself must not be shown."""
