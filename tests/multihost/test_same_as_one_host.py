"""What a job on several hosts shows and ends with is what it is on one: each job runs both ways, and the words are compared."""

import json
import os
import re
import signal
import socket
import time

import pytest
from test_several_hosts import at, start

from syncvar.core.exit_status import NOTICE_ECHO_S
from tests.support.launching import Job, check_bound

pytestmark = pytest.mark.slow

WRITES = """
    import os, sys, time
    import numpy as np
    import syncvar as sv

    sv.barrier()
    print("printed by", sv.rank(), flush=True)
    os.write(1, b"raw \\xff\\x00\\x1b[31m of %d\\n" % sv.rank())
    os.write(2, b"complaint of %d\\n" % sv.rank())
    os.write(1, b"z" * 9000 + b"\\n")
    for number in range(3):
        sys.stdout.write(f"\\rprogress {number}")
        sys.stdout.flush()
    sys.stdout.write("\\nno end")
    sys.stdout.flush()
    sv.barrier()
"""

ENDS = {
    "exits": ("sys.exit(3)", 3),
    "raises": ("raise ValueError('of rank 2')", 1),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "leaves": ("os._exit(0)", 70),
}
ENDING = """
    import os, signal, sys
    import numpy as np
    import probe
    import syncvar as sv

    def last_of_all(total):
        print("before", flush=True)
        {end}

    total = sv.all_reduce(np.ones(3))
    if sv.rank() == 2:
        last_of_all(total)
    sv.recv(2)
"""


def both(hosts, folder, script, *options, **named):
    """Return a job on this machine and one on two others, with two ranks and one, at their ends."""
    for name in ("here", "there"):
        (folder / name).mkdir()
    jobs = [
        Job(folder / "here", script, workers=3, options=options, **named),
        start(hosts, folder / "there", script, at(hosts, 0, 2, 1), *options, **named),
    ]
    for job in jobs:
        job.wait(120)
    return jobs


def told(job, hosts):
    """Return the launcher's words without what differs from run to run: names, times, and how far the others had come."""
    text = job.report.replace(str(job.folder), "FOLDER")
    for name in (*hosts.names, socket.gethostname()):
        text = text.replace(f" on {name} ", " on HOST ")
    text = re.sub(
        r"syncvar: ranks? [0-9, -]+ ha(s|ve) been waiting .*\n", "", text
    )  # on a slow machine, while they meet
    text = re.sub(r"after [0-9.]+ s( in all_reduce\(.*? in <module>)?", "after S s", text)
    text = re.sub(r"job-\w+ \(syncvar explain \w+\)", "job-ID", text)
    text = re.sub(r"--ssh '.*' -H \S+ ", "", text)
    return re.sub(r"(?<=others:\n)(  ranks? [0-9, -]+: .*PeerLost.*\n)+", "  PeerLost\n", text)


def test_lines_colours_and_logs(hosts, tmp_path):
    for job in (pair := both(hosts, tmp_path, WRITES, "--color", "always", "--log-dir", "logs")):
        assert job.process.returncode == 0, job
    here, there = pair
    assert sorted(here.out.split("\n")) == sorted(there.out.split("\n"))
    assert sorted(here.err.split("\n")) == sorted(there.err.split("\n"))
    assert "\x1b[" in there.out
    names = sorted(path.name for path in (here.folder / "logs").iterdir())
    assert "rank-2.out" in names
    assert sorted(path.name for path in (there.folder / "logs").iterdir()) == names
    for name in names:
        assert (there.folder / "logs" / name).read_bytes() == (
            here.folder / "logs" / name
        ).read_bytes()


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_rank(hosts, tmp_path, name):
    end, code = ENDS[name]
    here, there = both(hosts, tmp_path, ENDING.format(end=end))
    assert (here.process.returncode, there.process.returncode) == (code, code), there
    assert told(here, hosts) == told(there, hosts)


STUBBORN = """
    import signal, time
    import probe
    import syncvar as sv

    signal.signal(signal.SIGTERM, lambda *_: probe.note("ignored"))
    sv.barrier()
    probe.note("met")
    time.sleep(60)
"""


def test_f14_the_second_ctrl_c_kills_on_all_hosts(hosts, tmp_path):
    job = start(hosts, tmp_path, STUBBORN, at(hosts, 0, 2, 1), "--grace", "30")
    job.await_events("met", 3, limit_s=120)
    job.send(signal.SIGINT)
    job.await_events("ignored", 3)
    sent = job.send(signal.SIGINT)
    assert job.wait(120) == 130, job
    check_bound("F14 over hosts", job.ended - sent, 0.5)
    assert not hosts.await_quiet(), "and nothing is left anywhere"


