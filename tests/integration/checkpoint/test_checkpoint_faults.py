"""Disks that fail, files that change, two jobs in one folder: CheckpointError on every rank, and what was there before is as it was."""

import contextlib
import errno
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.checkpoint.folder import Disk
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks

CONFIG = RuntimeConfig(collective_timeout_s=60.0)
OPERATIONS = ("create", "write", "sync", "close", "rename", "sync_folder")


def world(count, fn, *arguments):
    results = run_ranks(count, fn, *arguments, config=CONFIG, timeout_s=120.0)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def failure(fn, *arguments, **keywords):
    try:
        fn(*arguments, **keywords)
    except sv.CheckpointError as error:
        return error
    return None


def acting_rank():
    return int(threading.current_thread().name.rpartition("-")[2])


class FaultyDisk:
    """Fails one operation, of one rank and one kind of file; counts what is done, and sees that no file is synced twice."""

    def __init__(self, monkeypatch, operation, rank, file, number=errno.EIO, at_byte=None):
        self.failed, self.synced, self.written = 0, [], {}
        kinds, lock, last = {}, threading.Lock(), {}

        def wrap(name):
            original = getattr(Disk, name)

            def call(*arguments):
                me = acting_rank()
                if name == "create":
                    last[me] = "manifest" if arguments[1].startswith("manifest") else "shard"
                descriptor_kind = last.get(me)
                if name in ("write", "sync", "close") and me in kinds:
                    descriptor_kind = kinds[me]
                hit = name == operation and me == rank and descriptor_kind == file and me in last
                if hit and name == "write" and at_byte is not None:
                    with lock:
                        done = self.written.get(me, 0)
                    if done + arguments[1].nbytes <= at_byte:
                        hit = False
                    elif done < at_byte:  # a disk that is full writes what fits
                        arguments = (arguments[0], arguments[1][: at_byte - done])
                        hit = False
                if hit:
                    self.failed += 1
                    if name == "close":
                        original(*arguments)
                    raise OSError(number, os.strerror(number))
                if name == "sync":
                    self.synced.append((me, arguments[0]))
                made = original(*arguments)
                if name == "create":
                    kinds[me] = descriptor_kind
                    self.written[me] = 0
                if name == "write":
                    self.written[me] = self.written.get(me, 0) + made
                return made

            return staticmethod(call)

        for name in OPERATIONS:
            monkeypatch.setattr(Disk, name, wrap(name))


def save_old(path):
    def fn():
        v = sv.Variable(np.arange(1000.0), name="v")
        own = sv.Variable(float(sv.rank()), name="own", synchronization="NONE")
        sv.Checkpoint(v=v, own=own).save(path)

    world(2, fn)


def save_new(path, *, goes_on=True):
    """Save other values on two ranks; return each rank's error."""

    def fn():
        v = sv.Variable(np.arange(1000.0) + 5, name="v")
        own = sv.Variable(sv.rank() + 5.0, name="own", synchronization="NONE")
        calls = current().world.next_call
        error = failure(sv.Checkpoint(v=v, own=own).save, path)
        made = current().world.next_call - calls
        if goes_on:
            assert float(sv.all_reduce(1.0)) == 2.0, "training goes on"
        return error, made

    return world(2, fn)


def restored(path, count=2):
    def fn():
        v = sv.Variable(np.zeros(1000), name="v")
        own = sv.Variable(-1.0, name="own", synchronization="NONE")
        sv.Checkpoint(v=v, own=own).restore(path)
        return float(v.numpy()[0]), float(v.numpy()[999]), float(own)

    return world(count, fn)


OLD, NEW = [(0.0, 999.0, 0.0), (0.0, 999.0, 1.0)], [(5.0, 1004.0, 5.0), (5.0, 1004.0, 6.0)]


