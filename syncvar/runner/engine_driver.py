"""Drives a call on an engine.

Start all ranks, wait, choose the failure to report, terminate, restart.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from typing import TYPE_CHECKING

from syncvar.core.errors import LaunchError, RankFailed
from syncvar.core.exit_status import INTERNAL, TIMEOUT, severity_of
from syncvar.core.restart_policy import Ending, Restarting
from syncvar.core.settings import RuntimeConfig, doubtful_variables
from syncvar.protocol.exception_codec import unpack_exception
from syncvar.runner.call_parts import End, EngineSlot, packed, parts, unpacked

if TYPE_CHECKING:
    from syncvar.runner.engines import Engine

_log = logging.getLogger("syncvar")
_LOOK_S = 1.0


def drive(
    engine: Engine, call: bytes, workers: int, limit_s: float, max_restarts: int
) -> list[bytes]:
    """Make a call as every rank of a job on an engine; return the packed results by rank.

    Args:
        engine: The engine; closed at the end.
        call: The packed function and its arguments.
        workers: Number of ranks.
        limit_s: Time limit of the whole job, in seconds.
        max_restarts: How often all ranks may be restarted after a failure.

    Raises:
        RankFailed: A rank failed; the failure that caused the others.
        LaunchError: There are too few places.
        ConfigError: A setting is wrong.
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


class _Start:
    """One start of all ranks."""

    def __init__(self, engine: Engine, config: RuntimeConfig, limit_s: float, until: float) -> None:
        self._engine = engine
        self._config = config
        self._limit_s = limit_s
        self._until = until
        self._began = time.monotonic()
        self._error = ""
        self.has_met = False

    def run(self, call: bytes, workers: int, restarts: int) -> list[bytes]:
        """Return the results by rank; raise the failure that caused the others."""
        limit_s = min(self._config.rendezvous_timeout_s, self._until - self._began)
        places = [unpacked(EngineSlot, data) for data in self._engine.gather(workers, limit_s)]
        pids = {(entry.ground, entry.pid) for entry in places}
        if len(pids) < workers:
            raise LaunchError(
                f"{workers} ranks were given {len(pids)} processes: each rank needs one of its "
                "own (a LocalCluster of Dask has them with processes=True)"
            )
        secret = secrets.token_hex(32)
        handed = parts(
            places,
            call,
            secrets.token_hex(8),
            secret,
            self._config.to_mapping(),
            [path for path in sys.path if path],
            restarts,
        )
        self._engine.begin([packed(part) for part in handed])
        ends: dict[int, End] = {}  # by rank, in order of arrival
        stop = self._until
        while len(ends) < workers and (now := time.monotonic()) < stop:
            for number, answer in self._engine.ended(min(_LOOK_S, stop - now)).items():
                end = (
                    unpacked(End, answer)
                    if isinstance(answer, bytes)
                    else End(error="", message=answer, exit_code=INTERNAL)
                )
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
