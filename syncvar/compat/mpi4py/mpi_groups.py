"""Groups of ranks, and infos: values of MPI that no message is needed for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py.mpi_errors import MpiException, reduced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class MpiGroup:
    """An ordered set of ranks of the world.

    Args:
        group: Group to refer to; None for a null group.
    """

    __qualname__ = "Group"
    __module__ = "syncvar.compat.mpi4py.mpi_namespace"
    _members: tuple[int, ...] | None = None
    _own = -1  # this process's rank of the world

    def __new__(cls, group: MpiGroup | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if group is not None:
            if not isinstance(group, MpiGroup):
                raise TypeError(f"{group!r} is no Group")
            self._members, self._own = group._members, group._own
        return self

    @classmethod
    def of(cls, members: Iterable[int], own: int) -> MpiGroup:
        """Return the group of some ranks of the world."""
        group = cls()
        group._members, group._own = tuple(members), own
        return group

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the world; raises for a null group."""
        if self._members is None:
            raise MpiException(const.ERR_GROUP, "the group is GROUP_NULL")
        return self._members

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    def Get_rank(self) -> int:
        """Return this process's rank, or UNDEFINED."""
        if self._own not in self.members:
            return const.UNDEFINED
        return self.members.index(self._own)

    size = property(Get_size)
    rank = property(Get_rank)

    def Translate_ranks(
        self, ranks: Sequence[int] | None = None, group: MpiGroup | None = None
    ) -> list[int]:
        """Return the ranks of another group, or of the world, that are the same processes."""
        places = range(len(self.members)) if ranks is None else ranks
        if group is None:
            return [rank if rank == const.PROC_NULL else self._member(rank) for rank in places]
        others = {member: rank for rank, member in enumerate(group.members)}
        return [
            const.PROC_NULL
            if rank == const.PROC_NULL
            else others.get(self._member(rank), const.UNDEFINED)
            for rank in places
        ]

    def _member(self, rank: int) -> int:
        if not 0 <= rank < len(self.members):
            raise MpiException(const.ERR_RANK, f"the group has no rank {rank}")
        return self.members[rank]

    def Compare(self, group: MpiGroup) -> int:
        """Return IDENT, SIMILAR or UNEQUAL."""
        return compare_members(self.members, group.members, const.IDENT)

    def Dup(self) -> MpiGroup:
        """Return a copy."""
        return MpiGroup.of(self.members, self._own)

    @classmethod
    def Union(cls, group1: MpiGroup, group2: MpiGroup) -> MpiGroup:
        """Return the ranks of the first group, then the others of the second."""
        rest = [one for one in group2.members if one not in group1.members]
        return cls.of((*group1.members, *rest), group1._own)

    @classmethod
    def Intersection(cls, group1: MpiGroup, group2: MpiGroup) -> MpiGroup:
        """Return the ranks of both groups, in the order of the first."""
        both = [one for one in group1.members if one in group2.members]
        return cls.of(both, group1._own)

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: MpiGroup, group2: MpiGroup) -> MpiGroup:
        """Return the ranks of the first group that are not in the second."""
        rest = [one for one in group1.members if one not in group2.members]
        return cls.of(rest, group1._own)

    def Incl(self, ranks: Sequence[int]) -> MpiGroup:
        """Return the group of some ranks, in this order."""
        members = [self._member(rank) for rank in ranks]
        if len(set(members)) != len(members):
            raise MpiException(const.ERR_RANK, f"a rank is twice in {list(ranks)}")
        return MpiGroup.of(members, self._own)

    def Excl(self, ranks: Sequence[int]) -> MpiGroup:
        """Return the group without some ranks."""
        without = {self._member(rank) for rank in ranks}
        return MpiGroup.of((one for one in self.members if one not in without), self._own)

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> MpiGroup:
        """Return the group of ranges (first, last, stride) of ranks."""
        return self.Incl(_in_ranges(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> MpiGroup:
        """Return the group without ranges (first, last, stride) of ranks."""
        return self.Excl(_in_ranges(ranks))

    def Free(self) -> None:
        """Make this a null group."""
        self._members = None

    free = Free

    @property
    def handle(self) -> int:
        """A number of the group."""
        return hash(self._members)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MpiGroup):
            return NotImplemented
        return self._members == other._members

    def __hash__(self) -> int:
        return hash(self._members)

    def __bool__(self) -> bool:
        return self._members is not None

    def __reduce__(self) -> Any:
        if self._members is None:
            return reduced(self, "GROUP_NULL")
        if not self._members:
            return reduced(self, "GROUP_EMPTY")
        raise ValueError("cannot pickle a group")


def _in_ranges(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    found: list[int] = []
    for first, last, stride in ranges:
        found.extend(range(first, last + (1 if stride > 0 else -1), stride))
    return found


def compare_members(one: tuple[int, ...], other: tuple[int, ...], same: int) -> int:
    """Return `same`, SIMILAR or UNEQUAL."""
    if one == other:
        return same
    return const.SIMILAR if set(one) == set(other) else const.UNEQUAL


class Info:
    """Pairs of a key and a value, which are hints.

    Args:
        info: Info to refer to; None for a null info.
    """

    _entries: dict[str, str] | None = None

    def __new__(cls, info: Info | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if info is not None:
            self._entries = info._entries
        return self

    @classmethod
    def Create(cls, items: Any = None) -> Info:
        """Return a new info."""
        info = cls()
        info._entries = {}
        if items is not None:
            info.update(items)
        return info

    @classmethod
    def Create_env(cls, args: Sequence[str] | None = None) -> Info:
        """Return an info about the start of the program."""
        return cls.Create()

    @property
    def entries(self) -> dict[str, str]:
        """The pairs; raises for a null info."""
        if self._entries is None:
            raise MpiException(const.ERR_INFO, "the info is INFO_NULL")
        return self._entries

    def Free(self) -> None:
        """Make this a null info."""
        self._entries = None

    free = Free

    def Dup(self) -> Info:
        """Return a copy."""
        return Info.Create(self.entries)

    copy = Dup

    def Get(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        return self.entries.get(key)

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return the value of a key, or a default."""
        return self.entries.get(key, default) if self else default

    def Set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self.entries[str(key)] = str(value)

    def Delete(self, key: str) -> None:
        """Delete a key."""
        if key not in self.entries:
            raise MpiException(const.ERROR_CLASSES["ERR_INFO_NOKEY"], f"there is no key {key!r}")
        del self.entries[key]

    def Get_nkeys(self) -> int:
        """Return the number of keys."""
        return len(self.entries)

    def Get_nthkey(self, n: int) -> str:
        """Return a key by its number."""
        return list(self.entries)[n]

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._entries or ())

    def values(self) -> list[str]:
        """Return the values."""
        return list((self._entries or {}).values())

    def items(self) -> list[tuple[str, str]]:
        """Return the pairs."""
        return list((self._entries or {}).items())

    def update(self, items: Info | Mapping[str, str] | Iterable[Any] = (), **kwds: str) -> None:
        """Set several values."""
        pairs = items.items() if hasattr(items, "items") else items
        for key, value in (*pairs, *kwds.items()):
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        """Delete a key and return its value."""
        return self.entries.pop(key, *default)

    def popitem(self) -> tuple[str, str]:
        """Delete some key; return it and its value."""
        return self.entries.popitem()

    def clear(self) -> None:
        """Delete all keys."""
        self.entries.clear()

    @property
    def handle(self) -> int:
        """A number of the info."""
        return 0 if self._entries is None else id(self._entries)

    def __len__(self) -> int:
        return len(self._entries or ())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in (self._entries or ())

    def __getitem__(self, item: str) -> str:
        return self.entries[item]

    def __setitem__(self, item: str, value: str) -> None:
        self.Set(item, value)

    def __delitem__(self, item: str) -> None:
        del self.entries[item]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Info):
            return NotImplemented
        return self._entries is other._entries

    def __hash__(self) -> int:
        return hash(self.handle)

    def __bool__(self) -> bool:
        return self._entries is not None

    def __reduce__(self) -> Any:
        if self._entries is None:
            return reduced(self, "INFO_NULL")
        return Info.Create, (dict(self._entries),)


GROUP_NULL = MpiGroup()
GROUP_EMPTY = MpiGroup.of((), -1)
INFO_NULL = Info()
