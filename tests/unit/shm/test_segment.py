"""Shared memory as workers have it: one memory for all, zeros at first, given back at last, errors in words and never a signal."""

import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import timeit

import numpy as np
import pytest

from syncvar.core.errors import (
    ConfigError,
    SharedMemoryFull,
    SharedMemoryUnavailable,
    SyncvarError,
    UsageError,
)
from syncvar.shm import segment, segment_file
from syncvar.shm.host_limits import Shortage
from syncvar.shm.segment import SharedSegment
from syncvar.shm.segment_file import create

MIB = 1 << 20


@pytest.fixture
def host():
    """Make segments; what was made is let go of at the end."""
    made, attached = [], []

    class Host:
        def create(self, shm_bytes=256 * MIB, ranks=2, **more):
            shm, reason = create(shm_bytes, ranks, 2, **more)
            assert reason == ""
            made.append(shm)
            return shm

        def attach(self, shm, rank=0, **more):
            attached.append(SharedSegment.attach(os.dup(shm.fd), rank, **more))
            return attached[-1]

        def one(self, shm_bytes=256 * MIB, ranks=2, **more):
            return self.attach(self.create(shm_bytes, ranks), **more)

    yield Host()
    for shm in attached:
        shm.close()
    for shm in made:
        shm.close()


def mappings():
    with open("/proc/self/maps") as file:
        return [line for line in file if "syncvar-shm" in line]


def held(shm):
    return os.fstat(shm.fd).st_blocks * 512


# What it is.


