"""Ranks as tasks of Dask, one on each of as many workers, all at once."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.errors import ConfigError, LaunchError

try:
    import distributed
except ImportError:
    raise ConfigError("engine='dask' needs Dask: pip install 'syncvar[dask]', here and on the hosts of the cluster") from None

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Dask"]

_log = logging.getLogger("syncvar")
_LOOK_S = 0.25
_COMING_S = 5.0
_PATIENCE_S = 30.0
_lock = threading.Lock()
_threads: dict[str, int] = {}  # of the ranks that run in this process: by key, the thread


class Ended(BaseException):
    """The rank of this thread is ended by whoever started it."""


class Dask:
    """Dask: the cluster of a client; by default that of this program's current client; else one on this host, for the time of the call.

    Args:
        client: A connected `distributed.Client`.
        workers: Addresses or names of those workers that may be used; None for all.

    Example:
        sv.run(train, workers=8, engine=sv.engines.Dask(client))
    """

    def __init__(self, client: Any = None, *, workers: Sequence[str] | None = None) -> None:
        self._client = client
        self._only = None if workers is None else set(workers)
        self._own: contextlib.ExitStack | None = None
        self._key = ""
        self._ids: list[tuple[str, str]] = []  # of each place: address and identity of its worker
        self._plays: dict[Any, int] = {}  # what will be known of a place -> its number
        self._is_again = False

    def gather(self, workers: int, timeout_s: float) -> Sequence[bytes]:
        """Choose the workers that have least to do, each of a process of its own."""
        # Workers that a nanny has just started again are there soon; those that never were do not come by waiting.
        until = time.monotonic() + (timeout_s if self._is_again else min(_COMING_S, timeout_s))
        self._connect(workers)
        while len(found := self._workers()) < workers:
            if time.monotonic() > until:
                raise LaunchError(
                    f"{workers} ranks need {workers} workers of Dask at once, one each, and {self._client.scheduler.address} has "
                    f"{len(found)}{'' if self._only is None else ' of those named'}: start more (cluster.scale({workers}), or dask worker), or ask for fewer (workers=)"
                )
            time.sleep(_LOOK_S)
        self._is_again = True
        processing = self._client.processing()
        chosen = sorted(found, key=lambda address: len(processing.get(address, ())))[:workers]
        chosen.sort()
        self._ids = [(address, found[address]) for address in chosen]
        try:
            told = self._client.run(_arrive, workers=chosen)
        except Exception as error:  # of any kind: it is what the worker raised
            raise LaunchError(f"a worker of Dask cannot be a rank: {error!r}; do all have this version of syncvar?") from error
        return [told[address] for address in chosen]

    def begin(self, parts: Sequence[bytes]) -> None:
        """Give each worker its part."""
        self._key = f"syncvar-{secrets.token_hex(8)}"
        self._plays = {
            self._client.submit(
                _play, part, f"{self._key}-{number}", key=f"{self._key}-{number}", workers=[address], allow_other_workers=False,
                pure=False, retries=0, priority=1000,
            ): number
            for number, (part, (address, _)) in enumerate(zip(parts, self._ids, strict=True))
        }  # fmt: skip

    def ended(self, timeout_s: float) -> Mapping[int, bytes | str]:
        """Wait for a task's answer, or until its worker is gone."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                distributed.wait(list(self._plays), timeout=min(_LOOK_S, timeout_s), return_when="FIRST_COMPLETED")
            told = {number: _answer(one) for one, number in self._plays.items() if one.done()}
            workers = self._workers()
            for number in self._plays.values():
                address, identity = self._ids[number]
                if number not in told and workers.get(address) != identity:
                    told[number] = f"its Dask worker {address} is gone"
            if told or time.monotonic() >= until:
                self._plays = {one: number for one, number in self._plays.items() if number not in told}
                return told

    def end(self, grace_s: float) -> None:
        """End the ranks that still run; where one does not, in its grace, its worker is started again by its nanny."""
        if self._plays:
            left = {self._ids[number][0]: f"{self._key}-{number}" for number in self._plays.values()}
            self._client.run(_interrupt, list(left.values()), workers=list(left), on_error="ignore")  # some may be gone
            with contextlib.suppress(TimeoutError):
                distributed.wait(list(self._plays), timeout=grace_s)
            late = [self._ids[number][0] for one, number in self._plays.items() if not one.done()]
            self._client.cancel(list(self._plays), force=True)
            if late:
                _log.warning("workers of Dask are started again, for their ranks did not end within %g s: %s", grace_s, ", ".join(late))
                self._client.restart_workers(late, timeout=_PATIENCE_S, raise_for_error=False)
        self._plays, self._ids = {}, []

    def close(self) -> None:
        """End the cluster that was started here."""
        if self._own is not None:
            self._own.close()
            self._own = self._client = None

    def _connect(self, workers: int) -> None:
        if self._client is not None:
            pass
        elif (current := _current_client()) is not None:
            self._client = current
        else:
            self._own = contextlib.ExitStack()
            cluster = distributed.LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
            self._client = self._own.enter_context(distributed.Client(self._own.enter_context(cluster), set_as_default=False))
        if getattr(self._client, "asynchronous", False):
            raise ConfigError("sv.run waits for its results: give it a client that is not asynchronous")

    def _workers(self) -> dict[str, str]:
        """Return the workers that there are now: address -> identity, which a worker that is started again has not."""
        told = self._client.scheduler_info(n_workers=-1)["workers"]
        return {
            address: about["id"] for address, about in told.items()
            if about.get("status") == "running" and (self._only is None or not self._only.isdisjoint((address, str(about["name"]))))
        }  # fmt: skip


def _current_client() -> Any:
    try:
        return distributed.Client.current()
    except ValueError:
        return None


def _arrive(dask_worker: Any) -> bytes:
    from syncvar.engines.place import arrive

    return arrive(dask_worker.ip)


def _play(part: bytes, key: str) -> bytes:
    from syncvar.engines.place import play

    with _lock:
        _threads[key] = threading.get_ident()
    try:
        return play(part)
    finally:
        with _lock:
            del _threads[key]


def _interrupt(keys: list[str]) -> None:
    """Raise in the threads of these ranks, as far as they are here: a task that runs cannot be cancelled otherwise."""
    with _lock:
        for thread in (_threads[key] for key in keys if key in _threads):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Ended))


def _answer(future: Any) -> bytes | str:
    try:
        answer: bytes = future.result(timeout=_PATIENCE_S)
    except Exception as error:  # of any kind: Dask raises what it has heard
        return f"its task of Dask has not come to an end: {error!r}"
    return answer