@pytest.mark.parametrize(("rank", "file"), [(0, "shard"), (1, "shard"), (0, "manifest")])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_fails(tmp_path, monkeypatch, operation, rank, file):
    path = str(tmp_path / "c")
    save_old(path)
    before = sorted(os.listdir(path))
    with monkeypatch.context() as patch:
        disk = FaultyDisk(patch, operation, rank, file)
        results = save_new(path)
    assert disk.failed == 1
    assert [type(error) for error, _ in results] == [sv.CheckpointError] * 2
    assert {calls for _, calls in results} == {2 if file == "shard" else 3}, (
        "the same number of calls on every rank"
    )
    own, told = results[rank][0], results[1 - rank][0]
    assert os.strerror(errno.EIO) in str(own)
    assert f"rank {rank}" in str(told)
    is_visible = file == "manifest" and operation == "sync_folder"
    assert ("may not" in str(own)) == is_visible or file == "shard"
    if is_visible:
        assert restored(path) == NEW, "the manifest is there, and whole"
    else:
        assert sorted(os.listdir(path)) == before, "nothing is left"
        assert restored(path) == OLD
    assert save_new(path)[0][0] is None
    assert restored(path) == NEW
    assert len(os.listdir(path)) == 3


def test_a_failed_sync_is_not_tried_again(tmp_path, monkeypatch):
    syncs = []

    def sync(descriptor):
        syncs.append(acting_rank())
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(Disk, "sync", staticmethod(sync))
    assert all(error is not None for error, _ in save_new(str(tmp_path / "c")))
    assert sorted(syncs) == [0, 1]


