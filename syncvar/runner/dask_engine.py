"""Ranks as tasks of Dask, one on each of several workers, all at once."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from syncvar.core.errors import ConfigError, LaunchError

try:
    import distributed
except ImportError:
    distributed = None  # type: ignore[assignment, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger("syncvar")
_LOOK_S = 0.25
_COMING_S = 5.0
_PATIENCE_S = 30.0
_lock = threading.Lock()
_threads: dict[str, int] = {}  # threads of ranks in this process, by key


class RankEnded(BaseException):
    """Raised in the thread of a rank that its starter terminates."""


class Dask:
    """Dask as an engine of `sv.run`.

    Args:
        client: Connected `distributed.Client`. None for this program's current client; without one,
            a cluster on this host for the time of the call.
        workers: Addresses or names of the workers to use; None for all.

    Raises:
        ConfigError: Dask is not installed.

    Example:
        >>> import syncvar as sv
        >>> sv.run(train, workers=8, engine=sv.engines.Dask(client))  # doctest: +SKIP
    """

    def __init__(self, client: Any = None, *, workers: Sequence[str] | None = None) -> None:
        if distributed is None:
            raise ConfigError(
                "engine='dask' needs Dask: pip install distributed cloudpickle, here and on the "
                "hosts of the cluster"
            )
        self._client = client
        self._only = None if workers is None else set(workers)
        self._own: contextlib.ExitStack | None = None
        self._key = ""
        self._ids: list[tuple[str, str]] = []  # of each place: (address, identity) of its worker
        self._plays: dict[Any, int] = {}  # future of a place -> its number
        self._is_again = False

    def gather(self, workers: int, timeout_s: float) -> Sequence[bytes]:
        """Choose the workers with the fewest tasks; a worker counts when it has answered."""
        began = time.monotonic()
        # Workers restarted by a nanny come soon; others do not come by waiting.
        coming_s = timeout_s if self._is_again else min(_COMING_S, timeout_s)
        self._connect(workers)
        self._is_again = True
        # Worker (address, identity) -> future of its answer.
        requests: dict[tuple[str, str], Any] = {}
        while True:
            found = self._workers()
            requests = {
                one: answer
                for one, answer in requests.items()
                if one in found and answer.status in ("pending", "finished")
            }
            ready = [one for one, answer in requests.items() if answer.done()]
            if len(ready) == workers:
                break
            waited_s = time.monotonic() - began
            if waited_s > (timeout_s if len(found) >= workers else coming_s):
                raise LaunchError(self._too_few(workers, len(found), len(ready), waited_s))
            processing = self._client.processing()
            free = sorted(
                (one for one in found if one not in requests),
                key=lambda one: len(processing.get(one[0], ())),
            )
            for one in free[: workers - len(requests)]:
                requests[one] = self._submit(_arrive, f"syncvar-{secrets.token_hex(8)}", one[0])
            self._wait([answer for answer in requests.values() if not answer.done()], _LOOK_S)
            for answer in requests.values():
                if (
                    answer.status == "error"
                    and isinstance(answer.exception(), Exception)
                    and not isinstance(answer.exception(), distributed.KilledWorker)
                ):
                    raise LaunchError(
                        f"a worker of Dask cannot be a rank: {answer.exception()!r}; do all have "
                        "this version of syncvar?"
                    )
        self._ids = sorted(ready)
        return [requests[one].result() for one in self._ids]

    def _too_few(self, workers: int, found: int, ready: int, waited_s: float) -> str:
        where = (
            f"{self._client.scheduler.address} has "
            f"{found}{'' if self._only is None else ' of those named'}"
        )
        if found >= workers:
            return (
                f"{workers} ranks need {workers} workers of Dask at once; {where}, of which "
                f"{ready} had room for a task within {waited_s:.0f} s"
            )
        return (
            f"{workers} ranks need {workers} workers of Dask at once, one each, and {where}: "
            f"start more (cluster.scale({workers}), or dask worker), or ask for fewer (workers=)"
        )

    def begin(self, parts: Sequence[bytes]) -> None:
        """Send each worker its part."""
        self._key = f"syncvar-{secrets.token_hex(8)}"
        self._plays = {
            self._submit(
                _play, f"{self._key}-{number}", address, part, f"{self._key}-{number}"
            ): number
            for number, (part, (address, _)) in enumerate(zip(parts, self._ids, strict=True))
        }

    def ended(self, timeout_s: float) -> Mapping[int, bytes | str]:
        """Wait for the answer of a task, or the loss of its worker."""
        until = time.monotonic() + timeout_s
        while True:
            self._wait(list(self._plays), min(_LOOK_S, timeout_s))
            reports = {number: _answer(one) for one, number in self._plays.items() if one.done()}
            workers = self._workers()
            for number in self._plays.values():
                if number not in reports and self._ids[number] not in workers:
                    reports[number] = f"its Dask worker {self._ids[number][0]} is gone"
            if reports or time.monotonic() >= until:
                self._plays = {
                    one: number for one, number in self._plays.items() if number not in reports
                }
                return reports

    def end(self, grace_s: float) -> None:
        """Terminate the ranks that still run; a nanny restarts workers that do not end in time."""
        if self._plays:
            there = self._workers()
            left = {
                self._ids[number][0]: f"{self._key}-{number}"
                for number in self._plays.values()
                if self._ids[number] in there
            }
            if left:
                # A worker may disappear just now.
                self._client.run(
                    _interrupt, list(left.values()), workers=list(left), on_error="ignore"
                )
            self._wait(list(self._plays), grace_s, "ALL_COMPLETED")
            late = [self._ids[number][0] for one, number in self._plays.items() if not one.done()]
            self._client.cancel(list(self._plays), force=True)
            if late:
                _log.warning(
                    "workers of Dask are started again, for their ranks did not end within %g s: "
                    "%s",
                    grace_s,
                    ", ".join(late),
                )
                self._client.restart_workers(late, timeout=_PATIENCE_S, raise_for_error=False)
        self._plays, self._ids = {}, []

    def close(self) -> None:
        """Stop the cluster that was started here."""
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
            cluster = distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None
            )
            self._client = self._own.enter_context(
                distributed.Client(self._own.enter_context(cluster), set_as_default=False)
            )
        if getattr(self._client, "asynchronous", False):
            raise ConfigError(
                "sv.run waits for its results: give it a client that is not asynchronous"
            )

    def _workers(self) -> set[tuple[str, str]]:
        """Return (address, identity) of the running workers.

        A restarted worker has a new identity.
        """
        reports = self._client.scheduler_info(n_workers=-1)["workers"]
        return {
            (address, about["id"])
            for address, about in reports.items()
            if about.get("status") == "running"
            and (self._only is None or not self._only.isdisjoint((address, str(about["name"]))))
        }

    def _wait(
        self, answers: list[Any], timeout_s: float, condition: str = "FIRST_COMPLETED"
    ) -> None:
        if not answers:
            time.sleep(timeout_s)
            return
        with contextlib.suppress(TimeoutError), self._client.as_current():
            distributed.wait(answers, timeout=timeout_s, return_when=condition)

    def _submit(
        self, function: Callable[..., bytes], key: str, address: str, *arguments: Any
    ) -> Any:
        """Run a function once on one worker, before other tasks."""
        return self._client.submit(
            function,
            *arguments,
            key=key,
            workers=[address],
            allow_other_workers=False,
            pure=False,
            retries=0,
            priority=1000,
        )


def _current_client() -> Any:
    try:
        return distributed.Client.current()
    except ValueError:
        return None


def _arrive() -> bytes:
    from syncvar.runner.remote_call import arrive

    return arrive(distributed.get_worker().ip)


def _play(part: bytes, key: str) -> bytes:
    from syncvar.runner.remote_call import play

    with _lock:
        _threads[key] = threading.get_ident()
    try:
        return play(part)
    finally:
        with _lock:
            del _threads[key]


def _interrupt(keys: list[str]) -> None:
    """Raise in the threads of these ranks: a running task cannot be cancelled otherwise."""
    with _lock:
        for thread in (_threads[key] for key in keys if key in _threads):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(RankEnded)
            )


def _answer(future: Any) -> bytes | str:
    try:
        answer: bytes = future.result(timeout=_PATIENCE_S)
    except Exception as error:  # Dask passes on any exception
        return f"its task of Dask has not come to an end: {error!r}"
    return answer
