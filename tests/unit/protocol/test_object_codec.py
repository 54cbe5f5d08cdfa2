"""Objects travel as data: what goes in comes out equal, and bytes that nobody packed do no harm."""

import datetime as dt
import decimal
import enum
import random
import re
import traceback
import tracemalloc
import zoneinfo
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import ConfigError, WireError
from syncvar.protocol.object_codec import may_travel, pack_object, unpack_object

arrays = st.builds(
    lambda index, shape, seed: _array(DTYPE_NAMES[index], tuple(shape), seed),
    st.integers(0, len(DTYPE_NAMES) - 1),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(0, 1 << 16),
)
keys = (
    st.text(max_size=5)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.tuples(st.text(max_size=3), st.integers())
)
zones = st.none() | st.sampled_from(
    [
        dt.UTC,
        dt.timezone(dt.timedelta(hours=-3, seconds=1)),
        dt.timezone(dt.timedelta(hours=2), "home"),
    ]
)
zones |= st.sampled_from(["Europe/Vienna", "America/St_Johns"]).map(zoneinfo.ZoneInfo)
moments = st.dates() | st.times(timezones=zones) | st.datetimes(timezones=zones) | st.timedeltas()
hashable = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=3) | moments,
    lambda inner: st.frozensets(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=4,
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | arrays
    | moments
    | st.sets(hashable, max_size=4)
    | st.frozensets(hashable, max_size=4)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(hashable, inner, max_size=4).map(Counter)
    ),
    max_leaves=12,
)


def _array(name, shape, seed):
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and bool(np.all(one == other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, dt.datetime | dt.time):
        return (one, one.fold, repr(one.tzinfo)) == (other, other.fold, repr(other.tzinfo))
    return one == other


@settings(max_examples=700, deadline=None)
@given(values)
def test_what_goes_in_comes_out_equal_and_of_the_same_types(value):
    assert same(unpack_object(pack_object(value)), value)


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 4), (1,) * 20])
def test_arrays_of_every_dtype_and_shape_come_back(name, shape):
    array = _array(name, shape, 1)
    back = unpack_object(pack_object(array))
    assert same(back, array)
    assert back.flags.writeable
    assert back.flags.c_contiguous


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_scalars_of_every_dtype_come_back_as_scalars(name):
    scalar = _array(name, (1,), 1)[0]
    assert same(unpack_object(pack_object(scalar)), scalar)


def test_arrays_of_any_layout_come_back_as_plain_ones():
    base = np.arange(24.0).reshape(4, 6)
    for array in (
        base.T,
        base[::2, ::-1],
        base.astype(">f8"),
        np.broadcast_to(np.float32(3), (2, 2)),
    ):
        back = unpack_object(pack_object([array]))[0]
        assert np.array_equal(back, array)
        assert back.dtype.isnative


@pytest.mark.parametrize(
    "number",
    [
        0,
        -1,
        (1 << 63) - 1,
        -(1 << 63),
        1 << 63,
        (1 << 64) - 1,
        1 << 64,
        -(1 << 63) - 1,
        10**300,
        -(10**300),
    ],
)
def test_integers_of_any_size_come_back(number):
    assert unpack_object(pack_object(number)) == number


class Hue(enum.StrEnum):
    WARM = "warm"


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: int


@dataclass
class Point:
    x: int


class Day(dt.date):
    pass


