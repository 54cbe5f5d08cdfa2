"""Limits of message lengths, so that an unauthenticated peer cannot make a process use much memory.

ZeroMQ compares the announced length of a frame with the socket's limit before it allocates memory,
and the limit cannot change once a peer has authenticated. So all frames of syncvar are short:
a longer message travels in several frames.

Unauthenticated peers have two more limits. `transports.unauthenticated_peers` closes a connection
after `UNPROVED_NBYTES_MAX` bytes without authentication. On a stream with our own framing the
first message has at most `HELLO_NBYTES_MAX` bytes (`parameter_server.same_host_links`).
"""

from __future__ import annotations

# Longest frame between workers and servers; between ranks the setting `segment_bytes` holds.
# An array of 1 MiB fits into one frame, so that the receiver need not copy it.
FRAME_NBYTES = (1 << 20) + 4096

# Allowance for the header of a frame and the overhead of encryption.
FRAMING_NBYTES = 4096

# Longest message between a worker and the launcher.
CONTROL_NBYTES_MAX = 1 << 20

# Most bytes of a connection before its peer has authenticated; a handshake takes less than 1 KiB.
UNPROVED_NBYTES_MAX = 64 << 10

# Longest first message on a stream.
HELLO_NBYTES_MAX = 4096
