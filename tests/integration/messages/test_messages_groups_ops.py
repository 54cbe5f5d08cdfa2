"""send and recv, meshes, groups that end, ops beyond the common ones, scales and weights, calls that are started."""

import gc
import logging

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.collectives.groups import Group, communicator_of
from syncvar.core.reduce_ops import identity, reduction
from syncvar.core.settings import RuntimeConfig
from syncvar.testing import run_ranks

SOON = RuntimeConfig(collective_timeout_s=60.0, report_after_s=0.05, rendezvous_timeout_s=60.0)


@pytest.fixture(params=["links", "shm"])
def ranks(request):
    def run(size, fn):
        results = run_ranks(size, fn, config=SOON, shared=request.param == "shm", timeout_s=120)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run


# -- messages --------------------------------------------------------------------------------------


def test_messages_of_one_tag_arrive_in_order_and_tags_do_not_disturb_each_other(ranks):
    def fn():
        if sv.rank() == 0:
            for number in range(6):
                sv.send(np.full(number, number), 1, tag=number % 2)
            return None
        odd = [sv.recv(0, tag=1).tolist() for _ in range(3)]
        return odd, [sv.recv(0, tag=0).tolist() for _ in range(3)]

    assert ranks(2, fn)[1] == ([[1], [3] * 3, [5] * 5], [[], [2] * 2, [4] * 4])


@pytest.mark.parametrize("count", [0, 1, 8192, 8193, 300_000])
def test_a_message_of_any_length_arrives_and_may_be_overwritten(ranks, count):
    def fn():
        if sv.rank() == 0:
            x = np.arange(float(count))
            work = sv.send(x, 1, async_op=True)
            x[...] = -1
            return work.wait()
        out = np.empty(count)
        return sv.recv(0, out=out) is out and bool((out == np.arange(float(count))).all())

    assert ranks(2, fn) == [None, True]


def test_a_message_keeps_its_shape_and_dtype(ranks):
    values = [np.ones((2, 3), np.int8).T, np.float16(2.5), np.zeros((0, 4), bool), [[1, 2], [3, 4]]]

    def fn():
        if sv.rank() == 1:
            return [
                (got.shape, got.dtype.name, got.tolist()) for got in (sv.recv(0) for _ in values)
            ]
        for value in values:
            sv.send(value, 1)
        return None

    arrays = [np.asarray(value) for value in values]
    assert ranks(2, fn)[1] == [(array.shape, array.dtype.name, array.tolist()) for array in arrays]


def test_a_rank_may_send_to_itself(ranks):
    def fn():
        x = np.ones(2)
        sv.send(x, sv.rank(), tag=4)
        x[...] = 7
        sv.send(5, sv.rank(), async_op=True).wait()
        with pytest.raises(sv.UsageError, match="sent itself nothing"):
            sv.recv(sv.rank(), tag=9)
        return sv.recv(sv.rank(), tag=4).tolist(), int(sv.recv(sv.rank(), async_op=True).wait())

    assert ranks(2, fn) == [([1.0, 1.0], 5)] * 2


def test_nothing_is_kept_of_a_tag_with_which_a_rank_has_sent_to_itself():
    def fn():
        rank = sv.rank()
        for step in range(50):
            sv.send(step, rank, tag=step)
            assert int(sv.recv(rank, tag=step)) == step
            work = sv.recv(rank, tag=step, async_op=True)
            with pytest.raises(sv.UsageError, match="sent itself nothing"):
                sv.recv(rank, tag=100 + step)
            sv.send(-step, rank, tag=step)
            assert int(work.wait()) == -step
        sv.send(1, rank, tag=7)
        return list(communicator_of(None).own_messages)

    assert run_ranks(2, fn, config=SOON, timeout_s=120) == [[7]] * 2


