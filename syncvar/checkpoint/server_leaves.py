"""Server-side variables, and the optimizer state that servers keep for them, as leaves.

One worker saves them from one snapshot and restores them in one transaction; the other workers
continue. Their keys are those of the same program under any other strategy.

Rank 0 restores, and server 0 keeps its report under the number of the restore, which is the same on
all workers. The other workers, and a rank 0 that was restarted alone, read the report.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.checkpoint.optimizer_state import RuleLeaf, local_leaves, require_saved_variables
from syncvar.checkpoint.save_plan import LeafHeader
from syncvar.checkpoint.trackables import (
    KEEP,
    FeedbackLeaf,
    Leaf,
    SoloGroup,
    VariableLeaf,
    communicator_of_leaves,
    require_fit,
    require_kind,
)
from syncvar.core.errors import ConfigError, DeadlineExceeded
from syncvar.optimizers.update_rules import compute_dtype, is_half
from syncvar.parameter_server.request_client import RequestBuilder
from syncvar.parameter_server.server_variables import PullBatch, ServerVariable
from syncvar.parameter_server.shard import ShardSlots, Spec, rule_of, slot_names
from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from syncvar.checkpoint.checkpoint_format import ManifestEntry
    from syncvar.checkpoint.trackables import CheckpointGroup, Reader
    from syncvar.optimizers import Optimizer
    from syncvar.parameter_server.request_client import ResultRef
    from syncvar.parameter_server.shard import RuleKey
    from syncvar.parameter_server.strategy import ParameterServerStrategy
    from syncvar.runtime.communicator import Communicator
    from syncvar.variables.variable import Variable

_HOME = 0  # the server that keeps the reports of restores
_MODE = "ON_WRITE NONE"  # mode of such a variable under other strategies
_STEPS = "steps"


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


def read_servers(
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


def write_servers(
    strategy: ParameterServerStrategy,
    variables: Sequence[SavedVariable],
    number: int,
    record: Any,
    timeout: float | None,
    pushes: dict[int, int] | None = None,
) -> None:
    """Restore variables on all servers or on none, with a record for the other workers."""
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
            request.add(server, "set_pushes", pushes=pushes if server == _HOME else {})
    report = np.frombuffer(pack_object(record), np.uint8)
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


class _ArrayLeaf:
    """A server-side variable, or an optimizer slot of it."""

    def __init__(
        self, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, is_optional: bool
    ) -> None:
        self.key = key
        self.shape, self.dtype, self.is_optional = shape, dtype, is_optional
        self.array: NDArray[Any] | None = None  # value in the snapshot, or the new value

    def describe(self, communicator: CheckpointGroup) -> LeafHeader:
        """Return its header: only the first rank of a save has it."""
        del communicator
        return LeafHeader("variable", _MODE, self.dtype.name, self.shape, 0, (0,), own=False)

    def snapshot(self) -> NDArray[Any]:
        assert self.array is not None, "a snapshot is taken before it is saved"
        return self.array

    def stage(
        self, entry: ManifestEntry, read: Reader, policy: str, communicator: CheckpointGroup
    ) -> Any:
        """Return its new value, on the rank that restores."""
        if communicator.member_rank:
            return KEEP
        require_kind(self.key, entry, "variable", "a server-side variable")
        stored = entry.choose(self.key, 0, 1, policy, own=False)
        assert stored is not None, "with own=False there is one, or an error"
        require_fit(self.key, stored, self.dtype.name, self.shape, "the server-side variable")
        return read(stored)

    def now(self) -> Any:
        """Return None: `ServerLeaves.write` changes it last, in one transaction."""
        return None

    def put(self, staged: Any) -> None:
        """Note the new value for `ServerLeaves.write`."""
        self.array = staged


class _IterationsLeaf(_ArrayLeaf):
    """Number of steps of an optimizer of server-side variables; each worker counts its own."""

    def __init__(self, key: str, optimizer: Optimizer) -> None:
        super().__init__(key, (), np.dtype(np.int64), is_optional=optimizer.iterations == 0)
        self._optimizer = optimizer
        self.worker_states: list[Any] = []

    def stage(
        self, entry: ManifestEntry, read: Reader, policy: str, communicator: CheckpointGroup
    ) -> Any:
        del communicator
        require_kind(self.key, entry, "variable", "the iterations of an optimizer")
        stored = entry.choose(self.key, 0, 1, policy, own=False)
        assert stored is not None, "with own=False there is one, or an error"
        require_fit(self.key, stored, "int64", (), "the number of steps")
        self.worker_states = [int(read(stored))]
        return self.worker_states[0]

    def accept(self, data: Any) -> Any:
        return data

    def now(self) -> Any:
        return self._optimizer.iterations

    def put(self, staged: Any) -> None:
        remote = self._optimizer.remote_step
        assert remote is not None, "it steps server-side variables"
        remote.steps = staged
        self._optimizer.slots.expect_iterations(staged)


class ServerVariableLeaf(NamedTuple):
    """A server-side variable and its key, before `sort_leaves`."""

    key: str
    variable: ServerVariable


class ServerOptimizerLeaf:
    """An optimizer and its key, before `sort_leaves`."""

    def __init__(self, key: str, optimizer: Optimizer) -> None:
        self.key, self.optimizer = key, optimizer

    @property
    def rule(self) -> RuleKey:
        """Key of the optimizer's update rule on servers."""
        remote = self.optimizer.remote_step
        assert remote is not None, "it steps server-side variables"
        return rule_key(*remote.rule)

    @property
    def is_supported(self) -> bool:
        """Whether servers support the update rule."""
        try:
            rule_of(self.rule[0], dict(self.rule[1]))
        except (ConfigError, TypeError):
            return False
        return True


