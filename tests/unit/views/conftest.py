"""The made-up groups of the tests of records."""

from tests.unit.observe.conftest import make_group

__all__ = ["make_group"]
