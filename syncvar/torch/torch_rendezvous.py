"""How the ranks of torch.distributed become ranks of syncvar.

If syncvar's world, from its launcher or from that of others, has the ranks of torch, it serves.
Else the ranks meet by the store that torch has given, in a job of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from syncvar.bootstrap import process
from syncvar.bootstrap.job_private import job_secret
from syncvar.bootstrap.kv_store import KeyValueStore
from syncvar.bootstrap.launch_env import LaunchInfo
from syncvar.bootstrap.launch_env.detection import launcher_info
from syncvar.bootstrap.rendezvous import leave
from syncvar.collectives.groups import Group
from syncvar.collectives.object_collectives import broadcast_object
from syncvar.core.errors import ConfigError
from syncvar.core.fork_cleanup import register_exit
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime.collective_spec import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

_SOURCE = "the store of init_process_group"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _Membership:
    """The default group of torch in this process."""

    def __init__(self) -> None:
        self.members: tuple[int, ...] = ()  # ranks of syncvar's world, in torch's order
        self.starts = 0  # default groups so far
        self.uses: Counter[tuple[object, ...]] = Counter()  # groups by name and members
        self.is_own_job = False  # this backend has joined, by a store


_membership = _Membership()


class TorchJob(NamedTuple):
    """What a process group leaves when torch destroys it."""

    is_default: bool

    def leave(self) -> None:
        """After the default group, leave a job that this backend has joined by a store."""
        if self.is_default and _membership.is_own_job:
            _membership.is_own_job = False
            process.shutdown()


class StoreEntries(KeyValueStore):
    """Entries in a store of torch."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, key: str, text: str) -> None:
        """Put an entry."""
        self._store.set(f"{self._prefix}/{key}", text)

    def read(self, key: str, owner: str) -> str:
        """Return an entry once it is there."""
        data: bytes = self._store.get(f"{self._prefix}/{key}")
        return data.decode()


def make_group(options: Any) -> tuple[Group, TorchJob]:
    """Return the group for a process group that torch makes, on its members.

    The members of other groups than the default one exchange nothing: torch gives each group a name
    that all its members know. After a group has been destroyed, a new one may get its name, so the
    members count the groups of each name.
    """
    ranks = tuple(options.global_ranks_in_group)
    if not ranks:
        _membership.starts += 1
        _membership.members = _join(options.store, options.group_rank, options.group_size)
        ranks = tuple(range(options.group_size))
    members = tuple(_membership.members[rank] for rank in ranks)
    key = (_membership.starts, options.group_id, members)
    _membership.uses[key] += 1
    identity = fingerprint("torch", *key, _membership.uses[key])
    communicator = process.current().communicator(identity, members)
    return Group(communicator), TorchJob(is_default=not options.global_ranks_in_group)


