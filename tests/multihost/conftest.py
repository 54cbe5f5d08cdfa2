from pathlib import Path

import pytest

from tests.support.host_testbed import Hosts, why_none
from tests.support.loopback_sshd import why_no_sshd


def pytest_collection_modifyitems(config, items):
    """Leave out what needs hosts where there can be none, and say why: the same tests run wherever they can."""
    folder = str(Path(__file__).parent)
    here = [item for item in items if str(item.path).startswith(folder)]
    for is_loopback, name, ask in (
        (False, "tests on real hosts", why_none),
        (True, "tests by a real ssh on this machine", why_no_sshd),
    ):
        own = [item for item in here if (item.path.stem == "test_loopback_ssh") is is_loopback]
        if own and (why := ask()):
            config.syncvar_left_out.append(f"{len(own)} {name} were left out: {why}")
            config.hook.pytest_deselected(items=own)
            items[:] = [item for item in items if item not in own]


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Three hosts, for all tests that leave them as they were."""
    made = Hosts(tmp_path_factory.mktemp("hosts"), 3)
    yield made
    made.close()


@pytest.fixture
def own_hosts(tmp_path_factory):
    """Three hosts, for a test that does not leave them as they were."""
    made = Hosts(tmp_path_factory.mktemp("own"), 3)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(request):
    """No test leaves a process on any host."""
    yield
    if "hosts" in request.fixturenames:
        left = request.getfixturevalue("hosts").await_quiet()
        assert not left, left
