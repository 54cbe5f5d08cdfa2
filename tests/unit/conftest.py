"""Fixtures of the tests of one module."""

from tests.support.fixtures import foreign_link  # noqa: F401