def test_a_receive_from_oneself_may_be_started_before_the_message_is_sent(ranks):
    def fn():
        rank = sv.rank()
        group = sv.new_group([1, 0])
        out = np.zeros(2)
        first, second = sv.recv(rank, async_op=True), sv.recv(rank, async_op=True, out=out)
        tagged, other = (
            sv.recv(rank, tag=3, async_op=True),
            sv.recv_object(rank, tag=4, async_op=True),
        )
        grouped = sv.recv(group.rank, group=group, async_op=True)
        narrow = sv.recv(rank, tag=5, out=np.zeros(3), async_op=True)
        assert not first.done()
        with pytest.raises(
            sv.UsageError,
            match=f"recv from rank {rank}, which is this one: it has sent itself nothing with tag 0.*Send first, or wait after that",
        ):
            first.wait(timeout=5)
        with pytest.raises(sv.UsageError, match=r"sent itself nothing.*async_op=True"):
            sv.recv(rank)  # those that were started come first
        sv.send(7, rank, tag=3)
        sv.send(8, group.rank, group=group)
        sv.send([1.0, 2.0], rank)
        assert first.done()
        assert not second.done()
        sv.send([3.0, 4.0], rank, async_op=True).wait()
        sv.send([5.0, 6.0], rank)  # nobody has asked for it yet
        sv.send_object({"a": 1}, rank, tag=4)
        sv.send([1.0], rank, tag=5)
        with pytest.raises(sv.ConfigError, match="out has shape"):
            narrow.wait()
        seen = [work.wait().tolist() for work in (second, first, tagged, grouped)]
        assert second.wait() is out
        return [*seen, other.wait(), sv.recv(rank).tolist()]

    assert ranks(2, fn) == [[[3.0, 4.0], [1.0, 2.0], 7, 8, {"a": 1}, [5.0, 6.0]]] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sv.send(1, 9), "dest 9 is not in the group"),
        (lambda: sv.send(1, "x"), "dest must be a rank"),
        (
            lambda: sv.recv(-1),
            "source -1 is not in the group: .*None is no rank.*write message = sv.recv_any",
        ),
        (
            lambda: sv.recv(None),
            "source must be a rank, not None: write message = sv.recv_any",
        ),
        (lambda: sv.send(1, -2), "dest -2 is not in the group: .*None is no rank"),
        (
            lambda: sv.send({"a": 7}, 0),
            "send takes an array or a number, not {'a': 7}: write sv.send_object.o, dest.",
        ),
        (lambda: sv.send([{"a": 7}], 0), "send takes an array or a number"),
        (lambda: sv.send("text", 0), "send takes an array or a number, not 'text'"),
        (lambda: sv.send(1, 0, tag=-1), "tag must be"),
        (lambda: sv.recv(0, tag=1.5), "tag must be"),
    ],
)
def test_wrong_ends_are_refused_before_anything_is_sent(call, words):
    with pytest.raises(sv.ConfigError, match=words):
        call()


@pytest.mark.parametrize("wrong", [{"source": 9}, {"source": 0, "recv_tag": -1}])
def test_a_wrong_half_of_sendrecv_sends_nothing(wrong):
    with pytest.raises(sv.ConfigError):
        sv.sendrecv(1.0, 0, **wrong)
    with pytest.raises(sv.UsageError, match="has sent itself nothing"):
        sv.recv(0)


