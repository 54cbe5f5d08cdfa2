"""Who is where: ranks, hosts and groups as plain data, without any process."""

from __future__ import annotations

from syncvar.topology.elsewhere import Told, told_elsewhere
from syncvar.topology.hosts import HostMap, divided
from syncvar.topology.ranks import rank_list, rank_spans

__all__ = ["HostMap", "Told", "divided", "rank_list", "rank_spans", "told_elsewhere"]
