"""Start TensorFlow's workers on this host: `python bench/peers/launch_tensorflow.py --workers 2 SCRIPT ...`.

TensorFlow has no launcher of its own. Each worker finds the others by TF_CONFIG.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

LOOK_S = 0.05
GRACE_S = 5.0


def main() -> int:
    """Start the workers and wait for them; the exit code is that of the first one that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script and its arguments")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(chosen.workers)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(chosen.workers):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
            running.append(subprocess.Popen([sys.executable, *chosen.command], env=environment))
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


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now; TensorFlow must be told them before its workers start."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


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
