"""Messages between `sv.run` and the workers of an engine, and the assignment of ranks to places.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from syncvar.protocol.object_codec import pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class EngineSlot(NamedTuple):
    """A place, as it describes itself.

    Args:
        ground: Identity of everything that processes need in common to share memory and sockets.
        host: Name of its host.
        address: Address for other hosts.
        port: Port that was free.
        pid: Its process.
    """

    ground: str
    host: str
    address: str
    port: int
    pid: int


class CallPart(NamedTuple):
    """What a rank needs for its call.

    Args:
        rank: Rank in the world.
        environ: Identity and rendezvous as torchrun's variables, the secret, and the settings.
        call: The function and its arguments.
        folders: Module path of the caller.
        pid: Process that it is meant for: an engine that repeats lost tasks must not repeat a rank.
    """

    rank: int
    environ: dict[str, str]
    call: bytes
    folders: list[str]
    pid: int


class End(NamedTuple):
    """The end of a rank.

    Args:
        result: Packed result of the function; empty after a failure.
        error: Name of the exception, or empty.
        message: Text of the exception.
        traceback: Traceback for the author of the function.
        exit_code: Exit code that its process would have.
        has_met: The rank had met the others.
        raised: Packed exception, or empty.
    """

    result: bytes = b""
    error: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int = 0
    has_met: bool = True
    raised: bytes = b""


_Carried = TypeVar("_Carried", EngineSlot, CallPart, End)


def packed(value: EngineSlot | CallPart | End) -> bytes:
    """Return a message as bytes."""
    return pack_object(list(value))


def unpacked(message_type: type[_Carried], data: bytes) -> _Carried:
    """Return a message of `packed`."""
    return message_type(*unpack_object(data))


def parts(
    places: Sequence[EngineSlot],
    call: bytes,
    job: str,
    secret: str,
    settings: Mapping[str, str],
    folders: Sequence[str],
    restarts: int = 0,
) -> list[CallPart]:
    """Return the part of each place.

    Ranks are numbered host by host, in the order of their first place.

    Example:
        >>> hosts = [("a", 5000), ("b", 6000), ("a", 5002)]
        >>> places = [EngineSlot(host, host, host, port, 1) for host, port in hosts]
        >>> made = parts(places, b"", "j", "", {}, [])
        >>> [(one.rank, one.environ["LOCAL_RANK"], one.environ["MASTER_ADDR"]) for one in made]
        [(0, '0', 'a'), (2, '0', 'a'), (1, '1', 'a')]
    """
    hosts: dict[str, list[int]] = {}
    for number, entry in enumerate(places):
        hosts.setdefault(entry.ground, []).append(number)
    first = places[0]
    created: list[CallPart | None] = [None] * len(places)
    rank = 0
    for host_index, numbers in enumerate(hosts.values()):
        for local_rank, number in enumerate(numbers):
            variables: dict[str, Any] = {
                "RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": len(numbers),
                "GROUP_RANK": host_index,
                "GROUP_WORLD_SIZE": len(hosts),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": first.port
                - 1,  # the rendezvous uses the next port, because torchrun itself uses MASTER_PORT
                "TORCHELASTIC_RUN_ID": job,
                "TORCHELASTIC_RESTART_COUNT": restarts,
                "SYNCVAR_KEY": secret,
            }
            environ = {**settings, **{name: str(value) for name, value in variables.items()}}
            created[number] = CallPart(rank, environ, call, list(folders), places[number].pid)
            rank += 1
    return [one for one in created if one is not None]
