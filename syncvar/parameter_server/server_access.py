"""A worker's connection to the servers of its job, and the requests of a strategy."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.optimizers.gradient_call import rows_of
from syncvar.optimizers.update_rules import compute_dtype
from syncvar.parameter_server.client.request_builder import RequestBuilder
from syncvar.variables.create import Names
from syncvar.variables.policy import AccessKind
from syncvar.variables.values import check_rows, operand_array
from syncvar.variables.variable_owner import current_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.client.pending_answers import Session
    from syncvar.parameter_server.client.request_client import Ticket
    from syncvar.strategies.base import Strategy

_log = logging.getLogger("syncvar")
_PUSHES_MAX = 32  # pushes of one worker without an answer
_WORLD = 0


class ServersHere:
    """This worker's connection to the servers: one for each process, or each rank of threads."""

    def __init__(self, session: Session, rank: int, workers: int) -> None:
        self.session, self.rank, self.workers = session, rank, workers
        self.count = session.client.servers
        self.names = Names()
        self.next_server = 0
        self.clock = 0
        self.restore_count = 0  # restores from checkpoints, the same number on all workers
        self.counts_barriers = False  # True if a variable has staleness 0: barriers end a step
        self.pushes: deque[tuple[Ticket, str]] = deque()
        self.lock = threading.RLock()
        if session.client.incarnation:
            self._read_progress()

    def _read_progress(self) -> None:
        """Read this worker's clock and number of pushes from the servers."""
        request = RequestBuilder()
        refs = request.on_all(self.count, "where")
        ticket = self.session.request(request.parts())
        self.session.wait(ticket, "asking servers where this worker was")
        found = [ticket.results[server][number] for server, number in refs]
        self.clock = max(self.clock, *(one["clock"] for one in found))
        self.session.client.pushes = sum(one["pushes"] for one in found)

    def resume_after_restore(self, path: str | None) -> None:
        """Continue after a restore from `path` (None: no checkpoint); warn about lost pushes."""
        self.settle("restoring", None)
        self._read_progress()
        before, self.session.pushes_before = self.session.pushes_before, 0
        restored = self.session.client.pushes
        if before > restored:
            _log.warning(
                "rank %d %s: %d of the %d pushes that it had made are lost, number %d and later",
                self.rank,
                f"goes on from {path}" if path else "begins anew, as nothing was saved",
                before - restored,
                before,
                restored + 1,
            )

    def settle(self, what: str, timeout: float | None) -> None:
        """Wait until the servers have acknowledged all pushes; raise the error of one."""
        while True:
            with self.lock:
                if not self.pushes:
                    return
                ticket, pushed = self.pushes[0]
            try:
                self.session.wait(ticket, f"{what}: {pushed}", timeout)
            finally:
                with self.lock, contextlib.suppress(ValueError):
                    self.pushes.remove((ticket, pushed))

    def before_call(self, group: int, name: str) -> None:
        """Wait for pushes before a collective; a barrier of the world ends a step."""
        if group == _WORLD and name == "barrier" and self.counts_barriers:
            request = RequestBuilder()
            request.on_all(self.count, "meet")
            self.pushes.append((self.session.request(request.parts()), "barrier"))
        self.settle(name, None)

    def leave(self) -> None:
        """Sign this worker off: no worker waits for its clock any more."""
        with contextlib.suppress(SyncvarError):
            self.settle("leaving the servers", None)
            request = RequestBuilder()
            request.on_all(self.count, "leave")
            self.session.wait(self.session.request(request.parts()), "leaving the servers")


