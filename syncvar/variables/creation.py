"""Making a variable on all replicas: names, the comparison of what each replica asks for, the chief's value."""

from __future__ import annotations

import re
import warnings
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncvar.collectives._headers import BYTES, Record, exchange
from syncvar.collectives.all_gather import gather_flat
from syncvar.collectives.broadcast import broadcast_flat
from syncvar.errors import ConfigError, MismatchError
from syncvar.runtime.context import current
from syncvar.runtime.group import Request, fingerprint
from syncvar.variables.casting import digest_of
from syncvar.wire import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from syncvar.runtime.executor import Stage
    from syncvar.variables.places import Owner

__all__ = ["Manifest", "checked_name", "create_request", "free_name", "take_name", "warn_of_differences"]

_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")


class Manifest(NamedTuple):
    """What a replica asks for. Shape and dtype are None where only the chief knows them (a callable)."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    synchronization: str
    aggregation: str
    trainable: bool
    options: str

    def describe(self) -> str:
        """Return the request in words."""
        value = "a callable" if self.shape is None else f"{self.dtype}{list(self.shape)}"
        kind = "trainable" if self.trainable else "not trainable"
        return f"{self.name!r}: {value}, {self.synchronization} + {self.aggregation}, {kind}, strategy with {self.options}"


def checked_name(name: Any) -> str:
    """Return a given name, or "Variable" for None.

    Raises:
        ConfigError: It breaks the rule.
    """
    if name is None:
        return "Variable"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"a variable's name must be 1 to 128 of A-Z a-z 0-9 _ . / -, not {name!r}"[:300])
    return name


def _taken(namespace: Any) -> set[str]:
    names: dict[Any, set[str]] = current().extras.setdefault("names_of_variables", {})
    return names.setdefault(namespace, set())


def free_name(base: str, namespace: Any) -> str:
    """Return `base`, or the first of `base_1`, `base_2`, … that is free in the namespace."""
    taken = _taken(namespace)
    if base not in taken:
        return base
    number = 1
    while f"{base}_{number}" in taken:
        number += 1
    return f"{base}_{number}"


def take_name(name: str, namespace: Any) -> None:
    """Use a name up. Names are never given back: replicas collect garbage at different times."""
    _taken(namespace).add(name)


def create_request(owner: Owner, mine: Manifest, value: NDArray[Any] | None, *, own: bool) -> Request:
    """Return the request that compares the manifests and gives every replica the chief's value.

    Args:
        owner: The strategy.
        mine: What this replica asks for.
        value: This replica's initial value; None where only the chief has one.
        own: Each replica keeps its own value (a copy of an existing variable).

    Returns:
        A request whose result is (value, replicas whose initial bytes differ from the chief's).
    """
    communicator = owner.communicator
    packed = pack_object([[*mine], None if value is None else digest_of(value)])

    def body() -> Generator[Stage, None, tuple[NDArray[Any], list[int]]]:
        records = yield from exchange(communicator, Record(BYTES, nbytes=len(packed)))
        counts = tuple(record.nbytes for record in records)
        flat = (yield from gather_flat(communicator, np.frombuffer(packed, np.uint8), counts)).tobytes()
        ends = list(accumulate(counts))
        everyone = [unpack_object(flat[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        manifests = [_manifest(fields) for fields, _ in everyone]
        _compare(communicator.members, manifests)
        if own and value is not None:
            return value, []
        shape, dtype = manifests[0].shape, manifests[0].dtype
        assert shape is not None
        made = yield from broadcast_flat(
            communicator, value if communicator.rank == 0 else None, shape, _dtype(dtype), 0
        )
        digests = [digest for _, digest in everyone]
        differ = [replica for replica, digest in enumerate(digests) if digest not in (None, digests[0])]
        if differ and owner.strict:
            table = {
                communicator.members[replica]: f"initial value with digest {digest:016x}"
                for replica, digest in enumerate(digests)
                if digest is not None
            }
            raise MismatchError(
                f"the initial values of variable {mine.name!r} differ, and the strategy is strict", table
            )
        return made, differ

    return Request(f"create variable {mine.name!r}", fingerprint("create variable"), body())


def warn_of_differences(name: str, differ: list[int], stacklevel: int) -> None:
    """Say once that replicas passed another initial value than the chief, whose value all take."""
    shown = ", ".join(map(str, differ[:8])) + (", …" if len(differ) > 8 else "")
    warnings.warn(
        f"variable {name!r}: the initial value of replica {shown} differs from replica 0's, which every replica takes. "
        f"Pass the same value everywhere (same seed), or a callable, or MirroredStrategy(strict=True) to make this an "
        f"error",
        stacklevel=stacklevel + 1,
    )


def _manifest(fields: Any) -> Manifest:
    name, shape, *rest = fields
    return Manifest(name, None if shape is None else tuple(shape), *rest)


def _dtype(name: str | None) -> np.dtype[Any]:
    from syncvar.wire import DTYPE_NAMES, dtype_from_index

    return dtype_from_index(DTYPE_NAMES.index(str(name)))


def _compare(members: tuple[int, ...], manifests: list[Manifest]) -> None:
    chief = manifests[0]
    for other in manifests:
        known = other._replace(
            shape=chief.shape if other.shape is None else other.shape,
            dtype=chief.dtype if other.dtype is None else other.dtype,
        )
        if known != chief:
            table = {members[replica]: one.describe() for replica, one in enumerate(manifests)}
            raise MismatchError("the replicas do not create the same variable; none was created", table)