class Elsewhere(dt.tzinfo):
    def utcoffset(self, when):
        return dt.timedelta(0)


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (object(), "value"),
        ({"a": [1, {2, object()}]}, r"an item of value\['a'\]\[1\]"),
        ([(1, len)], r"value\[0\]\[1\]"),
        ([Name("n")], r"value\[0\]"),
        (
            [dt.datetime(2020, 1, 1, tzinfo=Elsewhere())],
            r"value\[0\]: its time zone is a .*Elsewhere, which cannot travel.*astimezone",
        ),
        ([dt.timezone(dt.timedelta(0), "\ud800")], r"value\[0\]"),
        ([dt.time(1, tzinfo=dt.timezone(dt.timedelta(0), "\ud800"))], r"value\[0\]"),
        ([Day(2020, 1, 1)], r"value\[0\]"),
        ([Pair(1, 2)], r"value\[0\].*cannot travel: write tuple\(x\);"),
        ([Point(1)], r"value\[0\].*cannot travel: write dataclasses\.asdict\(x\);"),
        ([OrderedDict(a={1: [object()]})], r"value\[0\]\['a'\]\[1\]\[0\]"),
        ([range(1 << 70)], r"value\[0\] is range.*beyond 64-bit integers"),
        ([np.dtype("i4,i4")], r"value\[0\] is the dtype .*write x\.descr"),
        ([np.dtype(object)], r"value\[0\] is the dtype object"),
        ([np.array(["text"])], r"value\[0\]"),
        ([np.array([None], dtype=object)], r"value\[0\]"),
        ([np.array([(1, 2)], dtype="i4,i4")], r"value\[0\]"),
        ({"t": np.datetime64("2020-01-01")}, r"value\['t'\]"),
        ([np.str_("text")], r"value\[0\]"),
        ([np.longdouble(1)], r"value\[0\]"),
        ([np.ma.masked_array([1.0], [True])], r"value\[0\]"),
        ({frozenset({1, 1.5j, b"", len}): 2}, "an item of a key of value"),
        (["\ud800"], r"value\[0\]"),
        ({"\ud800": 1}, "a key of value"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_place(value, place):
    with pytest.raises(ConfigError, match=place) as raised:
        pack_object(value)
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count("Traceback (most recent call last)") == 1, "one exception, not a chain"


@pytest.mark.parametrize(
    ("home", "name", "remedy"),
    [
        ("pandas.core.frame", "DataFrame", "df.to_dict('list')"),
        ("polars.dataframe.frame", "DataFrame", "df.to_dict(as_series=False)"),
        ("pandas._libs.tslibs.timestamps", "Timestamp", "x.to_pydatetime()"),
        ("pandas.core.series", "Series", "x.to_numpy()"),
    ],
)
def test_frames_are_refused_with_what_to_write(home, name, remedy):
    value = type(name, (), {"__module__": home})()
    write = f"write {re.escape(remedy)}"
    with pytest.raises(ConfigError, match=f"which cannot travel: {write}; objects may be"):
        pack_object([value])
    words = rf"args\[0\] is a {home}.{name}, .* {write}, or sv.run\(\.\.\., pickle=True\) .SV-101.$"
    with pytest.raises(ConfigError, match=words):
        pack_object([value], place="args", advice="sv.run(..., pickle=True)")


def test_classes_that_may_travel_are_known():
    plain = [
        int,
        bool,
        str,
        dict,
        tuple,
        Pair,
        Hue,
        Colour,
        np.ndarray,
        Path,
        decimal.Decimal,
        dt.date,
        range,
        object,
    ]
    assert [kind for kind in plain if not may_travel(kind)] == []
    assert [kind for kind in (Point, ValueError, type, random.Random) if may_travel(kind)] == []


@pytest.mark.parametrize(
    "value",
    [
        range(5),
        range(9, -3, -4),
        Path("a/b"),
        Path("/x\udcff"),
        decimal.Decimal("-1.50"),
        decimal.Decimal("sNaN12"),
        *map(np.dtype, ("float32", ">i2", "<U7", "S3", "M8[ms]", "m8[25us]", "bool")),
        np.dtype(ml_dtypes.bfloat16),
    ],
    ids=repr,
)
def test_standard_types_come_out_as_they_went_in(value):
    made = unpack_object(pack_object({"x": [value]}))["x"][0]
    assert type(made) is type(value)
    assert repr(made) == repr(value)


def test_members_of_integer_and_text_enums_come_out_as_their_values():
    made = unpack_object(pack_object({"x": [Colour.RED], Colour.RED: Hue.WARM}))
    assert made == {"x": [1], 1: "warm"}
    assert [type(made["x"][0]), type(made[1])] == [int, str]


@pytest.mark.parametrize("code", [11, 13, 14])  # any bytes are a path
@pytest.mark.parametrize("data", [b"", b"\xff\x00", b"i4,O", b"<f4,<f4", b"(2)f4"])
def test_bytes_that_are_no_standard_type_are_refused(code, data):
    with pytest.raises(WireError):
        unpack_object(msgpack.packb(msgpack.ExtType(code, data)))


def test_nesting_has_a_limit_and_cycles_end():
    deep = []
    for _ in range(60):
        deep = [deep]
    assert unpack_object(pack_object(deep)) == deep
    for _ in range(10):
        deep = (deep,)
    with pytest.raises(ConfigError, match="nested more than"):
        pack_object(deep)
    cycle = []
    cycle.append(cycle)
    with pytest.raises(ConfigError, match="nested more than"):
        pack_object(cycle)


def test_an_object_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match="limit of 1000"):
        pack_object(bytes(2000), 1000)


def unpack_or_refuse(data):
    try:
        return unpack_object(data)
    except WireError:
        return None
    except ConfigError as error:  # the changed bytes name a class of the program
        assert "has not registered" in str(error)  # noqa: PT017
        return None


@settings(max_examples=1500, deadline=None)
@given(st.binary(max_size=100))
def test_random_bytes_are_read_or_refused_with_wire_error_only(data):
    unpack_or_refuse(data)


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 24), st.binary(max_size=60))
def test_random_extensions_are_read_or_refused_with_wire_error_only(code, data):
    unpack_or_refuse(msgpack.packb([msgpack.ExtType(code, data)]))


