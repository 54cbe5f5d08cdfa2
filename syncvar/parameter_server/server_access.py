"""A worker's way to the servers of its job, and what a strategy asks of them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.core.errors import ConfigError, SyncvarError, UsageError
from syncvar.optimizers.rules.update_rule import compute_dtype
from syncvar.optimizers.sparse_gradients import rows_of
from syncvar.parameter_server.client.request_builder import RequestBuilder
from syncvar.variables.coercion import operand_array
from syncvar.variables.policy import AccessKind
from syncvar.variables.row_updates import checked_rows
from syncvar.variables.scope import current_place
from syncvar.variables.unique_names import Names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.client.pending_answers import Session
    from syncvar.parameter_server.client.request_client import Ticket
    from syncvar.parameter_server.server_variables import ServerVariable
    from syncvar.strategies.base import Strategy

__all__ = ["ServerAccess", "ServersHere", "checked_staleness"]

_log = logging.getLogger("syncvar")
_PUSHES_MAX = 32  # of one strategy that may be under way
_WORLD = 0


class ServersHere:
    """This worker's way to the servers of its job: one for each process, or each rank of threads.

    Args:
        session: The way.
        rank: This worker.
        workers: How many there are.
    """

    def __init__(self, session: Session, rank: int, workers: int) -> None:
        self.session, self.rank, self.workers = session, rank, workers
        self.count = session.client.servers
        self.names = Names()
        self.next_server = 0
        self.clock = 0
        self.restorings = 0  # from checkpoints, which all workers count alike
        self.meets = False  # a variable has staleness 0, so that servers have to know of barriers
        self.pushes: deque[tuple[Ticket, str]] = deque()
        self.lock = threading.RLock()
        if session.client.incarnation:
            self._find_itself()

    def _find_itself(self) -> None:
        """Ask the servers where this worker is."""
        asking = RequestBuilder()
        places = [asking.where(server) for server in range(self.count)]
        ticket = self.session.wait(
            self.session.request(asking.parts()), "asking servers where this worker was"
        )
        told = [ticket.results[server][number] for server, number in places]
        self.clock = max(self.clock, *(one["clock"] for one in told))
        self.session.client.pushes = sum(one["pushes"] for one in told)

    def went_back(self, path: str | None) -> None:
        """Go on from a checkpoint, and say what is lost where all were started again.

        Args:
            path: Of the checkpoint; None where there was none.
        """
        self.settle("restoring", None)
        self._find_itself()
        before, self.session.pushes_before = self.session.pushes_before, 0
        there = self.session.client.pushes
        if before > there:
            _log.warning(
                "rank %d %s: %d of the %d pushes that it had made are lost, number %d and later",
                self.rank,
                f"goes on from {path}" if path else "begins anew, as nothing was saved",
                before - there,
                before,
                there + 1,
            )

    def settle(self, what: str, timeout: float | None) -> None:
        """Wait until what was pushed is acknowledged.

        Raises:
            SyncvarError: A push was refused.
        """
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
        """Wait for pushes before waiting for others; a barrier ends a step of staleness 0."""
        if group == _WORLD and name == "barrier" and self.meets:
            asking = RequestBuilder()
            for server in range(self.count):
                asking.meet(server)
            self.pushes.append((self.session.request(asking.parts()), "barrier"))
        self.settle(name, None)

    def leave(self) -> None:
        """Tell the servers that this worker takes no part any more."""
        with contextlib.suppress(SyncvarError):
            self.settle("leaving the servers", None)
            asking = RequestBuilder()
            for server in range(self.count):
                asking.leave(server)
            self.session.wait(self.session.request(asking.parts()), "leaving the servers")


class ServerAccess:
    """What one strategy asks of the servers: requests, pushes and optimizers' steps.

    Args:
        strategy: The strategy.
        here: The way of this worker.
        partitioner: Cuts large variables; None for none.

    Attributes:
        is_one: A function runs that a coordinator has scheduled.
    """

    def __init__(
        self,
        strategy: Strategy,
        here: ServersHere,
        partitioner: Callable[[Sequence[int], Any], list[int]] | None,
    ) -> None:
        self._strategy, self.here, self._partitioner = strategy, here, partitioner
        self._rules: set[str] = set()  # update rules of the program that the servers have
        self._open: RequestBuilder | None = None  # the writes of a transaction
        self.is_one = False

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """Let a scheduled function see this worker as the only one."""
        before, self.is_one = self.is_one, True
        try:
            yield
        finally:
            self.is_one = before

    def partition(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return into how many parts a variable is cut.

        Raises:
            ConfigError: The partitioner returned something else.
        """
        if self._partitioner is None or not shape:
            return 1
        parts = self._partitioner(shape, dtype)
        is_list = isinstance(parts, list | tuple) and len(parts) == len(shape)
        if not is_list or any(
            isinstance(one, bool) or not isinstance(one, int | np.integer) or one < 1
            for one in parts
        ):
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
        asking: RequestBuilder,
        what: str,
        *,
        snapshot: bool = False,
        timeout: float | None = None,
    ) -> Ticket:
        """Make a request and wait for it."""
        self.require_place(what)
        ticket = self.here.session.request(asking.parts(), snapshot=snapshot)
        return self.here.session.wait(
            ticket, what, self._strategy.timeout if timeout is None else timeout
        )

    @contextlib.contextmanager
    def pushing(self, what: str) -> Iterator[RequestBuilder]:
        """Give a request to which writes are added, and send it."""
        if self._open is not None:
            yield self._open
            return
        asking = RequestBuilder()
        yield asking
        self.push(asking, what)

    def push(self, asking: RequestBuilder, what: str) -> None:
        """Make a request that nobody waits for now."""
        self.require_place(what)
        here = self.here
        if not asking:
            return
        while here.pushes and here.pushes[0][0].is_over:
            ticket, pushed = here.pushes.popleft()
            self.here.session.wait(ticket, pushed)  # raises what it failed with
        if len(here.pushes) >= _PUSHES_MAX:
            here.settle(what, self._strategy.timeout)
        here.pushes.append((self.here.session.request(asking.parts()), what))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all writes of a block one.

        Raises:
            UsageError: Inside another one.
        """
        if self._open is not None:
            raise UsageError("a transaction is begun inside another one")
        asking = self._open = RequestBuilder()
        try:
            yield
        finally:
            self._open = None
        self.push(asking, "transaction")

    def require_place(self, what: str) -> None:
        """Refuse a call under another strategy's scope.

        Raises:
            UsageError: The scope is that of another strategy.
        """
        place = current_place()
        if place is not None and place.owner is not self._strategy and not place.owner.is_default:
            raise UsageError(
                f"{what}: the variable belongs to another strategy than the scope it is used in; "
                f"use it under `with variable.strategy.scope():`, or outside every scope"
            )

    def step(
        self,
        rule: tuple[str, dict[str, Any]],
        rate: float,
        pairs: list[tuple[Any, Any]],
        combine: str,
    ) -> None:
        """Push gradients, with which the servers make an optimizer's step of each variable."""
        self.prepare(rule)
        checked: list[tuple[ServerVariable, NDArray[Any], NDArray[Any] | None]] = []
        for gradient, variable in pairs:
            if gradient is None:
                continue
            if variable.dtype.kind not in "fV":
                raise ConfigError(
                    f"variable {variable.name!r} is {variable.dtype.name}; an optimizer steps real "
                    f"floating numbers"
                )
            what, dtype = f"gradient of variable {variable.name!r}", compute_dtype(variable.dtype)
            pair = rows_of(gradient, variable.shape)
            if pair is not None:
                rows = checked_rows(AccessKind.SCATTER_ADD, *pair, variable.shape, dtype, what)
                checked.append((variable, rows.values, rows.indices))
            else:
                checked.append(
                    (variable, operand_array(gradient, variable.shape, dtype, what), None)
                )
        with self.pushing("apply_gradients") as asking:
            for variable, value, indices in checked:
                variable.add_push(
                    asking, "step", value, indices, rule=rule, rate=rate, combine=combine
                )

    def prepare(self, rule: tuple[str, dict[str, Any]]) -> None:
        """Let every server import a program's own update rule, before the first step by it."""
        name = rule[1].get("rule", "")
        if not name or name in self._rules:
            return
        if name.startswith("__main__:"):
            raise ConfigError(
                f"update rule {name.partition(':')[2]!r} is in the script itself, which servers do "
                f"not run: put it into a module beside the "
                f"script and import it from there"
            )
        asking = RequestBuilder()
        for server in range(self.here.count):
            asking.rule(server, rule)
        self.ask(asking, f"asking servers for update rule {name}")
        self._rules.add(name)


def checked_staleness(staleness: Any) -> int | None:
    """Return a bound of staleness.

    Raises:
        ConfigError: It is none.
    """
    if staleness is None:
        return None
    if isinstance(staleness, bool) or not isinstance(staleness, int | np.integer) or staleness < 0:
        raise ConfigError(
            f"staleness must be a number of ticks of at least 0, or None for any number, not "
            f"{staleness!r:.80}"
        )
    return int(staleness)
