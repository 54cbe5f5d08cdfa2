"""Exceptions travel as data.

They come back as their own class where it can be imported, else as a stand-in of that name and text.
"""

import sys
import types

import pytest

from syncvar.core.errors import PeerLost, WireError
from syncvar.protocol.exception_codec import pack_exception, unpack_exception


class Counted(ValueError):
    made = 0

    def __init__(self, number):
        Counted.made += 1
        super().__init__(f"number {number}", (number,))
        self.number = number


class Holder(KeyError):
    def __init__(self, what):
        super().__init__(what)
        self.what = what

    def __str__(self):
        return "held"


class Mute(Exception):
    def __str__(self):
        raise OSError("no text")


def noted(error):
    error.add_note("a note")
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        KeyError(("a", 1)),
        OSError(2, "none", "file"),
        SystemExit(3),
        FileNotFoundError(2, "none", "a", None, "b"),
        Counted(4),
        PeerLost(1, "h", "why"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
        ImportError("no", name="n", path="p"),
        noted(TypeError()),
        KeyboardInterrupt(),
        ZeroDivisionError("by 0"),
        Mute(1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_back_as_its_own_class(error):
    made = Counted.made
    back = unpack_exception(pack_exception(error))
    assert type(back) is type(error)
    assert back.args == error.args
    assert vars(back) == vars(error)
    assert Counted.made == made, "an __init__ of the user's does not run again"
    if type(error) is not Mute:
        assert str(back) == str(error)
    for name in ("filename", "filename2", "code", "object", "name", "path"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_an_exception_that_cannot_be_rebuilt_has_a_stand_in():
    class Local(KeyError):
        pass

    group = ExceptionGroup("several", [ValueError(1)])
    for error, base in [
        (Local("x"), KeyError),
        (Holder(object()), KeyError),
        (group, Exception),
        (Counted(object()), ValueError),
    ]:
        back = unpack_exception(pack_exception(error))
        assert type(back) is not type(error)
        assert (type(back).__name__, str(back)) == (type(error).__name__, str(error))
        assert type(back).__qualname__ == type(error).__qualname__
        assert isinstance(back, base)


def test_a_class_that_is_not_here_has_a_stand_in(monkeypatch):
    there = types.ModuleType("only_there")
    exec("class Gone(ArithmeticError): pass", vars(there))
    monkeypatch.setitem(sys.modules, "only_there", there)
    data = pack_exception(there.Gone("far"))
    assert type(unpack_exception(data)) is there.Gone
    monkeypatch.delitem(sys.modules, "only_there")
    back = unpack_exception(data)
    assert isinstance(back, ArithmeticError)
    assert (type(back).__name__, str(back)) == ("Gone", "far")


@pytest.mark.parametrize("module", ["os", "builtins", "subprocess"])
@pytest.mark.parametrize("name", ["system", "eval", "Popen", "no_such.thing"])
def test_only_classes_of_exceptions_are_made(module, name):
    from syncvar.protocol.object_codec import pack_object

    back = unpack_exception(pack_object([[[module, name]], ("true",), {}, b"true"]))
    assert isinstance(back, RuntimeError)
    assert str(back) == "true"


def test_bytes_that_are_none_are_refused():
    with pytest.raises(WireError):
        unpack_exception(b"\xc1")
