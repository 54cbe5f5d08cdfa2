"""TF_CONFIG: the cluster and this process's task in it, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.bootstrap.launch_env.base import LaunchEnvironment, LaunchInfo, port_of
from syncvar.bootstrap.launch_env.rank_placement import add_host
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS = ("chief", "master", "worker")


class TfConfig(LaunchEnvironment):
    """The variable TF_CONFIG."""

    name = "TF_CONFIG"
    rank = "TF_CONFIG"

    def is_present(self) -> bool:
        """Return whether it describes a cluster; TensorFlow ignores `{}` and an empty cluster."""
        text = self.environ.get("TF_CONFIG", "").strip()
        if not text:
            return False
        import json

        try:
            config = json.loads(text)
        except ValueError:
            return True  # `info` raises
        return not isinstance(config, dict) or bool(config.get("cluster", {}))

    def info(self) -> LaunchInfo:
        """Return the identity of this process.

        Raises:
            ConfigError: The variable cannot be parsed, or this process is not a worker.
        """
        import json

        try:
            config = json.loads(self.environ["TF_CONFIG"])
            cluster, task = config["cluster"], config["task"]
            task_type, index = task["type"], task["index"]
            tasks = {name: list(cluster[name]) for name in cluster}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"TF_CONFIG cannot be read ({type(error).__name__}: {error}); it has to look like "
                '{"cluster": {"worker": ["host:port", ...]}, '
                '"task": {"type": "worker", "index": 0}}'
            ) from None
        others = sorted(set(tasks) - set(_KINDS))
        if "ps" in (*others, task_type):
            servers = max(1, len(tasks.get("ps", [])))
            raise ConfigError(
                "TF_CONFIG has tasks of type ps, and only syncvar-launch starts parameter servers: "
                "leave TF_CONFIG out, and write syncvar-launch --workers "
                f"{_workers(tasks)} --servers {servers} SCRIPT, with -H for several hosts"
            )
        if others or task_type not in _KINDS:
            raise ConfigError(
                f"TF_CONFIG has tasks of type {', '.join(others) or task_type}: only chief and "
                "worker become ranks; leave the others out"
            )
        everyone: list[tuple[str, int]] = [
            (name, number) for name in _KINDS for number in range(len(tasks.get(name, [])))
        ]
        if isinstance(index, str) and index.isascii() and index.isdigit():
            index = int(index)
        if (task_type, index) not in everyone or isinstance(index, bool):
            raise ConfigError(
                f"TF_CONFIG: there is no task {task_type} {index!r} in its cluster of "
                f"{len(everyone)}"
            )
        addresses = [tasks[name][number] for name, number in everyone]
        hosts, ports = _places(addresses)
        info = LaunchInfo(
            "TF_CONFIG",
            everyone.index((task_type, index)),
            len(everyone),
            0,
            0,
            -1,
            0,
            hosts[0].strip("[]"),
            ports[0],
            json.dumps(addresses),
        )
        return add_host(info, hosts, hosts, "List the workers host by host")


def _places(addresses: list[object]) -> tuple[list[str], list[int]]:
    """Return hosts and ports of addresses."""
    hosts: list[str] = []
    ports: list[int] = []
    for address in addresses:
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not colon or not host:
            raise ConfigError(f"TF_CONFIG: {address!r} is no host:port")
        hosts.append(host)
        ports.append(port_of(port, "TF_CONFIG"))
    return hosts, ports


def _workers(tasks: Mapping[str, Sequence[str]]) -> int:
    """Return the number of ranks of a cluster."""
    return max(1, sum(len(tasks.get(task_type, ())) for task_type in _KINDS))
