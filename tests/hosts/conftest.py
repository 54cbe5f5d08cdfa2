import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))  # for `launching`, also where only this folder is collected

from testbed import Hosts, why_none  # noqa: E402

_WHY = pytest.StashKey()


def pytest_collection_modifyitems(config, items):
    """Leave out what needs hosts where there can be none, and say why: the same tests run wherever they can."""
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    if own and (why := why_none()):
        config.stash[_WHY] = why
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in own]


def pytest_terminal_summary(terminalreporter, config):
    if _WHY in config.stash:
        terminalreporter.write_line(f"tests/hosts were left out: {config.stash[_WHY]}")


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Three hosts, for all tests that leave them as they were."""
    made = Hosts(tmp_path_factory.mktemp("hosts"), 3)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(request):
    """No test leaves a process on any host."""
    yield
    if "hosts" in request.fixturenames:
        left = request.getfixturevalue("hosts").await_quiet()
        assert not left, left
