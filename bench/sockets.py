"""Measure whether one thread sends a long array faster over several TCP connections than over one.

python bench/sockets.py                 as root: two hosts, which are network namespaces
python bench/sockets.py --mbit 10000    with links of 10 Gbit/s

A process on each host moves 16 MiB through 1, 2 and 4 connections in turn; the other end confirms with one byte. Each
line has the median and the shortest time. A lane between hosts is one connection for that reason.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from comparison.namespaces import REPOSITORY

NBYTES = 16 << 20
PIECE_NBYTES = 256 << 10  # received at a time
TRANSFERS = 60
TURNS = 2
PORT = 7000


def connected(role: str, host: str, count: int) -> list[socket.socket]:
    """Return the connections of one end."""
    if role == "receive":
        with socket.create_server((host, PORT + count)) as listener:
            print("ready", flush=True)
            found = [listener.accept()[0] for _ in range(count)]
    else:
        found = [socket.create_connection((host, PORT + count)) for _ in range(count)]
    for one in found:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setblocking(False)
    return found


def transfer(role: str, connections: list[socket.socket], memory: memoryview) -> None:
    """Move the memory, a part of it through each connection."""
    share = NBYTES // len(connections)
    left = {one: (share * index, share * (index + 1)) for index, one in enumerate(connections)}
    while left:
        for one, (start, stop) in list(left.items()):
            try:
                if role == "send":
                    nbytes = one.send(memory[start:stop])
                else:
                    nbytes = one.recv_into(memory[start : min(stop, start + PIECE_NBYTES)])
            except BlockingIOError:
                continue
            left[one] = start + nbytes, stop
            if start + nbytes == stop:
                del left[one]
    first = connections[0]
    first.setblocking(True)
    if role == "send":
        first.recv(1)
    else:
        first.sendall(b"x")
    first.setblocking(False)


def run_end(role: str, host: str, count: int) -> None:
    """Run one end; the sender prints the times."""
    connections = connected(role, host, count)
    memory, times = memoryview(bytearray(NBYTES)), []
    for _ in range(TRANSFERS):
        began = time.perf_counter()
        transfer(role, connections, memory)
        times.append(1e3 * (time.perf_counter() - began))
    for one in connections:
        one.close()
    if role == "send":
        median, least = statistics.median(times), min(times)
        print(f"{count} connections: {median:.2f} ms, at least {least:.2f} ms", flush=True)


def measure(mbit: int | None) -> None:
    """Run both ends on two hosts."""
    sys.path.insert(0, REPOSITORY)
    from tests.support.host_testbed import Hosts

    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder), 2)
        try:
            for index in range(2) if mbit else ():
                hosts.set_rate(index, mbit)
            for count in (1, 2, 4) * TURNS:
                words = ["--host", hosts.names[1], "--count", str(count), "--end"]
                ends = [
                    ["ip", "netns", "exec", space, sys.executable, __file__, *words]
                    for space in hosts.spaces
                ]
                receive, send = [*ends[1], "receive"], [*ends[0], "send"]
                with subprocess.Popen(receive, stdout=subprocess.PIPE) as receiver:
                    assert receiver.stdout is not None
                    receiver.stdout.readline()
                    subprocess.run(send, check=True, timeout=120)
        finally:
            hosts.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=int, help="rate of the links in Mbit/s [unlimited]")
    parser.add_argument("--end", choices=("send", "receive"), help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.end:
        run_end(chosen.end, chosen.host, chosen.count)
    else:
        measure(chosen.mbit)


if __name__ == "__main__":
    main()