def test_objects_are_messages_in_order_with_arrays_and_told_apart(ranks):
    def fn():
        other = 1 - sv.rank()
        big = "x" * 200_000  # longer than what is sent at once
        if sv.rank() == 0:
            for one in ({"a": 7, "b": [3.14, None]}, (1, "two"), big):
                sv.send_object(one, other, tag=4)
            work = sv.send_object({"later": np.arange(3)}, other, async_op=True)
            sv.send(np.arange(2), other, tag=5)
            sv.send_object("no array", other, tag=5)
            work.wait()
            with pytest.raises(sv.ConfigError, match="cannot travel"):
                sv.send_object(object(), other, tag=6)
            sv.send_object("after it", other, tag=6)
            return
        assert [sv.recv_object(other, tag=4) for _ in range(2)] == [
            {"a": 7, "b": [3.14, None]},
            (1, "two"),
        ]
        assert sv.recv_object(other, tag=4, timeout=20.0) == big
        later = sv.recv_object(other, async_op=True).wait()
        assert later["later"].tolist() == [0, 1, 2]
        with pytest.raises(
            sv.ConfigError,
            match=r"the message is an array, int64\[2\], not an object: receive it with sv\.recv\(source\)",
        ):
            sv.recv_object(other, tag=5)
        with pytest.raises(
            sv.ConfigError,
            match=r"the message is an object, not an array: receive it with sv\.recv_object",
        ):
            sv.recv(other, tag=5)
        with pytest.raises(sv.MismatchError, match="cannot travel"):
            sv.recv_object(other, tag=6)
        assert sv.recv_object(other, tag=6) == "after it"
        return

    ranks(2, fn)
    sv.send_object([1], 0)
    sv.send(2.0, 0)
    with pytest.raises(sv.ConfigError, match="not an array"):
        sv.recv(0)
    with pytest.raises(sv.ConfigError, match="not an object"):
        sv.recv_object(0)
    with pytest.raises(
        sv.UsageError,
        match="recv_object from rank 0, which is this one: it has sent itself nothing",
    ):
        sv.recv_object(0)


def test_a_wrong_value_is_told_to_the_receiver_and_the_next_message_arrives(ranks):
    def fn():
        if sv.rank() == 0:
            with pytest.raises(sv.ConfigError):
                sv.send("text", 1)
            sv.send(3, 1)
            return None
        with pytest.raises(sv.MismatchError, match="rank 0"):
            sv.recv(0)
        return int(sv.recv(0))

    assert ranks(2, fn)[1] == 3


def test_messages_within_a_group_name_its_ranks(ranks):
    def fn():
        group = sv.new_group([2, 0])
        if sv.rank() == 2:
            sv.send(8, 1, group=group)
        return int(sv.recv(0, group=group)) if sv.rank() == 0 else None

    assert ranks(3, fn) == [8, None, None]


# -- groups ----------------------------------------------------------------------------------------


