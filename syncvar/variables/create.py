"""Creation of variables: comparison of the arguments, the chief's value, unique names.

An initial value may be made part by part (`ShardInfo`), or be split over the copies (`share_of`).
"""

from __future__ import annotations

import inspect
import operator
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.bootstrap.process import current
from syncvar.collectives.compressors import checked_compressor
from syncvar.collectives.stage_builders import broadcast_flat, gather_bytes
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError, InternalError, MismatchError
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.collective_spec import CollectiveSpec
from syncvar.runtime.communicator import CheckedCall
from syncvar.variables.policy import (
    AccessKind,
    Action,
    Effect,
    Travel,
    VariableAggregation,
    VariableSynchronization,
    as_member,
    decide,
    resolve,
)
from syncvar.variables.storage import digest_of
from syncvar.variables.values import ArrayProtocol, checked_dtype, initial_array
from syncvar.variables.variable_owner import context_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from syncvar.collectives.compressors import Codec, PowerSGD
    from syncvar.runtime.request import Stage
    from syncvar.variables.variable_owner import VariableOwner

_CREATE = "create variable"
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
# Binary digits of the significand, and the exponent of the smallest place, by dtype.
_PLACES = {
    "float16": (11, -24),
    "bfloat16": (8, -133),
    "float32": (24, -149),
    "float64": (53, -1074),
}


class VariableProposal(NamedTuple):
    """A replica's arguments. Shape and dtype are None if only the chief knows them (a callable)."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    synchronization: str
    aggregation: str
    trainable: bool
    options: str
    compress: str = ""  # name of the compressor; "" for none

    def describe(self) -> str:
        """Return the arguments in words."""
        value = "a callable" if self.shape is None else f"{self.dtype}{list(self.shape)}"
        kind = "trainable" if self.trainable else "not trainable"
        mode = f"{self.synchronization} + {self.aggregation}"
        form = f"{value}, {mode}, {kind}" + (f", compress {self.compress}" if self.compress else "")
        return f"{self.name!r}: {form}, strategy with {self.options}"


class VariableSpec(NamedTuple):
    """The unchecked arguments of `Variable`."""

    initial_value: Any
    trainable: Any
    name: Any
    dtype: Any
    synchronization: Any
    aggregation: Any
    shape: Any = None
    compress: Any = None


class VariableInit(NamedTuple):
    """What a variable starts with on this replica."""

    owner: VariableOwner
    namespace: Any  # of the name: the ranks, or this process alone under NONE
    name: str
    value: NDArray[Any]
    trainable: bool
    requested: VariableSynchronization
    aggregation: VariableAggregation
    compressor: Codec | PowerSGD | None = None


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The part of a variable for which a function makes the initial value.

    Args:
        shape: Shape of the part.
        offset: Where it begins in the variable, by axis; only the first may exceed 0.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2))
        >>> def numbered(shard_info):
        ...     return shard_info.offset[0] + np.arange(shard_info.shape[0])
        >>> with strategy.scope():
        ...     table = sv.Variable(numbered, shape=5, dtype="int64")
        >>> table.row_ranges, table.numpy().tolist()
        ([[0, 3], [3, 5]], [0, 1, 2, 3, 4])
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Names:
    """The used names of one namespace, in constant memory for each base name.

    A name is never free again: garbage is collected at different times on the replicas, so they
    would not agree which names are free.

    Example:
        >>> names = Names()
        >>> [names.take("w") for _ in range(3)], names.take("w_2"), names.free("w"), len(names)
        (['w', 'w_1', 'w_2'], 'w_2_1', 'w_3', 2)
    """

    def __init__(self) -> None:
        # By base name: the name and all its numbers below this one are used.
        self._next: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of stored names."""
        return len(self._next)

    def __contains__(self, name: str) -> bool:
        if name in self._next:
            return True
        base, _, digits = name.rpartition("_")
        return digits.isdecimal() and digits[0] != "0" and int(digits) < self._next.get(base, 1)

    def free(self, base: str) -> str:
        """Return `base`, or the first of `base_1`, `base_2`, … that is free."""
        if base not in self:
            return base
        number = self._next.get(base, 1)
        while f"{base}_{number}" in self:
            number += 1
        return f"{base}_{number}"

    def take(self, base: str) -> str:
        """Mark what `free` returns as used, and return it."""
        name = self.free(base)
        self._next[base] = 1 if name == base else int(name[len(base) + 1 :]) + 1
        return name


