"""A user's own engine: made from its place in a recipe, with clear words where it does not fit."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from tests.contract import test_engine
from tests.contract.test_engine import model_of, use_layout_attention

from winnow.errors import ConfigError
from winnow.rollout.engine import load_custom_engine

ENGINE = """
from winnow.rollout.embedded.torch_engine import TorchEngine

class Wrapped(TorchEngine):
    def __init__(self, *, model, vocab_size, decode, live_updates, slots=8, **options):
        settings = {"prefill_tokens": 64, **options}
        super().__init__(model, slots, vocab_size=vocab_size, decode=decode,
                         live_updates=live_updates, **settings)

class Half:
    def __init__(self, **options):
        pass

    async def submit(self, groups):
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(ENGINE)
    return path


def made(place: str, **options: Any) -> Any:
    model = model_of("qwen3")
    use_layout_attention(model)
    given: dict[str, Any] = {"vocab_size": 40, "decode": str, "live_updates": True}
    return load_custom_engine(place, options, model=model, **given)


def test_an_engine_that_does_not_fit_is_refused_with_what_is_wrong(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.path .*has no callable Other"):
        made(f"{file}:Other")
    with pytest.raises(
        ConfigError,
        match=r"TypeError: .*'spots'; its keyword arguments are decode, ",
    ):
        made(f"{file}:Wrapped", spots=3)
    with pytest.raises(ConfigError, match="no method events, progress, abort, load_weights, stat"):
        made(f"{file}:Half")


def test_the_contract_runs_against_a_users_engine(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINNOW_ENGINE", f"{file}:Wrapped")
    spec = spec_from_file_location("contract_of_mine", test_engine.__file__)
    assert spec is not None
    assert spec.loader is not None
    contract: Any = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, contract)
    spec.loader.exec_module(contract)
    ((name, kind),) = contract.ENGINES.items()
    assert name == "custom"
    assert type(kind()).__name__ == "Wrapped"
    contract.test_the_limit_truncates_and_counts_the_prefix(kind)
    contract.test_a_stop_string_ends_an_answer(kind)