def test_a_mesh_has_a_group_for_each_line(ranks):
    def fn():
        grid = sv.mesh((2, -1))
        one = sv.mesh((4,), ["data"])
        return (
            grid.coordinates,
            grid.row.ranks,
            grid.column.ranks,
            grid.axis("row").ranks,
            grid.axis(0).ranks,
            int(sv.all_reduce(sv.rank(), group=grid.row)),
            one.axis("data").size,
            grid.rank_at(1, 0),
        )

    results = ranks(4, fn)
    assert results[2] == ((1, 0), (2, 3), (0, 2), (2, 3), (0, 2), 5, 4, 2)
    assert [one[0] for one in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("shape", [(3,), (0, 1), (-1, -1), "ab", 5, (2, 2)])
def test_a_mesh_holds_exactly_the_world(shape):
    with pytest.raises(sv.ConfigError, match="mesh"):
        sv.mesh(shape)


def test_a_destroyed_group_refuses_calls_and_others_go_on(ranks):
    def fn():
        group = sv.new_group(range(sv.world_size()))
        sv.all_reduce(1, group=group)
        group.destroy()
        group.destroy()
        with pytest.raises(sv.UsageError, match="destroyed"):
            sv.all_reduce(1, group=group)
        with pytest.raises(sv.UsageError, match="world cannot"):
            Group(current().world).destroy()
        return int(sv.all_reduce(1))

    assert ranks(2, fn) == [2, 2]


# -- ops -------------------------------------------------------------------------------------------


def test_minloc_and_maxloc_tell_the_lowest_rank_and_the_first_nan(ranks):
    def fn():
        x = np.array([1.0, -sv.rank(), 2.0, np.nan if sv.rank() == 1 else 0.0])
        low, where = sv.all_reduce(x, "minloc")
        high, place = sv.all_reduce(x, "maxloc")
        values, ranks_of = sv.reduce(x[:3], "minloc", root=1) or (None, None)
        if sv.rank() == 1:
            assert values.tolist() == [1.0, -2.0, 2.0]
            assert ranks_of.tolist() == [0, 2, 0]
        return (
            low[:3].tolist(),
            where.tolist(),
            place.tolist(),
            bool(np.isnan(low[3]) and np.isnan(high[3])),
        )

    assert ranks(3, fn) == [([1.0, -2.0, 2.0], [0, 2, 0, 1], [0, 0, 0, 1], True)] * 3


def test_a_registered_op_gets_the_lower_ranks_on_the_left(ranks):
    sv.register_op("leftmost", lambda left, right: left, replace=True)
    sv.register_op("hypot", np.hypot, replace=True)

    def fn():
        small = sv.all_reduce(np.array([sv.rank() + 1]), "leftmost").tolist()
        large = sv.all_reduce(np.full(200_000, sv.rank() + 1), "LEFTMOST")
        return (
            small,
            bool((large == 1).all()),
            float(sv.all_reduce(np.array([3.0, 4.0])[sv.rank() % 2], "hypot")),
        )

    assert ranks(2, fn) == [([1], True, 5.0)] * 2


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("count", [1, 5, 20_000, 300_000])
def test_the_ranks_keep_their_order_at_every_size(ranks, size, count):
    sv.register_op("rightmost", lambda left, right: right, replace=True)

    def fn():
        mine = np.full(count, sv.rank())
        same = np.zeros(count)
        right = [
            sv.all_reduce(mine, "rightmost"),
            sv.reduce_scatter(np.full(size, sv.rank()), "rightmost"),
        ]
        rooted = sv.reduce(mine, "rightmost", root=1)
        right += [] if rooted is None else [rooted]
        return all(bool((one == size - 1).all()) for one in right), int(
            sv.all_reduce(same, "minloc")[1].max()
        )

    assert ranks(size, fn) == [(True, 0)] * size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sum", np.add), "built-in"),
        (("a b", np.add), "letters"),
        (("twice", 3), "function"),
        ((3, np.add), "letters"),
    ],
)
def test_a_wrong_op_is_refused(arguments, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.register_op(*arguments)


def test_an_op_cannot_be_registered_twice_by_accident():
    sv.register_op("once", np.add, replace=True)
    with pytest.raises(sv.ConfigError, match="replace=True"):
        sv.register_op("once", np.add)


COMBINING = {
    "all_reduce": lambda x, **how: sv.all_reduce(x, **how),
    "number": lambda x, **how: sv.all_reduce(float(x[0]), **how),
    "structure": lambda x, **how: sv.all_reduce({"x": x}, **how)["x"],
    "started": lambda x, **how: sv.all_reduce(x, async_op=True, **how).wait(),
    "reduce": lambda x, **how: sv.reduce(x, **how),
    "reduce_scatter": lambda x, **how: sv.reduce_scatter(x, **how),
    "scan": lambda x, **how: sv.scan(x, **how),
    "shards": lambda x, **how: sv.all_reduce_shards({sv.rank(): x}, **how),
}


def test_an_op_may_be_a_member_of_the_enumeration(ranks):
    def body():
        x = np.arange(4.0) + sv.rank()
        for call in COMBINING.values():
            for op in (sv.ReduceOp.SUM, sv.ReduceOp.MEAN):
                for _ in range(3):  # the first calls are made another way than later ones
                    assert np.array_equal(call(x, op=op), call(x, op=op.value))

    ranks(2, body)


def test_what_is_no_op_is_refused_by_every_call_and_the_next_one_works(ranks):
    def body():
        for call in COMBINING.values():
            for op in (["sum"], {"sum"}, None, 3):
                with pytest.raises(sv.ConfigError, match=r"op .*must be one of sum, mean"):
                    call(np.ones(4), op=op)
        assert sv.all_reduce(1) == 2

    ranks(2, body)


def test_a_timeout_is_any_positive_number(ranks):
    def body():
        for timeout in (np.float32(50), np.int64(50), np.float64(50), 10**400, float("inf")):
            for call in COMBINING.values():
                call(np.ones(4), timeout=timeout)
            assert sv.all_reduce(1, async_op=True).wait(timeout) == 2
            strategy = sv.MirroredStrategy(timeout=timeout)
            assert type(strategy.timeout) is float
            assert strategy.reduce("SUM", 1.0, axis=None) == 2

    ranks(2, body)


@pytest.mark.parametrize(
    "timeout", [0, -1, float("nan"), True, np.True_, "5", np.array(5.0), 1j], ids=str
)
def test_what_is_no_time_is_refused(timeout):
    with pytest.raises(
        sv.ConfigError, match="timeout must be a positive number of seconds or None"
    ):
        sv.all_reduce(1, timeout=timeout)
    with pytest.raises(
        sv.ConfigError, match="timeout must be a positive number of seconds or None"
    ):
        sv.MirroredStrategy(timeout=timeout)


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        ("and", "float32", "bools and integers"),
        ("xor", "complex64", "bools and integers"),
        ("minloc", "complex128", "no order"),
        ("sum", "bool", "no meaning"),
        ("nand", "int8", "op must be one of"),
    ],
)
def test_an_op_without_meaning_for_a_dtype_is_refused(op, dtype, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.all_reduce(np.zeros(2, dtype), op)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float32"])
def test_the_identity_changes_nothing(op, dtype):
    if dtype == "float32" and op in ("and", "or", "xor"):
        return
    how = reduction(op, np.dtype(dtype))
    x = np.array([0, 1, 2, 100], dtype)
    neutral = np.full(4, identity(how), dtype)
    assert how.ufunc(neutral, x).tolist() == x.tolist() == how.ufunc(x, neutral).tolist()


def test_exscan_of_an_op_without_identity_is_refused():
    with pytest.raises(sv.ConfigError, match="no identity"):
        sv.exscan(np.ones(2), "minloc")


# -- scales and weights ----------------------------------------------------------------------------


def test_prescale_is_each_ranks_own_and_postscale_everybodys(ranks):
    def fn():
        x = np.full(3, 4.0, np.float16)
        made = sv.all_reduce(x, prescale=sv.rank() + 1, postscale=0.5)
        mean = sv.all_reduce(np.full(2, sv.rank(), np.float32), "mean", weight=sv.rank())
        out = np.empty(1)
        return (
            made.dtype.name,
            made.tolist(),
            mean.tolist(),
            sv.all_reduce(np.ones(1), postscale=3, out=out) is out,
            out.tolist(),
        )

    assert ranks(3, fn) == [("float16", [12.0] * 3, [np.float32(5 / 3)] * 2, True, [9.0])] * 3


def test_different_postscales_are_a_mismatch(ranks):
    def fn():
        with pytest.raises(sv.MismatchError):
            sv.all_reduce(np.ones(2), postscale=1.0 + sv.rank())
        return int(sv.all_reduce(1))

    assert ranks(2, fn) == [2, 2]


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (np.arange(3), {"prescale": 0.5}, "rounded"),
        (np.ones(3), {"prescale": "x"}, "must be a number"),
        (np.ones(3), {"postscale": 1j}, "real number"),
        (np.ones(3), {"weight": 2.0}, "belongs to the mean"),
        ({"a": np.ones(3)}, {"prescale": 2.0}, "one array"),
        (np.ones(3), {"op": "minloc", "out": np.ones(3)}, "two arrays"),
    ],
)
def test_scales_that_cannot_be_are_refused(x, options, words):
    with pytest.raises(sv.ConfigError, match=words):
        sv.all_reduce(x, **options)


