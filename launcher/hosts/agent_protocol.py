"""The messages between the launcher and the agents of hosts, as bytes and as values.

A message of the agent protocol is a length, then MessagePack. The agent sends one line as greeting,
so output of a login shell before it does no harm. After the greeting only messages may come. Each
kind has fields with types; a malformed message ends the connection. Both ends check all
messages, although they trust each other as members of the job: lengths before they allocate memory,
and no value ever names code.

Between the launcher and a host that joins by itself, these bytes travel in frames: one type byte,
then the payload. Type bytes and greeting are the same in all versions, so a host of another version
gets an explanation.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections import deque
from typing import Any, NamedTuple

import msgpack

from syncvar.core.errors import WireError
from syncvar_launcher.options.launch_options import RankProgram

PROTOCOL_VERSION = 5
GREETING = b"syncvar-agent %d\n" % PROTOCOL_VERSION
MESSAGE_NBYTES_MAX = 16 << 20
FIRST_CREDIT = 1 << 20
"""The bytes of a rank's stream that the agent may send before the launcher grants credit."""

CALL_PART_NBYTES = 4 << 20
"""The most bytes of a call of `sv.run`, or of a result, in one message."""

FRAME_NBYTES = 1 << 18
"""The most bytes of a frame behind its type byte."""

FRAMES_QUEUED = 16
"""The most frames that wait for each host and direction."""

_BEFORE_GREETING_MAX = 64 << 10
_LENGTH_NBYTES = 4
_GREETING = re.compile(rb"syncvar-agent ([0-9]{1,9})\n")

Message = dict[str, Any]

_KINDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    # from the launcher
    "get_facts": {
        "scripts": list,
        "cwd": str,
        "beat_s": float,
        "silence_s": float,
        "abort_grace_s": float,
        "term_grace_s": float,
    },
    "listen": {"addresses": list, "token": bytes},
    "connect": {"targets": list, "token": bytes, "timeout_s": float},
    "call_data": {"data": bytes},
    "start": {"request": dict},
    "restart_rank": {"rank_spec": dict},
    "begin_generation": {"generation": int, "host": int, "index": int, "size": int},
    "signal": {"ranks": list, "signal_number": int},
    "signal_groups": {"signal_number": int},
    "kill": {"ranks": list},
    "get_places": {"ranks": list},
    "get_stack": {"request_id": int, "rank": int, "all_threads": bool},
    "stop": {},
    "resume": {},
    "abort": {"generation": (int, type(None))},
    "credit": {"rank": int, "stream": str, "nbytes": int},
    "input": {"data": bytes},
    "window_size": {"rank": int, "size": list},
    "stage": {"path": str, "type": str, "mode": int, "link_target": str},
    "stage_data": {"data": bytes},
    "stage_end": {},
    "end_attempt": {},
    "heartbeat": {},
    # from the agent
    "facts": {"facts": dict},
    "listening": {"ports": list},
    "connected": {"results": list},
    "staged": {"folder": str, "reason": str},
    "start_failed": {"reason": str, "exit_code": int},
    "started": {"pids": dict},
    "output": {"rank": int, "stream": str, "data": bytes},
    "status": {"rank": int, "record": dict},
    "exited": {"rank": int, "status": int, "detail": str},
    "process_states": {"states": dict},
    "places": {"places": dict},
    "stack": {"request_id": int, "no_stack_reason": str, "threads": list},
    "result": {"name": str, "data": bytes, "is_last": bool},
    "record": {"name": str, "data": bytes},
    "input_consumed": {"nbytes": int},
    "notice": {"text": str},
    "not_signalled": {"signal_number": int, "ranks": list},
    "attempt_ended": {"is_released": bool},
}

_TEXT_FACTS = ("host", "machine", "python", "syncvar", "numpy", "byte_order", "processor")
_FACTS: dict[str, type] = {
    **dict.fromkeys((*_TEXT_FACTS, "launcher_address", "login_address"), str),
    **dict.fromkeys(("protocol", "cpu_count", "core_count", "pid", "tasks_left"), int),
    **dict.fromkeys(("cores", "interfaces", "missing_scripts"), list),
    "has_folder": bool,
}
_CORES_MAX = 1 << 14