def _join(store: Any, rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks of syncvar's world, in torch's order; join a job first if necessary."""
    _join_by_launcher(rank, size)
    if size == 1:
        alone = process.joined() is None and process.environment_here() is None
        return (process.current(alone=alone).rank,)
    start = store.add(f"syncvar/starts/{rank}", 1)  # a store may serve several times
    entries = StoreEntries(store, f"syncvar/{start}")
    context = process.joined()
    job = ["", -1]
    if context is not None and context.world_size > 1:
        identity = context.recorder.identity
        job = [f"{identity.job} {identity.generation}", context.rank]
    entries.put(f"rank-{rank}", json.dumps([*job, _host_name()]))
    everyone = [json.loads(entries.read(f"rank-{one}", f"rank {one}")) for one in range(size)]
    jobs = {one[0] for one in everyone}
    if jobs == {""}:
        return _join_by_store(entries, rank, [one[2] for one in everyone])
    if len(jobs) > 1:
        without = [one for one, record in enumerate(everyone) if not record[0]]
        raise ConfigError(
            f"the ranks of torch.distributed are in {len(jobs)} different jobs of syncvar "
            f"(without one: ranks {without}): start them together, or call sv.shutdown() before "
            "init_process_group"
        )
    return tuple(one[1] for one in everyone)


def _join_by_launcher(rank: int, size: int) -> None:
    """Join syncvar's world if a launcher has given this process the same place in it."""
    if process.joined() is not None or size == 1:
        return
    here: Any = process.environment_here()
    with contextlib.suppress(ConfigError):  # the store says all that is needed
        here = here or launcher_info(os.environ, None)
    if here is not None and (here.rank, here.world_size) == (rank, size):
        process.current()


def _join_by_store(entries: StoreEntries, rank: int, hosts: list[str]) -> tuple[int, ...]:
    """Join a job of these ranks, which all have the list of their hosts."""
    process.shutdown()  # a world of one
    leave(RuntimeConfig.from_mapping(os.environ).rendezvous_timeout_s)
    order = list(dict.fromkeys(hosts))
    ranks = sorted(range(len(hosts)), key=lambda one: (order.index(hosts[one]), one))
    here = [one for one in ranks if hosts[one] == hosts[rank]]
    is_one_host = len(order) == 1
    if not is_one_host:
        _require_secret()
    if rank == 0:
        entries.put("run", secrets.token_hex(16))
    run = entries.read("run", "rank 0")
    info = LaunchInfo(
        source=_SOURCE,
        rank=ranks.index(rank),
        world_size=len(hosts),
        local_rank=here.index(rank),
        local_world_size=len(here),
        host_index=0 if is_one_host else -1,
        host_count=int(is_one_host),
        address="",
        port=0,
        run=f"torch {run}",
        way="folder",
    )
    process.join_as(info, entries)
    _membership.is_own_job = True
    places = {one: place for place, one in enumerate(ranks)}
    return tuple(places[one] for one in range(len(hosts)))


def _require_secret() -> None:
    """Raise ConfigError without a secret: a store of torch is not private."""
    config = RuntimeConfig.from_mapping(os.environ)
    if config.encryption != "off" and job_secret(os.environ) is None:
        raise ConfigError(
            f"{_SOURCE} names several hosts: links between hosts need a secret that all ranks "
            "have. Set SYNCVAR_KEY_FILE to a file of 64 hexadecimal digits (chmod 600), or "
            "SYNCVAR_KEY to the digits"
        )


def _host_name() -> str:
    """Return a name that processes have in common if they can share memory."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()}"
    return socket.gethostname()


# -- init_process_group without variables of torchrun ----------------------------------------------


class _EnvHandler:
    """The handler of env:// that also knows syncvar-launch, mpirun and Slurm."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, url: str, timeout: timedelta, **options: Any) -> Iterator[Any]:
        query = url.partition("?")[2]
        named = {pair.partition("=")[0] for pair in query.split("&")}
        has_all = all(name in os.environ or name.lower() in named for name in _VARIABLES)
        if has_all or not _has_launcher():
            yield from self._original(url, timeout=timeout, **options)
        else:
            context = process.current()
            yield _store_of_world(timeout), context.rank, context.world_size


def _has_launcher() -> bool:
    """Return whether syncvar can tell this process its place without a store."""
    if process.joined() is not None or process.environment_here() is not None:
        return True
    return launcher_info(os.environ, None) is not None


def _store_of_world(timeout: timedelta) -> Any:
    """Return a store for the ranks of syncvar's world. Collective.

    On one host it is a file in a private folder, so that nothing listens on a port.
    """
    context = process.current()
    if context.world_size == 1:
        return dist.HashStore()
    if context.host_count == 1:
        folder = ""
        if context.rank == 0:
            folder = tempfile.mkdtemp(prefix="syncvar-torch-")
            register_exit(partial(shutil.rmtree, folder, ignore_errors=True))
        path = os.path.join(broadcast_object(folder), "store")
        return dist.FileStore(path, context.world_size)
    store = None
    if context.rank == 0:
        store = dist.TCPStore(
            socket.gethostname(),
            0,
            context.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
        )
    port = broadcast_object(None if store is None else store.port)
    here = process.environment_here()
    address = "" if here is None else here.host_address
    host = broadcast_object(address or socket.gethostname())
    if store is not None:
        return store
    return dist.TCPStore(host, port, context.world_size, is_master=False, timeout=timeout)


def install_handler() -> None:
    """Let env:// work where only syncvar knows ranks and addresses; idempotent."""
    if not isinstance(_rendezvous_handlers["env"], _EnvHandler):
        _rendezvous_handlers["env"] = _EnvHandler(_rendezvous_handlers["env"])
