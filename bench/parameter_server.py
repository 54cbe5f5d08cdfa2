"""What servers give: `python bench/parameter_server.py [--redis] [--json FILE]`.

One worker and one server on this host are timed beside a bare ZeroMQ ROUTER that sends back what it
gets (an echo), in the same process, turn and turn about, so that whatever else the machine does
meets both:

* throughput: a request pushes an array and pulls one of the same size; the echo gets as many bytes
  and sends them back. Within a host requests go through pipes, long arrays through shared memory;
  over ZeroMQ alone is the column beside it.
* a dense pull of 16 MiB, through shared memory and over ZeroMQ.
* lookups of 4 096 rows out of 1 000 000 of 64 floats, with --redis beside MGET of the same rows
  (redis-server on loopback; `redis` and, for its parser in C, `hiredis` must be installed), and
  pushes of as many rows beside MSET.
* `--slow`: four workers, one of which is ten times slower: steps per second of the others, with
  staleness None and 4.

Rates are of the median round; rounds are short and take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from syncvar.core.environment import RankEnvironment
from syncvar.core.settings import RuntimeConfig
from syncvar.parameter_server.request_client import RequestBuilder
from syncvar.parameter_server.shard import Spec
from syncvar.parameter_server.worker_session import WorkerSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_DENSE_NBYTES = 16 << 20
_ROWS, _WIDTH, _LOOKUP = 1_000_000, 64, 4096
_ROUNDS = 31
_ROUND_S = 0.05
_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    parts = socket.recv_multipart(copy=False)
    socket.send_multipart(parts, copy=False)
"""


def medians(bodies: dict[str, Callable[[], object]], rounds: int = _ROUNDS) -> dict[str, float]:
    """Return the time of a call of each body in its median round, in seconds; they take turns."""
    calls: dict[str, int] = {}
    for name, body in bodies.items():
        body()
        began = time.perf_counter()
        body()
        calls[name] = max(1, min(2000, int(_ROUND_S / max(1e-6, time.perf_counter() - began))))
    found: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds):
        for name, body in bodies.items():
            began = time.perf_counter()
            for _ in range(calls[name]):
                body()
            found[name].append((time.perf_counter() - began) / calls[name])
    return {name: statistics.median(times) for name, times in found.items()}


