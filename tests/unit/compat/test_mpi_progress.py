"""Progress of the mpi4py layer: looks for messages that have come."""

from types import SimpleNamespace

import syncvar as sv
from syncvar.compat.mpi4py.mpi_messages import Interest, MessagePort


def test_a_look_ends_though_messages_come_without_end(monkeypatch):
    port, read = MessagePort(None, 0, 2), []
    port._probes.append(SimpleNamespace(interest=Interest(1, 7)))
    monkeypatch.setattr(sv, "probe", lambda *_, **__: SimpleNamespace(source=1))
    monkeypatch.setattr(port, "_read", lambda source, _: read.append(source))
    port.poll()
    assert 0 < len(read) < 10_000
