"""A prepared write does what the plain one does, with either runner, and leaves to it what is not as it was."""

import contextlib
import sys
import threading
import weakref

import numpy as np
import pytest

import syncvar as sv
from syncvar._native.constants import StoreResult
from syncvar.core.settings import RuntimeConfig
from syncvar.runtime.communicator import Communicator
from syncvar.variables import replica_call
from syncvar.variables.policy import AccessKind
from tests.support.harness import caught, everywhere

FALLBACK, STORED, SAMPLE = StoreResult
ADD = AccessKind.ASSIGN_ADD
ON_WRITE, AUTO = sv.VariableSynchronization.ON_WRITE, sv.VariableSynchronization.AUTO
SUM, MEAN = sv.VariableAggregation.SUM, sv.VariableAggregation.MEAN
ONES = np.ones(3)


@pytest.fixture(params=["python", pytest.param("c", marks=pytest.mark.needs_c_extension)])
def ranks(request):
    """Run a function on two ranks with one of the runners."""
    config = RuntimeConfig(
        collective_timeout_s=60.0, shutdown_timeout_s=1.0, call_runner=request.param
    )

    def run(fn):
        def checked():
            return fn(), request.param

        out = everywhere(2, checked, shared=True, config=config)
        assert {runner for _, runner in out} == {request.param}
        return [found for found, _ in out]

    run.runner = request.param
    return run


def prepared(strategy=None, *, shape=(3,), dtype=float, sync=ON_WRITE, aggregation=SUM):
    """Return a variable of which assign_add has been prepared."""
    if strategy is None:
        v = sv.Variable(np.zeros(shape, dtype), synchronization=sync, aggregation=aggregation)
        v.assign_add(np.zeros(shape, dtype))
    else:
        with strategy.scope():
            v = sv.Variable(np.zeros(shape, dtype), synchronization=sync, aggregation=aggregation)
        strategy.run(lambda: v.assign_add(np.zeros(shape, dtype)))
    return v


def test_the_runner_is_the_one_that_is_asked_for(ranks):
    def fn():
        return [
            type(prepared(shape=shape)._persistent_writes[ADD]).__name__
            for shape in ((3,), (40_000,))
        ]

    assert ranks(fn) == [["PersistentWrite" if ranks.runner == "python" else "Write"] * 2] * 2


@pytest.mark.parametrize(
    ("dtype", "aggregation"),
    [
        ("f4", SUM),
        ("f8", MEAN),
        ("f2", SUM),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("f2", MEAN), ("i8", SUM), ("c8", SUM))
        ),
    ],
)
def test_it_gives_the_bytes_of_the_plain_write(ranks, dtype, aggregation):
    """Of each operation, small and long, inside of run and outside, in the copy's memory and in new memory."""

    def fn():
        draw = np.random.default_rng(sv.rank())
        differing = []
        for strategy in (None, sv.MirroredStrategy()):
            for shape in ((), (3,), (2, 9_000)):
                fast = prepared(strategy, shape=shape, dtype=dtype, aggregation=aggregation)
                plain = prepared(strategy, shape=shape, dtype=dtype, aggregation=aggregation)

                def step(fast=fast, plain=plain, shape=shape, strategy=strategy):
                    held = []
                    for turn in range(8):
                        plain._persistent_writes.update(
                            dict.fromkeys(plain._persistent_writes, lambda *_, **__: FALLBACK)
                        )
                        x = np.asarray(draw.standard_normal(shape) * 9).astype(dtype)
                        for v in (fast, plain):
                            (v.assign, v.assign_add, v.assign_sub)[turn % 3](x)
                        if fast.local_value().tobytes() != plain.local_value().tobytes():
                            differing.append((strategy, shape, turn))
                        if turn in (2, 5):
                            held = [fast.read_value(), fast.local_value().tobytes()]
                        elif held and held[0].tobytes() != held[1]:
                            differing.append("what was read has changed")

                step() if strategy is None else strategy.run(step)
        return differing

    assert ranks(fn) == [[], []]


