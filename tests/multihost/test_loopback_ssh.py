"""Jobs by a real ssh to a real sshd on this machine, by whoever runs the tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.launching import LIMIT_S, Job, await_true, free_ports
from tests.support.loopback_sshd import Sshd

WORLD = """
    import os
    import numpy as np
    import probe
    import syncvar as sv

    probe.note("met", total=float(sv.all_reduce(np.full(1000, sv.rank() + 1.0))[0]), way=os.environ.get("SSH_CONNECTION", ""))
"""


@pytest.fixture
def serve(tmp_path_factory):
    servers = []

    def begin(**named):
        servers.append(Sshd(tmp_path_factory.mktemp("sshd"), free_ports(), **named))
        return servers[-1]

    yield begin
    for one in servers:
        one.close()


def start(folder, sshd, *options, script=WORLD):
    (folder / "list").write_text(f"{sshd.place} slots=2\n")
    return Job(folder, script, options=(*sshd.ssh, "--hostfile", str(folder / "list"), *options))


@pytest.mark.slow
def test_ranks_are_started_by_the_ssh_of_this_user(serve, tmp_path):
    sshd = serve()
    job = start(tmp_path, sshd)
    assert job.wait(120) == 0, (job, sshd.log)
    met = job.events("met")
    assert [event["total"] for event in met] == [3.0, 3.0]
    assert all(event["way"].endswith(f" 127.0.0.1 {sshd.port}") for event in met), met


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["login", "host key", "port"])
def test_what_ssh_refuses_is_told_with_the_line_that_names_the_host(serve, tmp_path, wrong):
    sshd = serve(takes=wrong != "login")
    if wrong == "host key":
        sshd.known.write_text("")
    if wrong == "port":
        sshd.close()
    job = start(tmp_path, sshd)
    assert job.wait(120) == 69, (job, sshd.log)
    why = {
        "login": "the login is refused",
        "host key": "its host key is not known, or has changed",
        "port": "nobody listens for ssh there",
    }[wrong]
    assert f"127.0.0.1 ({tmp_path}/list:1): {why}" in job.err
    assert not job.events("began")


@pytest.mark.slow
def test_the_copy_of_a_script_goes_through_ssh_and_is_removed(serve, tmp_path):
    sshd = serve()
    source = tmp_path / "source"
    source.mkdir()
    job = start(
        source,
        sshd,
        "--stage",
        script=f"import sys; sys.path.insert(0, {str(source)!r})\nimport probe\nprobe.note('met', file=__file__)\n",
    )
    assert job.wait(120) == 0, (job, sshd.log)
    places = {event["file"] for event in job.events("met")}
    assert len(places) == 1, job
    (place,) = places
    assert not place.startswith(str(tmp_path)), job
    assert place.endswith("/stage/script.py"), job
    await_true(lambda: not Path(place).parent.exists(), what="the end of the copy")


CALLER = """
    import os
    import numpy as np
    import syncvar as sv

    class Model:
        def __init__(self, weights):
            self.weights = weights

    def work(model):
        assert os.environ["SSH_CONNECTION"]
        return Model(model.weights * 2 + sv.rank())

    def fails():
        raise OSError(28, "no space", f"file-{sv.rank()}")

    if __name__ == "__main__":
        large = Model(np.zeros(2_000_000))
        results = sv.run(work, hosts="list", args=(large,), pickle=True)
        print([(type(one) is Model, float(one.weights.max())) for one in results])
        try:
            sv.run(fails, hosts="list", workers=1)
        except sv.RankFailed as failure:
            print(repr(failure.__cause__), failure.__cause__.filename)
"""


@pytest.mark.slow
def test_a_program_calls_a_function_on_hosts_and_gets_its_results(serve, tmp_path):
    sshd = serve()
    (tmp_path / "list").write_text(f"{sshd.place} slots=2\n")
    (tmp_path / "script.py").write_text(textwrap.dedent(CALLER))
    _, command = sshd.ssh[:2]
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={**os.environ, "SYNCVAR_LAUNCH_SSH": command, "SYNCVAR_LAUNCH_SSH_ALWAYS": "1"},
    )
    assert ended.returncode == 0, (ended.stderr, sshd.log)
    assert ended.stdout.splitlines() == [
        "[(True, 0.0), (True, 1.0)]",
        "OSError(28, 'no space') file-0",
    ]
