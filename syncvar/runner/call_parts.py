"""What a rank is given and what comes back, as bytes; and which place is which rank. Data in, data out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CallPart", "End", "EnginePlace", "packed", "parts", "unpacked"]


class EnginePlace(NamedTuple):
    """What a place says about itself before it is given a part.

    Args:
        ground: What processes have in common that can share memory and sockets.
        host: Name of its host.
        address: Where other hosts reach it.
        port: A port that was free there.
        pid: Its process.
    """

    ground: str
    host: str
    address: str
    port: int
    pid: int


class CallPart(NamedTuple):
    """What a rank is given.

    Args:
        rank: Which it is.
        environ: Who it is and where it meets the others, as torchrun's variables say it; the secret; the settings.
        call: The function and its arguments.
        folders: Where the caller looks for modules.
        pid: The process that it is meant for: an engine that repeats what was lost must not repeat a rank.
    """

    rank: int
    environ: dict[str, str]
    call: bytes
    folders: list[str]
    pid: int


class End(NamedTuple):
    """How a rank has ended.

    Args:
        result: What the function returned, packed; empty where it has failed.
        error: Name of the exception, or an empty text.
        message: Its text.
        traceback: Its traceback, as its author should see it.
        exit_code: What its process would have ended with.
        has_met: It had met the others.
        raised: The exception, packed; empty where there was none.
    """

    result: bytes = b""
    error: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int = 0
    has_met: bool = True
    raised: bytes = b""


_Carried = TypeVar("_Carried", EnginePlace, CallPart, End)


def packed(value: EnginePlace | CallPart | End) -> bytes:
    """Return what an engine carries as bytes."""
    return pack_object(list(value))


def unpacked(kind: type[_Carried], data: bytes) -> _Carried:
    """Return what `packed` has packed."""
    return kind(*unpack_object(data))


def parts(
    places: Sequence[EnginePlace],
    call: bytes,
    job: str,
    secret: str,
    settings: Mapping[str, str],
    folders: Sequence[str],
    restarts: int = 0,
) -> list[CallPart]:
    """Return the part of each place: the ranks of a host follow each other, hosts in the order of their first place.

    Args:
        places: All of them.
        call: What each calls.
        job: What tells this start from all others.
        secret: 64 hexadecimal digits, new for each start.
        settings: Variables of the runtime's settings.
        folders: Where the caller looks for modules.
        restarts: How often the ranks have been started again before.

    Example:
        >>> two = [EnginePlace("a", "x", "10.0.0.1", 5000, 1), EnginePlace("b", "y", "10.0.0.2", 6000, 2), EnginePlace("a", "x", "10.0.0.1", 5002, 3)]
        >>> [(one.rank, one.environ["LOCAL_RANK"], one.environ["MASTER_ADDR"]) for one in parts(two, b"", "j", "", {}, [])]
        [(0, '0', '10.0.0.1'), (2, '0', '10.0.0.1'), (1, '1', '10.0.0.1')]
    """
    hosts: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        hosts.setdefault(place.ground, []).append(number)
    first = places[0]
    made: list[CallPart | None] = [None] * len(places)
    rank = 0
    for host_index, numbers in enumerate(hosts.values()):
        for local_rank, number in enumerate(numbers):
            told: dict[str, Any] = {
                "RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": len(numbers),
                "GROUP_RANK": host_index,
                "GROUP_WORLD_SIZE": len(hosts),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": first.port
                - 1,  # the roll is kept at the next one: torchrun itself listens at this
                "TORCHELASTIC_RUN_ID": job,
                "TORCHELASTIC_RESTART_COUNT": restarts,
                "SYNCVAR_KEY": secret,
            }
            environ = {**settings, **{name: str(value) for name, value in told.items()}}
            made[number] = CallPart(rank, environ, call, list(folders), places[number].pid)
            rank += 1
    return [one for one in made if one is not None]
