"""What a call is given: it is taken when the call is made, and what would lose something on the way is refused."""

import itertools
import threading
from inspect import signature

import ml_dtypes
import numpy as np
import pytest

import syncvar as sv
from syncvar.collectives.collective_registry import Case, CollectiveKind, available
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks

SOON = RuntimeConfig(collective_timeout_s=60.0, shutdown_timeout_s=1.0)
LAYOUTS = {"links": {}, "shm": {"shared": True}, "hosts": {"shared": True, "hosts": 2}}


def results(size, fn, layout):
    out = run_ranks(size, fn, config=SOON, timeout_s=60, **LAYOUTS[layout])
    errors = [one for one in out if isinstance(one, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return out


def of(rank, count, turn):
    return np.arange(count) % 5 + 10.0 * rank + turn


def halves(array):
    """Two halves, as a list."""
    return [array[: array.size // 2], array[array.size // 2 :]]


REGISTERED = [
    one
    for one in available()
    if one.kind in (CollectiveKind.REDUCE, CollectiveKind.MOVE) and one.takes("async_op")
]
# What the registry does not call: name -> (how it is called with a flat array of an even count, what this rank must get of the arrays of both ranks)
CALLS = {
    "all_reduce, reproducible": (lambda x: sv.all_reduce(x, reproducible=True, async_op=True), lambda parts, _: sum(parts)),
    "all_reduce, scaled": (lambda x: sv.all_reduce(x, prescale=2.0, async_op=True), lambda parts, _: sum(parts) * 2),
    "all_reduce, weighted": (lambda x: sv.all_reduce(x, "mean", weight=1.0, async_op=True), lambda parts, _: sum(parts) / 2),
    "all_reduce, registered": (lambda x: sv.all_reduce(x, "rightmost", async_op=True), lambda parts, _: parts[-1]),
    "all_reduce of pairs": (lambda x: sv.all_reduce(x, "maxloc", async_op=True), lambda parts, _: (parts[1], np.ones(parts[0].size, int))),
    "all_reduce of a list": (lambda x: sv.all_reduce(halves(x), async_op=True), lambda parts, _: halves(sum(parts))),
    "all_reduce of a dict": (lambda x: sv.all_reduce({"a": x, "b": [x[:3]]}, async_op=True), lambda parts, _: {"a": sum(parts), "b": [sum(parts)[:3]]}),
    "reduce of a list": (lambda x: sv.reduce(halves(x), async_op=True), lambda parts, rank: None if rank else halves(sum(parts))),
    "broadcast of a list": (lambda x: sv.broadcast(halves(x), root=1, async_op=True), lambda parts, _: halves(parts[1])),
    "all_gather of a list": (lambda x: sv.all_gather(halves(x), async_op=True), lambda parts, _: [np.concatenate(one) for one in zip(*map(halves, parts), strict=True)]),
    "gather of a list": (
        lambda x: sv.gather(halves(x), async_op=True), lambda parts, rank: None if rank else [np.concatenate(one) for one in zip(*map(halves, parts), strict=True)],
    ),
    "scatter of a list": (lambda x: sv.scatter(halves(x), root=1, async_op=True), lambda parts, rank: halves(parts[1])[rank]),
    "all_to_all of a list": (lambda x: sv.all_to_all(halves(x), async_op=True), lambda parts, rank: [halves(part)[rank] for part in parts]),
    "send": (lambda x: both(x), lambda parts, rank: parts[1 - rank]),
    "send_object": (lambda x: both_objects(x), lambda parts, rank: {"x": parts[1 - rank]}),
    "all_gather_object": (lambda x: sv.all_gather_object({"x": x}, async_op=True), lambda parts, _: [{"x": one} for one in parts]),
    "broadcast_object": (lambda x: sv.broadcast_object([x], 1, async_op=True), lambda parts, _: [parts[1]]),
    "gather_object": (lambda x: sv.gather_object((x,), async_op=True), lambda parts, rank: None if rank else [(one,) for one in parts]),
    "scatter_object": (lambda x: sv.scatter_object(halves(x), 1, async_op=True), lambda parts, rank: halves(parts[1])[rank]),
}  # fmt: skip


class both:  # noqa: N801
    """A message to the other rank and one from there."""

    def __init__(self, x):
        other = 1 - sv.rank()
        self.sent, self.coming = sv.send(x, other, async_op=True), sv.recv(other, async_op=True)

    def wait(self):
        self.sent.wait()
        return self.coming.wait()


class both_objects(both):  # noqa: N801
    """The same of objects."""

    def __init__(self, x):
        other = 1 - sv.rank()
        self.sent, self.coming = (
            sv.send_object({"x": x}, other, async_op=True),
            sv.recv_object(other, async_op=True),
        )


def same(got, wanted, what):
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), what
        for key in wanted:
            same(got[key], wanted[key], what)
    elif isinstance(wanted, list | tuple):
        assert type(got) is type(wanted), what
        assert len(got) == len(wanted), what
        for one, other in zip(got, wanted, strict=True):
            same(one, other, what)
    elif wanted is None:
        assert got is None, what
    else:
        assert np.array_equal(got, wanted), what


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_takes_its_input_when_it_is_called(layout):
    """The caller overwrites it at once, while some calls are outstanding."""
    sv.register_op("rightmost", lambda left, right: right, replace=True)  # noqa: ARG005

    def fn():
        rank = sv.rank()
        for count, make in itertools.product(
            (10, 20_000, 140_000) if layout == "shm" else (10, 20_000), (np.empty, sv.empty)
        ):
            xs = [make(count) for _ in range(3)]
            for name, (call, wanted) in CALLS.items():
                started = []
                for turn, x in enumerate(xs):
                    x[...] = of(rank, count, turn)
                    started.append(call(x))
                    x[...] = -1.0
                for turn, work in enumerate(started):
                    parts = [of(one, count, turn) for one in range(2)]
                    same(
                        work.wait(),
                        wanted(parts, rank),
                        f"{name} of {count} by {make.__module__}, {turn}",
                    )

    results(2, fn, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("one", REGISTERED, ids=lambda one: one.name)
def test_every_registered_collective_takes_its_input_when_it_is_called(one, layout):
    """The same for the inputs and results of the registry."""

    def fn():
        for count, make in itertools.product((10, 20_000), (np.empty, sv.empty)):
            cases = [Case(sv.rank(), 2, (count,), "float64", root=turn % 2) for turn in range(4)]
            started = []
            for turn, case in enumerate(cases):
                x = one.contribution(case)
                if x is not None:
                    given, x = x * (turn + 1), make(x.shape)
                    x[...] = given
                started.append(one.bound(case, x, async_op=True)())
                if x is not None:
                    x[...] = -1.0
            for turn, (case, work) in enumerate(zip(cases, started, strict=True)):
                got, wanted = work.wait(), one.wanted(case)
                if isinstance(wanted, list):
                    wanted = [each * (turn + 1) for each in wanted]
                elif wanted is not None:
                    wanted = wanted * (turn + 1)
                same(got, wanted, f"{one.name} of {count} by {make.__module__}, {turn}")

    results(2, fn, layout)


def test_every_collective_that_can_be_started_is_among_them():
    names = {
        name
        for name in sv.__all__
        if not isinstance(getattr(sv, name), type)
        and callable(getattr(sv, name))
        and "async_op" in signature(getattr(sv, name)).parameters
    }
    tested = {name.split()[0].rstrip(",") for name in CALLS} | {one.name for one in REGISTERED}
    assert names - {"recv", "recv_any", "recv_object", "barrier"} <= tested


MASKED = np.ma.array([0.0, 1.0, 2.0], mask=[False, True, False])
REFUSED = {
    "all_reduce": lambda x: sv.all_reduce(x),
    "all_reduce, scaled": lambda x: sv.all_reduce(x, prescale=2.0),
    "in a dict": lambda x: sv.all_reduce({"a": 1.0, "b": [x]}),
    "in a list": lambda x: sv.all_reduce([1.0, x]),
    "one element": lambda x: sv.all_reduce([1.0, x[1]]),
    "out": lambda x: sv.all_reduce(np.ones(3), out=x.copy()),
    "reduce": lambda x: sv.reduce(x),
    "reduce_scatter": lambda x: sv.reduce_scatter(x),
    "scan": lambda x: sv.scan(x),
    "broadcast": lambda x: sv.broadcast(x),
    "all_gather": lambda x: sv.all_gather(x),
    "gather": lambda x: sv.gather(x),
    "scatter": lambda x: sv.scatter([x, x], root=sv.rank()),
    "all_to_all": lambda x: sv.all_to_all([x, x]),
    "all_gather_object": lambda x: sv.all_gather_object(x),
    "initial value": lambda x: sv.Variable(x),
    "initial values in a list": lambda x: sv.Variable([1.0, x[1]]),
}
WRITES = {
    "assign": lambda v, x: v.assign(x),
    "assign_add": lambda v, x: v.assign_add(x),
    "assign_all": lambda v, x: sv.assign_all([(v, x)]),
    "scatter indices": lambda v, x: v.scatter_add(x.astype(np.int64), [1.0, 1.0, 1.0]),
    "scatter values": lambda v, x: v.scatter_add([0, 1, 2], x),
    "gradient": lambda v, x: sv.optimizers.SGD(1.0).apply_gradients([(x, v)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_arrays_are_refused_before_anything_is_sent(layout):
    """On the rank that brings one; the other is told, and the world is usable."""

    def fn():
        v = sv.Variable(np.zeros(3), aggregation=sv.VariableAggregation.SUM)
        calls = [
            *REFUSED.items(),
            *((name, lambda x, write=write: write(v, x)) for name, write in WRITES.items()),
        ]
        for name, call in calls:
            if sv.rank() == 0:
                with pytest.raises(
                    sv.ConfigError, match=r"masked|MaskedArray|MaskedConstant"
                ) as caught:
                    call(MASKED)
                assert (
                    "filled(0)" in str(caught.value)
                    or "out.data" in str(caught.value)
                    or "object" in name
                ), name
            else:
                with pytest.raises(sv.MismatchError, match=r"masked|Masked"):
                    call(
                        MASKED.filled(0) if name != "one element" else np.ma.array([1.0, 2.0]).data
                    )
            assert float(sv.all_reduce(1.0)) == 2.0
        assert not v.numpy().any()

    results(2, fn, layout)


def test_arrays_of_libraries_whose_dlpack_knows_not_the_dtype():
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **_):
            raise RuntimeError("Unsupported dtype in DLTensor.")

        def __dlpack_device__(self):
            return 1, 0

    class WithArray(Foreign):
        def __array__(self, dtype=None, copy=None):  # noqa: ARG002
            return self.array

    got = sv.all_gather(WithArray(np.ones(3, ml_dtypes.bfloat16)))
    assert got.dtype == ml_dtypes.bfloat16
    with pytest.raises(sv.ConfigError, match="Foreign cannot be an array: Unsupported dtype"):
        sv.all_gather(Foreign(np.ones(3)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", [sv.all_gather, sv.gather, sv.broadcast])
def test_too_many_dimensions_are_the_same_error_on_every_path(layout, call):
    """Those that tell each other shapes have room for 13 lengths, whether they have to tell them or not."""

    def fn():
        for _ in range(3):
            with pytest.raises(
                sv.ConfigError,
                match=r"an array of 20 dimensions cannot be communicated; reshape it to 13 or fewer",
            ):
                call(np.ones((1,) * 20))
            got = call(np.ones((1,) * 13))
            assert got is None or got.ndim == 13
        return float(sv.all_reduce(1.0))

    assert results(2, fn, layout) == [2.0, 2.0]


@pytest.mark.parametrize("layout", ["links", "shm"])
def test_the_deadline_of_a_wait_is_the_one_that_is_told(layout):
    given_up = threading.Event()

    def fn():
        if sv.rank() == 1:
            assert given_up.wait(20)  # in no call
            return None
        with pytest.raises(
            sv.DeadlineExceeded, match=r"did not finish within 0\.2 s: rank 0 waited"
        ) as caught:
            sv.all_reduce(1.0, async_op=True).wait(timeout=0.2)
        given_up.set()
        return caught.value.timeout_s

    assert run_ranks(2, fn, config=SOON, timeout_s=60, **LAYOUTS[layout]) == [0.2, None]
