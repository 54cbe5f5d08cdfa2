"""Checks of arrived frames that the ZeroMQ and the MPI transport share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.core.errors import WireError
from syncvar.protocol.frame import CARRIERS

if TYPE_CHECKING:
    from syncvar.protocol.frame import Header


def check_sender(header: Header, source: int, generation: int) -> None:
    """Raise WireError if a frame of `source` claims another rank or another generation."""
    if (header.source, header.generation) != (source, generation):
        claim = f"rank {header.source}, generation {header.generation}"
        raise WireError(f"a frame of rank {source} claims {claim}")


def check_length(header: Header, source: int, nbytes: int) -> None:
    """Raise WireError if the payload of `nbytes` bytes has another length than announced."""
    if header.kind in CARRIERS and header.nbytes != nbytes:
        lengths = f"announces {header.nbytes} bytes and has {nbytes}"
        raise WireError(f"a frame of rank {source} {lengths}")
