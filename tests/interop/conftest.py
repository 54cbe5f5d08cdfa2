"""Fixtures of the tests with other libraries and launchers."""

from tests.support.fixtures import launch, runtime  # noqa: F401
