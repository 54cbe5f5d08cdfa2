"""Helpers for tests of programs that use syncvar, and of transports that carry it."""

from __future__ import annotations

from syncvar.testing.ledger_check import assert_ledger
from syncvar.testing.simulation import Ask, Cluster, Simulation
from syncvar.testing.transport_check import TRANSPORT_CHECKS, TransportFactory, check_transport
from syncvar.testing.world import run_ranks
from syncvar.transports.in_memory import Faults

__all__ = [
    "TRANSPORT_CHECKS",
    "Ask",
    "Cluster",
    "Faults",
    "Simulation",
    "TransportFactory",
    "assert_ledger",
    "check_transport",
    "run_ranks",
]
