"""Whether a job shares memory, and the reason where it does not."""

import pytest

from syncvar.errors import ConfigError
from syncvar_launcher import options as options_module
from syncvar_launcher.options import core_count, parse
from syncvar_launcher.sharing import why_no_arena


def chosen(*argv, **environ):
    return parse([*argv, "-m", "x"], environ, "/")


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_shared_where_several_ranks_are_on_a_proven_processor(machine):
    assert why_no_arena(chosen("-n", "2"), machine) == ""


def test_reasons():
    assert why_no_arena(chosen("-n", "1"), "x86_64") == "a single rank sends nothing"
    assert why_no_arena(chosen("-n", "2", SYNCVAR_TRANSPORT="zmq"), "x86_64") == "SYNCVAR_TRANSPORT=zmq asks for it"
    reason = why_no_arena(chosen("-n", "2"), "aarch64")
    assert reason.startswith("unix sockets; no arena because aarch64 may show stores to other cores in another order")


def test_a_size_too_small_for_the_ranks():
    with pytest.raises(ConfigError, match="too small for 8 ranks on a host: they need at least 18874368"):
        why_no_arena(chosen("-n", "8", SYNCVAR_ARENA_BYTES="16777216"), "x86_64")
    assert why_no_arena(chosen("-n", "8", SYNCVAR_ARENA_BYTES="16777216", SYNCVAR_TRANSPORT="zmq"), "x86_64")


@pytest.mark.parametrize("text", ["16777215", "0", "-1", "1e12", "256M"])
def test_a_size_that_is_none(text):
    with pytest.raises(ConfigError, match="SYNCVAR_ARENA_BYTES"):
        chosen(SYNCVAR_ARENA_BYTES=text)


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (1, 1), (3, 3), (4, 4), (100, 4)])
def test_a_container_s_quota_counts_where_cores_are_counted(monkeypatch, quota, cores):
    monkeypatch.setattr(options_module, "core_quota", lambda: quota)
    monkeypatch.setattr(options_module.os, "sched_getaffinity", lambda pid: {3, 1, 8, 9})
    assert core_count() == cores
    assert chosen("-n", "auto").workers == cores
    assert options_module.usable_cores() == (1, 3, 8, 9), "but nothing is bound because of it"
