"""Hands a full tree to Hydra: unions become groups, overrides are applied and resolved.

Hydra keeps its state in the process; all of it is as before when `compose` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import Container, Node, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from winnow.config.base import Section
from winnow.config.files import RECIPES
from winnow.config.root import Config
from winnow.config.schema import default_tree, section, variants
from winnow.errors import ConfigError

_ROOT = "_winnow_"
_EACH = 1000
_AS_LAID = "_as_laid_"
"""The option of a group that holds what the recipe says, beside its variants."""
MOST_CHARACTERS = 1_000_000
"""That the `${…}` of a recipe may write out. Each of them counts as a thousand more, for the time
that it takes."""


def compose(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree with the overrides applied and every `${…}` resolved.

    Raises:
        ConfigError: an interpolation or an override cannot be applied.
    """
    try:
        with _hydra_left_as_found() as store:
            _Groups(store, overrides).add(Config, tree, "", _ROOT)
            with hydra.initialize_config_dir(str(RECIPES), version_base="1.3"):
                composed = hydra.compose(_ROOT, overrides=list(overrides))
        with _counting():
            resolved = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no default; add {error.full_key}=VALUE") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_reason(error)) from None
    except RecursionError:
        raise ConfigError("the recipe's ${…} refer to each other in a circle; break it") from None
    assert isinstance(resolved, dict)
    return {str(key): _with_text_keys(value) for key, value in resolved.items()}


class _Groups:
    """Stores a tree for Hydra, with a group for each union of which a variant is chosen.

    Other unions stay in the body as they are laid: Hydra copies each group several times.
    """

    def __init__(self, store: ConfigStore, overrides: Sequence[str]) -> None:
        self._store = store
        self._overrides = tuple(overrides)

    def add(self, cls: type[Section], tree: Mapping[str, Any], group: str, option: str) -> None:
        """Store a section as an option of a group, and each union in it as a group below."""
        defaults: list[Any] = ["_self_"]
        body = self._body(cls, tree, group, "", option, defaults)
        self._store.store(option, {"defaults": defaults, **body}, group=group or None)

    def _body(
        self,
        cls: type[Section],
        tree: Mapping[str, Any],
        group: str,
        below: str,
        option: str,
        defaults: list[Any],
    ) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for key, field in cls.model_fields.items():
            inner, options = section(field), variants(field)
            relative = f"{below}/{key}" if below else key
            path = f"{group}/{relative}" if group else relative
            if inner:
                body[key] = self._body(inner, tree[key], group, relative, option, defaults)
            elif options and self._is_chosen(path):
                for name, variant in options.items():
                    self.add(variant, default_tree(variant), path, name)
                # A tree as laid holds unions as laid; a variant's defaults hold default variants.
                laid = option in (_ROOT, _AS_LAID)
                name = tree[key]["name"]
                if laid:
                    self.add(options[name], tree[key], path, _AS_LAID)
                defaults.append({relative: _AS_LAID if laid else name})
            else:
                body[key] = tree[key]
        return body

    def _is_chosen(self, path: str) -> bool:
        """Whether an override chooses a variant of this union or of one within it."""
        return any(override.startswith((f"{path}=", f"{path}/")) for override in self._overrides)


@contextmanager
def _hydra_left_as_found() -> Iterator[ConfigStore]:
    store, version = ConfigStore.instance(), VersionBase.instance()
    repo, base = store.repo, version.version_base
    store.repo = {key: node for key, node in repo.items() if key not in Config.model_fields}
    # Settings of Hydra's own: without the launchers, help texts and logs that it would compose
    # beside ours and drop again, which takes a third of the time.
    store.repo["hydra"] = {}
    store.store("config", HydraConf(defaults=["_self_"]), group="hydra")
    try:
        yield store
    finally:
        store.repo, version.version_base = repo, base


class _TooMuch(InterpolationResolutionError):
    """The `${…}` write out more than any recipe needs."""


@contextmanager
def _counting() -> Iterator[None]:
    """Break off when `${…}` that name one another would fill the memory ("billion laughs").

    OmegaConf writes a value out as often as it is named, in each value around it again, and has
    no bound of its own.
    """
    resolve, written = Container.resolve_parse_tree, 0

    def counted(self: Container, *given: Any, **named: Any) -> Any:
        nonlocal written
        value = resolve(self, *given, **named)
        written += _EACH + _size(value)
        if written > MOST_CHARACTERS:
            raise _TooMuch(f"its ${{…}} write out more than {MOST_CHARACTERS:,} characters")
        return value

    Container.resolve_parse_tree = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _size(value: Any) -> int:
    """Characters of a text, about; of a list or table what stands in it, unresolved."""
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return 10 + sum(_size(inner) for inner in value.values())
    if isinstance(value, list):
        return 10 + sum(_size(inner) for inner in value)
    plain = value._value() if isinstance(value, Node) else value
    return 10 + (len(plain) if isinstance(plain, str) else 0)


def _reason(error: Exception) -> str:
    place = getattr(error, "full_key", None)
    cause = error.__cause__
    if not place and cause:
        place = str(error).splitlines()[0]
    lines = str(cause or error).splitlines() or [type(error).__name__]
    reason = lines[0].rpartition("raised while resolving interpolation: ")[2].strip('"')
    before = f"{place}: " if place else ""
    return f"{before}{reason[:1].lower()}{reason[1:]}; mend the value or its ${{…}}"


def _with_text_keys(value: Any) -> Any:
    """Keys that Hydra's grammar read as numbers, such as a source called 7, as text."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value