@pytest.mark.parametrize("part", range(12))
def test_the_disk_is_full(tmp_path, monkeypatch, part):
    path = str(tmp_path / "c")
    save_old(path)
    before = sorted(os.listdir(path))
    sizes = {name: os.path.getsize(tmp_path / "c" / name) for name in before}
    rank, file, size = [
        (0, "shard", sizes[before[1]]),
        (1, "shard", sizes[before[2]]),
        (0, "manifest", sizes["manifest.json"]),
    ][part % 3]
    at_byte = [0, 1, size // 2, size - 1][part // 3]
    with monkeypatch.context() as patch:
        disk = FaultyDisk(patch, "write", rank, file, errno.ENOSPC, at_byte)
        errors = [error for error, _ in save_new(path)]
    assert disk.failed == 1
    assert all("No space left" in str(error) for error in errors)
    assert sorted(os.listdir(path)) == before
    assert restored(path) == OLD


def test_free_space_is_looked_at_first(tmp_path, monkeypatch):
    path = str(tmp_path / "c")
    save_old(path)
    monkeypatch.setattr(Disk, "free_bytes", staticmethod(lambda folder: 4000))
    monkeypatch.setattr(Disk, "create", staticmethod(lambda *given: pytest.fail("a file was made")))
    for error, _ in save_new(path):
        assert "room for 4000 bytes" in str(error)
    assert restored(path) == OLD


def test_a_limit_on_the_size_of_files(tmp_path):
    """A real refusal of the kernel: EFBIG, without being root."""
    script = """
import resource, signal, sys
import numpy as np, syncvar as sv
checkpoint = sv.Checkpoint(v=sv.Variable(np.ones(100_000)))
path = checkpoint.save(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
checkpoint.v.assign(np.zeros(100_000))
try:
    checkpoint.save(path)
except sv.CheckpointError as error:
    print(error)
checkpoint.restore(path)
print(checkpoint.v.numpy().sum())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    error, value = done.stdout.splitlines()
    assert "File too large" in error
    assert value == "100000.0"
    assert len(os.listdir(tmp_path / "c")) == 2


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for error, calls in save_new(str(tmp_path / "file" / "c")):
        assert "cannot be made" in str(error)
        assert calls == 1


# -- files that change -----------------------------------------------------------------------------


def shards(path):
    return sorted(name for name in os.listdir(path) if name.startswith("shard"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def swap(path):
    first, second = (path / name for name in shards(path))
    first.rename(path / "x")
    second.rename(first)
    (path / "x").rename(second)


def other_manifest(path, other):
    (path / "manifest.json").write_bytes((other / "manifest.json").read_bytes())


DAMAGE = {
    "a bit of a value": lambda path, _: flip(path / shards(path)[1], -20),
    "a bit of a header": lambda path, _: flip(path / shards(path)[0], 30),
    "a bit of a length": lambda path, _: flip(path / shards(path)[0], 0),
    "a bit of the manifest": lambda path, _: flip(path / "manifest.json", 500),
    "a truncated shard": lambda path, _: os.truncate(path / shards(path)[1], 1000),
    "a longer shard": lambda path, _: os.truncate(path / shards(path)[1], 100_000),
    "an empty shard": lambda path, _: os.truncate(path / shards(path)[0], 0),
    "a missing shard": lambda path, _: (path / shards(path)[1]).unlink(),
    "swapped shards": lambda path, _: swap(path),
    "the manifest of another run": other_manifest,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_seen_on_every_rank_and_nothing_is_restored(tmp_path, what):
    path, other = tmp_path / "c", tmp_path / "other"
    save_old(str(path))
    save_old(str(other))
    DAMAGE[what](path, other)

    def fn():
        v = sv.Variable(np.full(1000, 7.0), name="v")
        own = sv.Variable(-1.0, name="own", synchronization="NONE")
        error = failure(sv.Checkpoint(v=v, own=own).restore, str(path))
        assert float(v.numpy().sum()) == 7000.0
        assert float(own) == -1.0
        assert float(sv.all_reduce(1.0)) == 2.0
        return [error]

    errors = [error for (error,) in world(2, fn)]
    assert all(isinstance(error, sv.CheckpointError) for error in errors), errors
    if what != "a bit of the manifest":
        assert all(
            isinstance(error, sv.Corrupt) and error.expected != error.actual for error in errors
        ), errors


def newer_version(path):
    from syncvar.checkpoint.checkpoint_format import digest_of

    body = json.loads((path / "manifest.json").read_text()) | {"version": 2}
    del body["digest"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    (path / "manifest.json").write_text(json.dumps(body | {"digest": digest_of(canonical)}))


# What is done to a checkpoint, and what the warning says. Bits within values are seen by restore only.
NOT_WHOLE = {
    "cut": (lambda path: os.truncate(path / "manifest.json", 100), "the manifest is not JSON"),
    "empty": (lambda path: os.truncate(path / "manifest.json", 0), "the manifest is not JSON"),
    "a bit": (lambda path: flip(path / "manifest.json", -3), ""),
    "newer": (newer_version, "the manifest has version 2, and this syncvar reads version 1"),
    "missing": (lambda path: (path / shards(path)[1]).unlink(), "has no regular file shard-"),
    "short": (lambda path: os.truncate(path / shards(path)[0], 50), "has 50 bytes instead of"),
}


@pytest.mark.parametrize("what", NOT_WHOLE)
def test_restore_latest_takes_the_one_before_those_that_are_damaged(tmp_path, caplog, what):
    damage, words = NOT_WHOLE[what]

    def fn():
        v = sv.Variable(np.zeros(100), name="v", aggregation="MEAN")
        with sv.CheckpointManager(sv.Checkpoint(v=v), tmp_path, keep=3) as manager:
            for step in (5, 8, 6, 7):
                v.assign(np.full(100, float(step)))
                manager.save(step)
            sv.barrier()
            if sv.rank() == 0:
                for path in manager.checkpoints[1:]:
                    damage(pathlib.Path(path))
            sv.barrier()
            found = manager.restore_latest(), manager.latest, float(v.numpy()[0])
            refusal = failure(manager._checkpoint.restore, tmp_path / "step-0000000007")
            manager.save(9)
            sv.barrier()
            return found, str(refusal), [int(path[-1]) for path in manager.checkpoints]

    folders = [str(tmp_path / f"step-000000000{step}") for step in (8, 6, 7)]
    for found, refusal, kept in world(2, fn):
        assert found == (folders[0], folders[0], 8.0)
        assert folders[2] in refusal, "restore(path) names the folder"
        assert sorted(kept) == [6, 7, 8, 9], "the damaged ones do not count"
    warnings = [line for line in caplog.messages if "another one is damaged" in line]
    assert len(warnings) == 2, "rank 0 warns of each"
    for folder in folders[1:]:
        assert any(folder in line.split(": ", 1)[1] and words in line for line in warnings), (
            warnings
        )


def test_a_directory_of_damaged_checkpoints_is_not_an_empty_one(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step-000000000{step}").mkdir()
        (tmp_path / f"step-000000000{step}" / "manifest.json").write_text("{")

    def fn():
        manager = sv.CheckpointManager(sv.Checkpoint(v=sv.Variable(0.0, name="v")), tmp_path)
        return [failure(manager.restore_latest), manager.latest, len(manager.checkpoints)]

    for error, latest, count in world(2, fn):
        assert f"no checkpoint in {tmp_path} can be restored" in str(error)
        assert all(f"step-000000000{step} cannot be read" in str(error) for step in (1, 2))
        assert (latest, count) == (None, 2)


@pytest.mark.parametrize("at", range(12))
def test_any_flipped_bit_of_a_shard_is_seen(tmp_path, at):
    path = tmp_path / "c"
    sv.Checkpoint(v=sv.Variable(np.arange(5.0)), n=3).save(path)
    shard = path / shards(path)[0]
    flip(shard, at * os.path.getsize(shard) // 12)
    with pytest.raises(sv.Corrupt):
        sv.Checkpoint(v=sv.Variable(np.zeros(5)), n=0).restore(path)


def test_a_link_in_place_of_a_shard_is_not_followed(tmp_path):
    path = tmp_path / "c"
    sv.Checkpoint(n=3).save(path)
    shard = path / shards(path)[0]
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(sv.CheckpointError, match="cannot be opened"):
        sv.Checkpoint(n=0).restore(path)


HOSTILE = ("a/../../../b", "-rf", ".hidden", "..", "x" * 128)


def test_no_name_reaches_outside_the_folder(tmp_path):
    """Files are named by a random identity and a rank: names of variables and keys stand in the manifest only."""
    folder = tmp_path / "in" / "c"
    variables = {
        f"v{number}": sv.Variable(float(number), name=name) for number, name in enumerate(HOSTILE)
    }
    state = {"../../../etc/x": 1.5, "a/b": np.arange(3.0), "~/x": 2, "\u202e": 3}
    checkpoint = sv.Checkpoint(state=state, **variables)
    checkpoint.save(folder)
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert made[:3] == ["in", "in/c", "in/c/manifest.json"]
    assert len(made) == 4
    assert made[3].startswith("in/c/shard-")
    for variable in variables.values():
        variable.assign(-1.0)
    checkpoint.restore(folder)
    assert [float(one) for one in variables.values()] == [0.0, 1.0, 2.0, 3.0, 4.0]
    for name in ("../x y", "%2e%2e%2fx", "a\n", "", "x" * 129, "\u0430", "a\0b"):
        with pytest.raises(sv.ConfigError, match="a variable's name must be"):
            sv.Variable(0.0, name=name)


@pytest.mark.parametrize(
    "where", ["../outside/", "{folder}/../outside/", "./../outside/", "sub/../../outside/"]
)
def test_a_manifest_that_names_files_elsewhere_opens_none(tmp_path, where, monkeypatch):
    """Even where the other file is whole and its digest right."""
    from syncvar.checkpoint.checkpoint_format import digest_of

    path = tmp_path / "c"
    sv.Checkpoint(v=sv.Variable(np.arange(5.0)), n=3).save(path)
    (shard,) = shards(path)
    (tmp_path / "outside").mkdir()
    (path / "sub").mkdir()
    (path / shard).rename(tmp_path / "outside" / shard)
    text = (path / "manifest.json").read_text()
    body = json.loads(text.replace(shard, where.format(folder=path) + shard))
    assert body != json.loads(text)
    del body["digest"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    (path / "manifest.json").write_text(json.dumps(body | {"digest": digest_of(canonical)}))
    opened = []

    def recording(name, *arguments, plain=os.open, **keywords):
        opened.append(str(name))
        return plain(name, *arguments, **keywords)

    monkeypatch.setattr(os, "open", recording)
    with pytest.raises(sv.CheckpointError):
        sv.Checkpoint(v=sv.Variable(np.zeros(5)), n=0).restore(path)
    assert opened
    assert not [name for name in opened if "outside" in name]


def test_a_link_of_another_user_on_the_way_is_not_followed(tmp_path, foreign_link):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "own").symlink_to(tmp_path / "theirs")
    sv.Checkpoint(n=3).save(tmp_path / "own" / "c")  # one's own links are followed
    foreign_link(tmp_path / "link", tmp_path / "theirs")
    for path in (tmp_path / "link", tmp_path / "link" / "new" / "c"):
        with pytest.raises(
            sv.CheckpointError,
            match=r"nothing is written to \S*/link: it is a link that user \d+ has made",
        ):
            sv.Checkpoint(n=3).save(path)
    with (
        sv.CheckpointManager(sv.Checkpoint(n=2), tmp_path / "link") as manager,
        pytest.raises(sv.CheckpointError, match="is a link"),
    ):
        manager.save(1)
    assert os.listdir(tmp_path / "theirs") == ["c"]


@pytest.mark.parametrize(
    "make",
    [lambda path: path.mkdir(), lambda path: os.mkfifo(path), lambda path: path.write_text("{}")],
)
def test_a_manifest_that_is_none(tmp_path, make):
    make(tmp_path / "manifest.json")
    with pytest.raises(sv.CheckpointError):
        sv.Checkpoint(n=0).restore(tmp_path)


def test_memory_is_not_taken_for_what_a_manifest_claims(tmp_path):
    path = tmp_path / "c"
    sv.Checkpoint(v=sv.Variable(np.arange(5.0)), n=3).save(path)
    text = (path / "manifest.json").read_text()
    from syncvar.checkpoint.checkpoint_format import digest_of

    body = json.loads(text)
    del body["digest"]
    stored = body["entries"]["v"]["value"]
    stored["shape"], stored["pieces"][0][2] = [1 << 45], 1 << 45
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    (path / "manifest.json").write_text(json.dumps(body | {"digest": digest_of(canonical)}))
    with pytest.raises(sv.CheckpointError, match="does not fit"):
        sv.Checkpoint(v=sv.Variable(np.zeros(5)), n=0).restore(path)


# -- two jobs --------------------------------------------------------------------------------------

HOLDER = """
import fcntl, json, os, sys, time
import syncvar as sv
manager = sv.CheckpointManager(sv.Checkpoint(n=1), sys.argv[1])
manager.save(0)
print("holds", flush=True)
sys.stdin.readline()
if sys.argv[2] == "die":
    os.kill(os.getpid(), 9)
manager.close()
"""


@contextlib.contextmanager
def holder(folder, end):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", ["die", "close"])
def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path, caplog, end):
    with holder(tmp_path, end) as first:
        with sv.CheckpointManager(sv.Checkpoint(n=2), tmp_path) as manager:
            with pytest.raises(
                sv.CheckpointError,
                match=f"in use: process {first.pid} on .*, started .*, holding it since",
            ):
                manager.save(1)
            assert manager.latest.endswith("step-0000000000"), (
                "looking and restoring are not refused"
            )
            assert manager.restore_latest() == manager.latest
            first.stdin.write("\n")
            first.stdin.flush()
            first.wait(120)
            assert manager.save(1) == manager.latest
        assert not (tmp_path / "lock.json").exists()
    said = [
        record.getMessage() for record in caplog.records if "left locked" in record.getMessage()
    ]
    assert len(said) == (end == "die"), (
        "a lock that was left is explained, one that was given back is not"
    )
    assert all(f"process {first.pid}" in one for one in said)


def test_a_second_save_in_the_same_folder_is_refused_while_the_first_is_pending(tmp_path):
    first, second = sv.Checkpoint(n=1), sv.Checkpoint(n=2)
    pending = first.save(tmp_path / "c", async_op=True)
    with pytest.raises(sv.CheckpointError, match="in use"):
        second.save(tmp_path / "c")
    pending.wait()
    second.save(tmp_path / "c")
    first.restore(tmp_path / "c")
    assert first.n == 2


def test_a_lock_of_nonsense_is_taken_over(tmp_path):
    (tmp_path / "lock.json").write_text("[" * 5000)
    sv.Checkpoint(n=1).save(tmp_path)
    assert not (tmp_path / "lock.json").exists()