# -- algorithms and started calls ------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "tree", "reproducible", "owners", "direct"])
def test_a_forced_algorithm_gives_the_same_sum(ranks, algorithm):
    def fn():
        return [
            int(sv.all_reduce(np.full(count, sv.rank()), algorithm=algorithm).sum())
            for count in (1, 7, 100_000)
        ]

    assert ranks(3, fn) == [[3, 21, 300_000]] * 3


def test_an_unknown_algorithm_is_refused_and_told(ranks):
    def fn():
        with pytest.raises((sv.ConfigError, sv.MismatchError)):
            sv.broadcast(np.ones(3), algorithm="rign" if sv.rank() == 0 else None)
        return int(sv.all_reduce(1))

    assert ranks(2, fn) == [2, 2]


def test_the_error_of_a_started_call_says_where_it_was_started(ranks):
    def fn():
        work = sv.all_reduce(np.ones(2 + sv.rank()), async_op=True)
        with pytest.raises(sv.MismatchError) as caught:
            work.wait()
        return any(
            "was started at" in note and "test_messages_groups_ops" in note
            for note in caught.value.__notes__
        )

    assert ranks(2, fn) == [True] * 2


def test_a_started_call_that_nobody_waits_for_is_waited_for_and_reported(ranks, caplog):
    def fn():
        sv.all_gather(np.ones(300_000), async_op=True)
        gc.collect()

    with caplog.at_level(logging.WARNING, "syncvar"):
        ranks(2, fn)
    for record in caplog.records:
        assert "not waited for" in record.getMessage()
        assert "test_messages_groups_ops" in record.getMessage()