def test_what_is_not_as_it_was_is_left_to_the_plain_write(ranks):
    """Another place, thread, form or memory; then it goes on."""

    def fn():
        strategy = sv.MirroredStrategy()
        other = sv.MirroredStrategy()
        v, w = prepared(), prepared(strategy)
        write, inside = v._persistent_writes[ADD], w._persistent_writes[ADD]
        found = {"as it was": (write(ONES), strategy.run(lambda: inside(ONES)))}
        found["in plain code"] = inside(ONES)
        with strategy.scope():
            found["in a scope"] = write(ONES), inside(ONES)
        found["in another run"] = other.run(lambda: (write(ONES), inside(ONES)))
        found["in merge_call"] = strategy.run(
            lambda: sv.get_replica_context().merge_call(lambda _: inside(ONES))
        )

        def in_a_thread():
            results = []
            thread = threading.Thread(target=lambda: results.append(inside(ONES)))
            thread.start()
            thread.join()
            return results

        found["in another thread"] = strategy.run(in_a_thread)
        odd = [
            1.0,
            np.float64(1),
            ONES[:2],
            ONES.astype(np.float32),
            ONES.reshape(3, 1),
            [1.0, 1.0, 1.0],
            np.ma.ones(3),
            None,
        ]
        found["of another form"] = [write(x) for x in odd]
        found["not in one piece"] = write(np.ones(6)[::2])
        strategy.registry.is_free = sv.get_strategy().registry.is_free = False
        sv.get_strategy().registry.until = 0
        found["to be compared"] = write(ONES)
        found["seen already"] = write(ONES, is_seen=True)
        sv.get_strategy().registry.until = 100
        before = v._state.tally.steps
        found["counted"] = write(ONES), v._state.tally.steps - before
        with sv.uneven():
            found["in uneven"] = write(ONES)
        return found, v.numpy().tolist(), w.numpy().tolist()

    left = dict.fromkeys(
        ("in plain code", "in merge_call", "to be compared", "in uneven"), FALLBACK
    )
    left |= {
        "in a scope": (FALLBACK,) * 2,
        "in another run": (FALLBACK,) * 2,
        "in another thread": [FALLBACK],
        "of another form": [FALLBACK] * 8,
    }
    made = {
        "as it was": (STORED, STORED),
        "not in one piece": STORED,
        "seen already": STORED,
        "counted": (STORED, 1),
    }
    assert ranks(fn) == [({**left, **made}, [8.0] * 3, [2.0] * 3)] * 2


def test_a_reader_keeps_what_it_has_read(ranks):
    def fn():
        v = prepared()
        kept = []
        for _ in range(4):
            v.assign_add(ONES)
            kept.append(v.read_value()[1:])
        v.assign_add(ONES)
        place = v._state.storage.array.ctypes.data
        del kept[2:]
        v.assign_add(ONES)
        return (
            [one.tolist() for one in kept],
            v.numpy().tolist(),
            v._state.storage.array.ctypes.data == place,
        )

    assert ranks(fn) == [([[2.0, 2.0], [4.0, 4.0]], [12.0] * 3, True)] * 2


def test_auto_is_told_at_every_64th_increment_in_plain_code(ranks):
    def fn():
        sv.get_strategy().check_every = 0
        v = prepared(sync=AUTO)
        v.pin("eager")
        write = v._persistent_writes[ADD]
        if write(ONES) == FALLBACK:  # to be pinned is to be prepared anew
            v.assign_add(ONES)
            write = v._persistent_writes[ADD]
        return [count for count in range(1, 200) if write(ONES) == SAMPLE], v._state.tally.added

    (found, added), other = ranks(fn)
    assert (found, added) == other
    assert [added - 199 + count for count in found] == [64, 128, 192]


def test_nothing_is_prepared_for_a_write_that_waits(ranks):
    def fn():
        v = prepared(sync=AUTO)
        v.pin("deferred")
        for _ in range(5):
            v.assign_add(ONES)
        waits = v.explain().numbers["pending"], v._persistent_writes[ADD](ONES)
        v.pin("eager")
        for _ in range(5):
            v.assign_add(ONES)
        return waits, v.numpy().tolist(), v._persistent_writes[ADD](np.zeros(3))

    assert ranks(fn) == [((5, FALLBACK), [20.0] * 3, STORED)] * 2


