"""Draw how fast a parameter server is beside a bare echo of ZeroMQ, for docs/benchmarks.md."""

import speed


def draw():
    """Return the picture of a push and a pull, by size."""
    found = speed.results("2026-11-23-servers.json")["push_and_pull"]
    rows = [
        (f"push and pull of {speed.size_name(one['size'])}", one["server_mb_s"] / one["echo_mb_s"])
        for one in found
    ]
    title = "Parameter server: bytes a second / those of a ZeroMQ echo"
    return speed.bars(title, rows, ends=("the echo is faster", "the server is faster"))
