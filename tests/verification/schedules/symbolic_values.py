"""Symbolic values: which contributions a value holds, combined in which order.

Values are small integers. Equal expressions are the same integer (hash-consing), so that comparing the results of all
ranks is comparing integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import PlanError

if TYPE_CHECKING:
    from tests.verification.schedules.collective_contracts import Expression

UNDEFINED = -1
"""What memory holds before anything was written."""


class Expressions:
    """All expressions of one run of the checker."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int, int], int] = {}
        self._operands: list[tuple[int, int] | None] = []
        self.element: list[int] = []
        self.lowest: list[int] = []
        self.contributors: list[int] = []

    def leaf(self, rank: int, element: int) -> int:
        """Return the contribution of a rank to an element of WORK."""
        key = (-1, rank, element)
        value = self._ids.get(key)
        return self._add(key, None, element, rank, 1 << rank) if value is None else value

    def combine(self, left: int, right: int) -> int:
        """Return left + right.

        Args:
            left: The left operand, defined.
            right: The right operand, defined.

        Returns:
            The sum; the same integer for the same operands in the same order.

        Raises:
            PlanError: The operands belong to different elements, share a contribution, or stand in the wrong order.
        """
        key = (0, left, right)
        value = self._ids.get(key)
        if value is not None:
            return value
        if self.element[left] != self.element[right]:
            raise PlanError(
                f"elements {self.element[left]} and {self.element[right]} are combined with each other"
            )
        contributors = self.contributors[left] | self.contributors[right]
        if self.contributors[left] & self.contributors[right]:
            raise PlanError(
                f"a contribution is counted twice: {self.text(left)} + {self.text(right)}"
            )
        if self.lowest[left] > self.lowest[right]:
            raise PlanError(
                f"operand order: {self.text(left)} + {self.text(right)} has the lower contributor on the right"
            )
        return self._add(key, (left, right), self.element[left], self.lowest[left], contributors)

    def of(self, expression: Expression, element: int) -> int:
        """Return the value of a written expression for one element of WORK."""
        if isinstance(expression, int):
            return self.leaf(expression, element)
        left, right = expression
        return self.combine(self.of(left, element), self.of(right, element))

    def text(self, value: int) -> str:
        """Return a value as text: ((x0 + x1) + x2), or "nothing" where memory is undefined."""
        if value == UNDEFINED:
            return "nothing"
        operands = self._operands[value]
        if operands is None:
            return f"x{self.lowest[value]}"
        return f"({self.text(operands[0])} + {self.text(operands[1])})"

    def _add(
        self,
        key: tuple[int, int, int],
        operands: tuple[int, int] | None,
        element: int,
        lowest: int,
        contributors: int,
    ) -> int:
        value = len(self._operands)
        self._ids[key] = value
        self._operands.append(operands)
        self.element.append(element)
        self.lowest.append(lowest)
        self.contributors.append(contributors)
        return value
