"""All that servers keep of variables, taken at one version and given back as one transaction: what checkpoints are made of.

Rank 0 gives it back. The others, and rank 0 itself where it was started again alone, are told what came of it: each restoring has
a number, which all workers count alike, and the lowest server keeps what rank 0 says of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.core.errors import ConfigError, DeadlineExceeded
from syncvar.optimizers.rules.update_rule import compute_dtype, is_half
from syncvar.parameter_server.client.request_builder import RequestBuilder
from syncvar.parameter_server.server.server_rules import rule_of
from syncvar.parameter_server.server.shard import ShardSlots, Spec
from syncvar.parameter_server.server_variables import Reads
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncvar.parameter_server.server.shard import RuleKey
    from syncvar.parameter_server.server_variables import ServerVariable
    from syncvar.parameter_server.strategy import ParameterServerStrategy

__all__ = ["SavedVariable", "ServerState", "give_back", "recall", "rule_key", "take"]

_HOME = 0  # the server that keeps what is said of restoring


class SavedVariable(NamedTuple):
    """One variable and what optimizers keep of it.

    Args:
        variable: Which.
        value: Of its shape and dtype.
        slots: By optimizer; one of 0 steps takes away what it keeps.
    """

    variable: ServerVariable
    value: NDArray[Any]
    slots: dict[RuleKey, ShardSlots]


class ServerState(NamedTuple):
    """Variables at one version of all servers.

    Args:
        variables: In the order in which they were asked for; of optimizers that never stepped one there is nothing.
        pushes: Rank -> how many of its pushes are in it.
    """

    variables: list[SavedVariable]
    pushes: dict[int, int]


def rule_key(name: str, settings: dict[str, Any]) -> RuleKey:
    """Return an optimizer as shards know it."""
    return name, tuple(sorted(settings.items()))


def take(
    variables: Sequence[tuple[ServerVariable, Sequence[RuleKey]]], timeout: float | None
) -> ServerState:
    """Take one snapshot of variables, and of what optimizers keep of them, while workers go on.

    Args:
        variables: At least one; with the optimizers whose slots are wanted.
        timeout: Seconds; None means those of the strategy.
    """
    strategy: ParameterServerStrategy = variables[0][0].strategy
    strategy.here.settle("snapshot", timeout)
    asking = RequestBuilder()
    reads = Reads(asking)
    for variable, _ in variables:
        reads.add(variable)
    asked = [
        [
            (
                rule,
                [
                    asking.slots(variable.server_of(index), variable.key_of(index), rule)
                    for index in range(variable.num_shards)
                ],
            )
            for rule in rules
        ]
        for variable, rules in variables
    ]
    versions = [asking.version(server) for server in range(strategy.server_count)]
    ticket = strategy.servers.ask(asking, "snapshot", snapshot=True, timeout=timeout)
    made = []
    for (variable, _), value, slots in zip(variables, reads.arrays(ticket), asked, strict=True):
        kept = SavedVariable(variable, value, {})
        for rule, places in slots:
            told, arrays = (
                [ticket.results[server][place] for server, place in places],
                [ticket.arrays[server] for server, _ in places],
            )
            kept.slots[rule] = _joined(rule, kept, told, arrays)
        made.append(kept)
    pushes: dict[int, int] = {}
    for server, number in versions:
        for rank, count in ticket.results[server][number]["pushes"].items():
            pushes[rank] = pushes.get(rank, 0) + count
    return ServerState(made, pushes)


def _joined(
    rule: RuleKey, kept: SavedVariable, told: list[dict[str, Any]], arrays: list[Any]
) -> ShardSlots:
    """Return what an optimizer keeps of all parts of a variable; a part that it never stepped has what slots begin with."""
    variable = kept.variable
    steps = max(one["steps"] for one in told)
    if not steps:
        return ShardSlots(0, {})
    dtype = compute_dtype(variable.dtype)
    made = {"master": kept.value.astype(dtype)} if is_half(variable.dtype) else {}
    initials = rule_of(rule[0], dict(rule[1])).initials()
    made |= {name: np.full(variable.shape, initial, dtype) for name, initial in initials.items()}
    for name, whole in made.items():
        for (start, stop), one, there in zip(variable.row_ranges, told, arrays, strict=True):
            if one["steps"]:
                (whole[start:stop] if variable.shape else whole)[...] = there[one["slots"][name]]
    return ShardSlots(steps, made)


def give_back(
    strategy: ParameterServerStrategy,
    variables: Sequence[SavedVariable],
    number: int,
    says: Any,
    timeout: float | None,
    pushes: dict[int, int] | None = None,
) -> None:
    """Make variables what they were once, all or none, and keep what is said of it under the number of this restoring.

    Args:
        strategy: Of the variables.
        variables: What they are to be.
        number: Of this restoring.
        says: Plain data.
        timeout: Seconds; None means those of the strategy.
        pushes: Rank -> how many of its pushes are in it; None where nothing is restored.

    Raises:
        SyncvarError: Nothing was changed, as servers refused, or it is not known.
    """
    strategy.here.settle("restoring", timeout)
    asking = RequestBuilder()
    for variable, value, slots in variables:
        for index, (start, stop) in enumerate(variable.row_ranges):

            def part(array: NDArray[Any], start: int = start, stop: int = stop) -> NDArray[Any]:
                return array[start:stop] if array.ndim else array

            rules = {
                rule: ShardSlots(one.steps, {name: part(slot) for name, slot in one.slots.items()})
                for rule, one in slots.items()
            }
            spec = variable.spec_of(index)
            asking.restore(
                variable.server_of(index),
                variable.key_of(index),
                spec,
                variable.staleness,
                part(value),
                rules,
            )
    if pushes is not None:
        for server in range(strategy.server_count):
            asking.count(server, pushes if server == _HOME else {})
    said = np.frombuffer(pack_object(says), np.uint8)
    asking.restore(
        _HOME, _key(number), Spec(said.shape, "uint8", "NONE", said.shape, 0), None, said
    )
    strategy.servers.ask(asking, "restoring", timeout=timeout)


def recall(
    strategy: ParameterServerStrategy, number: int, *, waits: bool, timeout: float | None
) -> Any:
    """Return what rank 0 has said of a restoring; None where it has not come so far, and this does not wait for it.

    Raises:
        DeadlineExceeded: Rank 0 has not restored in time.
    """
    asking = RequestBuilder()
    if waits:
        asking.describe(_HOME, _key(number))
    place = asking.pull(_HOME, _key(number))
    try:
        ticket = strategy.servers.ask(asking, "restoring, which rank 0 does", timeout=timeout)
    except ConfigError:  # there is nothing under this number
        return None
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            "restoring: rank 0 has not come to it in time. What is on servers is restored by rank 0, and the others wait for it: every "
            "worker makes this call",
            error.missing,
            error.timeout_s,
        ) from None
    return unpack_object(ticket.array(*place).tobytes())


def _key(number: int) -> str:
    return f"restoring {number}"  # no name of a variable has a blank
