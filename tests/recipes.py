"""Shipped recipes, loaded once in a process: configurations are frozen, so tests share them."""

from __future__ import annotations

from functools import cache

from winnow.config.load import parse_recipe
from winnow.config.root import Config
from winnow.config.rules import check_config


@cache
def resolved(name: str, *overrides: str) -> Config:
    """The recipe without the rules across sections."""
    return parse_recipe(name, overrides)


@cache
def recipe(name: str, *overrides: str) -> Config:
    """The recipe as `load_recipe` gives it."""
    config = resolved(name, *overrides)
    check_config(config)
    return config
