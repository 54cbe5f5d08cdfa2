"""Objects whose bytes travel with their length are one persistent call of one phase; longer ones, of any rank, go on in the same call."""

import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar._native import missing_reason
from syncvar.core.settings import RuntimeConfig
from syncvar.protocol.object_codec import pack_object, unpack_object
from syncvar.runtime.communicator import Communicator
from tests.support.harness import caught, everywhere

CONFIG = RuntimeConfig(collective_timeout_s=30.0, shutdown_timeout_s=1.0)
LAYOUTS = {
    **(
        {}
        if missing_reason()
        else {"c": {"shared": True, "config": CONFIG.replaced(call_runner="c")}}
    ),
    "python": {"shared": True, "config": CONFIG.replaced(call_runner="python")},
    "links": {"config": CONFIG},
    "hosts": {"shared": True, "hosts": 2, "config": CONFIG},
}
LENGTHS = [
    0,
    1,
    100,
    243,
    244,
    245,
    246,
    247,
    248,
    249,
    3000,
]  # of texts: the bytes of those up to 246 travel at once
STYLES = {
    "": {},
    "in time": {"timeout": 30.0},
    "seconds": {"timeout": np.float32(30)},
    "started": {"async_op": True},
}
CALLS = ["broadcast_object", "all_gather_object", "gather_object", "scatter_object"]


def made(call, each, root, rank):
    """What must come of a call to which each rank brings an object; to a scattering the root brings all of them."""
    whole = list(each)
    return {
        "broadcast_object": whole[root],
        "all_gather_object": whole,
        "gather_object": whole if rank == root else None,
        "scatter_object": whole[rank],
    }[call]


def make(call, each, root, rank, **options):
    if call == "all_gather_object":
        return sv.all_gather_object(each[rank], **options)
    brought = each[rank] if call != "scatter_object" else list(each) if rank == root else None
    return getattr(sv, call)(brought, root, **options)


def test_where_the_border_is():
    assert [len(pack_object("x" * length)) for length in (246, 247)] == [248, 249]


@pytest.mark.parametrize(
    ("layout", "size"),
    [*((layout, 2) for layout in LAYOUTS), (next(iter(LAYOUTS)), 3), ("hosts", 3)],
)
def test_objects_of_any_length_from_any_rank(layout, size):
    def fn():
        rng, rank = np.random.default_rng(size), sv.rank()
        for turn in range(80):
            call, root = CALLS[turn % 4], int(rng.integers(0, size))
            lengths = rng.choice(LENGTHS if turn % 3 else LENGTHS[:7], size)
            each = [
                {"text": "x" * int(length), "rank": number} if turn % 8 > 3 else "x" * int(length)
                for number, length in enumerate(lengths)
            ]
            style = [str(one) for one in rng.choice(list(STYLES), size)][rank]
            got = make(call, each, root, rank, **STYLES[style])
            got = got.wait() if style == "started" else got
            assert got == made(call, each, root, rank), (turn, call, root, lengths, style)

    everywhere(size, fn, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout in ("c", "python")])
def test_small_ones_are_prepared(layout, monkeypatch):
    long_way = []
    perform = Communicator.perform
    monkeypatch.setattr(
        Communicator,
        "perform",
        lambda self, name, *arguments, **how: (
            long_way.append(name) or perform(self, name, *arguments, **how)
        ),
    )
    met = threading.Barrier(2)

    def fn():
        rank = sv.rank()
        sv.barrier()  # the first call finds the others
        met.wait(20)
        long_way.clear()
        met.wait(20)
        for turn in range(12):
            for root in (0, 1):
                for call in CALLS:
                    assert make(call, [{"a": turn}, {"a": root}], root, rank) == made(
                        call, [{"a": turn}, {"a": root}], root, rank
                    )
        met.wait(20)
        return list(long_way)

    assert everywhere(2, fn, **LAYOUTS[layout]) == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_travel_is_told(layout, call):
    def fn():
        rank = sv.rank()
        for _ in range(2):
            assert make(call, [1, 2], 0, rank) == made(call, [1, 2], 0, rank)
            error = caught(
                lambda: make(call, [object(), 2], 0, rank)
            )  # only rank 0 looks at its own
            assert isinstance(error, sv.MismatchError if rank else sv.ConfigError), error
            error = caught(
                lambda: (
                    make(call, [1, 2], rank if call != "all_gather_object" else 0, rank)
                    if rank
                    else sv.barrier()
                )
            )
            assert isinstance(error, sv.MismatchError)
        assert make(call, [1, 2], 0, rank) == made(call, [1, 2], 0, rank)

    everywhere(2, fn, **LAYOUTS[layout])


def test_numbers_that_need_more_than_64_bits_and_texts_without_an_encoding():
    for value in ({"a": 1 << 70}, [-(1 << 80), 1], 1 << 64):
        assert unpack_object(pack_object(value)) == value
    with pytest.raises(sv.ConfigError, match=r"value\['a'\] is a text that cannot be encoded"):
        pack_object({"a": "\ud800"})