class _CheckedSpec(NamedTuple):
    """Checked arguments; no value if only the chief has one."""

    base: str
    value: NDArray[Any] | None
    trainable: bool
    requested: VariableSynchronization
    aggregation: VariableAggregation
    action: Action
    compressor: Codec | PowerSGD | None


def agree_on_variable(
    owner: VariableOwner, spec: VariableSpec, *, own: bool = False, stacklevel: int = 1
) -> VariableInit:
    """Check the arguments, compare them with the other replicas', and return the initial state.

    Collective, except under NONE. A replica with a wrong argument informs the others.
    """
    communicator = owner.communicator
    is_local = _is_local(spec.synchronization)
    if not is_local:
        communicator.require_all(
            "making a variable",
            "for the slots of an optimizer write optimizer.build([v, …]) before the block",
        )
    checked: _CheckedSpec | None = None
    failure: Exception | None = None
    try:
        checked = _checked(owner, spec)
    except Exception as error:  # the call below informs the other replicas
        failure = error
    namespace = "NONE" if is_local else communicator.members
    names = _names(namespace)

    def check() -> CheckedCall:
        if checked is None:
            raise failure or InternalError("the arguments were neither checked nor rejected")
        return _CreateCall(owner, names.free(checked.base), checked, own=own)

    value: Any = None
    differ: list[int] = []
    if not is_local:
        value, differ = communicator.perform(_CREATE, check, owner.timeout)
    if checked is None:
        raise failure or InternalError("the arguments were neither checked nor rejected")
    value = checked.value if is_local else value
    name = names.take(checked.base)
    _register(owner, name, value, checked.requested, checked.aggregation)
    if checked.action.effect is Effect.SHARE and not own:
        value = share_of(value, communicator.size, communicator.member_rank)
    if differ and communicator.rank == 0:
        _warn_of_differences(name, differ, stacklevel + 1)
    start, mode = np.array(value, copy=True), (checked.requested, checked.aggregation)
    return VariableInit(owner, namespace, name, start, checked.trainable, *mode, checked.compressor)


def checked_trainable(trainable: Any, *, usual: bool) -> bool:
    """Return whether a variable is trainable; None means `usual`."""
    if trainable is None:
        return usual
    if not isinstance(trainable, bool | np.bool_):
        raise ConfigError(
            f"trainable must be True, False or None, not {trainable!r}: write trainable=True"
        )
    return bool(trainable)


def checked_value(
    base: str,
    argument: Any,
    dtype: np.dtype[Any] | None,
    aggregation: VariableAggregation,
    *,
    calls: bool,
    shape: tuple[int, ...] | None = None,
) -> NDArray[Any] | None:
    """Return the initial value as an array; None if a function makes it and is not called here."""
    if callable(argument) and not isinstance(argument, ArrayProtocol):
        if not calls:
            return None
        argument = argument()
    argument = argument.read_value() if isinstance(argument, ArrayProtocol) else argument
    value = initial_array(argument, dtype, f"variable {base!r}: initial_value")
    if shape is not None and value.shape != shape:
        raise ConfigError(
            f"variable {base!r}: initial_value has shape {value.shape}, and shape= says {shape}; "
            "give what is meant"
        )
    if aggregation is VariableAggregation.MEAN and value.dtype.kind not in "fcV":
        raise ConfigError(
            f"variable {base!r}: MEAN of {value.dtype.name} is no {value.dtype.name}; use a "
            "floating dtype (dtype='float32'), or aggregation=sv.VariableAggregation.SUM"
        )
    return value


