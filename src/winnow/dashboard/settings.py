"""Settings of runs as the pages show them: by full name, beside their recipe's and the defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from winnow.config.files import available_recipes
from winnow.config.load import flatten, recipe_values
from winnow.config.schema import all_keys, variants


def plain_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe's tree by full name; lists, and what JSON lacks, as text."""
    return {key: _json_value(value) for key, value in flatten(tree).items()}


def _json_value(value: Any) -> Any:
    is_float = isinstance(value, float)
    is_plain = math.isfinite(value) if is_float else isinstance(value, str | int | None)
    return value if is_plain else json.dumps(value, default=str)


def differing_settings(configs: Collection[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that are not the same in all configurations."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


def describe_settings(tree: Mapping[str, Any], recipe: str | None) -> dict[str, Any]:
    """Return the settings of a run, with what they mean and the values that they would have had.

    Args:
        recipe: name that the run recorded; only the values of a shipped one are known.

    Returns:
        By full name `values`, `defaults`, `meanings`, and `recipe_values`, None where those are
        not known. A setting that this version does not have is in `values` alone.
    """
    values, is_shipped = plain_settings(tree), recipe in available_recipes()
    meanings = {
        ".".join((*key.path, *(["name"] if variants(key.field) else ()))): key.field.description
        for key in all_keys()
    }
    return {
        "recipe": recipe,
        "values": values,
        "defaults": plain_settings(recipe_values(None, tree)),
        "recipe_values": plain_settings(recipe_values(recipe, tree)) if is_shipped else None,
        "meanings": {key: " ".join((meanings.get(key) or "").split()) for key in values},
    }
