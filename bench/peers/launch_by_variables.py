"""Start workers that find each other by variables: `python bench/peers/launch_by_variables.py --workers 2 SCRIPT ...`.

By TF_CONFIG, for TensorFlow, which has no launcher of its own; with --hosts by torchrun's
variables, each worker as if it were alone on its host; with --spaces so too, spread evenly over the
hosts of network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 0.05
GRACE_S = 5.0


def main() -> int:
    """Start the workers and wait for them; the exit code is that of the first one that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument(
        "--hosts", action="store_true", help="torchrun's variables, a host for each worker"
    )
    parser.add_argument(
        "--spaces",
        type=lambda text: text.split(","),
        help="network namespaces, a host each; needs --address",
    )
    parser.add_argument("--address", default="127.0.0.1", help="of the first host [127.0.0.1]")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script and its arguments")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    hosts = len(chosen.spaces) if chosen.spaces else chosen.workers
    is_of_torch = chosen.hosts or chosen.spaces
    told = (
        _as_torchrun(chosen.workers, hosts, chosen.address)
        if is_of_torch
        else _as_tensorflow(chosen.workers)
    )
    running: list[subprocess.Popen[bytes]] = []
    try:
        for variables in told:
            environment = {**os.environ, **variables}
            inside = (
                ["ip", "netns", "exec", chosen.spaces[int(variables["GROUP_RANK"])]]
                if chosen.spaces
                else []
            )
            running.append(
                subprocess.Popen([*inside, sys.executable, *chosen.command], env=environment)
            )
        while running:
            codes = [worker.poll() for worker in running]
            failed = next((code for code in codes if code), None)
            if failed is not None:
                return failed
            running = [worker for worker, code in zip(running, codes, strict=True) if code is None]
            time.sleep(LOOK_S)
    finally:
        _end(running)
    return 0


def _as_tensorflow(workers: int) -> list[dict[str, str]]:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in _free_ports(workers)]}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
        for index in range(workers)
    ]


def _as_torchrun(workers: int, hosts: int, address: str) -> list[dict[str, str]]:
    each = workers // hosts
    common = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(each),
        "GROUP_WORLD_SIZE": str(hosts),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(_free_ports(1)[0]),
        "SYNCVAR_KEY": secrets.token_hex(32),
    }
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank % each), "GROUP_RANK": str(rank // each)}
        for rank in range(workers)
    ]
    return [{**common, **place} for place in places]


def _free_ports(count: int) -> list[int]:
    """Return ports that are free, of those that the system gives to no connection by itself: workers are told them before they start."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: set[int] = set()
    while len(found) < count:
        port = first_given - 1 - secrets.randbelow(10_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()


if __name__ == "__main__":
    sys.exit(main())
