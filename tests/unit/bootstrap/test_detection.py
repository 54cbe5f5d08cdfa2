"""What torchrun's variables and TF_CONFIG tell a process: read, checked, and compared where both do. Others: test_launch_env.py."""

import json

import pytest

from syncvar.bootstrap.launch_env.detection import launcher_info, unknown_identity_reason
from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError

TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def tf(index, workers=("a:1", "a:2", "b:1", "b:2"), kind="worker", **cluster):
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": list(workers)} | cluster, "task": {"type": kind, "index": index}}
        )
    }


def test_torchrun():
    told = launcher_info(TORCH)
    assert (told.rank, told.world_size, told.local_rank, told.local_world_size) == (3, 4, 1, 2)
    assert (told.host_index, told.host_count, told.address, told.port) == (1, 2, "node0", 29500)
    assert told.restarts == 0
    assert launcher_info(TORCH | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2


def test_without_local_ranks_every_rank_is_its_own_host_unless_rank_0_is_here():
    far = {name: TORCH[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert launcher_info(far).host_count == 4
    here = launcher_info(far | {"MASTER_ADDR": "127.0.0.1"})
    assert (here.host_count, here.local_rank, here.local_world_size) == (1, 3, 4)


def test_tf_config():
    told = launcher_info(tf(2))
    assert (told.rank, told.world_size, told.local_rank, told.local_world_size) == (2, 4, 0, 2)
    assert (told.host_index, told.host_count, told.address, told.port) == (1, 2, "a", 1)
    chief = launcher_info(tf(0, ("b:1",), kind="worker", chief=["a:9"]))
    assert (chief.rank, chief.world_size, chief.address, chief.port) == (1, 2, "a", 9)
    assert launcher_info(tf(0)).run == launcher_info(tf(1)).run, "the same for all ranks of a run"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"MASTER_ADDR": "x", "MASTER_PORT": "1"},
        {"TF_CONFIG": " "},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 0}}'},
    ],
)
def test_what_says_nothing_of_this_process(environ):
    assert launcher_info(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCH | {"RANK": "4"}, "RANK=4 is outside of 4"),
        (TORCH | {"RANK": "x"}, "RANK must be a non-negative integer"),
        (TORCH | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is outside of 2"),
        (TORCH | {"GROUP_RANK": "7"}, "GROUP_RANK=7"),
        (TORCH | {"RANK": "0"}, "contradicts RANK=0"),
        (TORCH | {"MASTER_PORT": "0"}, "MASTER_PORT has '0'"),
        (TORCH | {"MASTER_PORT": "70000"}, "must be 1 to 65535"),
        ({"TORCHELASTIC_RUN_ID": "r", "RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be read"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG cannot be read"),
        (tf(4), "no task worker 4"),
        (tf(True), "no task worker True"),
        (tf(0, kind="evaluator"), "only chief and worker"),
        (
            tf(0, ps=["p:1", "q:1"]),
            "leave TF_CONFIG out, and write syncvar-launch --workers 4 --servers 2 SCRIPT",
        ),
        (tf(0, kind="ps", ps=["p:1"]), "only syncvar-launch starts parameter servers"),
        (tf(0, ("a",)), "'a' is no host:port"),
        (tf(0, ("a:x",)), "TF_CONFIG has 'x' for a port"),
        (tf(0, ("a:1", "b:1", "a:2")), "must be numbered host by host"),
        (
            TORCH | tf(2),
            "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE says rank 3, TF_CONFIG says rank 2",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(environ, words):
    with pytest.raises(ConfigError) as caught:
        launcher_info(environ)
    assert words in str(caught.value)


def test_sources_that_agree_are_taken_and_contradictions_with_the_launcher_are_not():
    assert launcher_info(TORCH | tf(3)).rank == 3
    me = RankEnvironment(3, 4, 1, 2, 1, 2, 0, "ipc:///x", "j")
    assert launcher_info(TORCH | tf(3), me).rank == 3
    other = RankEnvironment(2, 4, 0, 2, 1, 2, 0, "ipc:///x", "j")
    for environ, source in ((TORCH, "MASTER_ADDR"), (tf(3), "TF_CONFIG")):
        with pytest.raises(ConfigError, match="SYNCVAR_RANK") as caught:
            launcher_info(environ, other)
        assert source in str(caught.value)


def test_a_size_of_our_own_without_a_rank_is_no_world_of_one():
    reason = unknown_identity_reason({"SYNCVAR_WORLD_SIZE": "2"})
    assert reason.startswith("SYNCVAR_WORLD_SIZE=2 is set and SYNCVAR_RANK is not")
    assert "syncvar-launch --workers 2" in reason


def test_a_size_that_is_no_number_is_named():
    with pytest.raises(
        ConfigError, match="OMPI_COMM_WORLD_SIZE must be a non-negative integer, not 'many'"
    ):
        unknown_identity_reason({"OMPI_COMM_WORLD_SIZE": "many"})
    with pytest.raises(ConfigError, match="SLURM_LOCALID must be a non-negative integer, not '-1'"):
        launcher_info(
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_NODEID": "0",
                "SLURM_LOCALID": "-1",
                "SLURM_STEP_TASKS_PER_NODE": "2",
            }
        )


def test_a_size_above_1_without_an_address_is_no_world_of_one():
    for given, missing in (
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but MASTER_ADDR and MASTER_PORT are not"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, "but MASTER_PORT is not"),
    ):
        reason = unknown_identity_reason(given)
        assert f"are set, {missing}: set MASTER_ADDR and MASTER_PORT" in reason
    for given in (
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "first", "WORLD_SIZE": "2"},
    ):
        assert unknown_identity_reason(given) == ""
    assert (
        unknown_identity_reason({"RANK": "0", "WORLD_SIZE": "2", "SYNCVAR_WORLD_SIZE": "1"}) == ""
    )