@pytest.mark.filterwarnings("error")
def test_a_rank_of_weight_zero_takes_no_part():
    def fn():
        rank = sv.rank()
        x = np.full(3, np.nan if rank else 2.0)
        return sv.all_reduce(x, "mean", weight=0 if rank else 5).tolist(), sv.all_reduce(
            x, "mean", weight=0.0
        ).tolist()

    for shared in (False, True):
        for some, none in run_ranks(2, fn, shared=shared):
            assert some == [2.0] * 3
            assert np.isnan(none).all()


def test_tags_that_are_not_used_any_more_are_let_go_and_can_be_used_again(ranks):
    def fn():
        rank, many = sv.rank(), 250
        world = current().world
        flow = world.engine.flow
        kept = sv.recv(1 - rank, tag=10**6, async_op=True)  # waits all the time
        sv.send(np.arange(3), 1 - rank, tag=10**6 + 1)  # is taken after all others
        for turn in range(2):
            for tag in range(many):
                if rank == 0:
                    sv.send(np.full(2, tag + turn), 1, tag=tag)
                    assert sv.recv(1, tag=tag).tolist() == [tag + turn + 1] * 2
                else:
                    sv.send(sv.recv(0, tag=tag) + 1, 0, tag=tag)
        sv.barrier()
        counts = len(world.streams), len(flow._credits), len(flow._owed)
        sv.send(np.array(7), 1 - rank, tag=10**6)
        return counts, int(kept.wait()), sv.recv(1 - rank, tag=10**6 + 1).tolist()

    for counts, kept, late in ranks(2, fn):
        assert max(counts) <= 140, counts
        assert (kept, late) == (7, [0, 1, 2])


def test_an_op_is_the_same_however_it_is_written(ranks):
    """A member of ReduceOp, or its name in any case; also where ranks write it differently, and in structures."""
    calls = [
        sv.all_reduce,
        sv.reduce,
        sv.reduce_scatter,
        sv.scan,
        sv.exscan,
        lambda x, op: sv.all_reduce({"a": x, "b": 1}, op),
        lambda x, op: sv.reduce([x, x], op),
        lambda x, op: sv.all_reduce(x, op, weight=2.0),
        lambda x, op: sv.all_reduce(x, op, reproducible=True),
        lambda x, op: sv.all_reduce_shards({sv.rank(): x}, op),
        lambda x, op: sv.MirroredStrategy().reduce(op, x, axis=None),
    ]

    def fn():
        for call in calls:
            for turn in range(3):
                call(np.arange(4.0), [sv.ReduceOp.MEAN, "mean", "MEAN"][(sv.rank() + turn) % 3])
        return float(sv.all_reduce(1.0, op=sv.ReduceOp.MEAN))

    assert ranks(2, fn) == [1.0, 1.0]