@contextmanager
def echo() -> Iterator[Callable[[NDArray[Any]], object]]:
    """Start a ROUTER that sends back what it gets; yields a function that sends an array and awaits it."""
    with (
        tempfile.TemporaryDirectory(prefix="sv-") as folder,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        place = f"ipc://{folder}/echo"
        process = subprocess.Popen([sys.executable, "-c", _ECHO, place])
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(place)

            def send(array: NDArray[Any]) -> object:
                dealer.send(array, copy=False)
                return dealer.recv(copy=False)

            yield send
        finally:
            process.kill()
            process.wait()


class Servers:
    """A worker's arrays on server 0.

    Args:
        edge: The way there.
    """

    def __init__(self, edge: WorkerSession) -> None:
        self.edge = edge

    def make(self, key: str, value: NDArray[Any]) -> None:
        """Make an array that runs free."""
        asking = RequestBuilder()
        asking.create(
            0, key, Spec(value.shape, value.dtype.name, "SUM", value.shape, 0), None, value
        )
        self.edge.wait(self.edge.request(asking.parts()), "making an array", 120.0)

    def both(self, key: str, value: NDArray[Any]) -> object:
        """Push an array and pull it, in one round trip."""
        asking = RequestBuilder()
        asking.push(0, key, "assign_add", value)
        asking.pull(0, key)
        return self._asked(asking, 1)

    def pull(self, key: str, rows: NDArray[Any] | None = None) -> NDArray[Any]:
        """Pull an array, or rows of it."""
        asking = RequestBuilder()
        asking.pull(0, key, rows)
        return self._asked(asking, 0)

    def push(self, key: str, value: NDArray[Any], rows: NDArray[Any]) -> None:
        """Push to rows of an array, and wait until that is acknowledged."""
        asking = RequestBuilder()
        asking.push(0, key, "scatter_update", value, rows)
        self.edge.wait(self.edge.request(asking.parts()), "a push", 120.0)

    def _asked(self, asking: RequestBuilder, operation: int) -> NDArray[Any]:
        ticket = self.edge.wait(self.edge.request(asking.parts()), "a pull", 120.0)
        return ticket.array(0, operation)


def throughput(servers: Servers, over: Servers) -> list[dict[str, Any]]:
    """Return for each size the rates in bytes per second, both directions together."""
    rows = []
    with echo() as bare:
        for nbytes in _SIZES:
            value = np.ones(nbytes // 4, np.float32)
            servers.make(f"t{nbytes}", value)
            found = medians(
                {
                    "echo": lambda value=value: bare(value),  # type: ignore[misc]
                    "server": lambda nbytes=nbytes, value=value: servers.both(f"t{nbytes}", value),  # type: ignore[misc]
                    "zmq": lambda nbytes=nbytes, value=value: over.both(f"t{nbytes}", value),  # type: ignore[misc]
                }
            )
            rows.append(
                {
                    "nbytes": nbytes,
                    **{name: 2 * nbytes / seconds for name, seconds in found.items()},
                }
            )
    return rows


def dense(servers: Servers, over: Servers) -> dict[str, float]:
    """Return the seconds of a pull of 16 MiB, through shared memory and over ZeroMQ."""
    servers.make("dense", np.zeros(_DENSE_NBYTES // 4, np.float32))
    return medians({"shm": lambda: servers.pull("dense"), "zmq": lambda: over.pull("dense")})


def embedding(servers: Servers, redis_port: int) -> dict[str, float]:
    """Return rows per second of lookups and updates."""
    table = np.arange(_ROWS * _WIDTH, dtype=np.float32).reshape(_ROWS, _WIDTH)
    servers.make("table", table)
    picked = np.random.default_rng(0).integers(0, _ROWS, _LOOKUP)
    rows = np.unique(picked)
    values = table[rows] + 1
    assert np.array_equal(servers.pull("table", picked), table[picked])
    bodies: dict[str, Callable[[], object]] = {
        "lookup": lambda: servers.pull("table", picked),
        "update": lambda: servers.push("table", values, rows),
    }
    with ExitStack() as stack:
        if redis_port:
            import redis

            client = stack.enter_context(redis.Redis("127.0.0.1", redis_port))
            for start in range(0, _ROWS, 10_000):
                client.mset(
                    {b"%d" % row: table[row].tobytes() for row in range(start, start + 10_000)}
                )
            asked = [b"%d" % row for row in picked]

            def lookup() -> NDArray[Any]:
                return np.frombuffer(b"".join(client.mget(asked)), np.float32).reshape(-1, _WIDTH)

            def update() -> None:
                client.mset(
                    {b"%d" % row: value.tobytes() for row, value in zip(rows, values, strict=True)}
                )

            assert np.array_equal(lookup(), table[picked])
            bodies |= {"redis lookup": lookup, "redis update": update}
        found = medians(bodies)
    return {
        name: (len(rows) if "update" in name else _LOOKUP) / seconds
        for name, seconds in found.items()
    }


def work(arguments: argparse.Namespace) -> None:
    """Measure, as the one worker of a job."""
    environment = RankEnvironment.from_mapping(os.environ)
    assert environment is not None
    if environment.rank == 1:  # it only lends its number
        while not Path(arguments.work).exists():
            time.sleep(0.1)
        return
    config = RuntimeConfig.from_mapping(os.environ).consistent()
    servers = Servers(WorkerSession(environment, config, os.environ))
    # The same process once more, without shared memory, in place of the other rank.
    over = Servers(
        WorkerSession(environment._replace(rank=1), config.replaced(transport="zmq"), os.environ)
    )
    found: dict[str, Any] = {"throughput": throughput(servers, over)}
    if not arguments.throughput:
        found |= {
            "dense": dense(servers, over),
            "embedding": embedding(servers, arguments.redis_port),
        }
    for one in (servers, over):
        one.edge.close()
    Path(arguments.work).write_text(json.dumps(found))


# A worker that is slower than the others.

_SLOW_S, _STEP_S = 6.0, 0.005


def lag(arguments: argparse.Namespace) -> None:
    """Step for a while, as one of several workers of which the last is ten times slower where that is asked for."""
    environment = RankEnvironment.from_mapping(os.environ)
    assert environment is not None
    edge = WorkerSession(
        environment, RuntimeConfig.from_mapping(os.environ).consistent(), os.environ
    )
    bound = None if arguments.staleness < 0 else arguments.staleness
    value = np.zeros(1000, np.float32)
    asking = RequestBuilder()
    asking.create(0, "v", Spec(value.shape, "float32", "SUM", value.shape, 0), bound, value)
    edge.wait(edge.request(asking.parts()), "making an array", 60.0)
    step_s = _STEP_S * (
        10 if arguments.lags and environment.rank == environment.world_size - 1 else 1
    )
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < _SLOW_S:
        asking = RequestBuilder()
        asking.pull(0, "v")
        edge.wait(edge.request(asking.parts()), "a pull", 60.0)
        time.sleep(step_s)
        steps += 1
        asking = RequestBuilder()
        asking.push(0, "v", "assign_add", value)
        asking.add(0, "tick", clock=steps)
        edge.wait(edge.request(asking.parts()), "a push", 60.0)
    lasted = time.perf_counter() - began
    asking = RequestBuilder()
    asking.add(0, "leave")
    edge.wait(edge.request(asking.parts()), "leaving", 60.0)
    edge.close()
    Path(f"{arguments.work}.{environment.rank}").write_text(json.dumps(steps / lasted))


def slow(folder: str) -> dict[str, dict[str, list[float]]]:
    """Return the steps per second of four workers, by bound of staleness, without and with a slow one."""
    found: dict[str, dict[str, list[float]]] = {}
    for bound in (-1, 4):
        for lags in ("", "--lags"):
            path = f"{folder}/lag"
            run(
                ["--workers", "4", "--servers", "1"],
                ["--lag", "--work", path, "--staleness", str(bound), *([lags] if lags else [])],
            )
            rates = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(4)]
            found.setdefault("None" if bound < 0 else str(bound), {})[
                "one ten times slower" if lags else "all alike"
            ] = rates
    return found


def run(options: list[str], arguments: list[str]) -> None:
    """Launch this file."""
    command = [
        sys.executable,
        "-m",
        "syncvar_launcher",
        *options,
        str(Path(__file__).resolve()),
        *arguments,
    ]
    subprocess.run(command, check=True)


@contextmanager
def redis_server(is_wanted: bool) -> Iterator[int]:  # noqa: FBT001
    """Start Debian's redis-server on loopback; yields its port, 0 where it is not wanted."""
    program = shutil.which("redis-server")
    if not is_wanted:
        yield 0
        return
    if program is None:
        raise SystemExit(
            "--redis needs redis-server: apt-get install redis-server, and pip install redis "
            "hiredis"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [
        program,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--loglevel",
        "warning",
    ]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--redis", action="store_true", help="beside redis-server")
    parser.add_argument("--slow", action="store_true", help="four workers, one of which is slow")
    parser.add_argument("--throughput", action="store_true", help="nothing but that")
    parser.add_argument("--json", default="", help="also write the numbers to a file")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lag", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lags", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--staleness", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--redis-port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        (lag if arguments.lag else work)(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="sv-") as folder, redis_server(arguments.redis) as port:
        path = f"{folder}/found.json"
        run(
            ["--workers", "2", "--servers", "1"],
            ["--work", path, "--redis-port", str(port), *(["--throughput"] * arguments.throughput)],
        )
        found = json.loads(Path(path).read_text())
        if arguments.slow:
            found["slow"] = slow(folder)
    show(found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


def show(found: dict[str, Any]) -> None:
    """Print the numbers."""
    print(
        "push + pull of an array, MB/s both ways\n   bytes      echo    server  of echo   by zmq  "
        "of echo"
    )
    for row in found["throughput"]:
        rates = [row[name] / 1e6 for name in ("echo", "server", "zmq")]
        print(
            f"{row['nbytes']:>8} {rates[0]:>9.1f} {rates[1]:>9.1f} {rates[1] / rates[0]:>7.0%} "
            f"{rates[2]:>9.1f} {rates[2] / rates[0]:>7.0%}"
        )
    if "dense" not in found:
        return
    shm, over = found["dense"]["shm"], found["dense"]["zmq"]
    print(
        f"\ndense pull of 16 MiB: {1e3 * shm:.2f} ms through shared memory, {1e3 * over:.2f} ms "
        f"over ZeroMQ: {over / shm:.1f} x"
    )
    print(f"\n{_LOOKUP} rows of {_WIDTH} floats out of {_ROWS}, rows/s")
    for name, rate in found["embedding"].items():
        print(f"  {name:<14}{rate:>12,.0f}")
    for bound, cases in found.get("slow", {}).items():
        print(f"\nstaleness {bound}, steps/s of four workers")
        for case, rates in cases.items():
            print(f"  {case:<22}{'  '.join(f'{rate:.1f}' for rate in rates)}")


if __name__ == "__main__":
    main()
