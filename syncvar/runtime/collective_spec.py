"""The description of a call: what ranks compare, what records contain, and its text.

A call has one `CollectiveSpec`. Whatever has to know something about a call reads its fields.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from syncvar.core.pytree import TreeDef

_STEP_SPREAD = 0x9E3779B97F4A7C15  # odd: all steps below 2**64 give different fingerprints
_MASK = (1 << 64) - 1


@lru_cache(maxsize=4096)
def fingerprint(*parts: object) -> int:
    """Return a 64-bit hash of values that is the same in every process."""
    import hashlib  # loads OpenSSL, which importing the package need not do

    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class CollectiveSpec(NamedTuple):
    """The description of a call; -1 or empty where a field does not apply.

    Records contain the fields that are also fields of `call_record.Event`.
    """

    collective: str  # name of the call, for instance "all_reduce" or "assign of variable 'w'"
    op: str = ""
    root: int = -1  # rank in the group of the root
    algorithm: str | None = None  # name of the algorithm; None lets syncvar choose
    reproducible: bool = False  # whether the ranks combine by the reproducible tree
    structure: TreeDef | None = None  # of a pytree
    kinds: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of its arrays
    options: tuple[object, ...] = ()  # more values that are the same on all ranks
    dtype: str = ""
    shape: tuple[int, ...] = ()
    elements: int = -1  # ranks compare the fields above this one
    size: int = -1  # bytes of the whole call, as nccl-tests counts; -1 for those that were moved
    peer: int = -1  # world rank of the other end of a message
    tag: int = -1
    # Name of the variable that the call is about, or names of several (`names_text`); else empty
    variable: str = ""
    access: str = ""  # short name of such a call, for instance "assign"
    step: int = 0  # step of an optimizer; compared too
    # Whether ranks compare dtype and shape here, and not in the call itself
    is_uniform: bool = True
    compared: str = ""  # what the ranks compare in place of the fields; empty for the fields
    shown: tuple[object, ...] = ()  # what the label has in parentheses
    text: Callable[[CollectiveSpec], str] | None = None  # returns another label

    @property
    def fingerprint(self) -> int:
        """The call signature: ranks that make the same call have the same one."""
        if self.compared:
            return fingerprint(self.compared)
        fields = self[: _UNIFORM if self.is_uniform else _RAGGED]
        # The hash is without the step: a hash for each step would push others out of the cache.
        return (fingerprint(*fields) + self.step * _STEP_SPREAD) & _MASK

    @property
    def kind(self) -> str:
        """The collective or the access with the op, for tables that have a column for variables."""
        name, op = self.access or self.collective, self.op
        return f"{name}({op})" if op.isalpha() and op.islower() else name

    @property
    def label(self) -> str:
        """The text of the call for people, for instance "all_reduce(sum, float32[10])"."""
        if self.text is not None:
            return self.text(self)
        shown = ", ".join(map(str, self.shown))
        return f"{self.collective}({shown})" if shown else self.collective

    def __str__(self) -> str:
        return self.label

    def with_array(self, array: NDArray[Any]) -> CollectiveSpec:
        """Return the description of the call with this input."""
        dtype, shape, count, nbytes = array.dtype.name, array.shape, array.size, array.nbytes
        return self._replace(dtype=dtype, shape=shape, elements=count, size=nbytes)

    # -- parts of a label --------------------------------------------------------------------------

    @property
    def array(self) -> str:
        """The array of this rank, for instance "float32[10]"."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def tree(self) -> str:
        """The structure of a pytree, in words."""
        from syncvar.core.pytree import describe  # loads NumPy, which the launcher does without

        return "" if self.structure is None else describe(self.structure)

    @property
    def mode(self) -> str:
        """The words ", reproducible" for such a call."""
        return ", reproducible" if self.reproducible else ""

    @property
    def to_root(self) -> str:
        """The root, for instance ", root 0", of a call that has one."""
        return f", root {self.root}" if self.root >= 0 else ""


_UNIFORM, _RAGGED = map(CollectiveSpec._fields.index, ("elements", "dtype"))


def names_text(names: Sequence[str]) -> str:
    """Return the names of a call's variables as `CollectiveSpec.variable` has them.

    Example:
        >>> names_text(["w"]), names_text(["w", "b"]), names_text(["w", "b", "c", "d"])
        ('w', 'w, b', 'w, b and 2 more')
    """
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown


def spec_of(name: str | CollectiveSpec) -> CollectiveSpec:
    """Return the description of a call that may have only a name."""
    return CollectiveSpec(name) if isinstance(name, str) else name
