"""How frames get from one rank to another. A transport knows links, memory and failure; it knows no collective.

`base` is the contract, `zeromq` the real thing (unix sockets and tcp), `memory` a whole world inside one process with
seeded faults. `syncvar.testing.check_transport` proves the contract for any of them.
"""

from __future__ import annotations

from syncvar.transports.base import Arrival, Control, Frame, Loan, Lost, Transport

__all__ = ["Arrival", "Control", "Frame", "Loan", "Lost", "Transport"]
