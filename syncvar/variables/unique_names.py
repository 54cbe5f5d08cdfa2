"""The names of variables that are used up: pure bookkeeping, in few bytes and a few steps for each name.

A name is never given back: garbage is collected at different times on the replicas, and they would not agree any more which
names are free. But what has to be remembered are only the names that a program has given, each with the first number
that is free behind it; the names that were made from these follow from it. So a loop of temporaries leaves one number.
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
        self._next: dict[
            str, int
        ] = {}  # of a name: it and all its numbers below this one are taken

    def __len__(self) -> int:
        """Return how many names are remembered."""
        return len(self._next)

    def __contains__(self, name: str) -> bool:
        if name in self._next:
            return True
        base, _, digits = name.rpartition("_")
        return digits.isdecimal() and digits[0] != "0" and int(digits) < self._next.get(base, 1)

    def free(self, base: str) -> str:
        """Return `base`, or the first of `base_1`, `base_2`, … that is free.

        Args:
            base: A name in letters, digits and signs of ASCII.
        """
        if base not in self:
            return base
        number = self._next.get(base, 1)
        while f"{base}_{number}" in self:
            number += 1
        return f"{base}_{number}"

    def take(self, base: str) -> str:
        """Take what `free` returns, and return it."""
        name = self.free(base)
        if name == base:
            self._next[base] = 1
        else:
            self._next[base] = int(name[len(base) + 1 :]) + 1
        return name
