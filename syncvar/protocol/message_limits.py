"""How long a message may be: one rule for every socket at which a stranger can speak.

ZeroMQ compares the length that a frame announces with the limit of its socket before it takes memory, and it does so from the first
byte of a connection on. The limit of a socket cannot change when a peer has proved itself. So no frame of syncvar is
long: whatever is longer than `FRAME_NBYTES` travels in several frames, and a stranger can make a process hold one frame.

Two more limits are only for peers that have not proved themselves. A peer that sends more than `UNPROVED_NBYTES_MAX` before it has
proved itself loses the connection (`syncvar.transports.unauthenticated_peers`). On a stream of our own framing, the first message is at most
`HELLO_NBYTES_MAX` long (`syncvar.parameter_server.transport.unix_stream`).
"""

from __future__ import annotations

FRAME_NBYTES = (1 << 20) + 4096
"""The longest frame of a message between workers and servers; between ranks it is the setting `segment_bytes`.

An array of 1 MiB fits into one frame, so the receiver need not copy it.
"""

FRAMING_NBYTES = 4096
"""What a frame may have beside its payload: a header, and what encryption adds."""

CONTROL_NBYTES_MAX = 1 << 20
"""The longest message between a worker and the launcher."""

UNPROVED_NBYTES_MAX = 64 << 10
"""The most that a connection may bring before its peer has proved itself; a handshake needs less than 1 KiB."""

HELLO_NBYTES_MAX = 4096
"""The longest message by which a process introduces itself on a stream."""