AnyLeaf = Leaf | ServerVariableLeaf | ServerOptimizerLeaf


class ServerLeaves:
    """All server-side objects of a checkpoint; `keys` has the key of each variable, by `id`."""

    def __init__(
        self,
        found: Iterable[ServerVariableLeaf],
        steppers: Iterable[ServerOptimizerLeaf],
        keys: dict[int, str],
    ) -> None:
        variables = dict(found)
        self._variables = {
            key: _ArrayLeaf(key, one.shape, one.dtype, is_optional=False)
            for key, one in variables.items()
        }
        self._found, self._keys = variables, keys
        self._steppers = list(steppers)
        # (key of an optimizer, key of a variable) -> slots
        self._slots: dict[tuple[str, str], dict[str, _ArrayLeaf]] = {}
        self._iterations = {
            one.key: _IterationsLeaf(f"{one.key}/iterations", one.optimizer)
            for one in self._steppers
        }
        for stepper in self._steppers:
            rule = rule_of(stepper.rule[0], dict(stepper.rule[1]))
            for variable in variables.values():
                known = keys[id(variable)]
                below = f"{stepper.key}/{known}/"
                shape, dtype = variable.shape, compute_dtype(variable.dtype)
                slots = {
                    name: _ArrayLeaf(below + name, shape, dtype, is_optional=True)
                    for name in slot_names(rule, variable.dtype)
                }
                if rule.counts_steps:
                    steps = _ArrayLeaf(below + _STEPS, (), np.dtype(np.int64), is_optional=True)
                    slots[_STEPS] = steps
                self._slots[stepper.key, known] = slots

    @property
    def strategy(self) -> Any:
        """Strategy of the variables."""
        return next(iter(self._found.values())).strategy

    @property
    def group(self) -> SoloGroup:
        """Group of this worker alone."""
        here = self.strategy.here
        return SoloGroup(here.rank, here.workers)

    def leaves(self) -> list[Leaf]:
        """Return all leaves that may be restored."""
        slots = [leaf for one in self._slots.values() for leaf in one.values()]
        return [*self._variables.values(), *self._iterations.values(), *slots]

    def take_snapshot(self, timeout: float | None) -> tuple[list[Leaf], dict[int, int]]:
        """Take a snapshot; return the leaves to save and the pushes of each worker in it."""
        _require_variables(self._steppers, {variable.name for variable in self._found.values()})
        rules = [stepper.rule for stepper in self._steppers]
        state: ServerState = read_servers(
            [(variable, rules) for variable in self._found.values()], timeout
        )
        leaves: list[Leaf] = []
        steps = dict.fromkeys(self._iterations, 0)
        for leaf, saved in zip(self._variables.values(), state.variables, strict=True):
            leaf.array = saved.value
            leaves.append(leaf)
            for stepper in self._steppers:
                one = saved.slots[stepper.rule]
                steps[stepper.key] = max(steps[stepper.key], one.steps)
                if not one.steps:
                    continue
                arrays = {**one.slots, _STEPS: np.array(one.steps, np.int64)}
                for name, slot in self._slots[stepper.key, self._keys[id(saved.variable)]].items():
                    slot.array = arrays[name]
                    leaves.append(slot)
        for stepper in self._steppers:
            iterations = self._iterations[stepper.key]
            count = stepper.optimizer.iterations or steps[stepper.key]
            iterations.array = np.array(count, np.int64)
            leaves.append(iterations)
        return leaves, state.pushes

    def joint_restorer(self, path: str, timeout: float | None) -> Callable[[], None]:
        """Return the function that restores the servers, for the first rank of a joint restore."""
        here = self.strategy.here
        here.restore_count += 1
        number = here.restore_count
        return lambda: self.write(number, restore_record(path), timeout)

    def write(self, number: int, record: Any, timeout: float | None) -> None:
        """Write the values of the leaves to the servers, in one transaction, and keep `record`.

        If the checkpoint has an optimizer but no state for a variable, its state there is reset.
        """
        saved = []
        for key, leaf in self._variables.items():
            if leaf.array is None:
                continue
            variable = self._found[key]
            slots: dict[RuleKey, ShardSlots] = {}
            for stepper in self._steppers:
                leaves = self._slots[stepper.key, self._keys[id(variable)]]
                arrays = {name: one.array for name, one in leaves.items() if one.array is not None}
                steps = arrays.pop(_STEPS, None)
                if arrays or steps is not None:
                    count = max(1, stepper.optimizer.iterations if steps is None else int(steps))
                    slots[stepper.rule] = ShardSlots(count, arrays)
                elif self._iterations[stepper.key].worker_states:
                    slots[stepper.rule] = ShardSlots(0, {})
            saved.append(SavedVariable(variable, leaf.array, slots))
        pushes = None if record["path"] is None else record["pushes"]
        write_servers(self.strategy, saved, number, record, timeout, pushes)


