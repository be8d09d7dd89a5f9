"""A small run of the quickstart's task, undisturbed, that tests of this folder compare with."""

from __future__ import annotations

import pytest
from benchmarks.kill import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A folder with a warm start and an undisturbed run."""
    return Lab(tmp_path_factory.mktemp("lab")).undisturbed()
