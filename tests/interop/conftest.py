"""Fixtures of the tests with other libraries and launchers."""

import importlib
import warnings

import pytest

from tests.support.fixtures import launch, runtime  # noqa: F401


@pytest.fixture(scope="module")
def torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torch")
        importlib.import_module("syncvar.torch")
    module.set_num_threads(1)
    return module
