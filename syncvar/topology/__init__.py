"""Who is where: ranks, hosts and groups as plain data, without any process."""

from __future__ import annotations

from syncvar.topology.elsewhere import (
    is_meant_alone,
    started_with_others,
    told_elsewhere,
    why_not_alone,
)
from syncvar.topology.engines import ADDRESS, FOLDER, MPI, PMI, Told
from syncvar.topology.hosts import HostMap, divided
from syncvar.topology.ranks import process_list, rank_list, rank_spans, ranks_of

__all__ = [
    "ADDRESS",
    "FOLDER",
    "MPI",
    "PMI",
    "HostMap",
    "Told",
    "divided",
    "is_meant_alone",
    "process_list",
    "rank_list",
    "rank_spans",
    "ranks_of",
    "started_with_others",
    "told_elsewhere",
    "why_not_alone",
]