_HELLO_FORMAT = 2
_TEXT_MAX = 4096
_NAME_MAX = 253
_SLOTS_MAX = 1 << 16
_HELLO_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "address", "syncvar", "python", "byte_order"), (str,)),
    "slots": (int, type(None)),
    "cwd": (str, type(None)),
    "protocol": (int,),
}


def pack(kind: str, **fields: Any) -> bytes:
    r"""Return a message as bytes.

    Example:
        >>> pack("stop")
        b'\x00\x00\x00\x0b\x81\xa4kind\xa4stop'
    """
    content = {"kind": kind, **_check_fields(kind, fields)}
    body: bytes = msgpack.packb(content, use_bin_type=True, unicode_errors="surrogateescape")
    if len(body) > MESSAGE_NBYTES_MAX:
        raise WireError(f"a message {kind!r} of {len(body)} bytes is above {MESSAGE_NBYTES_MAX}")
    return len(body).to_bytes(_LENGTH_NBYTES, "big") + body


class RankSpec(NamedTuple):
    """What the agent needs to start one rank or server."""

    rank: int  # the number of the process
    environ: dict[str, str]  # its own variables, beside those of all ranks
    cores: list[int] | None  # the cores that it may use, or None for all
    has_input: bool  # whether it reads the launcher's standard input
    terminal: list[int] | None  # rows and columns of its terminal; None for pipes
    program: int  # index of its program

    @classmethod
    def read(cls, fields: Any) -> RankSpec:
        """Return the specification in a message."""
        if not isinstance(fields, dict) or fields.keys() != set(cls._fields):
            raise WireError("a rank of an order to start has other fields than it should")
        one = cls(**fields)
        has_cores = one.cores is None or isinstance(one.cores, list)
        are_numbers = type(one.rank) is int and type(one.program) is int
        if not are_numbers or not _are_variables(one.environ) or not has_cores:
            raise WireError("a rank of an order to start has a field of another type")
        if one.terminal is not None:
            checked_list(one.terminal, int, 2)
        return one


class StartRequest(NamedTuple):
    """The order to start the ranks and servers of a host."""

    job: str  # the identity of the job
    generation: int  # the first generation of the membership that its ranks may join
    secret: bytes  # the secret of the job
    programs: list[RankProgram]  # the programs of all ranks of the job
    cwd: str  # the folder in which they start
    environ: dict[str, str]  # variables of all ranks, beside those of the login
    start_method: str  # "auto", "spawn" or "fork"
    ranks: list[RankSpec]  # the ranks and servers of this host
    shm_bytes: int  # the virtual size of their shared memory
    core_count: int  # the number of cores that they may use together
    shm_unavailable_reason: str  # why they share no memory; empty if they do
    requests_shm: bool  # whether they will request it
    env_clear: bool  # whether they inherit only an allow-list of the login's variables
    saves_call_totals: bool  # whether they leave the totals of their calls for the launcher
    server_count: int  # the number of servers among them

    @classmethod
    def read(cls, fields: Message) -> StartRequest:
        """Return the order in a message."""
        ranks, programs = fields.get("ranks"), fields.get("programs")
        are_lists = isinstance(ranks, list) and isinstance(programs, list)
        if fields.keys() != set(cls._fields) or not are_lists:
            raise WireError("an order to start has other fields than it should")
        lists = {
            "ranks": [RankSpec.read(one) for one in fields["ranks"]],
            "programs": [_read_program(one) for one in fields["programs"]],
        }
        order = cls(**{**fields, **lists})
        if not all(0 <= one.program < len(order.programs) for one in order.ranks):
            raise WireError("a rank of an order to start has a program that is not there")
        texts = (order.job, order.cwd, order.start_method, order.shm_unavailable_reason)
        numbers = (order.generation, order.shm_bytes, order.core_count, order.server_count)
        are_texts = all(isinstance(one, str) for one in texts)
        if not are_texts or not all(type(one) is int and one >= 0 for one in numbers):
            raise WireError("an order to start has a field of another type")
        if not isinstance(order.secret, bytes) or not _are_variables(order.environ):
            raise WireError("an order to start has no secret, or variables that are none")
        return order


