"""Fixtures of the tests of several ranks."""

from tests.support.fixtures import foreign_link, launch, runtime  # noqa: F401