def test_the_header_says_what_it_is(host):
    made = host.create(1 << 40, 3, generation=7)
    shm = host.attach(made, 2)
    assert (made.form, made.notice) == ("memfd", "")
    assert (shm.shm_bytes, shm.local_world_size, shm.usable_cores) == (1 << 40, 3, 2)
    assert (shm.generation, shm.local_rank) == (7, 2)
    assert len(shm.memory) == 1 << 40
    assert shm.words[segment_file.MAGIC] == segment_file.MAGIC_VALUE
    assert held(made) < MIB, "it is as large as it says, and almost nothing of it is there"
    assert [shm.words[shm.table(rank) // 8] for rank in range(3)] == [0, 0, 0]


def test_nobody_can_cut_it_short(host):
    made = host.create()
    for size in (0, 4096, 512 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    host.attach(made).empty(MIB, np.uint8)[:] = 1


def test_two_attachments_are_one_memory(host):
    made = host.create()
    first, second = host.attach(made, 0), host.attach(made, 1)
    array = first.empty((100, 10), np.float64)
    array[:] = np.arange(1000).reshape(100, 10)
    offset = first.locate(array)
    seen = second.view(offset, 1000, np.float64)
    assert np.array_equal(seen, np.arange(1000))
    seen[5] = -1
    assert array[0, 5] == -1
    assert second.locate(array) is None, "it is not the second one's array"


def test_the_abort_word(host):
    made = host.create()
    shm = host.attach(made)
    assert not shm.is_aborted
    made.abort()
    assert shm.is_aborted
    made.close()
    made.close()
    made.is_aborted = False
    made.abort()


def test_odd_sizes_are_whole_pages(host):
    assert host.one(100 * MIB + 1).shm_bytes == 100 * MIB + 4096
    with pytest.raises(ConfigError, match="too small for 50 ranks"):
        create(100 * MIB, 50, 2)


# Fallbacks.


def test_a_file_without_a_name_where_there_is_no_memfd(host, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    made = host.create()
    assert made.form == "a file in /dev/shm"
    assert (
        made.notice
        == "shared memory: a file in /dev/shm instead of memfd (Function not implemented)"
    )
    assert os.fstat(made.fd).st_nlink == 0
    assert os.fstat(made.fd).st_mode & 0o777 == 0o600
    array = host.attach(made).empty(MIB, np.uint8)
    array[:] = 1
    assert host.attach(made, 1).view(2 * MIB, 1, np.uint64)[0] == 0


def test_the_job_s_directory_is_the_last_way(host, monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(segment_file, "_SHARED_FOLDER", str(tmp_path / "missing"))
    made = host.create(directory=str(tmp_path))
    assert made.form == "a file in the job's directory"
    assert "memfd (Function not implemented) or a file in" in made.notice
    assert list(tmp_path.iterdir()) == []
    shm = host.attach(made)
    for _ in range(3):
        array = shm.empty(40 * MIB, np.uint8)
        array[:] = 1
        del array
        offset = shm.allocate(40 * MIB)
        assert not shm.view(offset, 40 * MIB, np.uint8).any(), (
            "zeros, whether or not pages can be given back"
        )
        shm.release(offset)


def test_no_way_is_a_reason(monkeypatch, tmp_path):
    def refuse(name, flags):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(segment_file, "_SHARED_FOLDER", str(tmp_path / "missing"))
    shm, reason = create(256 * MIB, 2, 2, directory=str(tmp_path / "missing too"))
    assert shm is None
    assert reason.startswith("it cannot be made: memfd (Operation not permitted), a file in ")
    assert reason.endswith("a file in the job's directory (No such file or directory)")


def test_a_full_file_system_is_not_taken(host, monkeypatch):
    allocate, calls = os.posix_fallocate, []

    def refuse(fd, offset, nbytes):
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert (
        host.create().notice
        == "shared memory: a file in /dev/shm instead of memfd (No space left on device)"
    )


def test_an_old_system_that_does_not_know_a_flag(host, monkeypatch):
    make = os.memfd_create

    def old(name, flags):
        if flags & 8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    assert host.create().form == "memfd"


# What is refused.


def memfd(data, size, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
    fd = os.memfd_create("syncvar-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(
    magic=segment_file.MAGIC_VALUE, version=segment_file.LAYOUT_VERSION, size=16 * MIB, ranks=2
):
    return struct.pack("=8Q", magic, version, size, ranks, 2, 0, 0, 1)


@pytest.mark.parametrize(
    ("data", "size", "seals", "words"),
    [
        (b"", 0, 6, "no shared memory: it has 0 bytes"),
        (b"", 16 * MIB, 6, "no shared memory: it begins with other bytes"),
        (header(version=99), 16 * MIB, 6, "layout 99, this process reads 2: use the same version"),
        (header(size=32 * MIB), 16 * MIB, 6, "has 16777216 bytes, but its header says 33554432"),
        (header(), 16 * MIB, fcntl.F_SEAL_GROW, "not sealed: another process could shrink it"),
        (header(ranks=1), 16 * MIB, 6, "for 1 ranks, so there is no local rank 1"),
    ],
)
def test_what_is_no_shm_is_refused_and_closed(data, size, seals, words):
    fd = memfd(data, size, seals)
    with pytest.raises(SharedMemoryUnavailable, match=words):
        SharedSegment.attach(fd, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert mappings() == []


def test_another_processor_is_refused(host, monkeypatch):
    made = host.create()
    uname = os.uname()
    other = type("Uname", (), {"machine": "aarch64", "sysname": uname.sysname})
    monkeypatch.setattr(os, "uname", other)
    with pytest.raises(
        SharedMemoryUnavailable, match="other cores of aarch64 may see stores out of order"
    ):
        host.attach(made)


def test_an_address_space_that_is_too_small(host):
    made = host.create(1 << 40)
    code = (
        "import resource, sys; from syncvar.shm.segment import SharedSegment; from syncvar.core.errors import SharedMemoryUnavailable\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try:\n    SharedSegment.attach(int(sys.argv[1]), 0)\n"
        "except SharedMemoryUnavailable as error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(made.fd)],
        pass_fds=[made.fd],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout == (
        "the system refused to map 1 TiB: Cannot allocate memory; this process may map 8 GiB (ulimit -v); "
        "a smaller SYNCVAR_SHM_BYTES may fit [SV-310]\n"
    )
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


# Arrays.


@pytest.mark.parametrize(
    "dtype", ["f4", "i1", "c16", "?", ">i4", "f2", "M8[s]", "S7", "V3", [("a", "i4"), ("b", "f8")]]
)
@pytest.mark.parametrize("shape", [(), 5, (3, 4), (0,), (2, 0, 3)])
def test_arrays_of_every_shape_and_dtype(host, shape, dtype):
    shm = host.one()
    array = shm.empty(shape, dtype)
    expected = np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert array.strides == expected.strides or not array.size
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    offset = shm.locate(array)
    assert offset % 64 == 0
    start, stop = segment_file.SegmentLayout(shm.shm_bytes, 2).arrays(0)
    assert start <= offset < stop
    array[...] = np.zeros(shape, dtype)


def test_objects_are_refused(host):
    with pytest.raises(ConfigError, match="an array of object cannot be shared between processes"):
        host.one().empty(3, object)


def test_locate(host):
    shm, other = host.one(), host.one()
    array = shm.empty((10, 20), np.float32)
    start = shm.locate(array)
    assert shm.locate(array[3]) == start + 3 * 80
    assert shm.locate(array[2:5]) == start + 2 * 80
    assert shm.locate(array.reshape(-1)[7:]) == start + 28
    assert shm.locate(array.view(np.int32)) == start
    assert shm.locate(array.T) is None
    assert shm.locate(array[:, 1]) is None
    assert shm.locate(array[::-1]) is None
    assert shm.locate(array.copy()) is None
    assert shm.locate(np.zeros(3)) is None
    assert shm.locate(np.zeros((3, 3))[1]) is None
    assert shm.locate(np.frombuffer(b"abcd", np.uint8)) is None
    assert shm.locate(shm.view(start, 4, np.uint8)) is None, (
        "a view of anybody's memory owns nothing"
    )
    assert other.locate(array) is None
    assert shm.locate(array.view(np.matrix)) == start


def test_locate_costs_next_to_nothing_where_there_is_nothing(host):
    shm, array = host.one(), np.zeros(3)
    best = min(timeit.repeat(lambda: shm.locate(array), number=10_000, repeat=5)) / 10_000
    assert best < 1e-6


def test_memory_reads_as_zeros_and_is_aligned(host):
    shm = host.one()
    for _ in range(3):
        offsets = [
            (shm.allocate(nbytes), nbytes)
            for nbytes in (0, 1, 100, 4096, 5000, 300_000, 3 * MIB, 20 * MIB)
        ]
        for offset, nbytes in offsets:
            view = shm.view(offset, nbytes, np.uint8)
            assert not view.any()
            view[:] = 255
            assert offset % 64 == 0
            assert offset % 4096 == 64 or nbytes < 4096
            assert offset % (2 * MIB) == 64 or nbytes < 2 * MIB
        for offset, _ in offsets:
            shm.release(offset)


def test_signals_do_not_keep_an_allocation_from_ending(host):
    shm, seen = host.one(2048 * MIB), []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    limit_of_the_test = signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        shm.allocate(200 * MIB)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *limit_of_the_test)
    assert len(seen) > 3


# Its end.


def test_a_thousand_arrays_in_an_shm_of_a_quarter(host):
    made = host.create(256 * MIB)
    shm = host.attach(made)
    for number in range(1000):
        array = shm.empty(MIB, np.uint8)
        array[:] = number % 256
        view = array[5:10]
        del array
        assert view[0] == number % 256, "a view is enough to keep it"
    assert held(made) < 20 * MIB


def test_memory_goes_back_to_the_system(host):
    made = host.create(512 * MIB)
    shm = host.attach(made)
    before = held(made)
    arrays = [shm.empty(16 * MIB, np.uint8) for _ in range(8)]
    for array in arrays:
        array[:] = 1
    assert held(made) >= before + 128 * MIB
    del array, arrays
    shm.allocate(1)
    assert held(made) <= before + 18 * MIB, "all but the reserve"
    assert "syncvar-shm" in mappings()[0]


def test_the_reserve_is_used_before_an_allocation_fails(host):
    class Tight:
        left = 24 * MIB

        def shortage(self, nbytes):
            return Shortage(1, 2, "a test") if held(made) + nbytes > self.left else None

    made = host.create(512 * MIB)
    shm = host.attach(made, room=Tight())
    small = [shm.empty(MIB, np.uint8) for _ in range(16)]
    del small
    large = shm.empty(22 * MIB, np.uint8)
    large[:] = 1
    with pytest.raises(SharedMemoryFull):
        shm.empty(22 * MIB, np.uint8)
    del large
    assert shm.allocate(20 * MIB) > 0, "and what failed took nothing"


def test_arrays_outlive_the_shm_and_take_it_with_them(host):
    made = host.create()
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    shm = SharedSegment.attach(os.dup(made.fd), 0)
    array = shm.empty((1000, 1000), np.float32)
    array[:] = 3
    view = array[10:20]
    shm.close()
    shm.close()
    with pytest.raises(UsageError, match="shared memory is closed"):
        shm.empty(1, np.uint8)
    with pytest.raises(TypeError, match="too small"):
        shm.view(0, 1, np.uint8)
    assert array.sum() == 3_000_000
    del array, shm
    gc.collect()
    assert view.sum() == 30_000
    assert mappings() != []
    del view
    gc.collect()
    assert mappings() == []
    assert len(os.listdir("/proc/self/fd")) == fds


def test_nothing_is_freed_or_reused_after_a_break(host):
    made = host.create()
    shm = host.attach(made)
    early = shm.empty(MIB, np.uint8)
    kept = shm.locate(early)
    del early
    shm.allocate(1)  # reads the note
    late = shm.empty(2 * MIB, np.uint8)
    place = shm.locate(late)
    late[:] = 7
    shm.quarantine()
    del late
    taken = {shm.allocate(nbytes) for nbytes in (64, MIB, 2 * MIB, 40 * MIB)}
    assert not taken & {kept, place}
    assert (shm.view(place, 2 * MIB, np.uint8) == 7).all()


def test_arrays_may_die_anywhere(host):
    shm = host.one()

    class Ring:
        def __init__(self):
            self.array = shm.empty(100_000, np.uint8)
            self.me = self

    def make():
        for _ in range(200):
            Ring()

    threads = [threading.Thread(target=make, daemon=True) for _ in range(4)]
    threshold = gc.get_threshold()
    gc.set_threshold(5)  # the collector runs in the middle of allocations, in whichever thread
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    shm.allocate(1)
    assert shm._extents.used_bytes == MIB, "the extent of the last byte"


def test_a_forked_child_frees_nothing(host):
    shm = host.one()
    array = shm.empty(MIB, np.uint8)
    array[:] = 5
    pid = os.fork()
    if pid == 0:
        del array
        os._exit(len(shm._released))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (array == 5).all()


# No room.


def test_a_full_region_is_told(host):
    shm = host.one(64 * MIB, 2)
    arrays = [shm.empty(MIB - 64, np.uint8) for _ in range(20)]  # 1 MiB of pages each
    with pytest.raises(SharedMemoryFull) as caught:
        shm.empty((40, MIB), np.uint8)
    assert str(caught.value) == (
        "40 MiB of shared memory asked for, but 20 MiB of the 29.8 MiB of local rank 0 are in use and no free piece is as "
        "large: ask for less, or raise shm_bytes (64 MiB for all ranks of the host), for instance by "
        "SYNCVAR_SHM_BYTES=134217728 [SV-102]"
    )
    for kind in (MemoryError, ConfigError, SyncvarError):
        assert isinstance(caught.value, kind)
    assert len(arrays) == 20


def test_a_container_s_limit_is_told_before_anything_is_touched(host):
    class Full:
        def shortage(self, nbytes):
            return Shortage(
                1900 * MIB, 2048 * MIB, "the container's limit (/sys/fs/cgroup/memory.max)"
            )

    made = host.create()
    shm, before = host.attach(made, room=Full()), held(made)
    with pytest.raises(SharedMemoryFull) as caught:
        shm.empty(100 * MIB, np.uint8)
    assert str(caught.value) == (
        "100 MiB of shared memory asked for, but 1.9 GiB of 2 GiB are in use: ask for less, or raise the container's "
        "limit (/sys/fs/cgroup/memory.max) [SV-102]"
    )
    assert held(made) == before


def test_a_full_file_system_is_told(host, monkeypatch):
    shm = host.one()
    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryFull) as caught:
        shm.allocate(100 * MIB)
    assert str(caught.value).startswith(
        "100 MiB of shared memory asked for, but the system has no more room for it"
    )
    assert str(caught.value).endswith(
        "ask for less, or raise the size of /dev/shm or the memory limit of the container [SV-102]"
    )


def full(fd, offset, nbytes):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_crash_writes_no_terabyte(host):
    shm = host.one(1 << 40)
    with open("/proc/self/smaps") as file:
        text = file.read()
    about = text[text.index("syncvar-shm") :].split("VmFlags:")[1].split("\n")[0]
    assert " dd" in about
    assert isinstance(shm.memory, mmap.mmap)
