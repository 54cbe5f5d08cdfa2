"""The used names of variables, in constant memory for each base name.

A name is never free again: garbage is collected at different times on the replicas, so they would
    not
agree which names are free. Only names from the program are stored, each with its first free number.
So a loop of temporary variables stores one number.
"""

from __future__ import annotations


class Names:
    """The names of one namespace.

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
        if name == base:
            self._next[base] = 1
        else:
            self._next[base] = int(name[len(base) + 1 :]) + 1
        return name
