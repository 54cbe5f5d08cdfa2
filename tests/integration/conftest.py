"""Fixtures of the tests of several ranks."""

from tests.support.fixtures import (  # noqa: F401
    foreign_link,
    jobs_of_this_test,
    launch,
    runtime,
)
