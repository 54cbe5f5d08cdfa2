"""What programs of the tests do with servers, below variables: they make, push and pull arrays by name."""

import os

import numpy as np

from syncvar.core.environment import RankEnvironment
from syncvar.core.settings import RuntimeConfig
from syncvar.parameter_server.request_client import ServerPart
from syncvar.parameter_server.worker_session import WorkerSession

ME = RankEnvironment.from_mapping(os.environ)


def edge():
    return WorkerSession(ME, RuntimeConfig.from_mapping(os.environ).consistent(), os.environ)


def create(key, value, staleness=None):
    whole = list(value.shape)
    operation = {
        "op": "create",
        "key": key,
        "shape": whole,
        "dtype": value.dtype.name,
        "aggregation": "SUM",
        "whole": whole,
        "start": 0,
        "value": 0,
        "staleness": staleness,
    }
    return ServerPart([operation], (value,))


def push(key, value):
    return ServerPart(
        [{"op": "push", "key": key, "method": "assign_add", "value": 0, "rows": None}], (value,)
    )


def step(way, servers, value, key="v"):
    """Push to all servers, and count the step there, in one transaction."""
    one = np.zeros(ME.world_size, np.int64)
    one[ME.rank] = 1
    ask = {}
    for server in servers:
        ask[server] = push(key, value)
        ask[server].operations.append(
            {"op": "push", "key": "steps", "method": "assign_add", "value": 1, "rows": None}
        )
        ask[server] = ServerPart(ask[server].operations, (value, one))
    way.wait(way.request(ask), "a step", 60.0)


def begun(way, servers, value, key="v"):
    """Make what is pushed to, unless it is there; return how many steps of this worker have been counted."""
    made(way, servers, value, key)
    made(way, servers, np.zeros(ME.world_size, np.int64), "steps")
    (first,) = {int(one[ME.rank]) for one in pulled(way, servers, "steps")}
    return first


def pull(key):
    return ServerPart([{"op": "pull", "key": key, "rows": None}])


def made(way, servers, value, key="v"):
    """Make an array on each server; whoever comes first does."""
    way.wait(way.request({server: create(key, value) for server in servers}), "making")


def pulled(way, servers, key="v"):
    ticket = way.wait(way.request({server: pull(key) for server in servers}), "a pull", 60.0)
    return [np.array(ticket.array(server, 0)) for server in servers]


__all__ = ["ME", "begun", "edge", "pulled", "step"]