def test_f13_the_first_ctrl_c_lets_all_ranks_end_in_order(hosts, tmp_path):
    script = """
        import probe
        import syncvar as sv
        sv.barrier()
        try:
            probe.note("met")
            sv.recv((sv.rank() + 1) % sv.world_size())
        finally:
            probe.note("cleaned")
    """
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        folder = tmp_path / str(code)
        folder.mkdir()
        job = start(hosts, folder, script, at(hosts, 0, 2, 1))
        job.await_events("met", 3, limit_s=120)
        sent = job.send(number)
        assert job.wait(120) == code, job
        check_bound(f"F13 over hosts, {code}", job.ended - sent, 3.0)
        assert len(job.events("cleaned")) == 3


def test_the_time_limit_ends_all_hosts(hosts, tmp_path):
    here, there = both(hosts, tmp_path, STUBBORN, "--timeout", "12", "--grace", "3")
    assert (here.process.returncode, there.process.returncode) == (124, 124), there
    assert told(here, hosts) == told(there, hosts)


def test_a_process_that_is_no_python_ends_with_its_own_code(hosts, tmp_path):
    job = Job(
        tmp_path,
        workers=3,
        prefix=hosts.prefix,
        options=(*hosts.ssh, "-H", at(hosts, 0, 2, 1)),
        target=[
            "--no-python",
            "sh",
            "-c",
            'echo "$SYNCVAR_RANK of $WORLD_SIZE"; exit $((SYNCVAR_RANK / 2 * 5))',
        ],
    )
    assert job.wait(120) == 5, job
    assert sorted(job.out.split()) == sorted(
        ["[0]", "0", "of", "3", "[1]", "1", "of", "3", "[2]", "2", "of", "3"]
    )


def test_totals_and_the_names_of_torch(hosts, tmp_path):
    script = """
        import os, socket, time
        import numpy as np
        import probe
        import syncvar as sv

        for _ in range(300):
            sv.all_reduce(np.ones(2))
        names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        probe.note("torch", **{name: os.environ[name] for name in names})
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.create_server(master) if sv.rank() == 0 else socket.socket() as end:  # as torch.distributed does
            sv.barrier()
            if sv.rank():
                end.settimeout(20)
                end.connect(master)
            sv.barrier()
    """
    job = start(
        hosts,
        tmp_path,
        script,
        at(hosts, 0, 2, 1),
        "--torch-env",
        f"--stats={tmp_path / 'totals.json'}",
    )
    assert job.wait(120) == 0, job
    told = json.loads((tmp_path / "totals.json").read_text())
    assert (told["workers"], told["missing"]) == (3, [])
    assert {row["call"]: row["calls"] for row in told["rows"]} == {
        "all_reduce(sum)": 300,
        "barrier": 2,
    }
    torch = {event["rank"]: event for event in job.events("torch")}
    assert {
        (one["MASTER_ADDR"], one["WORLD_SIZE"], one["GROUP_WORLD_SIZE"]) for one in torch.values()
    } == {(hosts.names[1], "3", "2")}
    assert len({one["MASTER_PORT"] for one in torch.values()}) == 1
    places = [
        tuple(
            int(torch[rank][name])
            for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        for rank in range(3)
    ]
    assert places == [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1)]


def test_an_agent_told_to_end_ends_its_ranks_in_order_and_the_second_time_at_once(hosts, tmp_path):
    for name, script, code in (
        ("plain", STUBBORN.replace("signal.signal(", "lambda *_: ("), 143),
        ("stubborn", STUBBORN, 70),
    ):
        folder = tmp_path / name
        folder.mkdir()
        job = start(hosts, folder, script, at(hosts, 0, 2, 1))
        job.await_events("met", 3, limit_s=120)
        os.kill(hosts.agent(2), signal.SIGTERM)
        if name == "stubborn":
            job.await_events("ignored", 1, rank=2)
            assert job.process.poll() is None
            time.sleep(NOTICE_ECHO_S)  # else both are one notice
            os.kill(hosts.agent(2), signal.SIGTERM)
        assert job.wait(120) == code, job
        assert f"rank 2 on {hosts.names[2]}" in job.err
