"""After a call that the ranks do not make alike every rank has been told, and every later call is right: on every path.

F30, F31: all pairs of different calls, made by one rank and by half of the ranks, and long random orders.
"""

import re

import pytest

from tests.support.paths import RANK_SCRIPTS

PROGRAM = [str(RANK_SCRIPTS / "mismatched_calls.py")]
LAYOUTS = {
    "shm": {"workers": 4},
    "links": {"workers": 4, "env": {"SYNCVAR_TRANSPORT": "zmq"}},
    "two hosts": {"workers": 4, "options": ["--fake-hosts", "2"]},
    "three hosts": {"workers": 5, "options": ["--fake-hosts", "3"]},
}
# It is not the time that is tested here: a busy machine may take longer for a call than the test profile allows.
ENVIRONMENT = {"SYNCVAR_REPORT_AFTER_S": "0.02", "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name == "two hosts" else name
        for name in LAYOUTS
    ]
)
def refusals(request, launch):
    """Run the program in a layout; returns how many calls were refused, the same on all ranks."""

    def run(*arguments, limit_s=120.0):
        layout = dict(LAYOUTS[request.param])
        env = {**ENVIRONMENT, **layout.pop("env", {})}
        options = ["--timeout", f"{limit_s:g}", *layout.pop("options", ())]
        job = launch(
            target=PROGRAM, arguments=list(map(str, arguments)), env=env, options=options, **layout
        )
        assert job.wait(limit_s) == 0, str(job)
        told = [int(number) for number in re.findall(r"refused (\d+), the slowest", job.out)]
        assert len(told) == layout["workers"], str(job)
        assert len(set(told)) == 1, str(job)
        return told[0]

    return run


def test_some_calls_on_which_the_ranks_disagree(refusals):
    assert refusals(1, 60, 3) > 10


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_many_calls_on_which_the_ranks_disagree(refusals):
    assert refusals(2, 2000, 5, limit_s=400) > 300


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_pair_of_different_calls(refusals):
    assert refusals("pairs", 1, limit_s=400) == 18 * 17 * 2
