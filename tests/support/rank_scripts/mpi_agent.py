"""A process of MPI that owns transports and does with them what the process of the tests says, over unix sockets.

`python mpi_agent.py FOLDER`, started by mpirun: each process listens at FOLDER/<rank of MPI>. A connection is served by a thread
of its own, so that a wait asked for by one does not keep a wake of another from being heard.
"""

import os
import sys
import threading
from multiprocessing.connection import Listener

from mpi4py import MPI

from syncvar.transports.mpi_transport import Fabric, MpiTransport

FABRIC = Fabric(MPI, MPI.COMM_WORLD.Dup())
TRANSPORTS, LOANS, LENT = {}, {}, {}


def make(key, rank, tag, nbytes_max):
    TRANSPORTS[key] = MpiTransport(FABRIC, rank, tag, nbytes_max)
    return TRANSPORTS[key].address


def send(key, number, peer, header, payload, borrow):
    """Send from memory that is overwritten as soon as it may be: at once, or when its loan is done."""
    memory = None if payload is None else bytearray(payload)
    view = None if memory is None else memoryview(memory)
    loan = TRANSPORTS[key].send(peer, header, view, borrow=borrow)
    if loan is None:
        scribble(memory)
        return False
    LOANS[number], LENT[number] = loan, memory
    return True


def is_done(number):
    if not LOANS[number].is_done():
        return False
    scribble(LENT[number])
    return True


def scribble(memory):
    if memory is not None:
        memory[:] = b"\xee" * len(memory)


def level():
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE, MPI.Query_thread() == MPI.THREAD_SERIALIZED


def call(key, name, *arguments):
    return getattr(TRANSPORTS[key], name)(*arguments)


def receive(key):
    arrival = TRANSPORTS[key].receive()
    return (
        None
        if arrival is None
        else (
            type(arrival).__name__,
            [bytes(one) if isinstance(one, memoryview) else one for one in arrival],
        )
    )


def serve(connection, ends):
    with connection:
        while True:
            try:
                name, *arguments = connection.recv()
            except EOFError:
                return
            try:
                connection.send(
                    (True, ends.set() if name == "end" else globals()[name](*arguments))
                )
            except Exception as error:  # noqa: BLE001
                connection.send((False, repr(error)))


def main():
    folder, ends = sys.argv[1], threading.Event()
    listener = Listener(os.path.join(folder, f"making-{MPI.COMM_WORLD.rank}"), "AF_UNIX")
    os.rename(
        os.path.join(folder, f"making-{MPI.COMM_WORLD.rank}"),
        os.path.join(folder, str(MPI.COMM_WORLD.rank)),
    )

    def accept():
        while True:
            connection = listener.accept()
            threading.Thread(target=serve, args=(connection, ends), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    ends.wait(600)
    FABRIC.close()


if __name__ == "__main__":
    main()
