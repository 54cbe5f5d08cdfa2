"""Calls of `sv.run` and their results go to other hosts and back in parts."""

import os

import pytest

from syncvar.core.errors import WireError
from syncvar.core.progress_line import ProgressLine
from syncvar_launcher.hosts import file_transfer
from syncvar_launcher.hosts.file_transfer import (
    Collection,
    call_parts,
    forget_results,
    keep_result,
    result_parts,
    stage,
    without_call,
)
from syncvar_launcher.options.hostfile import Host


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(file_transfer, "CALL_PART_NBYTES", 4)


@pytest.fixture
def folders(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    return there, here


@pytest.mark.parametrize("data", [b"", b"123", b"1234", b"12345", bytes(range(100))])
def test_results_arrive_whole_and_are_taken_once(folders, data):
    there, here = folders
    (there / "result.0").write_bytes(data)
    (there / "of.2").touch()
    (there / "result.1.part").write_bytes(b"half")
    environ = {"SYNCVAR_RESULT_DIR": str(here)}
    for name, part, is_last in result_parts(there):
        assert len(part) <= 4
        keep_result(environ, name, part, is_last=is_last)
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        "result.0": data,
        "of.2": b"",
    }
    assert list(result_parts(there)) == []
    assert [path.name for path in there.iterdir()] == ["result.1.part"]


@pytest.mark.parametrize(
    "name", ["../x", "result.1/../../x", "outcome", "result.", "result.1.part", ""]
)
def test_only_results_are_kept(folders, name):
    _, here = folders
    with pytest.raises(WireError):
        keep_result({"SYNCVAR_RESULT_DIR": str(here)}, name, b"", is_last=True)
    with pytest.raises(WireError):
        keep_result({}, "result.0", b"", is_last=True)
    assert list(here.iterdir()) == []


def test_a_start_after_another_one_forgets_its_errors_and_halves(folders):
    _, here = folders
    environ = {"SYNCVAR_RESULT_DIR": str(here)}
    keep_result(environ, "result.0", b"half", is_last=False)
    keep_result(environ, "error.1", b"old", is_last=True)
    forget_results(environ)
    keep_result(environ, "result.0", b"new", is_last=True)
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {"result.0": b"new"}
    forget_results({})


def test_a_caller_that_has_gone_is_no_error(folders):
    _, here = folders
    keep_result({"SYNCVAR_RESULT_DIR": str(here / "gone")}, "result.0", b"x", is_last=True)


def test_a_call_is_read_whole_and_is_no_variable_of_an_agent():
    descriptor = os.memfd_create("call")
    try:
        os.write(descriptor, b"0123456789")
        environ = {"SYNCVAR_CALL_FD": str(descriptor), "SYNCVAR_RESULT_DIR": "/x", "PATH": "/bin"}
        assert list(call_parts(environ)) == [b"0123", b"4567", b"89"]
        assert without_call(environ) == {"PATH": "/bin"}
        assert list(call_parts({})) == []
    finally:
        os.close(descriptor)


class SlowRemote:
    """A host whose connection takes half a MiB at each look, and that answers after the last byte."""

    loss_reason = ""

    def __init__(self, name):
        self.host = Host(name)
        self.staged = ""
        self.unsent_nbytes = 0

    def send(self, kind, **fields):
        self.unsent_nbytes += len(fields.get("data", b"")) + 1

    def take(self):
        self.unsent_nbytes = max(0, self.unsent_nbytes - (1 << 19))
        return [] if self.unsent_nbytes else [{"kind": "staged", "folder": "/there", "reason": ""}]


def test_the_copy_shows_how_many_bytes_each_host_has(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_bytes(b"x" * (2 << 20))
    monkeypatch.setattr("syncvar.core.progress_line._EVERY_S", 0.0)
    monkeypatch.setattr(
        "syncvar_launcher.hosts.file_transfer.poll_hosts",
        lambda remotes, _limit_s: ([one.take() for one in remotes], []),
    )
    texts = []
    entries = (("script.py", "file", 0o600, ""),)
    collection = Collection(tmp_path, entries, 2 << 20, ())
    assert (
        stage([SlowRemote("a"), SlowRemote("b")], collection, ProgressLine(texts.append, 0.0)) == {}
    )
    assert texts[0] == (
        "--stage: 0 of 2 hosts have the copy; a has 0.0 of 2.0 MiB (0 %), b has 0.0 of 2.0 MiB (0 %)"
    )
    shares = [int(text.partition("(")[2].partition(" ")[0]) for text in texts]
    assert shares == sorted(shares)
    assert any(40 <= share <= 60 for share in shares)
