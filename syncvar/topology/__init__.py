"""Who is where: ranks and groups as plain data, without any process."""

from __future__ import annotations

from syncvar.topology.ranks import rank_list, rank_spans

__all__ = ["rank_list", "rank_spans"]