def checked_name(name: Any) -> str:
    """Return a name, or "Variable" for None."""
    if name is None:
        return "Variable"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fitting = re.sub(r"[^A-Za-z0-9_./-]", "_", str(name))[:128] or "v"
        raise ConfigError(
            f"a variable's name must be 1 to 128 of A-Z a-z 0-9 _ . / -, not {name!r:.140}: write "
            f"name={fitting!r}"
        )
    return name


def takes_shard_info(value: Any) -> bool:
    """Return whether an initial value is a function with a parameter named `shard_info`."""
    if not callable(value) or isinstance(value, ArrayProtocol):
        return False
    try:
        return "shard_info" in inspect.signature(value).parameters
    except (TypeError, ValueError):  # a function without a signature, such as some of C
        return False


def checked_shape(base: str, shape: Any) -> tuple[int, ...] | None:
    """Return the requested shape, or None for that of the value."""
    if shape is None:
        return None
    try:
        lengths = tuple(
            operator.index(one) for one in (shape if isinstance(shape, tuple | list) else (shape,))
        )
    except TypeError:
        raise ConfigError(
            f"variable {base!r}: shape must be an integer or a tuple of integers, not {shape!r}"
        ) from None
    if any(length < 0 for length in lengths):
        raise ConfigError(f"variable {base!r}: no length of a shape may be negative: {shape!r}")
    return lengths


