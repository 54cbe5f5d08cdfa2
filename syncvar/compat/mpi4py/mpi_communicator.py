"""Communicators of the mpi4py layer: creation, messages, and collectives by plans."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

import syncvar as sv
from syncvar.compat.mpi4py import mpi_collectives as plans
from syncvar.compat.mpi4py import mpi_constants as const
from syncvar.compat.mpi4py import mpi_objects
from syncvar.compat.mpi4py.mpi_buffers import (
    BUFFER_AUTOMATIC,
    BufferAutomaticType,
    buffer,
    simple_region,
    writable_region,
)
from syncvar.compat.mpi4py.mpi_datatypes import AttributesMixin
from syncvar.compat.mpi4py.mpi_errors import (
    ERRORS_RETURN,
    FAILURES,
    INTERCOMM,
    PARTITIONED,
    SPAWN,
    Errhandler,
    HandlerMixin,
    MpiException,
    UnsupportedByLayer,
    constant,
    reduced,
)
from syncvar.compat.mpi4py.mpi_groups import INFO_NULL, Info, MpiGroup, compare_members
from syncvar.compat.mpi4py.mpi_messages import (
    MESSAGES,
    ArrivedMessage,
    CollectiveOperation,
    MessagePort,
    ReceiveOperation,
    SendOperation,
    probe_once,
    probe_wait,
)
from syncvar.compat.mpi4py.mpi_operations import Operation, Status
from syncvar.compat.mpi4py.mpi_ops import SUM, Op
from syncvar.compat.mpi4py.mpi_requests import MpiRequest, Prequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_all_reduce = sv.all_reduce
_ndarray = np.ndarray


class CommState:
    """What all references to one communicator share.

    Args:
        group: Group of the core; None for the world.
        members: Ranks of the world, in the order of the communicator.
        name: Name of the communicator.
    """

    def __init__(self, group: Any, members: Sequence[int], name: str = "") -> None:
        self.group = group
        self.members = tuple(members)
        self.world_rank = sv.rank()
        self.size = len(self.members)
        self.rank = self.members.index(self.world_rank)
        self.port = MessagePort(group, self.rank, self.size)
        self.name = name
        self.attributes: dict[int, Any] = {}
        self.errhandler: Errhandler = ERRORS_RETURN
        self.info = Info.Create()
        self.topology: Any = None
        self.send_buffer: Any = None
        self.buffered: list[SendOperation] = []

    def subgroup(self, ranks: Sequence[int]) -> Any:
        """Return a new group of the core of some ranks of this communicator; only they call it."""
        return sv.new_group(list(ranks), members_only=True, group=self.group)

    def attach(self, buf: Any) -> None:
        """Keep the buffer of buffered sends; this layer needs none."""
        if self.send_buffer is not None:
            raise MpiException(const.ERR_BUFFER, "a buffer is attached already")
        self.send_buffer = BUFFER_AUTOMATIC if buf is None else buf

    def keep_buffered(self, operation: SendOperation) -> None:
        """Remember a buffered send that has not ended."""
        self.buffered = [one for one in self.buffered if not one.is_over()]
        if not operation.is_over():
            self.buffered.append(operation)

    def flush(self) -> None:
        """Wait until all buffered sends have ended."""
        while self.buffered:
            self.buffered.pop().wait()

    def detach(self) -> Any:
        """Wait for buffered sends, and return the buffer."""
        self.flush()
        found, self.send_buffer = self.send_buffer, None
        if found is None or isinstance(found, buffer | BufferAutomaticType):
            return found
        return buffer(found)


class Message:
    """A message that a matched probe has taken; only its `Recv` receives it.

    Args:
        message: Message to refer to; None for a null message.
    """

    _port: MessagePort | None = None
    _arrived: ArrivedMessage | None = None
    _is_no_proc = False

    def __new__(cls, message: Message | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        if message is not None:
            if not isinstance(message, Message):
                raise TypeError(f"{message!r} is no Message")
            self.__dict__.update(message.__dict__)
        return self

    @classmethod
    def _of(cls, port: MessagePort, arrived: ArrivedMessage) -> Message:
        message = cls.__new__(cls)
        message._port, message._arrived = port, arrived
        port.remove(arrived)
        return message

    @classmethod
    def Probe(
        cls,
        comm: Comm,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> Message:
        """Wait for a message and take it."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(
        cls,
        comm: Comm,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> Message | None:
        """Take a message if one has come."""
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def _received(self, buf: Any, *, is_object: bool) -> Operation:
        """Return the receive of the message, which becomes null."""
        if self._is_no_proc:
            if self is not MESSAGE_NO_PROC:
                self.__dict__.clear()
            return _no_message()
        if self._port is None or self._arrived is None:
            raise MpiException(const.ERR_REQUEST, "the message is MESSAGE_NULL")
        region = None if is_object else writable_region(buf)
        arrived = self._arrived
        operation = ReceiveOperation(self._port, region, arrived.source, arrived.tag)
        operation.take(arrived)
        self.__dict__.clear()
        return operation

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive the message into a buffer."""
        MpiRequest.of(self._received(buf, is_object=False)).finish(status)

    def Irecv(self, buf: Any) -> MpiRequest:
        """Receive the message into a buffer."""
        return MpiRequest.of(self._received(buf, is_object=False))

    def recv(self, status: Status | None = None) -> Any:
        """Receive the object of the message."""
        return MpiRequest.of(self._received(None, is_object=True)).finish(status)

    def irecv(self) -> MpiRequest:
        """Receive the object of the message."""
        return MpiRequest.of(self._received(None, is_object=True))

    def free(self) -> None:
        """Make this a null message."""
        self.__dict__.clear()

    @property
    def handle(self) -> int:
        """A number of the message."""
        return id(self._arrived) if self._arrived is not None else int(self._is_no_proc)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self._arrived is other._arrived and self._is_no_proc == other._is_no_proc

    def __hash__(self) -> int:
        return hash(self.handle)

    def __bool__(self) -> bool:
        return self._arrived is not None or self._is_no_proc

    def __reduce__(self) -> Any:
        if self._arrived is not None:
            raise ValueError("cannot pickle a message")
        return reduced(self, "MESSAGE_NO_PROC" if self._is_no_proc else "MESSAGE_NULL")


MESSAGE_NULL = Message()
MESSAGE_NO_PROC = Message()
MESSAGE_NO_PROC._is_no_proc = True


def _no_message() -> Operation:
    """Return the operation of a message from or to PROC_NULL."""
    operation = Operation()
    operation.status = Status.of(const.PROC_NULL, const.ANY_TAG, 0)
    return operation


class Comm(AttributesMixin, HandlerMixin):
    """A communicator: a group of ranks with messages of its own.

    Args:
        comm: Communicator to refer to; None for a null communicator.
    """

    _state: CommState | None = None

    def __new__(cls, comm: Comm | None = None) -> Self:
        """Return a reference to the same object, or a null one."""
        self = super().__new__(cls)
        self._state = None
        if comm is not None:
            if not isinstance(comm, Comm):
                raise TypeError(f"{comm!r} is no Comm")
            self._state = comm._state
        return self

    @classmethod
    def of(cls, state: CommState) -> Any:
        """Return the communicator of a state."""
        comm = cls.__new__(cls)
        comm._state = state
        return comm

    @property
    def state(self) -> CommState:
        """The state; raises for a null communicator."""
        if self._state is None:
            raise MpiException(const.ERR_COMM, "the communicator is COMM_NULL")
        return self._state

    # -- group

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.state.size

    def Get_rank(self) -> int:
        """Return this process's rank."""
        return self.state.rank

    def Get_group(self) -> MpiGroup:
        """Return the group of the ranks."""
        return MpiGroup.of(self.state.members, self.state.world_rank)

    size = property(Get_size)
    rank = property(Get_rank)
    group = property(Get_group)

    def Compare(self, comm: Comm) -> int:
        """Return IDENT, CONGRUENT, SIMILAR or UNEQUAL."""
        if self.state is comm.state:
            return const.IDENT
        return compare_members(self.state.members, comm.state.members, const.CONGRUENT)

    def Is_inter(self) -> bool:
        """Return False."""
        return False

    def Is_intra(self) -> bool:
        """Return True."""
        return True

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Get_topology(self) -> int:
        """Return CART, GRAPH, DIST_GRAPH or UNDEFINED."""
        topology = self.state.topology
        return const.UNDEFINED if topology is None else int(topology.kind)

    topology = property(Get_topology)

    @property
    def is_topo(self) -> bool:
        """Whether the communicator has a topology."""
        return self.state.topology is not None

    @classmethod
    def Get_parent(cls) -> Intercomm:
        """Return a null communicator: no program of MPI has started this one."""
        return Intercomm()

    # -- creation

    def _child(self, ranks: Sequence[int] | None) -> Comm:
        """Return a new communicator of some ranks; COMM_NULL where this rank is not among them."""
        state = self.state
        if ranks is None or state.rank not in ranks:
            return Intracomm()
        child = CommState(state.subgroup(ranks), [state.members[rank] for rank in ranks])
        child.errhandler = state.errhandler
        return Intracomm.of(child)  # type: ignore[no-any-return]

    def Dup(self, info: Info | None = None) -> Any:
        """Return a communicator of the same ranks, with messages of its own."""
        state = self.state
        group = state.subgroup(range(state.size))
        dup = CommState(group, state.members)
        dup.topology, dup.errhandler = state.topology, state.errhandler
        dup.info = Info.Create(info or state.info)
        comm = type(self).of(dup)
        dup.attributes = self._copied_attributes()
        return comm

    def Dup_with_info(self, info: Info) -> Any:
        """Return a communicator of the same ranks."""
        return self.Dup(info)

    def Clone(self) -> Any:
        """Return a communicator of the same ranks."""
        return self.Dup()

    def Idup(self, info: Info | None = None) -> tuple[Any, MpiRequest]:
        """Return a communicator of the same ranks, and a request that has ended."""
        return self.Dup(info), MpiRequest.of(Operation())

    def Idup_with_info(self, info: Info) -> tuple[Any, MpiRequest]:
        """Return a communicator of the same ranks, and a request that has ended."""
        return self.Idup(info)

    def Create(self, group: MpiGroup) -> Comm:
        """Return the communicator of a group; all ranks call it."""
        return self._child([self.state.members.index(member) for member in group.members])

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """Return the communicator of the ranks of one color, in the order of their keys."""
        if color < 0 and color != const.UNDEFINED:
            raise MpiException(const.ERR_ARG, f"a color must not be negative: {color}")
        everyone = self.allgather_plain((int(color), int(key)))
        if color == const.UNDEFINED:
            return Intracomm()
        chosen = sorted(
            (theirs[1], rank) for rank, theirs in enumerate(everyone) if theirs[0] == color
        )
        return self._child([rank for _, rank in chosen])

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> Comm:
        """Return the communicator of the ranks that share memory, which are those of a host."""
        kind = info.get("mpi_hw_resource_type") if info else None
        guided = (const.COMM_TYPE_HW_GUIDED, const.COMM_TYPE_RESOURCE_GUIDED)
        shares = split_type in (const.COMM_TYPE_SHARED, const.COMM_TYPE_HW_UNGUIDED) or (
            split_type in guided and kind == "mpi_shared_memory"
        )
        comm = self.Split(sv.host_index() if shares else const.UNDEFINED, key)
        if split_type == const.COMM_TYPE_HW_UNGUIDED and comm:
            if comm.size == self.size:  # it must be a proper part
                comm.Free()
            elif info:
                info.Set("mpi_hw_resource_type", "mpi_shared_memory")
        return comm

    def allgather_plain(self, value: Any) -> list[Any]:
        """Return a plain value of each rank."""
        options = {"group": self.state.group}
        found: list[Any] = MESSAGES.run(sv.all_gather_object, (value,), options)
        return found

    def Free(self) -> None:
        """Give up the communicator."""
        state = self.state
        if state.group is None or state.name == "MPI_COMM_SELF":
            raise MpiException(const.ERR_COMM, f"{state.name} cannot be freed")
        self._delete_attributes()
        state.flush()
        if state.port.is_idle:
            state.group.destroy()
        self._state = None

    def free(self) -> None:
        """Give up the communicator, unless it is null or predefined."""
        state = self._state
        if state is not None and state.group is not None and state.name != "MPI_COMM_SELF":
            self.Free()

    Disconnect = Free

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this process at once; the launcher ends the others."""
        sys.stdout.flush()
        print(f"MPI: rank {sv.rank()} called Abort({errorcode})", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(errorcode & 255 or 1)

    # -- name, info, attributes, handlers

    def Get_name(self) -> str:
        """Return the name."""
        return "MPI_COMM_NULL" if self._state is None else self._state.name

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self.state.name = name

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        """Return a copy of the info."""
        return self.state.info.Dup()

    def Set_info(self, info: Info) -> None:
        """Set the info."""
        self.state.info = Info.Create(info or None)

    info = property(Get_info, Set_info)

    @property
    def _attributes(self) -> dict[int, Any]:  # type: ignore[override]
        return self.state.attributes

    def Get_attr(self, keyval: int) -> Any:
        """Return the value of a key, or None."""
        if keyval == const.TAG_UB:
            return const.TAG_MAX
        if keyval == const.UNIVERSE_SIZE:
            return sv.world_size()
        if keyval in (const.APPNUM, const.IO):
            return 0
        if keyval == const.WTIME_IS_GLOBAL:
            return sv.host_count() == 1
        return super().Get_attr(keyval)

    @property
    def _errhandler(self) -> Errhandler:
        return self.state.errhandler

    @_errhandler.setter
    def _errhandler(self, errhandler: Errhandler) -> None:
        self.state.errhandler = errhandler

    # -- buffers of buffered sends

    def Attach_buffer(self, buf: Any) -> None:
        """Keep the buffer of buffered sends."""
        self.state.attach(buf)

    def Detach_buffer(self) -> Any:
        """Wait for buffered sends, and return the buffer."""
        return self.state.detach()

    def Flush_buffer(self) -> None:
        """Wait for buffered sends."""
        self.state.flush()

    def Iflush_buffer(self) -> MpiRequest:
        """Wait for buffered sends; return a request that has ended."""
        self.state.flush()
        return MpiRequest.of(Operation())

    # -- sends

    def _begin_send(
        self, buf: Any, dest: int, tag: int = 0, *, mode: str = "", waits: bool = False
    ) -> Operation:
        """Begin to send a buffer; `mode` is "", "synchronous" or "buffered"."""
        state = self.state
        if dest == const.PROC_NULL:
            return _no_message()
        _check_rank_and_tag(dest, tag, state.size)
        return self._begin_bytes(simple_region(buf).packed(), dest, tag, mode=mode, waits=waits)

    def _begin_object(
        self, obj: Any, dest: int, tag: int = 0, *, mode: str = "", waits: bool = False
    ) -> Operation:
        if dest == const.PROC_NULL:
            return _no_message()
        _check_rank_and_tag(dest, tag, self.state.size)
        data = np.frombuffer(mpi_objects.pickle.dumps(obj), np.uint8)
        return self._begin_bytes(data, dest, tag, mode=mode, waits=waits)

    def _begin_bytes(
        self, data: Any, dest: int, tag: int, *, mode: str, waits: bool = False
    ) -> Operation:
        is_synchronous = mode == "synchronous"
        port = self.state.port
        operation = port.send(data, dest, tag, is_synchronous=is_synchronous, waits=waits)
        if mode == "buffered":
            self.state.keep_buffered(operation)
            return Operation()  # has ended for the program
        return operation

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; return when it may change."""
        state = self.state
        if dest == const.PROC_NULL:
            return
        _check_rank_and_tag(dest, tag, state.size)
        data = simple_region(buf).packed()
        if not state.port.send_quick(data, dest, tag):
            state.port.send(data, dest, tag, waits=True).wait()

    Rsend = Send

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; return when a receive has taken it."""
        self._begin_send(buf, dest, tag, mode="synchronous").wait()

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of a buffer."""
        self._begin_send(buf, dest, tag, mode="buffered")

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MpiRequest:
        """Begin to send a buffer."""
        return MpiRequest.of(self._begin_send(buf, dest, tag))

    Irsend = Isend

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> MpiRequest:
        """Begin to send a buffer; the request ends when a receive has taken it."""
        return MpiRequest.of(self._begin_send(buf, dest, tag, mode="synchronous"))

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> MpiRequest:
        """Send a copy of a buffer."""
        return MpiRequest.of(self._begin_send(buf, dest, tag, mode="buffered"))

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Return a persistent send."""
        return Prequest.to(partial(self._begin_send, buf, dest, tag))

    Rsend_init = Send_init

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Return a persistent synchronous send."""
        return Prequest.to(partial(self._begin_send, buf, dest, tag, mode="synchronous"))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Return a persistent buffered send."""
        return Prequest.to(partial(self._begin_send, buf, dest, tag, mode="buffered"))

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self._begin_object(obj, dest, tag, waits=True).wait()

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; return when a receive has taken it."""
        self._begin_object(obj, dest, tag, mode="synchronous").wait()

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of an object."""
        self._begin_object(obj, dest, tag, mode="buffered")

    def isend(self, obj: Any, dest: int, tag: int = 0) -> MpiRequest:
        """Begin to send an object."""
        return MpiRequest.of(self._begin_object(obj, dest, tag))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> MpiRequest:
        """Begin to send an object; the request ends when a receive has taken it."""
        return MpiRequest.of(self._begin_object(obj, dest, tag, mode="synchronous"))

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> MpiRequest:
        """Send a copy of an object."""
        return MpiRequest.of(self._begin_object(obj, dest, tag, mode="buffered"))

    # -- receives

    def _receive_operation(self, buf: Any, source: int, tag: int, *, is_object: bool) -> Any:
        """Return the operation of a receive that has not begun; of PROC_NULL one that has ended."""
        state = self.state
        if source == const.PROC_NULL:
            return _no_message()
        _check_source_and_tag(source, tag, state.size)
        region = None if is_object else writable_region(buf)
        return ReceiveOperation(state.port, region, source, tag)

    def _begin_receive(
        self,
        buf: Any,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        *,
        is_object: bool = False,
    ) -> Operation:
        operation: Operation = self._receive_operation(buf, source, tag, is_object=is_object)
        if isinstance(operation, ReceiveOperation):
            operation.port.receive(operation)
        return operation

    def _receive_now(
        self, buf: Any, source: int, tag: int, status: Status | None, *, is_object: bool
    ) -> Any:
        operation = self._receive_operation(buf, source, tag, is_object=is_object)
        if isinstance(operation, ReceiveOperation):
            operation.port.receive_now(operation)
        if status is not None:
            status.assign(operation.status)
        if operation.error is not None:
            raise operation.error
        return operation.value

    def Recv(
        self,
        buf: Any,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Receive a message into a buffer."""
        state = self.state
        if source == const.PROC_NULL:
            self._receive_now(buf, source, tag, status, is_object=False)
            return
        _check_source_and_tag(source, tag, state.size)
        operation = state.port.receive_quick(writable_region(buf), source, tag, status)
        if operation is not None:
            MpiRequest.of(operation).finish(status)

    def Irecv(
        self, buf: Any, source: int = const.ANY_SOURCE, tag: int = const.ANY_TAG
    ) -> MpiRequest:
        """Begin to receive a message into a buffer."""
        return MpiRequest.of(self._begin_receive(buf, source, tag))

    def Recv_init(
        self, buf: Any, source: int = const.ANY_SOURCE, tag: int = const.ANY_TAG
    ) -> Prequest:
        """Return a persistent receive."""
        return Prequest.to(partial(self._begin_receive, buf, source, tag))

    def recv(
        self,
        buf: Any = None,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Receive an object."""
        if buf is not None:
            warnings.warn("the argument buf is deprecated and ignored", UserWarning, stacklevel=2)
        return self._receive_now(None, source, tag, status, is_object=True)

    def irecv(
        self, buf: Any = None, source: int = const.ANY_SOURCE, tag: int = const.ANY_TAG
    ) -> MpiRequest:
        """Begin to receive an object."""
        return MpiRequest.of(self._begin_receive(None, source, tag, is_object=True))

    # -- sends with receives

    def Sendrecv(  # noqa: PLR0913, PLR0917  (MPI's signature)
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = const.ANY_SOURCE,
        recvtag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send one buffer and receive into another."""
        send = self._begin_send(sendbuf, dest, sendtag)
        self._receive_now(recvbuf, source, recvtag, status, is_object=False)
        send.wait()

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = const.ANY_SOURCE,
        recvtag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send a buffer, and receive into it."""
        self.Sendrecv(buf, dest, sendtag, buf, source, recvtag, status)

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = const.ANY_SOURCE,
        recvtag: int = const.ANY_TAG,
    ) -> MpiRequest:
        """Begin to send one buffer and to receive into another."""
        send = self._begin_send(sendbuf, dest, sendtag)
        receive = self._begin_receive(recvbuf, source, recvtag)
        return MpiRequest.of(_BothOperations(send, receive))

    def Isendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = const.ANY_SOURCE,
        recvtag: int = const.ANY_TAG,
    ) -> MpiRequest:
        """Begin to send a buffer, and to receive into it."""
        return self.Isendrecv(buf, dest, sendtag, buf, source, recvtag)

    def sendrecv(  # noqa: PLR0913, PLR0917  (MPI's signature)
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = const.ANY_SOURCE,
        recvtag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send one object and receive another."""
        send = self._begin_object(sendobj, dest, sendtag)
        value = self._receive_now(None, source, recvtag, status, is_object=True)
        send.wait()
        return value

    # -- probes

    def _probed(self, source: int, tag: int, status: Status | None, *, waits: bool) -> Any:
        """Return the message that a probe finds; None for PROC_NULL or none."""
        state = self.state
        if source == const.PROC_NULL:
            found = None
        else:
            _check_source_and_tag(source, tag, state.size)
            found = (probe_wait if waits else probe_once)(state.port, source, tag)
        if status is not None:
            if source == const.PROC_NULL:
                status.assign(_no_message().status)
            else:
                status.assign(Status() if found is None else found.status())
        return found

    def Probe(
        self,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> bool:
        """Wait for a message, without receiving it."""
        self._probed(source, tag, status, waits=True)
        return True

    def Iprobe(
        self,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> bool:
        """Return whether a message has come."""
        found = self._probed(source, tag, status, waits=False)
        return source == const.PROC_NULL or found is not None

    def Mprobe(
        self,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> Message:
        """Wait for a message, and take it."""
        found = self._probed(source, tag, status, waits=True)
        return Message(MESSAGE_NO_PROC) if found is None else Message._of(self.state.port, found)

    def Improbe(
        self,
        source: int = const.ANY_SOURCE,
        tag: int = const.ANY_TAG,
        status: Status | None = None,
    ) -> Message | None:
        """Take a message if one has come."""
        found = self._probed(source, tag, status, waits=False)
        if source == const.PROC_NULL:
            return Message(MESSAGE_NO_PROC)
        return None if found is None else Message._of(self.state.port, found)

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    # -- collectives

    def _options(self, plan: Any) -> dict[str, Any]:
        options: dict[str, Any] = plan.options
        options["group"] = self.state.group
        return options

    def _now(self, plan_of: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a collective call."""
        plan = plan_of(self, *args, **options)
        result = MESSAGES.run(plan.function, plan.args, self._options(plan))
        return result if plan.finish is None else plan.finish(result)

    def _now_buffers(self, plan_of: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Make a collective call that returns nothing."""
        self._now(plan_of, *args, **options)

    def _started(self, plan_of: Callable[..., Any], args: Any, options: Any) -> Operation:
        """Start a collective call."""
        plan = plan_of(self, *args, **options)
        work = plan.function(*plan.args, **self._options(plan), async_op=True)
        return CollectiveOperation(work, plan.finish)

    def _soon(self, plan_of: Callable[..., Any], *args: Any, **options: Any) -> MpiRequest:
        """Start a collective call, and return its request."""
        return MpiRequest.of(self._started(plan_of, args, options))

    def _persistent(
        self, plan_of: Callable[..., Any], *args: Any, info: Info = INFO_NULL, **options: Any
    ) -> Prequest:
        """Return the persistent request of a collective call."""
        if args and isinstance(args[-1], Info):
            args = args[:-1]
        return Prequest.to(partial(self._started, plan_of, args, options))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine the buffers of all ranks on all."""
        is_alike = (
            type(sendbuf) is _ndarray
            and type(recvbuf) is _ndarray
            and sendbuf.dtype is recvbuf.dtype
            and sendbuf.shape == recvbuf.shape
        )
        if is_alike and sendbuf.dtype.char in op.core_dtypes and not MESSAGES.is_receiving:
            if sendbuf.ndim != 1:
                # Shapes may differ between ranks, and elements are added by their place in memory.
                if not (sendbuf.flags.c_contiguous and recvbuf.flags.c_contiguous):
                    self._now(plans.plan_allreduce, sendbuf, recvbuf, op)
                    return
                sendbuf, recvbuf = sendbuf.reshape(-1), recvbuf.reshape(-1)
            _all_reduce(sendbuf, op.core_name, out=recvbuf, group=self.state.group)
        else:
            self._now(plans.plan_allreduce, sendbuf, recvbuf, op)

    Barrier = barrier = partialmethod(_now_buffers, plans.plan_barrier)
    Bcast = partialmethod(_now_buffers, plans.plan_bcast)
    Gather = partialmethod(_now_buffers, plans.plan_gather)
    Gatherv = partialmethod(_now_buffers, plans.plan_gatherv)
    Scatter = partialmethod(_now_buffers, plans.plan_scatter)
    Scatterv = partialmethod(_now_buffers, plans.plan_scatterv)
    Allgather = partialmethod(_now_buffers, plans.plan_allgather)
    Allgatherv = partialmethod(_now_buffers, plans.plan_allgatherv)
    Alltoall = partialmethod(_now_buffers, plans.plan_alltoall)
    Alltoallv = partialmethod(_now_buffers, plans.plan_alltoallv)
    Alltoallw = partialmethod(_now_buffers, plans.plan_alltoallw)
    Reduce = partialmethod(_now_buffers, plans.plan_reduce)
    Reduce_scatter_block = partialmethod(_now_buffers, plans.plan_reduce_scatter_block)
    Reduce_scatter = partialmethod(_now_buffers, plans.plan_reduce_scatter)

    Ibarrier = partialmethod(_soon, plans.plan_barrier)
    Ibcast = partialmethod(_soon, plans.plan_bcast)
    Igather = partialmethod(_soon, plans.plan_gather)
    Igatherv = partialmethod(_soon, plans.plan_gatherv)
    Iscatter = partialmethod(_soon, plans.plan_scatter)
    Iscatterv = partialmethod(_soon, plans.plan_scatterv)
    Iallgather = partialmethod(_soon, plans.plan_allgather)
    Iallgatherv = partialmethod(_soon, plans.plan_allgatherv)
    Ialltoall = partialmethod(_soon, plans.plan_alltoall)
    Ialltoallv = partialmethod(_soon, plans.plan_alltoallv)
    Ialltoallw = partialmethod(_soon, plans.plan_alltoallw)
    Ireduce = partialmethod(_soon, plans.plan_reduce)
    Iallreduce = partialmethod(_soon, plans.plan_allreduce)
    Ireduce_scatter_block = partialmethod(_soon, plans.plan_reduce_scatter_block)
    Ireduce_scatter = partialmethod(_soon, plans.plan_reduce_scatter)

    Barrier_init = partialmethod(_persistent, plans.plan_barrier)
    Bcast_init = partialmethod(_persistent, plans.plan_bcast)
    Gather_init = partialmethod(_persistent, plans.plan_gather)
    Gatherv_init = partialmethod(_persistent, plans.plan_gatherv)
    Scatter_init = partialmethod(_persistent, plans.plan_scatter)
    Scatterv_init = partialmethod(_persistent, plans.plan_scatterv)
    Allgather_init = partialmethod(_persistent, plans.plan_allgather)
    Allgatherv_init = partialmethod(_persistent, plans.plan_allgatherv)
    Alltoall_init = partialmethod(_persistent, plans.plan_alltoall)
    Alltoallv_init = partialmethod(_persistent, plans.plan_alltoallv)
    Alltoallw_init = partialmethod(_persistent, plans.plan_alltoallw)
    Reduce_init = partialmethod(_persistent, plans.plan_reduce)
    Allreduce_init = partialmethod(_persistent, plans.plan_allreduce)
    Reduce_scatter_block_init = partialmethod(_persistent, plans.plan_reduce_scatter_block)
    Reduce_scatter_init = partialmethod(_persistent, plans.plan_reduce_scatter)

    bcast = partialmethod(_now, plans.plan_bcast_object)
    gather = partialmethod(_now, plans.plan_gather_objects)
    scatter = partialmethod(_now, plans.plan_scatter_objects)
    allgather = partialmethod(_now, plans.plan_allgather_objects)
    alltoall = partialmethod(_now, plans.plan_alltoall_objects)
    reduce = partialmethod(_now, plans.plan_reduce_objects)
    allreduce = partialmethod(_now, plans.plan_allreduce_objects)

    # -- what the layer does not have

    def _unsupported(self, name: str, instead: str, *args: Any, **options: Any) -> NoReturn:
        raise UnsupportedByLayer(name, instead)

    Psend_init = partialmethod(_unsupported, "Psend_init", PARTITIONED)
    Precv_init = partialmethod(_unsupported, "Precv_init", PARTITIONED)
    Revoke = partialmethod(_unsupported, "Revoke", FAILURES)
    Shrink = partialmethod(_unsupported, "Shrink", FAILURES)
    Agree = partialmethod(_unsupported, "Agree", FAILURES)
    Get_failed = partialmethod(_unsupported, "Get_failed", FAILURES)
    Spawn = partialmethod(_unsupported, "Spawn", SPAWN)
    Spawn_multiple = partialmethod(_unsupported, "Spawn_multiple", SPAWN)
    Accept = partialmethod(_unsupported, "Accept", INTERCOMM)
    Connect = partialmethod(_unsupported, "Connect", INTERCOMM)
    Create_intercomm = partialmethod(_unsupported, "Create_intercomm", INTERCOMM)

    @classmethod
    def Join(cls, fd: int) -> NoReturn:
        """Raise: the layer has no intercommunicators."""
        raise UnsupportedByLayer("Join", INTERCOMM)

    # -- identity

    @property
    def handle(self) -> int:
        """A number of the communicator."""
        return 0 if self._state is None else id(self._state)

    def py2f(self) -> int:
        """Return -1: communicators of this layer are no integers."""
        return -1

    toint = py2f

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Comm):
            return NotImplemented
        return self._state is other._state

    def __hash__(self) -> int:
        return hash(self.handle)

    def __bool__(self) -> bool:
        return self._state is not None

    def __reduce__(self) -> Any:
        for name in ("COMM_NULL", "COMM_WORLD", "COMM_SELF"):
            known = constant(name)
            if self == known:
                return (constant, (name,)) if self is known else (type(self), (known,))
        raise ValueError("cannot pickle a communicator of the program")


class _BothOperations(Operation):
    """A send and a receive as one operation."""

    def __init__(self, send: Operation, receive: Operation) -> None:
        super().__init__()
        self._send, self._receive = send, receive

    def test(self) -> bool:
        is_sent = self._send.test()
        if is_sent and self._receive.test():
            self._copy()
            return True
        return False

    def wait(self) -> None:
        self._send.wait()
        self._receive.wait()
        self._copy()

    def _copy(self) -> None:
        self.status, self.error = self._receive.status, self._receive.error


def _check_rank_and_tag(rank: int, tag: int, size: int) -> None:
    if not 0 <= rank < size:
        raise MpiException(const.ERR_RANK, f"rank {rank} is not in 0..{size - 1}")
    if not 0 <= tag <= const.TAG_MAX:
        raise MpiException(const.ERR_TAG, f"tag {tag} is not in 0..{const.TAG_MAX}")


def _check_source_and_tag(source: int, tag: int, size: int) -> None:
    if not (0 <= source < size and tag >= 0):
        is_any = source == const.ANY_SOURCE, tag == const.ANY_TAG
        _check_rank_and_tag(0 if is_any[0] else source, 0 if is_any[1] else tag, size)


class Intracomm(Comm):
    """A communicator of one group of ranks."""

    def Create_group(self, group: MpiGroup, tag: int = 0) -> Comm:
        """Return the communicator of a group; only its members call it."""
        return self.Create(group)

    @classmethod
    def Create_from_group(
        cls,
        group: MpiGroup,
        stringtag: str = "org.mpi4py",
        info: Info = INFO_NULL,
        errhandler: Errhandler | None = None,
    ) -> Comm:
        """Return the communicator of a group; only its members call it."""
        world: Intracomm = constant("COMM_WORLD")
        return world.Create_group(group)

    def Create_cart(
        self,
        dims: Sequence[int],
        periods: Sequence[bool] | None = None,
        reorder: bool = False,
    ) -> Any:
        """Return a communicator whose ranks form a grid."""
        return constant("Cartcomm").create_cart(self, dims, periods)

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> Any:
        """Return a communicator whose ranks form a graph that all ranks know."""
        return constant("Graphcomm").create_graph(self, index, edges)

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        sourceweights: Any = None,
        destweights: Any = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Return a communicator with a graph of which each rank knows its own neighbours."""
        return constant("Distgraphcomm").create_adjacent(
            self, sources, destinations, sourceweights, destweights
        )

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Any = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Return a communicator with a graph of which each rank knows some edges."""
        return constant("Distgraphcomm").create_dist_graph(
            self, sources, degrees, destinations, weights
        )

    def Cart_map(self, dims: Sequence[int], periods: Any = None) -> int:
        """Return this process's rank in a grid, or UNDEFINED."""
        return self.rank if self.rank < int(np.prod(dims)) else const.UNDEFINED

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """Return this process's rank in a graph, or UNDEFINED."""
        return self.rank if self.rank < len(index) else const.UNDEFINED

    Scan = partialmethod(Comm._now_buffers, plans.plan_scan)
    Exscan = partialmethod(Comm._now_buffers, plans.plan_exscan)
    Iscan = partialmethod(Comm._soon, plans.plan_scan)
    Iexscan = partialmethod(Comm._soon, plans.plan_exscan)
    Scan_init = partialmethod(Comm._persistent, plans.plan_scan)
    Exscan_init = partialmethod(Comm._persistent, plans.plan_exscan)
    scan = partialmethod(Comm._now, plans.plan_scan_objects)
    exscan = partialmethod(Comm._now, plans.plan_exscan_objects)


class Intercomm(Comm):
    """A communicator between two groups; this layer has null ones only."""

    def Is_inter(self) -> bool:
        """Return True."""
        return True


COMM_NULL = Comm()


def world_and_self() -> tuple[Intracomm, Intracomm]:
    """Return COMM_WORLD and COMM_SELF of this process; initializes syncvar."""
    sv.init()
    own = sv.rank()
    world = CommState(None, range(sv.world_size()), "MPI_COMM_WORLD")
    own_comm = CommState(world.subgroup([own]), [own], "MPI_COMM_SELF")
    return Intracomm.of(world), Intracomm.of(own_comm)