def restore_record(path: str | None) -> dict[str, Any]:
    """Return the record of a restore that servers keep for the other workers."""
    return {"failure": None, "path": path, "identity": "", "left": [], "own": {}, "pushes": {}}


def _require_variables(steppers: Iterable[ServerOptimizerLeaf], names: Collection[str]) -> None:
    """Raise ConfigError if an optimizer steps server-side variables outside `names`."""
    for stepper in steppers:
        remote = stepper.optimizer.remote_step
        left_out = [] if remote is None else sorted(set(remote.variables) - set(names))
        if left_out:
            name = re.sub("[^a-zA-Z0-9_]", "_", left_out[0])
            raise ConfigError(
                f"{stepper.key!r} has state on servers for variable {left_out[0]!r}, which is not "
                f"part of the checkpoint: write sv.Checkpoint(…, {stepper.key}={stepper.key}, "
                f"{name}=…)"
            )


def snapshot_for_file(
    variables: list[ServerVariable], optimizers: list[Optimizer]
) -> tuple[dict[int, NDArray[Any]], dict[int, dict[str, NDArray[Any]]]]:
    """Take one snapshot for a worker that writes its own file (`sv.save`)."""
    pairs = [
        (one, ServerOptimizerLeaf("", one)) for one in optimizers if one.remote_step is not None
    ]
    pairs = [(one, leaf) for one, leaf in pairs if leaf.is_supported]
    found = {id(one): one for one in variables}
    for one, _ in pairs:
        assert one.remote_step is not None
        found |= {
            id(variable): variable
            for variable in one.remote_step.variables.values()
            if isinstance(variable, ServerVariable)
        }
    if not found:
        return {}, {}
    chosen = list(found.values())
    state = read_servers(
        [(variable, [leaf.rule for _, leaf in pairs]) for variable in chosen], None
    )
    slots: dict[int, dict[str, NDArray[Any]]] = {}
    for one, leaf in pairs:
        counts = rule_of(leaf.rule[0], dict(leaf.rule[1])).counts_steps
        by_name = {saved.variable.name: saved.slots[leaf.rule] for saved in state.variables}
        by_name = {name: each for name, each in by_name.items() if each.steps}
        steps = one.iterations or max((each.steps for each in by_name.values()), default=0)
        own = slots[id(one)] = {"iterations": np.array(steps, np.int64)}
        for name, each in by_name.items():
            own |= {f"{name}/{slot}": array for slot, array in each.slots.items()}
            if counts:
                own[f"{name}/{_STEPS}"] = np.array(each.steps, np.int64)
    return {id(saved.variable): saved.value for saved in state.variables}, slots