def require_shape(
    base: str, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a variable that a function makes part by part."""
    if shape is None or dtype is None:
        missing = " and ".join(
            name for name, value in (("shape=", shape), ("dtype=", dtype)) if value is None
        )
        raise ConfigError(
            f"variable {base!r}: an initial_value that takes shard_info makes parts of a variable, "
            f"so {missing} must say what the whole is: sv.Variable(fn, shape=(1000000, 64), "
            "dtype='float32')"
        )
    return shape, dtype


def as_one_part(value: Callable[..., Any], shape: tuple[int, ...]) -> Callable[[], Any]:
    """Return a function that makes the whole variable as one part."""
    return lambda: value(shard_info=ShardInfo(shape, (0,) * len(shape)))


def share_of(value: NDArray[Any], count: int, index: int) -> NDArray[Any]:
    """Return the share of copy `index` of a value that is split over `count` copies.

    Every copy takes value / count truncated: integers toward zero, floats to a multiple of the
    value's last place. Copy 0 takes the rest. Then every partial sum is a multiple of that place
    and no larger than the value, so it is exact in any order. Infinities, NaN and zeros (with their
    sign) go to every copy. For a bool, copy 0 has the value and the others False.

    Example:
        >>> import numpy as np
        >>> [int(share_of(np.asarray(-7), 2, copy)) for copy in (0, 1)]
        [-4, -3]
        >>> parts = [share_of(np.asarray(0.1), 3, copy) for copy in range(3)]
        >>> float(sum(parts)) == 0.1
        True
    """
    kind = value.dtype.kind
    if count == 1:
        return value
    if kind == "b":
        return value if index == 0 else np.zeros_like(value)
    if kind in "iu":
        return np.asarray(_integer_share(value, count, index), value.dtype)
    if kind == "c":
        result = np.empty_like(value)
        result.real = _float_share(value.real, count, index)
        result.imag = _float_share(value.imag, count, index)
        return result
    return _float_share(value, count, index)


def init_in_world(init: VariableInit) -> VariableInit:
    """Return what a variable starts with whose strategy has moved to another world; sends nothing.

    All replicas call it for the same variables, in the same order. The value is this replica's.
    """
    owner = init.owner
    namespace = "NONE" if init.namespace == "NONE" else owner.communicator.members
    name = _names(namespace).take(init.name)
    _register(owner, name, init.value, init.requested, init.aggregation)
    return init._replace(namespace=namespace, name=name)


def _register(
    owner: VariableOwner,
    name: str,
    value: NDArray[Any],
    requested: VariableSynchronization,
    aggregation: VariableAggregation,
) -> None:
    """Enter an ON_WRITE variable into the registry of its strategy."""
    registry = owner.registry
    if registry is not None and resolve(requested)[0] is VariableSynchronization.ON_WRITE:
        is_sum = aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        is_auto = is_sum and requested is VariableSynchronization.AUTO and value.dtype.kind != "b"
        registry.enter(name, value.nbytes, is_auto=is_auto)


def _is_local(synchronization: Any) -> bool:
    """Return whether creating the variable must not send anything."""
    none = VariableSynchronization.NONE
    return synchronization is none or (
        isinstance(synchronization, str) and synchronization.upper() == none.name
    )


def _checked(owner: VariableOwner, spec: VariableSpec) -> _CheckedSpec:
    requested = as_member(VariableSynchronization, spec.synchronization, "synchronization")
    aggregation = as_member(VariableAggregation, spec.aggregation, "aggregation")
    base = checked_name(spec.name)
    dtype = None if spec.dtype is None else checked_dtype(spec.dtype)
    is_weight = requested is not VariableSynchronization.ON_READ
    trainable = checked_trainable(spec.trainable, usual=is_weight)
    context = context_of(owner, f"variable {base!r}")
    action = decide(resolve(requested)[0], aggregation, context, AccessKind.CREATE)
    calls = action.travel is Travel.NOTHING or owner.communicator.member_rank == 0
    argument, shape = spec.initial_value, checked_shape(base, spec.shape)
    if takes_shard_info(argument):
        argument = as_one_part(argument, require_shape(base, shape, dtype)[0])
    value = checked_value(base, argument, dtype, aggregation, calls=calls, shape=shape)
    known = dtype if value is None else value.dtype
    compressor = None
    if spec.compress is not None:
        compressor = checked_compressor(spec.compress)
        _check_compressible(owner, base, requested, aggregation, known)
    return _CheckedSpec(base, value, trainable, requested, aggregation, action, compressor)


def _check_compressible(
    owner: VariableOwner,
    base: str,
    requested: VariableSynchronization,
    aggregation: VariableAggregation,
    dtype: np.dtype[Any] | None,
) -> None:
    """Raise ConfigError if no sum of such a variable can travel compressed."""
    reason = ""
    if requested is VariableSynchronization.NONE:
        reason = "with synchronization NONE nothing travels"
    elif aggregation not in (VariableAggregation.SUM, VariableAggregation.MEAN):
        reason = (
            f"with aggregation {aggregation.name} the replicas add nothing up. It goes with SUM "
            "and MEAN"
        )
    elif dtype is not None and dtype.kind not in "fV":
        reason = (
            f"it rounds, and {dtype.name} is exact or complex. It goes with real floating numbers, "
            "such as dtype='float32'"
        )
    elif owner.reproducible:
        reason = (
            "the strategy has reproducible=True, so that bits do not depend on the number of "
            "replicas, and what a compressor rounds does"
        )
    if reason:
        raise ConfigError(f"variable {base!r}: leave out compress=, because {reason}")


def _names(namespace: Any) -> Names:
    names: dict[Any, Names] = current().extras.setdefault("names_of_variables", {})
    return names.setdefault(namespace, Names())


class _CreateCall(CheckedCall):
    """A call that compares the arguments and gives every replica the chief's value.

    Its result is (value, replicas whose initial bytes differ from the chief's).
    """

    def __init__(
        self, owner: VariableOwner, name: str, checked: _CheckedSpec, *, own: bool
    ) -> None:
        # The name is compared in the call, which explains a difference better.
        label = f"create variable {name!r}"
        super().__init__(CollectiveSpec(label, compared=_CREATE, variable=name, access=_CREATE))
        self._owner, self._name, self._own = owner, name, own
        self._value = value = checked.value
        mine = VariableProposal(
            name,
            None if value is None else value.shape,
            None if value is None else value.dtype.name,
            checked.requested.name,
            checked.aggregation.name,
            checked.trainable,
            f"strict={owner.strict} check_cross_writes={owner.check_cross_writes} "
            f"reproducible={owner.reproducible}",
            "" if checked.compressor is None else checked.compressor.name,
        )
        missing = [] if owner.registry is None else owner.registry.pop_missing()
        digest = None if value is None else digest_of(value)
        self._packed = pack_object([[*mine], digest, missing])

    def stages(self) -> Generator[Stage, None, tuple[NDArray[Any], list[int]]]:
        owner, value, communicator = self._owner, self._value, self._owner.communicator
        packed = yield from gather_bytes(communicator, self._packed)
        everyone = list(map(unpack_object, packed))
        if owner.registry is not None:
            owner.registry.forget(name for _, _, names in everyone for name in names)
        manifests = [_manifest(fields) for fields, _, _ in everyone]
        _compare(communicator.members, manifests)
        if self._own and value is not None:
            return value, []
        shape, dtype = manifests[0].shape, manifests[0].dtype
        assert shape is not None
        chief_value = value if communicator.rank == 0 else None
        result = yield from broadcast_flat(communicator, chief_value, shape, _dtype(dtype), 0)
        digests = {replica: one[1] for replica, one in enumerate(everyone) if one[1] is not None}
        differ = [replica for replica, digest in digests.items() if digest != everyone[0][1]]
        if differ and owner.strict:
            table = {
                communicator.members[replica]: f"initial value with digest {digest:016x}"
                for replica, digest in digests.items()
            }
            raise MismatchError(
                f"the initial values of variable {self._name!r} differ, and the strategy is "
                "strict. Pass the same everywhere: np.random.default_rng(seed) with one seed, or a "
                "callable, sv.Variable(lambda: x, …), which only the chief calls",
                table,
            )
        return result, differ


def _warn_of_differences(name: str, differ: list[int], stacklevel: int) -> None:
    """Warn that replicas passed another initial value than the chief, whose value all take."""
    shown = ", ".join(map(str, differ[:8])) + (", …" if len(differ) > 8 else "")
    warnings.warn(
        f"variable {name!r}: the initial value of replica {shown} differs from replica 0's, which "
        "every replica takes. Pass the same value everywhere (same seed), or a callable, or "
        "MirroredStrategy(strict=True) to make this an error",
        stacklevel=stacklevel + 1,
    )


def _manifest(fields: Any) -> VariableProposal:
    name, shape, *rest = fields
    return VariableProposal(name, None if shape is None else tuple(shape), *rest)


def _dtype(name: str | None) -> np.dtype[Any]:
    return dtype_from_index(DTYPE_NAMES.index(str(name)))


def _compare(members: tuple[int, ...], manifests: list[VariableProposal]) -> None:
    chief = manifests[0]
    for other in manifests:
        known = other._replace(
            shape=chief.shape if other.shape is None else other.shape,
            dtype=chief.dtype if other.dtype is None else other.dtype,
        )
        if known != chief:
            table = {members[replica]: one.describe() for replica, one in enumerate(manifests)}
            raise MismatchError(
                "the replicas do not create the same variable; none was created. Every rank has "
                "to write the same line sv.Variable(…), with a value of the same shape and dtype",
                table,
            )


def _integer_share(value: NDArray[Any], count: int, index: int) -> NDArray[Any]:
    divisor = value.dtype.type(count) if np.iinfo(value.dtype).max >= count else None
    if divisor is None:  # fewer values than copies: every quotient is 0
        return value if index == 0 else np.zeros_like(value)
    quotient = value // divisor
    quotient = quotient + ((value < 0) & (value % divisor != 0)).astype(value.dtype)
    rest: NDArray[Any] = value - quotient * value.dtype.type(count - 1)
    return rest if index == 0 else quotient


def _float_share(value: NDArray[Any], count: int, index: int) -> NDArray[Any]:
    digits, lowest = _PLACES[value.dtype.name]
    ordinary = np.isfinite(value) & (value != 0)
    wide = np.where(ordinary, value, np.ones_like(value)).astype(np.float64)
    exponent = np.frexp(wide)[1]
    # np.spacing overflows at the largest value.
    place = np.ldexp(1.0, np.maximum(exponent - digits, lowest))
    units = np.asarray(wide / place).astype(np.int64)
    share = _integer_share(units, count, index).astype(np.float64) * place
    return np.asarray(np.where(ordinary, share.astype(value.dtype), value), value.dtype)