def test_errors_are_those_of_the_plain_write(ranks):
    """One replica adds and the other subtracts, or brings nothing; no copy changes, and none of them counts: on some replicas it may be no write."""

    def fn():
        v = prepared()
        v.assign_sub(ONES)
        v.assign_add(ONES)
        crossed = caught(lambda: (v.assign_sub if sv.rank() else v.assign_add)(ONES))
        refused = caught(lambda: v.assign_add(ONES if sv.rank() else None))
        v.assign_add(ONES)
        return (
            type(crossed),
            type(refused),
            v.numpy().tolist(),
            v._state.tally.steps,
            v._state.storage.is_being_written,
        )

    mismatch = sv.MismatchError
    assert ranks(fn) == [
        (mismatch, error, [2.0] * 3, 4, False) for error in (sv.ConfigError, mismatch)
    ]


def test_after_the_job_it_is_refused(ranks):
    def fn():
        v = prepared()
        write = v._persistent_writes[ADD]
        sv.barrier()
        sv.shutdown()
        return write(ONES), type(caught(lambda: v.assign_add(ONES))), v.local_value().tolist()

    assert ranks(fn) == [(FALLBACK, sv.UsageError, [0.0] * 3)] * 2


def test_what_a_write_holds_is_let_go_with_its_variable(ranks):
    def fn():
        v = prepared()
        storage, tally = v._state.storage, v._state.tally
        held = sys.getrefcount(storage), sys.getrefcount(tally)
        for _ in range(50):
            v.assign_add(ONES)
        same = (sys.getrefcount(storage), sys.getrefcount(tally)) == held
        del v
        return same, sys.getrefcount(storage), sys.getrefcount(tally)

    alone = sys.getrefcount(object())
    assert [(same, one - alone, two - alone) for same, one, two in ranks(fn)] == [(True, 1, 1)] * 2


@pytest.mark.parametrize(
    ("dtype", "aggregation", "wanted"),
    [("f4", SUM, 6.0), ("f8", MEAN, 3.0), ("f2", MEAN, 3.0), ("i8", SUM, 6.0)],
)
def test_reads_that_combine_the_copies_are_prepared_and_exact(ranks, dtype, aggregation, wanted):
    """The first read goes by the table, the others by the persistent call; what was read stays, whatever is written later."""

    def fn():
        strategy = sv.MirroredStrategy()
        seen = []
        for shape in ((), (3,), (9_000,)):
            v = sv.Variable(
                np.zeros(shape, dtype), synchronization="ON_READ", aggregation=aggregation
            )
            with strategy.scope():
                w = sv.Variable(
                    np.zeros(shape, dtype), synchronization="ON_READ", aggregation=aggregation
                )
            kept = []
            for _ in range(4):
                for one, where in ((v, sv.get_strategy()), (w, strategy)):
                    where.run(lambda one=one: one.assign(np.full(shape, 2 + 2 * sv.rank(), dtype)))  # noqa: B023
                    kept.append(one.read_value())
                    own, synced = where.run(lambda one=one: (one.read_value(), one.sync()))
                    kept.append(synced)
                    seen += [
                        own.dtype == dtype,
                        bool((own == 2 + 2 * sv.rank()).all()),
                        not kept[-2].flags.writeable,
                    ]
                    where.run(lambda one=one: one.assign(np.full(shape, 9, dtype)))  # noqa: B023
                seen += [
                    bool((one == wanted).all() and one.shape == shape and one.dtype == dtype)
                    for one in kept
                ]
        return all(seen), len(seen)

    (good, count), other = ranks(fn)
    assert good
    assert (good, count) == other


def test_only_one_rank_reads_what_all_have_to(ranks):
    def fn():
        v = sv.Variable(ONES, synchronization="ON_READ", aggregation=SUM)
        for _ in range(3):
            v.read_value()
        error = caught(v.read_value if sv.rank() == 0 else sv.barrier)
        return type(error), "or take this replica's copy" in str(error), v.read_value().tolist()

    assert ranks(fn) == [(sv.MismatchError, rank == 0, [1.0] * 3) for rank in range(2)]


