"""A job of four ranks on three hosts, in a phase of the table of faults, for tests that hurt its last host or the way to it.

Rank 0 is on the launcher's host, rank 1 on the second, ranks 2 and 3 share memory on the third. Phases: R rendezvous (rank 0
does not come), C the third host computes and the others wait in a call, X all are inside a call that rank 0 holds back,
K rank 3 is in the middle of writing its part of a checkpoint. Survivors are the ranks of the other two hosts.
"""

import syncvar as sv
from tests.support.launching import Job, check_bound, last_exception

TIMES = 10  # of each fault, over its phases
PATHS = ({}, {"SYNCVAR_ENCRYPTION": "control-only"}, {"SYNCVAR_TRANSPORT": "zmq"})
"""Settings for each path of data between hosts: lanes with TLS, as a user has who sets none, plain lanes, ZeroMQ links."""
SCRIPT = """
import os, sys, time
import probe

phase, folder = sys.argv[1], sys.argv[2]
rank = probe.RANK


def body():
    import numpy as np
    import syncvar as sv

    if phase == "R":
        if rank == 0:
            probe.note("ready")
            probe.gate("never")
        import syncvar.bootstrap.context as context

        meet = context.join_handshake
        context.join_handshake = lambda *arguments: (probe.note("ready"), meet(*arguments))[1]
    sv.init()
    assert sv.all_reduce(1) == 4
    solo = sv.new_group([0])
    if phase == "C" and rank >= 2:
        probe.note("ready")
        probe.gate("never")
    if phase == "X" and rank == 0:
        probe.note("ready")
        while True:  # computes; a call that needs nobody tells it of the loss
            sv.barrier(group=solo)
            time.sleep(0.01)
    if phase == "K":
        from syncvar.checkpoint.folder import Disk

        checkpoint = sv.Checkpoint(n=1, own=sv.Variable(np.full(1000, float(rank)), name="own", synchronization="NONE"))
        checkpoint.save(folder)
        checkpoint.n = 2
        if rank == 3:
            Disk.write = staticmethod(lambda *_: probe.note("ready") or probe.gate("never"))
        else:
            probe.note("ready")
        checkpoint.save(folder)
    probe.note("ready")
    sv.all_reduce(np.ones(100_000))


try:
    body()
except BaseException as error:
    probe.raised(error)
    raise
"""


DEFAULTS = "defaults"
"""A case beside the phases: inside a call, with the settings that a user has who sets none."""


def slots(hosts):
    """Return the value of -H for a job of this module."""
    return f"{hosts.names[0]}:1,{hosts.names[1]}:1,{hosts.names[2]}:2"


def path_of(number):
    """Return the settings of one of several jobs: they take the paths in turn."""
    return PATHS[number % len(PATHS)]


def begin(
    hosts, folder, phase, script=SCRIPT, arguments=(), *, lost_after_s=15.0, path=PATHS[0], **named
):
    """Start a job and wait until all its ranks are in a phase.

    Only where silence is what is to be noticed, `lost_after_s` is the short one of the tests: processes that start, on a
    machine with more to do, may be silent for so long.
    """
    folder.mkdir()
    if phase == DEFAULTS:
        phase = "X"
        (folder / "defaults.toml").write_text("[launch]\ntimeout = 120\n")
        named["config"] = folder / "defaults.toml"
    workers = named.setdefault("workers", 4)
    named["env"] = {"SYNCVAR_LOST_AFTER_S": str(lost_after_s), **path, **named.get("env", {})}
    job = Job(
        folder,
        script,
        prefix=hosts.prefix,
        arguments=[phase, str(folder / "checkpoint"), *arguments],
        options=(*hosts.ssh, "-H", slots(hosts)),
        **named,
    )
    try:
        job.await_events("ready", workers, limit_s=120)
    except BaseException:
        job.close()
        raise
    return job


def over_and_over(hosts, tmp_path, phase, phases, **named):
    """Yield jobs in a phase, one after the other: so many that all phases together make ten.

    They take the paths in turn: three jobs of a phase take all. After each nothing is left.
    """
    for number in range(1 if phase == DEFAULTS else -(-TIMES // len(phases))):
        job = begin(hosts, tmp_path / f"job{number}", phase, path=path_of(number), **named)
        try:
            yield job
        finally:
            job.close()
        left = hosts.await_quiet()
        assert not left, (left, job)


def phases(letters):
    """Return the cases of a fault: its phases, and the one with the settings of a user who sets none."""
    return [*letters, DEFAULTS]


def survivors(phase):
    """Return the ranks of the first two hosts that are in a call: rank 0 does not come to the rendezvous."""
    return [1] if phase == "R" else [0, 1]


def grace_s(phase):
    """Return how much later than the last exception a job may end in a case: ranks that are told to end are given so long."""
    return 12.0 if phase == DEFAULTS else 2.5


def silence_s(phase):
    """Return `lost_after_s` for a test of silence."""
    return 15.0 if phase == DEFAULTS else 3.0


def bounded(phase, bound):
    """Return which of a row's two bounds holds in a case."""
    return bound[phase != DEFAULTS]


def check_survivors(job, injected, name, phase, bound, reason="", ranks=None, lost=(2, 3)):
    """Check that the survivors have raised PeerLost in time for this reason, and that the job has ended in time."""
    last, raised = last_exception(job, survivors(phase) if ranks is None else ranks)
    bound_s = bounded(phase, bound)
    for event in raised.values():
        assert event["error"] == "PeerLost", job
        assert event["lost"] in lost, job
        assert reason in event["reason"], job
    check_bound(name, last - injected, bound_s)
    check_bound(f"{name} to the end of the job", job.ended - injected, bound_s + grace_s(phase))


def check_old_checkpoint(job):
    """Check that the checkpoint before is whole."""
    whole = sv.Checkpoint(n=0)
    whole.restore(job.folder / "checkpoint")
    assert whole.n == 1, "the checkpoint before is whole"
