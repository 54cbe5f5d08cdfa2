"""Training on real hosts: to the very weights of one host, with a host that is lost and ranks that are told to end on the way."""

import os
import re
import signal
import uuid

import pytest
from test_several_hosts import at, start

from tests.integration.restart.test_restarts import digests, training
from tests.support.launching import Job

pytestmark = pytest.mark.slow

DIGITS = ["-m", "syncvar.examples.digits", "--epochs", "8"]


def weights(job):
    assert job.wait(120) == 0, job
    (found,) = re.findall(r"weights_sha256=([0-9a-f]{64})", job.out)
    return found


def test_digits_ends_with_the_weights_of_one_host_on_even_and_uneven_hosts(hosts, tmp_path):
    folders = [tmp_path / name for name in ("one", "even", "uneven")]
    for folder in folders:
        folder.mkdir()
    one = weights(Job(folders[0], target=DIGITS, workers=1))
    for folder, slots in zip(folders[1:], [(0, 2, 2), (1, 3, 1)], strict=True):
        lines = [
            f"{name} slots={count}\n"
            for name, count in zip(hosts.names, slots, strict=True)
            if count
        ]
        (folder / "hosts").write_text("".join(lines))
        job = Job(
            folder,
            target=DIGITS,
            workers=sum(slots),
            prefix=hosts.prefix,
            options=(*hosts.ssh, "--hostfile", str(folder / "hosts")),
        )
        assert weights(job) == one
        assert f"workers={sum(slots)} " in job.out


def over(hosts):
    """Return what launches a script on two other hosts, with two ranks and one."""

    def launch(script, *, workers, arguments=(), options=()):
        folder = hosts.folder / f"job-{uuid.uuid4().hex}"
        folder.mkdir()
        assert workers == 3
        return start(hosts, folder, script, at(hosts, 0, 2, 1), *options, arguments=arguments)

    return launch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the digest of the training on one host, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = training(lambda script, **named: Job(folder, script, **named), folder / "c", 3)
    assert job.wait() == 0, job
    (whole,) = digests(job)
    return whole


@pytest.mark.parametrize(
    "faults",
    [{"0": [2, "compute", 9]}, {"0": [0, "after shard", 7], "1": [1, "meet", -1]}],
    ids=str,
)
def test_a_rank_killed_on_another_host_and_started_again_ends_with_the_weights_of_one_host(
    hosts, tmp_path, undisturbed, faults
):
    job = training(
        over(hosts), tmp_path / "c", 3, faults, options=("--max-restarts", str(len(faults)))
    )
    assert job.wait(120) == 0, job
    assert digests(job) == {undisturbed}, job
    assert len(job.events("final")) == 3
    assert {event["step"] for event in job.events("restored")} == {7} if len(faults) == 1 else {3}
    starts = {(event["restarts"], event["generation"]) for event in job.events("starts")}
    assert starts == {(str(number), str(number)) for number in range(len(faults) + 1)}


@pytest.mark.parametrize("who", ["launcher", "rank", "agent", "all"])
def test_an_engine_that_takes_the_machines_back_lets_the_ranks_save(
    hosts, tmp_path, undisturbed, who
):
    first = training(over(hosts), tmp_path / "c", 3, pause_s=0.25)
    first.await_events("running", 3, limit_s=120)
    agents = [hosts.agent(1), hosts.agent(2)]
    if who in ("rank", "all"):
        first.kill_rank(2, signal.SIGTERM)
    if who in ("agent", "all"):
        os.kill(agents[1], signal.SIGTERM)
    if who == "all":
        for rank in (0, 1):
            first.kill_rank(rank, signal.SIGTERM)
        os.kill(agents[0], signal.SIGTERM)
    if who in ("launcher", "all"):
        first.send(signal.SIGTERM)
    assert first.wait(120) == 75, first
    (step,) = {event["step"] for event in first.events("stops")}
    assert 6 <= step < 23
    second = training(over(hosts), tmp_path / "c", 3)
    assert second.wait(120) == 0, second
    assert {event["step"] for event in second.events("restored")} == {step}
    assert digests(second) == {undisturbed}, second


def test_a_host_that_was_wanted_back_and_is_there_again_is_logged_in_to_anew(
    hosts, tmp_path, undisturbed
):
    job = training(over(hosts), tmp_path / "c", 3, pause_s=0.25, options=("--max-restarts", "1"))
    job.await_events("running", 3, limit_s=120)
    agent = hosts.agent(2)
    os.kill(agent, signal.SIGTERM)
    assert job.wait(120) == 0, job
    assert digests(job) == {undisturbed}, job
    (step,) = {event["step"] for event in job.events("stops")}
    assert {event["step"] for event in job.events("restored")} == {step}
    assert "all ranks stopped as asked" in job.err.split("started again 1 time:\n")[1]