def _read_program(fields: Any) -> RankProgram:
    """Return a program in a message."""
    if not isinstance(fields, dict) or fields.keys() != set(RankProgram._fields):
        raise WireError("a program of an order to start has other fields than it should")
    args = fields["args"]
    one = RankProgram(**{**fields, "args": tuple(args) if isinstance(args, list) else (None,)})
    are_texts = all(isinstance(text, str) for text in (one.kind, one.target, *one.args))
    if not are_texts or type(one.workers) is not int or not _are_variables(one.env):
        raise WireError("a program of an order to start has a field of another type")
    return one


def _are_variables(environ: Any) -> bool:
    if not isinstance(environ, dict):
        return False
    return all(isinstance(one, str) and "\0" not in one for pair in environ.items() for one in pair)


class Reader:
    """Turns received bytes into whole messages.

    While it awaits the greeting, other text may come first; `before` keeps it.
    """

    def __init__(self, *, awaits_greeting: bool = False) -> None:
        self.before = b""  # the text before the greeting
        self.has_greeted = not awaits_greeting
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete."""
        self._data += data
        if not self.has_greeted:
            found = _GREETING.search(self._data)
            if found is None:
                self.before = bytes(self._data)
                if len(self._data) > _BEFORE_GREETING_MAX:
                    count = f"more than {_BEFORE_GREETING_MAX} bytes came"
                    raise WireError(f"{count}, and none of them is the agent's greeting")
                return []
            if int(found[1]) != PROTOCOL_VERSION:
                raise WireError(
                    f"it speaks version {int(found[1])} of the agent protocol, and the launcher "
                    f"speaks version {PROTOCOL_VERSION}"
                )
            self.before = bytes(self._data[: found.start()])
            del self._data[: found.end()]
            self.has_greeted = True
        messages = []
        start = 0
        while len(self._data) - start >= _LENGTH_NBYTES:
            length = int.from_bytes(self._data[start : start + _LENGTH_NBYTES], "big")
            if length > MESSAGE_NBYTES_MAX:
                raise WireError(f"a message of {length} bytes is above {MESSAGE_NBYTES_MAX}")
            end = start + _LENGTH_NBYTES + length
            if len(self._data) < end:
                break
            messages.append(_parse(bytes(self._data[start + _LENGTH_NBYTES : end])))
            start = end
        del self._data[:start]
        return messages


def checked_facts(facts: Message) -> Message:
    """Return an agent's facts about its host, if they are well formed."""
    if facts.keys() != _FACTS.keys() or any(
        type(facts[name]) is not kind for name, kind in _FACTS.items()
    ):
        raise WireError("its facts about its host have other fields than they should")
    cores, interfaces = facts["cores"], facts["interfaces"]
    counts = (facts["core_count"], facts["cpu_count"])
    if not all(1 <= count <= _CORES_MAX for count in counts) or len(cores) > _CORES_MAX:
        raise WireError("its numbers of cores cannot be right")
    if not all(type(one) is int for one in cores) or not all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(part, str) for part in one)
        for one in interfaces
    ):
        raise WireError("its cores or interfaces have another form than they should")
    if not all(isinstance(one, str) for one in facts["missing_scripts"]):
        raise WireError("its missing scripts have another form than they should")
    own = facts["launcher_address"], facts["login_address"]
    for address in (*own, *(address for _, address in interfaces)):
        _check_address(address)
    return facts


def _check_address(text: str) -> None:
    if text:
        try:
            ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            raise WireError("it sent an address that is none") from None


def checked_list(values: Any, kind: type, count: int) -> list[Any]:
    """Return a list of so many values of one type."""
    if not isinstance(values, list) or [*map(type, values)] != [kind] * count:
        raise WireError(f"it sent something else than a list of {count} values")
    return values


