"""TF_CONFIG: the cluster and this process's task in it, as JSON."""

from __future__ import annotations

from syncvar.errors import ConfigError
from syncvar.topology.engines.base import Engine, Told, port_of

__all__ = ["TfConfig"]

_KINDS = ("chief", "master", "worker")


class TfConfig(Engine):
    """The variable TF_CONFIG, whoever sets it."""

    name = "TF_CONFIG"
    rank = "TF_CONFIG"

    def is_present(self) -> bool:
        """Return whether it holds something."""
        return bool(self.environ.get("TF_CONFIG", "").strip())

    def told(self) -> Told:
        """Return what it says of this process.

        Raises:
            ConfigError: It cannot be read, or this process is no worker of its cluster.
        """
        import json  # only TF_CONFIG needs it

        try:
            config = json.loads(self.environ["TF_CONFIG"])
            cluster, task = config["cluster"], config["task"]
            kind, index = task["type"], task["index"]
            tasks = {name: list(cluster[name]) for name in cluster}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"TF_CONFIG cannot be read ({type(error).__name__}: {error}); it has to look like "
                f'{{"cluster": {{"worker": ["host:port", ...]}}, "task": {{"type": "worker", "index": 0}}}}'
            ) from None
        others = sorted(set(tasks) - set(_KINDS))
        if others or kind not in _KINDS:
            raise ConfigError(
                f"TF_CONFIG has tasks of type {', '.join(others) or kind}: only chief and worker become ranks; leave the "
                f"others out"
            )
        everyone: list[tuple[str, int]] = [(name, number) for name in _KINDS for number in range(len(tasks.get(name, [])))]
        if isinstance(index, str) and index.isascii() and index.isdigit():
            index = int(index)
        if (kind, index) not in everyone or isinstance(index, bool):
            raise ConfigError(f"TF_CONFIG: there is no task {kind} {index!r} in its cluster of {len(everyone)}")
        addresses = [tasks[name][number] for name, number in everyone]
        hosts, places, ports = _places(addresses)
        rank = everyone.index((kind, index))
        here = [other for other, place in enumerate(places) if place == places[rank]]
        return Told(
            "TF_CONFIG", rank, len(everyone), rank - here[0], len(here), places[rank], len(hosts), hosts[0].strip("[]"),
            ports[0], json.dumps(addresses),
        )  # fmt: skip


def _places(addresses: list[object]) -> tuple[list[str], list[int], list[int]]:
    """Return the hosts of some addresses, which of them each is on, and their ports."""
    hosts: list[str] = []
    places: list[int] = []
    ports: list[int] = []
    for address in addresses:
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not colon or not host:
            raise ConfigError(f"TF_CONFIG: {address!r} is no host:port")
        if not hosts or host != hosts[-1]:
            if host in hosts:
                raise ConfigError(f"TF_CONFIG: the workers of {host} do not follow each other; list them host by host")
            hosts.append(host)
        places.append(len(hosts) - 1)
        ports.append(port_of(port, "TF_CONFIG"))
    return hosts, places, ports
