"""Saves all server-side state at one version, and restores it as one transaction, for checkpoints.

Rank 0 restores, and server 0 keeps its report under the number of the restore, which is the same on
all workers. The other workers, and a rank 0 that was restarted alone, read the report.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError, DeadlineExceeded
from syncvar.optimizers.update_rules import compute_dtype, is_half
from syncvar.parameter_server.client.request_builder import RequestBuilder
from syncvar.parameter_server.server.server_rules import rule_of
from syncvar.parameter_server.server.shard import ShardSlots, Spec
from syncvar.parameter_server.server_variables import PullBatch
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.client.request_builder import ResultRef
    from syncvar.parameter_server.server.shard import RuleKey
    from syncvar.parameter_server.server_variables import ServerVariable
    from syncvar.parameter_server.strategy import ParameterServerStrategy

_HOME = 0  # the server that keeps the reports of restores


class SavedVariable(NamedTuple):
    """A variable with the slots that optimizers keep of it; slots with 0 steps delete them."""

    variable: ServerVariable
    value: NDArray[Any]
    slots: dict[RuleKey, ShardSlots]


class ServerState(NamedTuple):
    """Variables at one version of all servers, in order, and rank -> pushes in that version."""

    variables: list[SavedVariable]
    pushes: dict[int, int]


def rule_key(name: str, settings: dict[str, Any]) -> RuleKey:
    """Return the key of an optimizer on shards."""
    return name, tuple(sorted(settings.items()))


def take(
    variables: Sequence[tuple[ServerVariable, Sequence[RuleKey]]], timeout: float | None
) -> ServerState:
    """Take one snapshot of variables and of optimizers' slots, while workers continue."""
    strategy: ParameterServerStrategy = variables[0][0].strategy
    strategy.here.settle("snapshot", timeout)
    request = RequestBuilder()
    pulls = PullBatch(request)
    for variable, _ in variables:
        pulls.add(variable)
    slot_refs = [
        {rule: _slot_refs(request, variable, rule) for rule in rules}
        for variable, rules in variables
    ]
    versions = request.on_all(strategy.server_count, "version")
    ticket = strategy.servers.ask(request, "snapshot", snapshot=True, timeout=timeout)
    saved = []
    for (variable, _), value, by_rule in zip(
        variables, pulls.arrays(ticket), slot_refs, strict=True
    ):
        one = SavedVariable(variable, value, {})
        for rule, refs in by_rule.items():
            results = [ticket.results[server][number] for server, number in refs]
            arrays = [ticket.arrays[server] for server, _ in refs]
            one.slots[rule] = _assemble(rule, one, results, arrays)
        saved.append(one)
    pushes: collections.Counter[int] = collections.Counter()
    for server, number in versions:
        pushes.update(ticket.results[server][number]["pushes"])
    return ServerState(saved, dict(pushes))


def _slot_refs(request: RequestBuilder, variable: ServerVariable, rule: RuleKey) -> list[ResultRef]:
    return [
        request.slots(variable.server_of(index), variable.key_of(index), rule)
        for index in range(variable.num_shards)
    ]


def _assemble(
    rule: RuleKey, saved: SavedVariable, results: list[dict[str, Any]], arrays: list[Any]
) -> ShardSlots:
    """Return the slots of all parts; a part that the optimizer never stepped has initial slots."""
    variable = saved.variable
    steps = max(one["steps"] for one in results)
    if not steps:
        return ShardSlots(0, {})
    dtype = compute_dtype(variable.dtype)
    slots = {"master": saved.value.astype(dtype)} if is_half(variable.dtype) else {}
    initials = rule_of(rule[0], dict(rule[1])).initials()
    slots |= {name: np.full(variable.shape, initial, dtype) for name, initial in initials.items()}
    for name, whole in slots.items():
        for (start, stop), one, parts in zip(variable.row_ranges, results, arrays, strict=True):
            if one["steps"]:
                (whole[start:stop] if variable.shape else whole)[...] = parts[one["slots"][name]]
    return ShardSlots(steps, slots)


def give_back(
    strategy: ParameterServerStrategy,
    variables: Sequence[SavedVariable],
    number: int,
    says: Any,
    timeout: float | None,
    pushes: dict[int, int] | None = None,
) -> None:
    """Restore variables on all servers or on none, with a report for the other workers."""
    strategy.here.settle("restoring", timeout)
    request = RequestBuilder()
    for variable, value, slots in variables:
        for index, (start, stop) in enumerate(variable.row_ranges):
            rows = slice(start, stop)
            rules = {
                rule: ShardSlots(
                    one.steps, {name: _part(slot, rows) for name, slot in one.slots.items()}
                )
                for rule, one in slots.items()
            }
            server, key = variable.server_of(index), variable.key_of(index)
            spec, part = variable.spec_of(index), _part(value, rows)
            request.restore(server, key, spec, variable.staleness, part, rules)
    if pushes is not None:
        for server in range(strategy.server_count):
            request.add(server, "count", pushes=pushes if server == _HOME else {})
    report = np.frombuffer(pack_object(says), np.uint8)
    spec = Spec(report.shape, "uint8", "NONE", report.shape, 0)
    request.restore(_HOME, _key(number), spec, None, report)
    strategy.servers.ask(request, "restoring", timeout=timeout)


def _part(array: NDArray[Any], rows: slice) -> NDArray[Any]:
    return array[rows] if array.ndim else array


def read_report(
    strategy: ParameterServerStrategy, number: int, *, waits: bool, timeout: float | None
) -> Any:
    """Return the report of a restore; None if there is none and `waits` is False."""
    request = RequestBuilder()
    if waits:
        request.add(_HOME, "describe", key=_key(number))
    ref = request.pull(_HOME, _key(number))
    try:
        ticket = strategy.servers.ask(request, "restoring, which rank 0 does", timeout=timeout)
    except ConfigError:  # the server has no report with this number
        return None
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            "restoring: rank 0 has not come to it in time. Rank 0 restores the server-side "
            "variables, and the others wait for it: every worker makes this call",
            error.missing,
            error.timeout_s,
        ) from None
    return unpack_object(ticket.array(*ref).tobytes())


def _key(number: int) -> str:
    return f"restoring {number}"  # names of variables have no blank