# -- several variables in one call -----------------------------------------------------------------


def several(
    strategy=None,
    *,
    shapes=((), (3,), (2, 2), (0,), (500,)),
    dtype="f8",
    aggregation=SUM,
    sync=ON_WRITE,
):
    """Return variables that hold 0, 1, 2, …"""
    made = []
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        for number, shape in enumerate(shapes):
            made.append(
                sv.Variable(
                    np.full(shape, number, dtype), synchronization=sync, aggregation=aggregation
                )
            )
    return made


@pytest.mark.parametrize(
    ("dtype", "aggregation"), [("f8", SUM), ("f4", MEAN), ("f2", SUM), ("i8", SUM)]
)
def test_a_group_gives_the_bytes_of_writes_one_by_one(ranks, dtype, aggregation):
    """By each operation, in plain code and in run; what is read and kept in between does not change."""

    def fn():
        draw = np.random.default_rng(sv.rank())
        wrong = []
        strategy = sv.MirroredStrategy()
        for owner in (None, strategy):
            together, alone = (
                several(owner, dtype=dtype, aggregation=aggregation) for _ in range(2)
            )
            kept = []

            def step(owner=owner, together=together, alone=alone, kept=kept, wrong=wrong):
                for turn in range(12):
                    values = [
                        np.asarray(draw.standard_normal(v.shape) * 9).astype(dtype)
                        for v in together
                    ]
                    name = ("assign_add", "assign_sub", "assign")[turn // 2 % 3]
                    pairs = list(zip(together, values, strict=True))
                    getattr(sv, f"{name}_all")(iter(pairs) if turn == 3 else pairs)
                    for v, x in zip(alone, values, strict=True):
                        getattr(v, name)(x)
                    if any(
                        v.local_value().tobytes() != w.local_value().tobytes()
                        for v, w in zip(together, alone, strict=True)
                    ):
                        wrong.append((owner, turn, name))
                    if (
                        turn in (4, 9) and sv.rank() == turn % 2
                    ):  # this rank alone has to go to other memory
                        kept += [(v.read_value()[...], v.local_value().tobytes()) for v in together]

            step() if owner is None else owner.run(step)
            wrong += [
                "what was read has changed" for view, before in kept if view.tobytes() != before
            ]
            wrong += [f"{v.explain().numbers}" for v in together if v._state.tally.writes != 12]
        return wrong

    assert ranks(fn) == [[], []]


def test_a_prepared_group_makes_one_prepared_call_in_place(ranks, monkeypatch):
    performed = []
    plain = Communicator.perform
    monkeypatch.setattr(
        Communicator,
        "perform",
        lambda self, name, *rest, **more: (
            performed.append(name) or plain(self, name, *rest, **more)
        ),
    )

    def fn():
        made = several()
        pairs = [(v, np.ones(v.shape)) for v in made]
        sv.assign_add_all(pairs)
        sv.barrier()
        performed.clear()
        sv.barrier()
        places = [v._state.storage.moves for v in made]
        for _ in range(20):
            sv.assign_add_all(pairs)
        made[1].assign_add(np.ones(3))  # by itself, in the same memory
        made[1].assign_sub(np.ones(3))
        one = made[1]._state.storage.array.ctypes.data - made[0]._state.storage.array.ctypes.data
        return (
            [v.numpy().reshape(-1)[:1].tolist() for v in made],
            [v._state.storage.moves for v in made] == places,
            one,
        )

    wanted = [[42.0], [43.0], [44.0], [], [46.0]]
    assert ranks(fn) == [(wanted, True, 8)] * 2
    assert [name for name in performed if name == "assign_add_all"] == []


def test_what_is_wrong_in_a_prepared_group_is_refused_and_told(ranks):
    """A value of another shape on one rank, other variables on one rank, a variable twice, a variable that is gone."""

    def fn():
        rank = sv.rank()
        made = several(shapes=((2,),) * 4)
        ones = [np.ones(2)] * 4
        pairs = list(zip(made, ones, strict=True))
        for _ in range(3):
            sv.assign_add_all(pairs)
        odd = [*pairs[:3], (made[3], np.ones(3) if rank else ones[3])]
        errors = [caught(lambda: sv.assign_add_all(odd))]
        errors.append(caught(lambda: sv.assign_add_all(pairs[::-1] if rank else pairs)))
        errors.append(caught(lambda: sv.assign_add_all([*pairs[:3], pairs[2]])))
        sv.assign_add_all([*pairs[:3], (made[3], [1.0, 1])])  # of another form: all the same
        sv.assign_add_all(pairs)
        values = [v.numpy().tolist() for v in made]
        other = several(shapes=((2,),))[0]
        sv.assign_add_all([*pairs[:3], (other, ones[0])])  # begins with the same, and has as many
        sv.assign_add_all(pairs)
        return (
            [type(one) for one in errors],
            values,
            made[3].numpy().tolist(),
            other.numpy().tolist(),
            made[0]._state.storage.is_being_written,
        )

    values = [[number + 10.0] * 2 for number in range(4)]
    config, mismatch = sv.ConfigError, sv.MismatchError
    wanted = [
        ([first, mismatch, config], values, [15.0] * 2, [2.0] * 2, False)
        for first in (mismatch, config)
    ]
    assert ranks(fn) == wanted


def test_a_prepared_group_is_looked_at_as_its_first_variable_is(ranks):
    def fn():
        sv.get_strategy().check_every = 10
        made = several()
        pairs = [(v, np.zeros(v.shape)) for v in made]
        for _ in range(12):
            sv.assign_add_all(pairs)
        if sv.rank():
            made[2]._state.storage.array[...] = 7
        errors = [caught(lambda: sv.assign_add_all(pairs)) for _ in range(8)]
        return [number for number, error in enumerate(errors, 13) if error is not None], str(
            errors[7]
        ).count(repr(made[2].name)) > 0

    assert ranks(fn) == [([20], True)] * 2


def test_a_group_goes_with_its_variables(ranks):
    def fn():
        made = several()
        pairs = [(v, np.zeros(v.shape)) for v in made]
        for _ in range(3):
            sv.assign_add_all(pairs)
        gone = [weakref.ref(v) for v in made]
        del made, pairs
        return [one() for one in gone]

    assert ranks(fn) == [[None] * 5] * 2


@pytest.mark.parametrize("unusual", ["nothing", "the others' calls", "a full table"])
def test_a_value_that_all_replicas_write_is_compared_by_a_prepared_call(
    ranks, monkeypatch, unusual
):
    """In cross context all write the same. Where one makes the call the long way, or brings something else, all come to the same end."""
    if unusual == "a full table":
        monkeypatch.setattr(replica_call, "_ALIKE_MAX", 0)

    def fn():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(np.zeros(3), synchronization=ON_WRITE, aggregation=SUM, name="v")
        communicator = strategy.communicator
        performed, perform = [], communicator.perform
        communicator.perform = lambda what, *rest, **more: (
            performed.append(what),
            perform(what, *rest, **more),
        )[1]
        for turn in range(10):
            if unusual == "the others' calls":
                communicator.keeps_persistent = (turn + sv.rank()) % 2 == 0
                if not communicator.keeps_persistent:
                    communicator.persistent_calls.clear()
            v.assign_add(ONES)
        often = len(performed)
        found = []
        for turn in range(3):
            with pytest.raises(sv.MismatchError, match="pass different values") as info:
                v.assign(ONES * sv.rank()) if turn == 1 else v.assign_add(ONES * (2 - sv.rank()))
            found.append(str(info.value).count("passes float64[3] with digest"))
            assert v.numpy().tolist() == [10.0 + turn] * 3
            v.assign_add(ONES)
        with pytest.raises((sv.ConfigError, sv.MismatchError)):
            v.assign_add(ONES if sv.rank() else np.ones(4))
        v.assign_add(ONES)
        return v.numpy().tolist(), found, often

    for value, found, often in ranks(fn):
        assert value == [14.0] * 3
        assert found == [2] * 3
        assert often <= 1 if unusual == "nothing" else often >= 4, (
            "the first call is prepared at once"
        )