def _parse(body: bytes) -> Message:
    try:
        found = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=False,
            unicode_errors="surrogateescape",
            max_str_len=len(body),
            max_bin_len=len(body),
            max_array_len=1 << 17,
            max_map_len=1 << 16,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"what came is no message: {type(error).__name__}") from None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise WireError("what came is no message: it has no kind")
    kind = found.pop("kind")
    return {"kind": kind, **_check_fields(kind, found)}


def _check_fields(kind: str, fields: Message) -> Message:
    wanted = _KINDS.get(kind)
    if wanted is None:
        raise WireError(f"there is no message {kind[:40]!r}")
    if fields.keys() != wanted.keys():
        raise WireError(f"a message {kind!r} has the fields {', '.join(wanted)}, and others came")
    for name, value in fields.items():
        types = wanted[name] if isinstance(wanted[name], tuple) else (wanted[name],)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):  # type: ignore[operator]
            known = "/".join(one.__name__ for one in types)  # type: ignore[union-attr]
            raise WireError(f"{name} of a message {kind!r} is no {known}")
    return fields


class PipeOutbox:
    """The bytes that wait for a pipe. It never blocks: its owner polls the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.nbytes = 0  # the number of bytes that wait
        self._descriptor = descriptor
        self._unwritten: deque[memoryview] = deque()

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for writing."""
        return [self._descriptor] if self._unwritten else []

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._unwritten.append(memoryview(data))
        self.nbytes += len(data)

    def flush(self) -> bool:
        """Write as much as the pipe takes; return whether it still has a reader."""
        while self._unwritten:
            first = self._unwritten[0]
            try:
                count = os.write(self._descriptor, first)
            except BlockingIOError:
                return True
            except OSError:
                self.clear()
                return False
            self.nbytes -= count
            if count < len(first):
                self._unwritten[0] = first[count:]
            else:
                self._unwritten.popleft()
        return True

    def clear(self) -> None:
        """Forget the bytes that wait."""
        self._unwritten.clear()
        self.nbytes = 0


class JoinFrame:
    """The type bytes of the frames between the launcher and a host that joins."""

    # from the host: what its agent writes, and its exit status
    HELLO, STDOUT, STDERR, EXITED = b"h", b"o", b"e", b"x"
    # from the launcher: input of the agent, a refusal, the exit code of the job
    START, STDIN, STDIN_END, REJECTED, JOB_ENDED, PING = b"s", b"i", b"c", b"r", b"d", b"p"


class Hello(NamedTuple):
    """The greeting of a host that joins."""

    name: str  # the name for messages
    address: str  # its own address towards the launcher
    slots: int | None  # its slots for workers; None for one per usable core
    cwd: str | None  # the folder in which they start; None for the launcher's own
    syncvar: str  # the version of syncvar there
    protocol: int  # the version of the protocol there
    python: str  # the version of Python there
    byte_order: str  # "little" or "big"

    def pack(self) -> bytes:
        """Return the greeting as bytes."""
        packed: bytes = msgpack.packb({"format": _HELLO_FORMAT, **self._asdict()})
        return packed

    @classmethod
    def read(cls, data: bytes) -> Hello:
        """Return the greeting in these bytes."""
        try:
            found: Any = msgpack.unpackb(data, max_map_len=64, max_array_len=0, max_ext_len=0)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise WireError("it sent no greeting") from None
        is_known = isinstance(found, dict) and found.pop("format", None) == _HELLO_FORMAT
        if not is_known or found.keys() != _HELLO_TYPES.keys():
            raise WireError(
                "its greeting has another form than here: it has another version of "
                "syncvar; install the same on all"
            )
        for name, value in found.items():
            is_long = isinstance(value, str) and len(value) > _TEXT_MAX
            if type(value) not in _HELLO_TYPES[name] or is_long:
                raise WireError(f"the {name} in its greeting cannot be right")
        if not found["name"] or not found["name"].isprintable() or len(found["name"]) > _NAME_MAX:
            raise WireError("the name in its greeting cannot be right")
        _check_address(found["address"])
        if found["slots"] is not None and not 1 <= found["slots"] <= _SLOTS_MAX:
            raise WireError(
                f"it offers {found['slots']} slots, and at least 1 and at most {_SLOTS_MAX} can be"
            )
        return cls(**found)
