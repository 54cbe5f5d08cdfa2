"""`sv.run(…, engine="ray")` and `engine="dask"` on clusters that are started here; see install_ray_dask.sh."""

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from tests.support.paths import RANK_SCRIPTS

ENGINES = [pytest.param("ray", marks=pytest.mark.ray), pytest.param("dask", marks=pytest.mark.dask)]
LIMITS = {
    "LOST_AFTER_S": 5,
    "SUSPECT_AFTER_S": 2,
    "HEARTBEAT_INTERVAL_S": 0.2,
    "RESTART_DELAY_S": 0.1,
    "RENDEZVOUS_TIMEOUT_S": 60,
}
BEGIN = """
import json, sys
import syncvar as sv
import engine_jobs as jobs

def tell(**what):
    print("told", json.dumps(what), flush=True)

def failure(*arguments, **keywords):
    try:
        return sv.run(*arguments, **keywords)
    except sv.SyncvarError as error:
        return f"{type(error).__name__}: {error}"
"""
CLUSTERS = {
    "ray": """
import ray
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
""",
    "dask": """
from distributed import Client, LocalCluster
cluster = LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None)
client = Client(cluster)
""",
}
END = {"ray": "ray.shutdown()\n", "dask": "client.close()\ncluster.close()\n"}
SOON_S = 30.0  # until the processes of a cluster that was ended are gone


