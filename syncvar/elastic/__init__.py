"""Elastic jobs: workers come and go, and those that live go on from the last commit.

Start reading in `elastic_state`: the public `State`. `elastic_run` drives it from one generation to
the next. `held_objects` moves its objects to another world and gives all members the same commit.
`snapshot` is one commit in memory, and `state_transfer` agrees on one and sends it. `world_move`
has the order in which strategies and variables move.

Example:
    >>> import syncvar as sv
    >>> state = sv.elastic.State(w=sv.Variable(1.0), step=0)
    >>> state.commit()
    >>> state
    <sv.elastic.State of w, step>
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.elastic.elastic_run import run
from syncvar.elastic.elastic_state import State

__all__ = ["State", "run"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from syncvar.core.migration_hints import missing_attribute

        raise missing_attribute("sv.elastic", name, __all__)
