"""Control messages: every field of every kind has its type, and nothing but WireError comes of anything else."""

import itertools
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.core.errors import WireError
from syncvar.protocol.control_messages import pack_message, parse_message
from syncvar.protocol.frame import CONTROL_NBYTES_MAX

GOOD = {
    "join": {
        "rank": 0,
        "job": "j",
        "generation": 0,
        "address": "ipc:///x",
        "pid": 1,
        "host": "h",
        "about": {"protocol": 1, "byte_order": "little"},
    },
    "wait_report": {
        "group": (1 << 64) - 1,
        "members": [0, 1],
        "call": 7,
        "ordinal": 3,
        "fingerprint": (1 << 64) - 1,
        "description": "w",
        "site": "s",
        "awaiting": [1],
        "alternatives": [1, (1 << 64) - 1, 7],
        "waited_s": 0.5,
        "mismatch": False,
        "is_awaited": True,
        "has_active_threads": True,
        "entered": {0: 7, (1 << 64) - 1: 3},
    },
    "wait_end": {"group": 0, "call": 1},
    "reject_call": {"group": 0, "members": [0, 1], "call": 1, "description": "w", "reason": "r"},
    "abort_step": {"group": 0, "members": [0, 1], "call": 1, "last_call": 9, "reason": "r"},
    "group_failure": {
        "failure_kind": "deadline",
        "reason": "r",
        "group": 0,
        "call": 1,
        "missing": [1],
    },
    "leave": {
        "entered": {0: 4},
        "skipped": [0, 4, 9],
        "sent": [7, 1, 6, 2],
        "sites": {7: "a.py:1"},
    },
    "members": {
        "generation": 0,
        "addresses": {0: "a", 1: "b"},
        "hosts": {0: "h", 1: "h"},
        "host_indices": {0: 0, 1: 0},
        "without_shm": {1: "no memfd"},
        "probes": True,
        "rates": [0, 1, 50_000, 110_000],
    },
    "host_rates": {"rates": [0, 1, 50_000, 110_000], "path": "lanes"},
    "host_network": {"rates": []},
    "refused": {"error": "RendezvousError", "reason": "r", "missing": []},
    "abort": {
        "rank": 1,
        "host": "h",
        "reason": "signal 9",
        "failure_kind": "lost",
        "group": -1,
        "call": -1,
        "missing": [],
        "status": [-9],
    },
    "leave_notice": {"rank": 1, "entered": {0: 4}, "skipped": [0, 4, 9]},
    "decision": {
        "group": 0,
        "call": 1,
        "last_call": 2,
        "text": "t",
        "table": {0: "what", 1: "else"},
        "has_waiting_ranks": True,
        "is_deadlock": False,
    },
}
FIELDS = [(kind, field) for kind, fields in GOOD.items() for field in fields]
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)


def parse_or_refuse(data):
    try:
        return parse_message(data)
    except WireError:
        return None


@pytest.mark.parametrize("kind", GOOD)
def test_a_message_is_read_as_it_was_written(kind):
    assert parse_message(pack_message(kind, **GOOD[kind])) == {"kind": kind, **GOOD[kind]}


def refusal_of(kind, fields):
    """Return the text with which a message is refused; empty where it is taken."""
    try:
        parse_message(pack_message(kind, **fields))
    except WireError as error:
        return str(error)
    return ""


def test_a_missing_field_is_refused():
    for kind, field in FIELDS:
        fields = {name: value for name, value in GOOD[kind].items() if name != field}
        assert field in refusal_of(kind, fields), (kind, field)


def test_a_field_of_another_type_is_refused():
    for (kind, field), wrong in itertools.product(
        FIELDS, [None, b"x", [b"x"], {"x": b"x"}, [[1]], {1: [1]}, {1: {2: 3}}, True]
    ):
        if isinstance(wrong, bool) and isinstance(GOOD[kind][field], bool):
            continue  # that is its type
        assert field in refusal_of(kind, GOOD[kind] | {field: wrong}), (kind, field, wrong)


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        ("wait_report", "members", ["0"]),
        ("wait_report", "awaiting", [0.5]),
        ("wait_report", "awaiting", [True]),
        ("wait_report", "entered", {0: "7"}),
        ("wait_report", "entered", {"0": 7}),
        ("wait_report", "waited_s", float("nan")),
        ("leave", "entered", {0: None}),
        ("reject_call", "members", [[0]]),
        ("members", "addresses", {0: 5}),
        ("members", "hosts", {"0": "h"}),
        ("decision", "table", {0: 5}),
        ("abort", "missing", ["1"]),
        ("abort", "status", ["9"]),
        ("decision", "is_deadlock", 1),
        ("join", "rank", "0"),
    ],
)
def test_what_lists_and_maps_hold_is_checked_too(kind, field, wrong):
    with pytest.raises(WireError, match=field):
        parse_message(pack_message(kind, **GOOD[kind] | {field: wrong}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x80",
        b"\x81\xa4kind\x01",
        b"\x81\xa4kind\xa4nope",
        b"\x81\xa4kind\x90",
    ],
)
def test_what_is_no_map_of_a_known_kind_is_refused(data):
    with pytest.raises(WireError):
        parse_message(data)


@pytest.mark.parametrize("extra", [b"\x00", b"\xc1", b"\xa4kind"])
def test_bytes_after_a_message_are_refused(extra):
    with pytest.raises(WireError):
        parse_message(pack_message("wait_end", group=0, call=1) + extra)


@pytest.mark.parametrize("code", [-1, 0, 5, 127])
@pytest.mark.parametrize("length", [0, 1, 4, 8, 12])
def test_extension_types_are_refused(code, length):
    data = pack_message("wait_end", group=0, call=1)
    extension = b"\xc7" + bytes([length, code & 0xFF]) + bytes(length)
    with pytest.raises(WireError):
        parse_message(b"\x84" + data[1:] + b"\xa4more" + extension)


def test_a_message_may_be_as_long_as_the_limit_and_no_longer():
    with pytest.raises(WireError, match="exceeds"):
        parse_message(bytes(CONTROL_NBYTES_MAX + 1))


def test_deep_nesting_is_refused():
    for depth in (9, 100, 500, 5000, 100_000):
        data = pack_message("wait_end", group=0, call=1)
        deep = b"\x84" + data[1:] + b"\xa1x" + b"\x91" * depth + b"\xc0"
        with pytest.raises(WireError):
            parse_message(deep)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 items
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdc\x10\x01" + b"\xc0" * 4097,
        b"\xdb\x00\x01\x00\x01" + b"x" * 65537,
    ],
)
def test_claims_of_great_length_are_refused_without_memory(body):
    data = b"\x84" + pack_message("wait_end", group=0, call=1)[1:] + b"\xa1x" + body
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            parse_message(data)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + (1 << 18)
    finally:
        tracemalloc.stop()


@settings(max_examples=1500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_wire_error_only(data):
    assert parse_or_refuse(data) is None


@settings(max_examples=700, deadline=None)
@given(st.sampled_from(FIELDS), anything)
def test_any_value_in_any_field_is_taken_or_refused(place, value):
    kind, field = place
    parse_or_refuse(pack_message(kind, **GOOD[kind] | {field: value}))


def test_messages_with_changed_bytes_are_taken_or_refused():
    draw = random.Random(0)
    for number in range(20_000):
        kind = list(GOOD)[number % len(GOOD)]
        data = bytearray(pack_message(kind, **GOOD[kind]))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        parse_or_refuse(bytes(data))
        parse_or_refuse(bytes(data[: draw.randrange(len(data))]))
