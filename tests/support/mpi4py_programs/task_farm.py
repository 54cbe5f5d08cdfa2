"""A task farm with tags for its messages: an ordinary mpi4py program."""

from enum import IntEnum

from mpi4py import MPI

Tag = IntEnum("Tag", "READY TASK RESULT STOP")
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
status = MPI.Status()
TASKS = 30


def collatz(number):
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


if rank == 0:
    next_task, running, results = 1, size - 1, {}
    by_worker = dict.fromkeys(range(1, size), 0)
    while running:
        data = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        source, tag = status.Get_source(), status.Get_tag()
        if tag == Tag.RESULT:
            results[data[0]] = data[1]
            by_worker[source] += 1
        if tag == Tag.READY:
            if next_task <= TASKS:
                comm.send(next_task, dest=source, tag=Tag.TASK)
                next_task += 1
            else:
                comm.send(None, dest=source, tag=Tag.STOP)
                running -= 1
    assert sum(by_worker.values()) == len(results) == TASKS
    print("longest", max(results, key=results.get), "sum", sum(results.values()))
else:
    while True:
        comm.send(None, dest=0, tag=Tag.READY)
        task = comm.recv(source=0, tag=MPI.ANY_TAG, status=status)
        if status.Get_tag() == Tag.STOP:
            break
        comm.send((task, collatz(task)), dest=0, tag=Tag.RESULT)
