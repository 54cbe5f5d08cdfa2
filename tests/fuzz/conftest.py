"""Fixtures of the random tests."""

from tests.support.fixtures import launch  # noqa: F401
