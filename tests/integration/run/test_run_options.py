"""`sv.run` takes the options of `syncvar-launch`, with the same meaning."""

import os
import subprocess

import numpy as np
import pytest

import syncvar as sv
from syncvar.runner.local import checked_options


def world():
    return sv.rank(), int(sv.all_reduce(1))


def pushes():
    strategy = sv.ParameterServerStrategy()
    with strategy.scope():
        total = sv.Variable([0.0, 0.0], name="total", aggregation="SUM")
    strategy.run(lambda: total.assign_add([1.0, 2.0]))
    sv.barrier()
    return total.numpy().tolist()


def speaks(word):
    print(word, sv.rank())
    return os.environ.get("OF_THE_CALL"), os.environ.get("OF_THE_CALLER")


def test_auto_is_a_worker_for_each_usable_core(capfd):
    cores = len(os.sched_getaffinity(0))
    results = sv.run(world, workers="auto")
    assert results == [(rank, len(results)) for rank in range(len(results))]
    assert 1 <= len(results) <= cores


def test_servers_hold_variables():
    assert sv.run(pushes, workers=2, servers=1) == [[2.0, 4.0]] * 2


def test_variables_output_and_logs_are_those_of_the_call(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_CALLER", "kept")
    logs = tmp_path / "logs"
    results = sv.run(
        speaks, workers=2, args=("hear",), env={"OF_THE_CALL": "a b"}, output=[1], log_dir=logs
    )
    assert results == [("a b", "kept")] * 2
    assert capsys.readouterr().out == "[1] hear 1\n"
    assert sorted(path.name for path in logs.glob("*.out")) == ["rank-0.out", "rank-1.out"]
    assert (logs / "rank-0.out").read_text() == "hear 0\n"
    assert "OF_THE_CALL" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": "many"}, "workers must be a positive integer or \"auto\", not 'many'"),
        ({"servers": -1}, "servers must be a whole number of at least 0, not -1"),
        (
            {"hosts": []},
            "hosts must be a list such as ['node1:4', 'node2:4'], or the path of a host file",
        ),
        ({"hosts": 5}, "hosts must be a list such as"),
        (
            {"env": {"A": 1}},
            "env must be a dict of texts, such as env={'NAME': 'value'}, not {'A': 1}",
        ),
        ({"env": {"A=B": ""}}, "env has 'A=B', which cannot be a variable"),
        ({"output": 1.5}, 'output must be "all", "first", "failed", "none" or ranks, not 1.5'),
        ({"log_dir": ""}, "log_dir must be a path, not ''"),
        ({"engine": "dask", "servers": 1}, 'servers= is an option of engine="local": leave it out'),
        ({"engine": "ray", "workers": "auto"}, 'workers="auto" counts the cores of this host'),
    ],
    ids=str,
)
def test_options_of_a_wrong_type_start_nothing(arguments, words, monkeypatch):
    def refuse(*_arguments, **_keywords):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("syncvar.runner.engines.engine_of", refuse)
    with pytest.raises(sv.ConfigError) as raised:
        sv.run(world, **arguments)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"output": "fist"},
            "--output: must be one of all, first, failed, none, or ranks such as 0,3-5",
        ),
        ({"hosts": "no/such/file"}, "no/such/file: No such file or directory"),
        ({"env": {"SYNCVAR_RANK": "1"}}, "SYNCVAR_RANK is set by the launcher"),
    ],
    ids=["output", "hosts", "env"],
)
def test_what_the_launcher_refuses_is_raised(arguments, words, capfd):
    with pytest.raises(sv.ConfigError) as raised:
        sv.run(world, **arguments)
    assert words in str(raised.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sv.run(world, n_jobs=2), "write workers="),
        (lambda: sv.run(world, out="all"), 'write output="all"'),
        (
            lambda: sv.map(world, [1]),
            r"write sv.run\(fn, workers=4\), in which each worker takes items",
        ),
        (lambda: sv.Pool(2), r"write sv.run\(fn, workers=4\)"),
    ],
    ids=["n_jobs", "out", "map", "Pool"],
)
def test_words_of_other_libraries_are_answered(call, words):
    with pytest.raises((TypeError, AttributeError), match=words):
        call()


def test_hosts_are_a_list_or_a_file():
    others = {"servers": 0, "env": None, "output": None, "log_dir": None}
    listed = checked_options(None, None, 0, {**others, "hosts": ("a:2", "b")})
    assert listed.command_line() == ["--hosts=a:2,b"]
    named = checked_options(3, 2, 1, {**others, "hosts": "hosts.txt"})
    assert named.command_line() == [
        "--workers=3",
        "--timeout=2.0",
        "--max-restarts=1",
        "--hostfile=hosts.txt",
    ]


def squares(values):
    print("on a host")
    return sv.host_count(), sv.rank(), (values**2).sum()


def fails_on_a_host():
    if sv.rank() == 1:
        raise KeyError("on a host")
    sv.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["auto", "spawn"])
def test_calls_go_to_agents_of_hosts_and_results_come_back(how, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SYNCVAR_LAUNCH_START_METHOD", how)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    values = np.arange(3_000_000.0)  # of several messages
    for hosts in (["localhost:2"], tmp_path / "hosts"):
        results = sv.run(squares, hosts=hosts, args=(values,))
        assert results == [(1, 0, (values**2).sum()), (1, 1, (values**2).sum())]
    assert capsys.readouterr().out.count("on a host") == 4
    (back, _) = sv.run(lambda: values, hosts=["localhost:2"], env={"OF_THE_CALL": "1"})
    assert (back == values).all()
    with pytest.raises(sv.RankFailed) as raised:
        sv.run(fails_on_a_host, hosts=["localhost:2"])
    assert raised.value.__cause__.args == ("on a host",)
