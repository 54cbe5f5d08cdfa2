"""torch's own distributed_test.py over syncvar and over gloo: `pytest -m foreign`, which takes about half an hour."""

import pytest
from torch_suite import behind, run_suite

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(3600)]
NAMED_GLOO = {"test_get_backend"}  # compares the name of the backend


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_passes_over_gloo_passes_over_syncvar(size):
    results = {(backend, size): run_suite(size, backend) for backend in ("gloo", "syncvar")}
    assert set(behind(results, size)) <= NAMED_GLOO
