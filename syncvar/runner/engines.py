"""The engines of `sv.run` besides this machine: Ray and Dask.

`Engine` is the protocol, `EngineSlot`, `CallPart` and `End` are the messages, and `drive` is the
loop. `remote_call` runs in the engine's worker; `ray_engine` and `dask_engine` are the engines.

The ranks find each other as those of torchrun do, by rank 0's address, and with the job's secret.
An engine carries messages as bytes. It pickles them, but syncvar unpickles only the function.

Example:
    >>> import syncvar as sv
    >>> sv.engines.engine_of("spark")
    Traceback (most recent call last):
    ...
    syncvar.core.errors.ConfigError: ...
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from syncvar.core.errors import ConfigError, LaunchError, RankFailed
from syncvar.core.exit_status import INTERNAL, TIMEOUT, severity_of
from syncvar.core.restart_policy import Ending, Restarting
from syncvar.core.settings import RuntimeConfig, doubtful_variables
from syncvar.protocol.exception_codec import unpack_exception
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Engine", "engine_of"]

_ENGINES = {"ray": ("ray_engine", "Ray"), "dask": ("dask_engine", "Dask")}
_CLASSES = {name: home for home, name in _ENGINES.values()}
_log = logging.getLogger("syncvar")
_LOOK_S = 1.0


@runtime_checkable
class Engine(Protocol):
    """A cluster on which `sv.run` can run ranks. `drive` calls the methods in this order.

    Each rank has a place, which is a process. Places are numbered from 0 in the order of `gather`.
    `gather` to `end` run once for each start.
    """

    def gather(self, workers: int, timeout_s: float) -> Sequence[bytes]:
        """Reserve one place per rank, and return what `remote_call.arrive` returns in each.

        Raises:
            LaunchError: There are too few places; the message says how many, and what to do.
        """

    def begin(self, parts: Sequence[bytes]) -> None:
        """Run `remote_call.play` with a part in each place, all at once."""

    def ended(self, timeout_s: float) -> Mapping[int, bytes | str]:
        """Wait until a place has ended that was not reported before.

        Returns:
            For each ended place, the result of `remote_call.play`, or a text that says why its
            process is gone.
        """

    def end(self, grace_s: float) -> None:
        """Terminate what still runs, and release the places. Idempotent.

        Args:
            grace_s: Time until ranks that were asked to end are killed, in seconds.
        """

    def close(self) -> None:
        """Release the engine, and stop its cluster if it was started here. Idempotent."""


class EngineSlot(NamedTuple):
    """A place, as it describes itself."""

    ground: str  # identity of everything that processes need in common to share memory and sockets
    host: str  # name of its host
    address: str  # address for other hosts
    port: int  # port that was free
    pid: int  # its process


class CallPart(NamedTuple):
    """What a rank needs for its call."""

    rank: int  # rank in the world
    # identity and rendezvous as torchrun's variables, the secret, and the settings
    environ: dict[str, str]
    call: bytes  # the function and its arguments
    folders: list[str]  # module path of the caller
    # process that it is meant for: an engine that repeats lost tasks must not repeat a rank
    pid: int


class End(NamedTuple):
    """The end of a rank."""

    result: bytes = b""  # packed result of the function; empty after a failure
    error: str = ""  # name of the exception, or empty
    message: str = ""  # text of the exception
    traceback: str = ""  # traceback for the author of the function
    exit_code: int = 0  # exit code that its process would have
    has_met: bool = True  # the rank had met the others
    raised: bytes = b""  # packed exception, or empty


_Carried = TypeVar("_Carried", EngineSlot, CallPart, End)


def engine_of(name: str | Engine) -> Engine:
    """Return an engine by name, or the given engine.

    Raises:
        ConfigError: The name is unknown, or packages of the engine are missing.
    """
    if isinstance(name, Engine):
        return name
    if not isinstance(name, str) or name not in _ENGINES:
        raise ConfigError(
            f"engine must be one of local, {', '.join(_ENGINES)}, or an object of sv.engines, not "
            f"{name!r:.100}"
        )
    home, class_name = _ENGINES[name]
    make: Callable[[], Engine] = getattr(
        importlib.import_module(f"syncvar.runner.{home}"), class_name
    )
    return make()


def pack(value: EngineSlot | CallPart | End) -> bytes:
    """Return a message as bytes."""
    return pack_object(list(value))


def unpack(message_type: type[_Carried], data: bytes) -> _Carried:
    """Return a message of `pack`."""
    return message_type(*unpack_object(data))


def parts(
    places: Sequence[EngineSlot],
    call: bytes,
    job: str,
    secret: str,
    settings: Mapping[str, str],
    folders: Sequence[str],
    restarts: int = 0,
) -> list[CallPart]:
    """Return the part of each place.

    Ranks are numbered host by host, in the order of their first place.

    Example:
        >>> hosts = [("a", 5000), ("b", 6000), ("a", 5002)]
        >>> places = [EngineSlot(host, host, host, port, 1) for host, port in hosts]
        >>> created = parts(places, b"", "j", "", {}, [])
        >>> [(one.rank, one.environ["LOCAL_RANK"], one.environ["MASTER_ADDR"]) for one in created]
        [(0, '0', 'a'), (2, '0', 'a'), (1, '1', 'a')]
    """
    hosts: dict[str, list[int]] = {}
    for number, entry in enumerate(places):
        hosts.setdefault(entry.ground, []).append(number)
    first = places[0]
    created: list[CallPart | None] = [None] * len(places)
    rank = 0
    for host_index, numbers in enumerate(hosts.values()):
        for local_rank, number in enumerate(numbers):
            variables: dict[str, Any] = {
                "RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": len(numbers),
                "GROUP_RANK": host_index,
                "GROUP_WORLD_SIZE": len(hosts),
                "MASTER_ADDR": first.address,
                # The rendezvous uses the next port, because torchrun itself uses MASTER_PORT.
                "MASTER_PORT": first.port - 1,
                "TORCHELASTIC_RUN_ID": job,
                "TORCHELASTIC_RESTART_COUNT": restarts,
                "SYNCVAR_KEY": secret,
            }
            environ = {**settings, **{name: str(value) for name, value in variables.items()}}
            created[number] = CallPart(rank, environ, call, list(folders), places[number].pid)
            rank += 1
    return [one for one in created if one is not None]


def drive(
    engine: Engine, call: bytes, workers: int, limit_s: float, max_restarts: int
) -> list[bytes]:
    """Make a call as every rank of a job on an engine; return the packed results by rank.

    It closes the engine. RankFailed has the failure that caused the others.
    """
    config = RuntimeConfig.from_mapping(os.environ).consistent()
    for sentence in doubtful_variables(os.environ):
        _log.warning("%s", sentence)
    restarting = Restarting(max_restarts, config.restart_delay_s)
    until, had_met = time.monotonic() + limit_s, False
    try:
        while True:
            start = _Start(engine, config, limit_s, until)
            try:
                return start.run(call, workers, restarting.number)
            except RankFailed as failure:
                had_met = had_met or start.has_met
                decision = restarting.after(start.ending(failure, had_met=had_met))
                if not decision.restarts:
                    if decision.reason:
                        _log.warning("not started again: %s", decision.reason)
                    raise
                _log.warning(
                    "%s; %s, in %g s",
                    str(failure).split("\n", 1)[0],
                    decision.reason,
                    decision.pause_s,
                )
                time.sleep(max(0.0, min(decision.pause_s, until - time.monotonic())))
            finally:
                engine.end(config.term_grace_s)
    finally:
        engine.close()


def __getattr__(name: str) -> object:
    if name in _CLASSES:
        return getattr(importlib.import_module(f"syncvar.runner.{_CLASSES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Start:
    """One start of all ranks."""

    def __init__(self, engine: Engine, config: RuntimeConfig, limit_s: float, until: float) -> None:
        self._engine, self._config = engine, config
        self._limit_s, self._until, self._began = limit_s, until, time.monotonic()
        self._error = ""
        self.has_met = False

    def run(self, call: bytes, workers: int, restarts: int) -> list[bytes]:
        """Return the results by rank; raise the failure that caused the others."""
        limit_s = min(self._config.rendezvous_timeout_s, self._until - self._began)
        places = [unpack(EngineSlot, data) for data in self._engine.gather(workers, limit_s)]
        pids = {(entry.ground, entry.pid) for entry in places}
        if len(pids) < workers:
            raise LaunchError(
                f"{workers} ranks were given {len(pids)} processes: each rank needs one of its "
                "own (a LocalCluster of Dask has them with processes=True)"
            )
        job, secret = secrets.token_hex(8), secrets.token_hex(32)
        settings, folders = self._config.to_mapping(), [path for path in sys.path if path]
        handed = parts(places, call, job, secret, settings, folders, restarts)
        self._engine.begin([pack(part) for part in handed])
        ends: dict[int, End] = {}  # by rank, in order of arrival
        stop = self._until
        while len(ends) < workers and (now := time.monotonic()) < stop:
            for number, answer in self._engine.ended(min(_LOOK_S, stop - now)).items():
                if isinstance(answer, str):
                    end = End(message=answer, exit_code=INTERNAL)
                else:
                    end = unpack(End, answer)
                ends[handed[number].rank] = end
                # the others notice by their links, except for ranks that compute on and on
                if not end.result:
                    stop = min(stop, time.monotonic() + self._config.abort_grace_s)
        self.has_met = bool(ends) and all(end.has_met for end in ends.values())
        hosts = {part.rank: entry.host for part, entry in zip(handed, places, strict=True)}
        failed = [rank for rank, end in ends.items() if not end.result]
        if failed:
            rank = min(failed, key=lambda one: severity_of(ends[one].error))
            failure = self._failure(rank, hosts[rank], ends[rank])
            raise failure from failure.__cause__
        if len(ends) < workers:
            raise RankFailed(
                -1, socket.gethostname(), TIMEOUT, f"the time limit of {self._limit_s:g} s passed"
            )
        return [ends[rank].result for rank in range(workers)]

    def ending(self, failure: RankFailed, *, had_met: bool) -> Ending:
        """Return the facts that decide about a restart."""
        reason = str(failure).split("\n", 1)[0]
        lasted_s = time.monotonic() - self._began
        return Ending(
            failure.exit_code, reason, self._error, failure.exit_code == TIMEOUT, had_met, lasted_s
        )

    def _failure(self, rank: int, host: str, end: End) -> LaunchError:
        if end.exit_code == 0:
            return LaunchError(f"rank {rank} ended without returning a result")
        self._error = end.error
        failure = RankFailed(rank, host, end.exit_code, end.traceback or end.message)
        failure.__cause__ = unpack_exception(end.raised) if end.raised else None
        return failure
