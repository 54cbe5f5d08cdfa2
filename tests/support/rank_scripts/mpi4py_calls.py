"""Calls of the mpi4py layer with three ranks; each function checks one subject and raises if it is wrong."""

import os
import pickle

import numpy as np

import syncvar as sv
from syncvar.compat.mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
LONG = 200_000  # elements, above what travels with its header


def caught(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except (MPI.Exception, sv.ConfigError) as error:
        return error
    raise AssertionError(f"{call} raises nothing")


def error_class(call, *arguments, **keywords):
    return caught(call, *arguments, **keywords).Get_error_class()


def collectives_in_place_and_of_derived_datatypes():
    x = np.arange(4.0) + RANK
    COMM.Allreduce(MPI.IN_PLACE, x)
    assert x.tolist() == [SIZE * i + 3.0 for i in range(4)]
    table = np.full((SIZE, 2), -1)
    COMM.Allgather(np.array([RANK, RANK * 10]), table)
    assert table.tolist() == [[r, r * 10] for r in range(SIZE)]
    every_second = MPI.INT64_T.Create_vector(3, 1, 2).Commit()
    y = np.arange(6) if RANK == 1 else np.full(6, -1)
    COMM.Bcast([y, 1, every_second], root=1)
    assert y.tolist() == ([0, 1, 2, 3, 4, 5] if RANK == 1 else [0, -1, 2, -1, 4, -1])
    counts = [1, 2, 3]
    z = np.zeros(6) if RANK == 0 else None
    COMM.Gatherv(np.full(counts[RANK], float(RANK)), [z, counts] if RANK == 0 else None, root=0)
    assert RANK or z.tolist() == [0, 1, 1, 2, 2, 2]
    with_places = np.array([(5.0 - RANK, RANK)], np.dtype([("v", "f8"), ("i", "i4")], align=True))
    best = np.zeros_like(with_places)
    COMM.Allreduce([with_places, 1, MPI.DOUBLE_INT], [best, 1, MPI.DOUBLE_INT], op=MPI.MINLOC)
    assert best[0].tolist() == (3.0, 2)
    rows = np.arange(6.0).reshape(2, 3, order="F" if RANK == 1 else "C")
    by_place = np.zeros((2, 3))
    COMM.Allreduce(rows, by_place)  # as in memory, whatever the order of the axes
    assert by_place.ravel().tolist() == [SIZE * i for i in range(6)]
    shape = [(2, 3), (6,), (3, 1, 2)][RANK]  # ranks need not agree on it
    COMM.Allreduce(np.ones(shape), total := np.zeros(shape))
    assert (total == SIZE).all()
    flags = np.array([RANK, 1, 0], np.int32)
    both = np.zeros(3, np.int32)
    COMM.Allreduce(flags, both, op=MPI.LAND)
    assert both.tolist() == [0, 1, 0]


def ops_of_the_program_in_the_order_of_the_ranks():
    def affine(one, other, datatype):
        left, right = (np.frombuffer(side, np.float64).reshape(-1, 2) for side in (one, other))
        right[:] = np.stack([left[:, 0] * right[:, 0], left[:, 0] * right[:, 1] + left[:, 1]], 1)

    op = MPI.Op.Create(affine, commute=False)
    pair = MPI.DOUBLE.Create_contiguous(2).Commit()
    mine, result = np.array([RANK + 2.0, RANK + 1.0]), np.zeros(2)
    COMM.Allreduce([mine, 1, pair], [result, 1, pair], op=op)
    assert result.tolist() == [24.0, 2 * (3 * 3 + 2) + 1]
    COMM.Scan([mine, 1, pair], [result, 1, pair], op=op)
    assert result.tolist() == [[2, 1], [6, 5], [24, 23]][RANK]
    assert COMM.allreduce(str(RANK), op=lambda x, y: x + y) == "012"
    op.Free()


def started_and_persistent_calls():
    x, y = np.ones(3) * (RANK + 1), np.zeros(3)
    request = COMM.Iallreduce(x, y)
    request.Wait()
    assert y.tolist() == [6, 6, 6]
    call = COMM.Allreduce_init(x, y)
    send = COMM.Send_init(x, RIGHT, 3)
    receive = COMM.Recv_init(z := np.zeros(3), LEFT, 3)
    for turn in range(3):
        x[:] = turn
        MPI.Prequest.Startall([call, send, receive])
        MPI.Request.Waitall([call, send, receive])
        assert y.tolist() == [3 * turn] * 3
        assert z.tolist() == [turn] * 3
    for one in (call, send, receive):
        one.Free()
        assert one == MPI.REQUEST_NULL


def messages_of_any_source_and_tag():
    status = MPI.Status()
    if RANK == 0:
        seen = []
        for _ in range(2 * (SIZE - 1)):
            buffer = np.zeros(9, np.int32)
            COMM.Recv(buffer, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            seen.append((status.source, status.tag, status.Get_count(MPI.INT), buffer[0]))
        assert sorted(seen) == [(s, 10 * s + k, k + 1, s) for s in (1, 2) for k in (0, 1)]
        assert [one for one in seen if one[0] == 1] == sorted(one for one in seen if one[0] == 1)
    else:
        for k in (0, 1):  # of one sender they arrive in the order sent
            COMM.Send(np.full(k + 1, RANK, np.int32), 0, 10 * RANK + k)
    COMM.Barrier()
    if RANK == 1:
        COMM.Send(np.arange(4), 0, 8)
        COMM.send({"a": 1}, 0, 9)
        return
    if RANK == 0:
        assert COMM.recv(source=1, tag=9) == {"a": 1}  # the earlier one waits
        assert COMM.Iprobe(1, MPI.ANY_TAG, status)
        assert (status.tag, status.Get_count(MPI.INT64_T)) == (8, 4)
        message = COMM.Mprobe(MPI.ANY_SOURCE, 8)
        assert not COMM.Iprobe(1)
        assert error_class(message.Recv, np.zeros(3, np.int64)) == MPI.ERR_TRUNCATE


def long_messages_that_cross():
    x, y = np.full(LONG, float(RANK)), np.zeros(LONG)
    COMM.Sendrecv(x, RIGHT, 1, y, LEFT, 1)
    assert (y == LEFT).all()
    request = COMM.Irecv(y := np.zeros(LONG), LEFT, 2)
    COMM.Send(x, RIGHT, 2)  # all ranks send first
    request.Wait()
    assert (y == LEFT).all()
    if RANK == 0:
        request = COMM.Irecv(y := np.zeros(LONG), 1, 4)
        COMM.Barrier()  # receives meanwhile
        request.Wait()
        assert (y == 1).all()
    else:
        if RANK == 1:
            COMM.Send(x, 0, 4)
        COMM.Barrier()
    first, second = COMM.Irecv(np.zeros(1), LEFT, 6), COMM.Irecv(np.zeros(1), LEFT, 7)
    COMM.Ssend(np.ones(1), RIGHT, 7)
    assert MPI.Request.Waitany([first, second]) == 1
    first.Cancel()
    status = MPI.Status()
    first.Wait(status)
    assert status.Is_cancelled()


def short_messages_that_cross_in_large_numbers():
    """They take more room than a link has for messages that nobody has received."""
    count, x, y = 400, np.full(1000, float(RANK)), np.empty((400, 1000))
    requests = [COMM.Isend(x, RIGHT) for _ in range(count)]
    for i in range(count):
        COMM.Recv(y[i], LEFT)
    MPI.Request.Waitall(requests)
    assert (y == LEFT).all()
    y[...] = -1
    requests = [COMM.Irecv(y[i], LEFT) for i in range(count)]
    for _ in range(count):
        COMM.Send(x, RIGHT)
    MPI.Request.Waitall(requests)
    assert (y == LEFT).all()


def communicators_and_topologies():
    part = COMM.Split(RANK % 2, -RANK)
    assert part.allgather(RANK) == ([2, 0] if RANK % 2 == 0 else [1])
    part.Free()
    group = COMM.Get_group().Incl([2, 0])
    if RANK != 1:
        pair = COMM.Create_group(group)
        assert pair.rank == [1, None, 0][RANK]
        assert pair.bcast(RANK, root=0) == 2
        pair.Free()
    ring = COMM.Create_cart([SIZE], periods=[True])
    assert ring.Shift(0, 1) == (LEFT, RIGHT)
    both = np.zeros(2)
    ring.Neighbor_allgather(np.array([float(RANK)]), both)
    assert both.tolist() == [LEFT, RIGHT]
    assert ring.neighbor_alltoall(["to left", "to right"]) == ["to right", "to left"]
    single = COMM.Split(0 if RANK < 2 else MPI.UNDEFINED)
    if RANK < 2:  # both neighbours are the same rank
        loop = single.Create_cart([2], periods=[True])
        assert loop.neighbor_alltoall([f"{RANK}-", f"{RANK}+"]) == [f"{1 - RANK}+", f"{1 - RANK}-"]
    tree = COMM.Create_dist_graph_adjacent([] if RANK == 0 else [0], [1, 2] if RANK == 0 else [])
    assert tree.neighbor_allgather(RANK) == ([] if RANK == 0 else [0])
    dup = COMM.Dup()
    assert MPI.Comm.Compare(COMM, dup) == MPI.CONGRUENT
    dup.send(1, RIGHT)
    COMM.send(2, RIGHT)
    assert (COMM.recv(source=LEFT), dup.recv(source=LEFT)) == (2, 1)  # each has its own messages
    dup.Free()


def windows_of_shared_memory():
    host = COMM.Split_type(MPI.COMM_TYPE_SHARED)
    if os.environ.get("SYNCVAR_TRANSPORT") == "zmq":
        assert "share no memory" in str(caught(MPI.Win.Allocate_shared, 8, comm=host))
        return
    window = MPI.Win.Allocate_shared(8 * (RANK + 1), 8, comm=host)
    mine = np.frombuffer(window.tomemory(), np.int64)
    mine[:] = RANK
    window.Fence()
    memory, unit = window.Shared_query(LEFT)
    assert unit == 8
    assert np.frombuffer(memory, np.int64).tolist() == [LEFT] * (LEFT + 1)
    window.Fence()
    counter = np.frombuffer(window.Shared_query(0)[0], np.int64)
    for _ in range(50):
        window.Lock(0)
        counter[0] += 1
        window.Unlock(0)
    window.Fence()
    assert counter[0] == 50 * SIZE
    window.Free()


def generalized_requests_tell_the_program_when_they_are_forgotten():
    forgotten = []

    def start(number):
        return MPI.Grequest.Start(None, forgotten.append, None, (number,))

    waited, freed, early = map(start, range(3))
    waited.Complete()
    assert not forgotten
    waited.Wait()
    assert forgotten == [0]
    freed.Complete()
    freed.Free()
    assert forgotten == [0, 1]
    end = MPI.Grequest(early)
    early.Free()
    assert forgotten == [0, 1]  # the operation has not ended
    end.complete("value")
    assert forgotten == [0, 1, 2]


def read_only_buffers():
    x = np.zeros(3)
    x.flags.writeable = False
    for receive in (COMM.Recv, COMM.Irecv):
        try:
            receive(x, LEFT)
        except BufferError:
            continue
        raise AssertionError(receive)
    COMM.Sendrecv(x, RIGHT, 0, np.empty(3), LEFT)


def errors_and_what_is_not_there():
    assert error_class(COMM.Send, np.zeros(1), SIZE) == MPI.ERR_RANK
    assert error_class(COMM.bcast, 1, root=-1) == MPI.ERR_ROOT
    assert error_class(COMM.send, 1, RIGHT, tag=-5) == MPI.ERR_TAG
    for call in (MPI.File.Open, MPI.Win.Create, COMM.Spawn, COMM.Create_intercomm, MPI.Open_port):
        error = caught(call, COMM)
        assert "Instead:" in str(error)
        assert error.Get_error_class() == MPI.ERR_UNSUPPORTED_OPERATION


def objects_by_pickle_only_where_the_program_asks():
    refused = caught(MPI.pickle.dumps, error_class)
    assert any("--pickle" in note for note in refused.__notes__)
    MPI.pickle.__init__(pickle.dumps, pickle.loads)
    assert COMM.bcast(error_class, root=0) is error_class
    assert COMM.alltoall([{RANK, to} for to in range(SIZE)]) == [{s, RANK} for s in range(SIZE)]
    MPI.pickle.__init__()


CHECKS = (
    collectives_in_place_and_of_derived_datatypes,
    ops_of_the_program_in_the_order_of_the_ranks,
    started_and_persistent_calls,
    messages_of_any_source_and_tag,
    long_messages_that_cross,
    short_messages_that_cross_in_large_numbers,
    communicators_and_topologies,
    windows_of_shared_memory,
    generalized_requests_tell_the_program_when_they_are_forgotten,
    read_only_buffers,
    errors_and_what_is_not_there,
    objects_by_pickle_only_where_the_program_asks,
)

if __name__ == "__main__":
    assert SIZE == 3
    for check in CHECKS:
        check()
        COMM.Barrier()
    if RANK == 0:
        print("checked", len(CHECKS), "subjects")