def test_packed_objects_with_changed_bytes_are_read_or_refused():
    draw = random.Random(0)
    value = {
        "a": (1, [2.5, None, 1 << 80, 3j]),
        "b": np.arange(6, dtype=np.int16).reshape(2, 3),
        ("t", 1): np.float32(2),
        "s": {1, "x", frozenset({2})},
        "o": OrderedDict(a=Counter("ab")),
        "d": [
            dt.datetime(2020, 2, 29, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Vienna")),
            dt.timedelta(3, 4),
            dt.time(5, 6, tzinfo=dt.timezone(dt.timedelta(hours=1))),
        ],
    }
    packed = pack_object(value)
    for _ in range(20_000):
        data = bytearray(packed)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        unpack_or_refuse(bytes(data))
        unpack_or_refuse(bytes(data[: draw.randrange(len(data))]))


def head(index, *shape):
    return bytes([index, len(shape)]) + b"".join(length.to_bytes(8, "little") for length in shape)


@pytest.mark.parametrize(
    "data",
    [
        head(3, 1 << 60),
        head(3, 1 << 32, 1 << 32),
        head(3, 0, 1 << 63),
        head(3, (1 << 64) - 1, 0),
        head(200, 1),
        bytes([3, 255]),
        bytes([3, 100]) + bytes(800),
        head(3, *([1] * 70)) + bytes(4),
        head(3, 2) + bytes(7),
        b"",
        b"\x03",
    ],
)
@pytest.mark.parametrize("code", [2, 3])
def test_arrays_that_claim_what_they_do_not_have_are_refused_without_memory(code, data):
    packed = msgpack.packb(msgpack.ExtType(code, data))
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            unpack_object(packed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [100, 2000])
def test_tuples_within_tuples_do_not_multiply_memory(depth):
    data = msgpack.packb([bytes(100_000)])
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(1, data)])
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            unpack_object(msgpack.packb(msgpack.ExtType(1, data)))
        assert tracemalloc.get_traced_memory()[1] < 80 * len(data)
    finally:
        tracemalloc.stop()


def test_lengths_that_are_not_there_are_refused_without_memory():
    for data in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ):
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                unpack_object(data)
            assert tracemalloc.get_traced_memory()[1] < 1 << 18
        finally:
            tracemalloc.stop()


def test_nothing_is_ever_pickled():
    class Trap:
        def __reduce__(self):
            raise AssertionError("it was pickled")

    with pytest.raises(ConfigError, match="nothing is pickled"):
        pack_object([Trap()])


def test_every_index_of_the_table_is_a_dtype_of_that_name():
    assert [dtype_from_index(index).name for index in range(len(DTYPE_NAMES))] == list(DTYPE_NAMES)


def test_equal_sets_are_equal_bytes_whatever_their_order():
    one, other = set(), set()
    for number in range(100):
        one.add(f"{number << 10}")
        other.add(f"{(99 - number) << 10}")
    assert pack_object([one, frozenset(one)]) == pack_object([other, frozenset(other)])


def test_what_modules_note_on_their_state_stays_with_it():
    state = OrderedDict(w=1.0)
    state._metadata = OrderedDict([("", {"version": 2})])
    back = unpack_object(pack_object([state]))[0]
    assert (type(back), back, back._metadata) == (OrderedDict, state, state._metadata)
    assert type(back._metadata) is OrderedDict


@pytest.mark.parametrize(
    ("code", "data"),
    [
        (6, [[]]),
        (6, [[[1, 2, 3]], None]),
        (6, [[[[1], 2]], None]),
        (6, 5),
        (7, [[1]]),
        (7, [msgpack.packb([1])]),
        (8, 3),
        (9, [msgpack.packb({})]),
    ],
)
def test_sets_and_dicts_of_what_cannot_be_in_them_are_refused(code, data):
    with pytest.raises(WireError):
        unpack_object(msgpack.packb(msgpack.ExtType(code, msgpack.packb(data))))


DAY, CLOCK = b"\xe4\x07\x02\x1d", b"\x01\x02\x03\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("code", "data"),
    [
        (16, b""),
        (16, DAY + b"1"),
        (16, b"\xe4\x07\x0d\x1d"),
        (17, CLOCK),
        (17, CLOCK[:-1] + b"\x02\x00"),
        (17, CLOCK + b"\x00x"),
        (18, DAY + CLOCK + b"\x07"),
        (18, DAY + CLOCK + b"\x01" + bytes(7)),
        (18, DAY + CLOCK + b"\x01" + b"\xff" * 7 + b"\x7f"),
        (18, DAY + CLOCK + b"\x02../../etc/passwd"),
        (18, DAY + CLOCK + b"\x02/etc/passwd"),
        (18, DAY + CLOCK + b"\x02Europe"),
        (18, DAY + CLOCK + b"\x02a\x00b"),
        (18, DAY + CLOCK + b"\x02"),
        (18, DAY + CLOCK + b"\x02\xff"),
        (19, b"\xff\xff\xff\x7f" + bytes(8)),
        (20, b""),
        (10, b""),
        (10, b"\x07" + bytes(40)),
    ],
)
def test_moments_and_tensors_that_are_none_are_refused(code, data):
    with pytest.raises(WireError):
        unpack_object(msgpack.packb([msgpack.ExtType(code, data)]))