class ServerAccess:
    """The requests of one strategy: reads, pushes and optimizers' steps.

    Attributes:
        in_scheduled_function: Whether a function of a ClusterCoordinator runs.
    """

    def __init__(
        self,
        strategy: Strategy,
        here: ServersHere,
        partitioner: Callable[[Sequence[int], Any], list[int]] | None,
    ) -> None:
        self._strategy, self.here, self._partitioner = strategy, here, partitioner
        self._rules: set[str] = set()  # custom update rules that all servers have imported
        self._open: RequestBuilder | None = None  # the writes of a transaction
        self.in_scheduled_function = False

    @contextlib.contextmanager
    def as_only_worker(self) -> Iterator[None]:
        """Show a scheduled function this worker as the only one."""
        before, self.in_scheduled_function = self.in_scheduled_function, True
        try:
            yield
        finally:
            self.in_scheduled_function = before

    def partition(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return the number of parts of a variable."""
        if self._partitioner is None or not shape:
            return 1
        parts = self._partitioner(shape, dtype)
        is_list = isinstance(parts, list | tuple) and len(parts) == len(shape)
        if not is_list or not all(map(_is_part_count, parts)):
            raise ConfigError(
                f"variable_partitioner returned {parts!r:.80} for shape {shape}: it must return "
                f"{len(shape)} numbers of at least 1"
            )
        if any(one > 1 for one in parts[1:]):
            raise ConfigError(
                f"variable_partitioner returned {parts!r:.80}: variables are cut along their first "
                f"axis only"
            )
        return int(min(parts[0], max(1, shape[0])))

    def ask(
        self,
        request: RequestBuilder,
        call: str,
        *,
        snapshot: bool = False,
        timeout: float | None = None,
    ) -> Ticket:
        """Send a request and wait for the answers."""
        self.require_scope(call)
        session = self.here.session
        ticket = session.request(request.parts(), snapshot=snapshot)
        return session.wait(ticket, call, self._strategy.timeout if timeout is None else timeout)

    @contextlib.contextmanager
    def pushing(self, call: str) -> Iterator[RequestBuilder]:
        """Yield a request for writes, and send it; in a transaction, yield the open request."""
        if self._open is not None:
            yield self._open
            return
        request = RequestBuilder()
        yield request
        self.push(request, call)

    def push(self, request: RequestBuilder, call: str) -> None:
        """Send a request without waiting; raise the error of an earlier push."""
        self.require_scope(call)
        here = self.here
        if not request:
            return
        while here.pushes and here.pushes[0][0].is_over:
            here.session.wait(*here.pushes.popleft())  # raises its error
        if len(here.pushes) >= _PUSHES_MAX:
            here.settle(call, self._strategy.timeout)
        here.pushes.append((here.session.request(request.parts()), call))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Send all writes of a block as one request."""
        if self._open is not None:
            raise UsageError("a transaction is begun inside another one")
        request = self._open = RequestBuilder()
        try:
            yield
        finally:
            self._open = None
        self.push(request, "transaction")

    def require_scope(self, call: str) -> None:
        """Raise UsageError in the scope of another strategy."""
        place = current_scope()
        if place is not None and place.owner is not self._strategy and not place.owner.is_default:
            raise UsageError(
                f"{call}: the variable belongs to another strategy than the scope it is used in; "
                f"use it under `with variable.strategy.scope():`, or outside every scope"
            )

    def step(
        self,
        rule: tuple[str, dict[str, Any]],
        rate: float,
        pairs: list[tuple[Any, Any]],
        combine: str,
    ) -> None:
        """Push gradients, from which the servers make an optimizer's step of each variable."""
        self.prepare(rule)
        steps: list[tuple[Any, NDArray[Any], NDArray[Any] | None]] = []
        for gradient, variable in pairs:
            if gradient is None:
                continue
            if variable.dtype.kind not in "fV":
                raise ConfigError(
                    f"variable {variable.name!r} is {variable.dtype.name}; an optimizer steps real "
                    f"floating numbers"
                )
            call, dtype = f"gradient of variable {variable.name!r}", compute_dtype(variable.dtype)
            pair = rows_of(gradient, variable.shape)
            if pair is not None:
                rows = check_rows(AccessKind.SCATTER_ADD, *pair, variable.shape, dtype, call)
                steps.append((variable, rows.values, rows.indices))
            else:
                steps.append((variable, operand_array(gradient, variable.shape, dtype, call), None))
        settings = {"rule": list(rule), "rate": rate, "combine": combine}
        with self.pushing("apply_gradients") as request:
            for variable, value, indices in steps:
                variable.add_push(request, "step", value, indices, **settings)

    def prepare(self, rule: tuple[str, dict[str, Any]]) -> None:
        """Make every server import a custom update rule, before the first step with it."""
        name = rule[1].get("rule", "")
        if not name or name in self._rules:
            return
        if name.startswith("__main__:"):
            raise ConfigError(
                f"update rule {name.partition(':')[2]!r} is in the script itself, which servers do "
                f"not run: put it into a module beside the script and import it from there"
            )
        request = RequestBuilder()
        request.on_all(self.here.count, "rule", rule=list(rule))
        self.ask(request, f"asking servers for update rule {name}")
        self._rules.add(name)


def _is_part_count(count: Any) -> bool:
    is_whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    return is_whole and bool(count >= 1)


def checked_staleness(staleness: Any) -> int | None:
    """Return a bound of staleness; raise ConfigError for anything else."""
    if staleness is None:
        return None
    if isinstance(staleness, bool) or not isinstance(staleness, int | np.integer) or staleness < 0:
        raise ConfigError(
            f"staleness must be a number of ticks of at least 0, or None for any number, not "
            f"{staleness!r:.80}"
        )
    return int(staleness)