@pytest.fixture
def session(tmp_path, nothing_left_behind):
    """Run a program that has a cluster and starts ranks on it; return what it told."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SYNCVAR_LAUNCH", "RAY_", "DASK_"))
    }
    environ |= {f"SYNCVAR_{name}": str(value) for name, value in LIMITS.items()}
    environ |= {
        "PYTHONPATH": str(RANK_SCRIPTS),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }

    def run(text, engine="", *, own=False):
        begin, end = ("", "") if own else (CLUSTERS[engine], END[engine])
        body = textwrap.indent(begin + textwrap.dedent(text) + end, "    ")
        path = tmp_path / "session.py"
        path.write_text(
            f"{BEGIN}\ndef inner(scale):\n    return jobs.who(scale)\n\nif __name__ == '__main__':\n{body}"
        )
        done = subprocess.run(
            [sys.executable, str(path)],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told = {}
        for line in re.findall(r"^told (.*)$", done.stdout, re.MULTILINE):
            told |= json.loads(line)
        return told

    yield run
    until = time.monotonic() + SOON_S
    while nothing_left_behind.own_processes() and time.monotonic() < until:
        time.sleep(0.05)  # the processes of a cluster end by themselves, some after the program


@pytest.mark.parametrize("engine", ENGINES)
def test_results_come_by_rank_of_functions_of_a_module_and_of_the_script(engine, session):
    told = session(
        f"tell(first=sv.run(jobs.who, 4, (2,), engine={engine!r}), second=sv.run(inner, 3, (1,), engine={engine!r}))\n",
        engine,
    )
    assert [one[:6] for one in told["first"]] == [
        [rank, 4, rank, 0, 1, [0, 8, 16]] for rank in range(4)
    ]
    assert [one[:6] for one in told["second"]] == [
        [rank, 3, rank, 0, 1, [0, 3, 6]] for rank in range(3)
    ]
    assert len({one[6] for one in told["first"]}) == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failure_comes_back_with_its_traceback_and_the_engine_is_as_before(engine, session):
    told = session(
        f"tell(failed=failure(jobs.fails, 3, (2,), engine={engine!r}), then=sv.run(jobs.who, 3, (1,), engine={engine!r}))\n",
        engine,
    )
    assert told["failed"].startswith("RankFailed: rank 2 on "), told
    assert "failed with exit code 1\nTraceback (most recent call last):\n" in told["failed"]
    assert told["failed"].strip().endswith("ValueError: of its own")
    assert "syncvar/runner" not in told["failed"]
    assert len(told["then"]) == 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rank", [0, 2])
def test_who_is_killed_is_lost_to_the_others_and_all_are_started_again_where_that_is_asked_for(
    rank, engine, session, tmp_path
):
    told = session(
        f"""
        tell(failed=failure(jobs.is_killed, 3, ({rank}, {str(tmp_path)!r}), engine={engine!r}))
        tell(again=sv.run(jobs.is_killed, 3, ({rank}, {str(tmp_path)!r}), engine={engine!r}, max_restarts=1))
        """,
        engine,
    )
    assert told["failed"].startswith(f"RankFailed: rank {rank} on "), told
    assert f"its {'actor' if engine == 'ray' else 'Dask worker'} " in told["failed"]
    assert sorted(path.name for path in tmp_path.glob("lost-*")) == [
        f"lost-{other}" for other in range(3) if other != rank
    ]
    for path in tmp_path.glob("lost-*"):
        assert path.read_text().startswith(f"{rank} rank {rank} "), path.read_text()
    assert told["again"] == [1, 1, 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_computes_on_and_on_is_ended_at_the_time_limit(engine, session, tmp_path):
    told = session(
        f"tell(late=failure(jobs.computes_on_and_on, 2, ({str(tmp_path)!r},), engine={engine!r}, timeout=6), then=sv.run(jobs.who, 4, (1,), engine={engine!r}))\n",
        engine,
    )
    assert (
        told["late"]
        == "RankFailed: the job failed with exit code 124\nthe time limit of 6 s passed"
    )
    assert len(told["then"]) == 4, "all places are free again"


@pytest.mark.parametrize("engine", ENGINES)
def test_digits_ends_with_the_weights_that_it_has_under_syncvar_launch(engine, session):
    told = session(
        f"tell(here=sv.run(jobs.digits, 2)[0], there=sv.run(jobs.digits, 3, engine={engine!r})[0])\n",
        engine,
    )
    weights = {
        place: re.search(r"weights_sha256=(\w{64})", told[place])[1] for place in ("here", "there")
    }
    assert weights["here"] == weights["there"]
    assert "workers=3" in told["there"]


@pytest.mark.ray
def test_an_actor_writes_to_the_caller_and_runs_in_its_main_thread(session):
    told = session(
        """
        import time
        class Heard:  # Ray writes here, from a thread of its own, when it has read what actors write
            text = ""
            def __getattr__(self, name):
                return getattr(sys.__stdout__, name)
            def write(self, text):
                self.text += text
                return sys.__stdout__.write(text)
        sys.stdout = sys.stderr = heard = Heard()
        tell(main=sv.run(jobs.is_main_thread, 2, engine="ray"))
        sv.run(print, 2, ("from a rank",), engine="ray")
        until = time.monotonic() + 60
        while "from a rank" not in heard.text and time.monotonic() < until:
            time.sleep(0.05)
        tell(lines=[line for line in heard.text.splitlines() if line.endswith("from a rank")][:1])
        """,
        "ray",
    )
    assert told["main"] == [True, True]
    assert "(Actor pid=" in told["lines"][0]


@pytest.mark.ray
def test_more_ranks_than_a_cluster_of_ray_has_room_for(session):
    told = session(
        """
        import os
        os.environ["SYNCVAR_RENDEZVOUS_TIMEOUT_S"] = "3"
        tell(five=failure(jobs.who, 5, (1,), engine="ray"))
        os.environ["SYNCVAR_RENDEZVOUS_TIMEOUT_S"] = "60"
        tell(half=len(sv.run(jobs.who, 5, (1,), engine=sv.engines.Ray(cpus=0.5))))
        """,
        "ray",
    )
    assert told["five"].startswith(
        "LaunchError: Ray has not had room for 5 ranks, each with {'CPU': 1.0}, within 3 s: the cluster has CPU 4, "
    ), told
    assert told["half"] == 5


@pytest.mark.ray
def test_hosts_of_ray_meet_over_tcp(session, runtime_of_another_host):
    told = session(
        f"""
        import ray
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 2}})
        cluster.add_node(num_cpus=2, env_vars={{"XDG_RUNTIME_DIR": {runtime_of_another_host!r}}})
        ray.init(address=cluster.address)
        tell(who=sv.run(jobs.who, 4, (1,), engine="ray"))
        ray.shutdown()
        cluster.shutdown()
        """,
        own=True,
    )
    assert [one[:6] for one in told["who"]] == [
        [rank, 4, rank % 2, rank // 2, 2, [0, 4, 8]] for rank in range(4)
    ]


@pytest.fixture
def runtime_of_another_host(tmp_path):
    """A folder for sockets that the ranks of this host do not have: what poses as another host."""
    with tempfile.TemporaryDirectory(prefix="sv-") as made:
        yield made


@pytest.mark.dask
def test_fewer_workers_of_dask_than_ranks_are_refused(session):
    told = session("tell(five=failure(jobs.who, 5, (1,), engine='dask'))\n", "dask")
    assert re.match(
        r"LaunchError: 5 ranks need 5 workers of Dask at once, one each, and tcp://\S+ has 4: start more \(cluster.scale\(5\), or dask worker\)",
        told["five"],
    ), told


@pytest.mark.dask
def test_workers_of_dask_that_are_threads_of_one_process_are_refused(session):
    told = session(
        """
        from distributed import Client, LocalCluster
        with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
            tell(threads=failure(jobs.who, 2, (1,), engine=sv.engines.Dask(client)))
        """,
        own=True,
    )
    assert told["threads"].startswith(
        "LaunchError: 2 ranks were given 1 processes: each rank needs one of its own"
    ), told


@pytest.mark.dask
def test_hosts_of_dask_meet_over_tcp_and_named_workers_are_used(
    session, runtime_of_another_host, tmp_path
):
    file = str(tmp_path / "scheduler.json")
    told = session(
        f"""
        import os, subprocess
        from distributed import Client
        here, there = os.environ, {{**os.environ, "XDG_RUNTIME_DIR": {runtime_of_another_host!r}}}
        dask = [sys.executable, "-m", "dask"]
        running = [subprocess.Popen([*dask, "scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", {file!r}])]
        for name, environ in (("here", here), ("there", there)):
            for number in range(2):
                words = ["worker", "--scheduler-file", {file!r}, "--nthreads", "1", "--no-dashboard", "--name", name + str(number)]
                running.append(subprocess.Popen([*dask, *words], env=environ))
        with Client(scheduler_file={file!r}) as client:
            client.wait_for_workers(4, timeout=60)
            tell(all=sv.run(jobs.who, 4, (1,), engine="dask"))
            tell(two=sv.run(jobs.who, 2, (1,), engine=sv.engines.Dask(client, workers=["here1", "there0"])))
        for one in running:
            one.terminate()
        for one in running:
            one.wait(120)
        """,
        own=True,
    )
    assert sorted(one[:6] for one in told["all"]) == [
        [rank, 4, rank % 2, rank // 2, 2, [0, 4, 8]] for rank in range(4)
    ]
    assert [one[:6] for one in told["two"]] == [
        [rank, 2, 0, rank, 2, [0, 2, 4]] for rank in range(2)
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_cluster_one_is_there_for_the_time_of_the_call(engine, session):
    told = session(f"tell(who=sv.run(jobs.who, 2, (1,), engine={engine!r}))\n", own=True)
    assert [one[:2] for one in told["who"]] == [[0, 2], [1, 2]]


@pytest.mark.ray
def test_a_caller_that_is_killed_takes_its_ranks_along(session, tmp_path):
    told = session(
        f"""
        import os, subprocess, time
        text = "import engine_jobs as jobs, syncvar as sv; sv.run(jobs.computes_on_and_on, 2, ({str(tmp_path)!r},), engine='ray')"
        child = subprocess.Popen([sys.executable, "-c", text], env={{**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}})
        until = time.monotonic() + 60
        pids = []
        while len(pids) < 2 and child.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
            pids = [name.removeprefix("began-") for name in os.listdir({str(tmp_path)!r}) if name.startswith("began-")]
        child.kill()
        child.wait()
        while any(os.path.exists(f"/proc/{{pid}}") for pid in pids) and time.monotonic() < until:
            time.sleep(0.05)
        tell(began=len(pids), stay=[pid for pid in pids if os.path.exists(f"/proc/{{pid}}")])
        tell(then=len(sv.run(jobs.who, 2, (1,))))  # which sweeps the folder that killed processes leave
        """,
        "ray",
    )
    assert (told["began"], told["stay"], told["then"]) == (2, [], 2)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpus": 0}, "cpus must be a number above 0, not 0"),
        ({"cpus": True}, "cpus must be a number above 0, not True"),
        (
            {"strategy": "NEAR"},
            "strategy must be PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, not 'NEAR'",
        ),
    ],
    ids=["none", "boolean", "strategy"],
)
def test_wrong_options_of_ray_are_refused(options, words):
    import syncvar as sv

    with pytest.raises(sv.ConfigError) as raised:
        sv.engines.Ray(**options)
    assert str(raised.value) == f"{words} [SV-101]"