class CheckpointContent(NamedTuple):
    """All objects of a checkpoint."""

    leaves: list[Leaf]  # leaves sorted by key, without server-side ones
    group: CheckpointGroup  # group that saves them
    # error of an object that cannot be saved, reported to the group; or None
    refused: Exception | None
    on_servers: ServerLeaves | None  # server-side objects, or None
    # error about optimizer state that a save would leave out; or None
    unsaved: ConfigError | None = None


def sort_leaves(
    found: Sequence[AnyLeaf],
    default: Callable[[], Communicator],
    refused: Exception | None = None,
    *,
    prefix: str = "",
    only: Collection[str] | None = None,
) -> CheckpointContent:
    """Sort the objects of a checkpoint, and find the group that saves them."""
    leaves, refused, on_servers, unsaved = sort_objects(found, refused, prefix=prefix, only=only)
    group: CheckpointGroup
    if on_servers is not None and not any(isinstance(leaf, VariableLeaf) for leaf in leaves):
        group = on_servers.group
    else:
        group = communicator_of_leaves(leaves, default)
    return CheckpointContent(leaves, group, refused, on_servers, unsaved)


class SortedObjects(NamedTuple):
    """All objects of a checkpoint, without the group that saves them."""

    leaves: list[Leaf]  # sorted by key, without server-side ones
    refused: Exception | None  # error of an object that cannot be saved
    on_servers: ServerLeaves | None  # server-side objects
    unsaved: ConfigError | None  # error about optimizer state that a save would leave out


def sort_objects(
    found: Sequence[AnyLeaf],
    refused: Exception | None = None,
    *,
    prefix: str = "",
    only: Collection[str] | None = None,
) -> SortedObjects:
    """Sort the objects of a checkpoint into leaves of ranks and server-side objects."""
    variables = [one for one in found if isinstance(one, ServerVariableLeaf)]
    steppers = [one for one in found if isinstance(one, ServerOptimizerLeaf)]
    leaves: list[Leaf] = [
        one for one in found if not isinstance(one, ServerVariableLeaf | ServerOptimizerLeaf)
    ]
    keys: dict[int, str] = {}
    local: dict[str, Variable] = {}
    for one in found:
        if not isinstance(one, ServerVariableLeaf | VariableLeaf) or isinstance(one, FeedbackLeaf):
            continue
        key = prefix + one.key
        if keys.setdefault(id(one.variable), key) == key and isinstance(one, VariableLeaf):
            local[key] = one.variable
    steppers_there = [
        one
        for one in steppers
        if variables and one.optimizer.remote_step is not None and one.is_supported
    ]
    for stepper in steppers:
        leaves.append(RuleLeaf(stepper.key, stepper.optimizer))
        leaves += local_leaves(
            stepper.key, stepper.optimizer, local, has_own=stepper not in steppers_there
        )
    leaves.sort(key=lambda leaf: leaf.key)
    if only is not None:
        leaves = [leaf for leaf in leaves if prefix + leaf.key in only]
        variables = [one for one in variables if prefix + one.key in only]
    on_servers = ServerLeaves(variables, steppers_there, keys) if variables else None
    if on_servers is None and only is None:
        try:
            _require_variables(steppers, ())
        except ConfigError as error:
            refused = refused or error
    unsaved = None
    try:
        require_saved_variables([(one.key, one.optimizer) for one in steppers], keys)
    except ConfigError as error:
        unsaved = error
    return SortedObjects(leaves, refused, on_servers, unsaved)
