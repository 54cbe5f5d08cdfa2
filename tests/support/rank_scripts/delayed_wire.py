"""A wire that is long: takes frames from each of two network interfaces and puts them on the other, so much later.

Runs as a program of its own, since this kernel need not have netem: `delayed_wire.py NAME NAME SECONDS`. Frames keep what the
kernel has put off (checksums, segmentation), so that they may be larger than a wire's.
"""

import collections
import select
import socket
import sys
import time

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_FRAME_NBYTES_MAX = 1 << 17
_BUFFER_NBYTES = 8 << 20
_EVERYTHING = 0x0003  # ETH_P_ALL


def end(name):
    """Return a socket that reads and writes the frames of an interface."""
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    one.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    one.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_NBYTES)
    one.bind((name, _EVERYTHING))
    return one


def main(first, second, delay_s):
    """Serve until the process is killed."""
    ends = [end(first), end(second)]
    on_the_way = collections.deque()  # (when it arrives, where, frame): of one delay, so in order
    poller = select.poll()
    for one in ends:
        poller.register(one, select.POLLIN)
    print("ready", flush=True)
    while True:
        wait_s = on_the_way[0][0] - time.monotonic() if on_the_way else 60.0
        for descriptor, _ in poller.poll(max(0.0, wait_s * 1000)):
            here, there = ends if descriptor == ends[0].fileno() else ends[::-1]
            on_the_way.append((time.monotonic() + delay_s, there, here.recv(_FRAME_NBYTES_MAX)))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, there, frame = on_the_way.popleft()
            try:
                there.send(frame)
            except OSError:  # the interface is down: so is the wire
                continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
