"""Structures and groups of variables: one transfer for many arrays, the same result as one after another."""

import threading
import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current, use
from syncvar.runtime.compile_reduce import pieces
from syncvar.testing import run_ranks
from tests.support.harness import covering

COUNTS = [(3, 1, 5), (0, 7, 0), (1,) * 40, (70_000, 5, 300_000, 1), (16_384, 16_384)]


@pytest.fixture(params=["links", "shm"])
def ranks(request):
    def run(size, fn):
        results = run_ranks(size, fn, shared=request.param == "shm", timeout_s=120)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_pieces_cover_the_stretch_once(counts):
    whole = np.concatenate([np.arange(count) + 1000 * index for index, count in enumerate(counts)])
    total = whole.size
    for start in {0, total // 3, total - 1}:
        for stop in {start, min(total, start + 1), total // 2, total}:
            made = np.full(max(0, stop - start), -1)
            for index, first, last, place in pieces(counts, start, stop):
                made[place : place + last - first] = np.arange(first, last) + 1000 * index
            assert made.tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize(
    "counts", COUNTS, ids=lambda counts: f"{len(counts)} arrays, {sum(counts)}"
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_structure_is_reduced_like_its_leaves(ranks, size, counts):
    def fn():
        tree = {
            f"leaf{index}": np.arange(count, dtype=np.float32) % 5 * (sv.rank() + 1)
            for index, count in enumerate(counts)
        }
        tree["half"] = np.full(3, sv.rank(), np.float16)
        tree["more"] = [np.full((2, 2), sv.rank(), np.float16).T, np.int64(sv.rank())]
        together = sv.all_reduce(tree, reproducible=True)
        out = {
            name: np.zeros_like(value) for name, value in tree.items() if name.startswith("leaf")
        }
        sv.all_reduce({name: tree[name] for name in out}, "mean", out=out)
        right = all(
            (together[name] == sv.all_reduce(tree[name], reproducible=True)).all() for name in out
        )
        right = right and all(
            (out[name] == sv.all_reduce(tree[name], "mean")).all() for name in out
        )
        return (
            right,
            together["half"].tolist(),
            together["more"][0].tolist(),
            int(together["more"][1]),
        )

    ones = float(sum(range(size)))
    assert ranks(size, fn) == [(True, [ones] * 3, [[ones] * 2] * 2, int(ones))] * size


def test_a_group_of_variables_is_written_like_one_after_another(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        name = "shm" if current().shm else "links"
        with strategy.scope():
            made = [
                sv.Variable(
                    np.zeros(shape, dtype),
                    aggregation=how,
                    synchronization=mode,
                    name=f"{name}{number}",
                )
                for number, (shape, dtype, how, mode) in enumerate(
                    [
                        ((4,), "float32", "SUM", "ON_WRITE"),
                        ((2, 3), "float32", "MEAN", "ON_WRITE"),
                        ((), "float64", "SUM", "ON_WRITE"),
                        ((70_000,), "float32", "SUM", "ON_WRITE"),
                        ((3,), "float16", "SUM", "ON_WRITE"),
                        ((2,), "int64", "SUM", "ON_WRITE"),
                        ((2,), "float32", "ONLY_FIRST_REPLICA", "ON_WRITE"),
                        ((2,), "float32", "SUM", "ON_READ"),
                        ((2,), "float32", "NONE", "NONE"),
                    ]
                )
            ]

        def step():
            kept = made[0].numpy()
            before = kept.tolist()
            ones = [(v, np.full(v.shape, sv.rank() + 1, v.dtype)) for v in made]
            sv.assign_all(ones)
            sv.assign_add_all(ones)
            sv.assign_add_all(ones)
            sv.assign_sub_all(ones)
            return [v.local_value().reshape(-1)[-1].item() for v in made], kept.tolist() == before

        return strategy.run(step)

    zero, one = ranks(2, fn)
    shared = [6.0, 3.0, 6.0, 6.0, 6.0, 6, 2.0]
    assert zero == ([*shared, 2.0, 2.0], True)
    assert one == ([*shared, 4.0, 4.0], True)


def test_a_wrong_value_writes_nothing_anywhere(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v, w = (
                sv.Variable(np.ones(2), aggregation="SUM"),
                sv.Variable(np.ones(3), aggregation="SUM"),
            )

        def step():
            with pytest.raises((sv.ConfigError, sv.MismatchError)):
                sv.assign_add_all([(v, np.ones(2)), (w, np.ones(3 + sv.rank()))])
            with pytest.raises(sv.MismatchError):
                sv.assign_add_all([(v, np.ones(2)), (w, np.ones(3))][:: 1 - 2 * sv.rank()])
            return v.numpy().tolist() + w.numpy().tolist()

        return strategy.run(step)

    assert ranks(2, fn) == [[1.0] * 5] * 2


def test_what_is_no_group_of_variables_is_refused():
    v = sv.Variable(1.0)
    with pytest.raises(sv.ConfigError, match="named twice"):
        sv.assign_all([(v, 1.0), (v, 2.0)])
    with pytest.raises(sv.ConfigError, match="pairs of a variable and a value"):
        sv.assign_add_all([(1.0, v)])
    with pytest.raises(sv.ConfigError, match="pairs of a variable and a value"):
        sv.assign_sub_all([v])
    with sv.MirroredStrategy().scope():
        other = sv.Variable(1.0)
    with pytest.raises(sv.UsageError, match="another strategy"):
        sv.assign_all([(v, 1.0), (other, 2.0)])
    sv.assign_all([])
    assert float(v) == 1.0


def test_a_result_may_go_where_another_array_lies(ranks):
    def fn():
        a, b = np.full(400_000, 1.0, np.float32), np.full(400_000, 10.0, np.float32)
        sv.all_reduce([a, b], out=[b, a])
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(np.full(400_000, 1.0, np.float32), aggregation="SUM")
            w = sv.Variable(np.full(400_000, 10.0, np.float32), aggregation="MEAN")
        strategy.run(lambda: sv.assign_all([(v, w), (w, v)]))
        swapped = [v.numpy()[-1].item(), w.numpy()[-1].item()]
        return a[-1].item(), b[-1].item(), bool((a == 20).all() and (b == 2).all()), swapped

    assert ranks(2, fn) == [(20.0, 2.0, True, [20.0, 1.0])] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_operands_may_be_views_of_each_other_and_of_the_copies(ranks, dtype):
    def fn():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            group = [
                sv.Variable(np.full((2, 3), index, dtype), aggregation="SUM") for index in range(6)
            ]

        def step():
            flat = np.arange(24).astype(dtype) + sv.rank()
            reads = [v.read_value(copy=False) for v in group]
            values = [
                flat[:6].reshape(2, 3),
                flat[12:24:2].reshape(2, 3),
                flat[3:9].reshape(3, 2).T,
                reads[4],
                reads[3],
                flat[6:12].reshape(2, 3),
            ]
            wanted = [read + sum_of(value) for read, value in zip(reads, values, strict=True)]
            sv.assign_add_all(list(zip(group, values, strict=True)))
            return [np.array_equal(v.numpy(), want) for v, want in zip(group, wanted, strict=True)]

        def sum_of(value):
            return sv.all_reduce(np.array(value))

        return strategy.run(step)

    assert ranks(2, fn) == [[True] * 6] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_results_of_a_structure_go_to_arrays_that_are_not_contiguous(ranks, op, dtype):
    def fn():
        values = [
            np.arange(6).astype(dtype).reshape(2, 3) * (sv.rank() + 1),
            np.array(7 + sv.rank()).astype(dtype),
            np.arange(4).astype(dtype),
        ]
        room = np.full((4, 2, 4), -1, dtype)
        outs = [room[0, :, :3], room[1, 0, 0:1].reshape(()), room[:, 1, 3]]
        made = sv.all_reduce(values, op, out=outs)
        alone = [sv.all_reduce(value, op) for value in values]
        right = all(
            one is out and np.array_equal(one, want)
            for one, out, want in zip(made, outs, alone, strict=True)
        )
        return right, int((room == -1).sum())

    assert ranks(2, fn) == [(True, 32 - 6 - 1 - 4)] * 2


def test_a_value_of_bool_is_refused_in_a_group_as_alone():
    v, flag = sv.Variable(1.0), sv.Variable(True, aggregation="SUM")
    with pytest.raises(sv.ConfigError, match="bool has no sum"):
        sv.assign_add_all([(v, 1.0), (flag, np.array(True))])
    assert float(v) == 1.0


@pytest.mark.parametrize("where", ["resident", "private"])
def test_a_result_may_go_beside_where_its_own_array_lies(ranks, where):
    def fn():
        whole = _placed(where, 700_001, np.float32)
        wanted = sv.all_reduce(whole[1:].copy())
        sv.all_reduce([whole[1:], np.ones(5)], out=[whole[:-1], np.zeros(5)])
        return np.array_equal(whole[:-1], wanted)

    assert ranks(2, fn) == [True, True]


LONG = (300_000, 7, 70_000, 400_000, 64)


def _placed(where, count, dtype):
    made = sv.empty(count, dtype) if where == "resident" else np.empty(count, dtype)
    made[...] = np.arange(count) % 7 + sv.rank() + 1
    return made


PLACES = [
    (2, "resident", "x"),
    (2, "private", "x"),
    (2, "private", "resident"),
    (3, "resident", "resident"),
    (3, "resident", "private"),
    (3, "by rank", "x"),
    (4, "by rank", "other by rank"),
    (4, "resident", "x or resident"),
]


@pytest.mark.parametrize(
    ("places", "what"), covering(PLACES, [(np.float32, "sum"), (np.float16, "mean")], strength=1)
)
def test_long_arrays_are_reduced_where_they_lie(places, what):
    (size, of_x, of_out), (dtype, op) = places, what
    counts = LONG if op == "sum" else LONG[:3]

    def where(word, index):
        odd = (sv.rank() + index) % 2
        return {
            "by rank": ["private", "resident"][odd],
            "other by rank": ["resident", "private"][odd],
        }.get(word, word)

    def fn():
        wanted = [
            sum(np.arange(count) % 7 + rank + 1 for rank in range(size))
            / (size if op == "mean" else 1)
            for count in counts
        ]
        for _ in range(2):
            xs = [_placed(where(of_x, index), count, dtype) for index, count in enumerate(counts)]
            own = of_out == "x" or (of_out == "x or resident" and sv.rank() % 2)
            outs = (
                xs
                if own
                else [
                    _placed(where(of_out, index)[-8:], count, dtype)
                    for index, count in enumerate(counts)
                ]
            )
            before = [x.copy() for x in xs]
            made = sv.all_reduce(xs, op, out=outs)
            if not all(one is out for one, out in zip(made, outs, strict=True)):
                return "another array"
            if not all(
                np.array_equal(out, want.astype(dtype))
                for out, want in zip(outs, wanted, strict=True)
            ):
                return "a wrong sum"
            if outs is not xs and not all(
                np.array_equal(x, one) for x, one in zip(xs, before, strict=True)
            ):
                return "an operand was changed"
            single = sv.all_reduce(before[0], op, out=_placed("resident", counts[0], dtype))
            if not np.array_equal(single, outs[0]):
                return "not the same as alone"
        return "right"

    assert run_ranks(size, fn, shared=True, timeout_s=60) == ["right"] * size


@pytest.mark.parametrize(
    ("size", "dtype", "operation"),
    [
        (2, "float32", "assign_add"),
        (3, "float16", "assign_sub"),
        (3, "int64", "assign_add"),
        (2, "float16", "assign"),
    ],
)
def test_long_variables_are_written_on_all_ranks_by_the_owners(size, dtype, operation):
    counts = (300_000, 9, 550_000)

    def fn():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            group = [
                sv.Variable(np.full(count, 3, dtype), aggregation="SUM", name=f"g{count}")
                for count in counts
            ]
            single = [
                sv.Variable(np.full(count, 3, dtype), aggregation="SUM", name=f"s{count}")
                for count in counts
            ]

        def step():
            parts = [(np.arange(count) % 5 + sv.rank()).astype(dtype) for count in counts]
            getattr(sv, f"{operation}_all")(list(zip(group, parts, strict=True)))
            for v, x in zip(single, parts, strict=True):
                getattr(v, operation)(x)
            held = [
                v.read_value() for v in single
            ]  # while they are seen, the next write goes elsewhere
            getattr(single[0], operation)(parts[0])
            getattr(group[0], operation)(parts[0])
            return held[0].astype(np.float64).sum()

        seen = strategy.run(step)
        total = [sum(np.arange(count) % 5 + rank for rank in range(size)) for count in counts]
        sign = {"assign_add": 1, "assign_sub": -1, "assign": 0}[operation]
        wanted = [3 * abs(sign) + (sign or 1) * one for one in total]
        if seen != wanted[0].sum():
            return "what was held has changed"
        wanted[0] = wanted[0] + sign * total[0]
        for variables in (group, single):
            for v, want in zip(variables, wanted, strict=True):
                if not np.array_equal(v.read_value(copy=False), want.astype(dtype)):
                    return v.name
        return "right"

    results = run_ranks(size, fn, shared=True, timeout_s=60)
    assert results == ["right"] * size


@pytest.mark.parametrize("way", ["one", "prepared", "grouped"])
def test_a_view_taken_beside_a_write_does_not_change(way):
    begun, seen = threading.Event(), threading.Event()

    def fn():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(np.zeros(100_000, "f4"), aggregation="SUM", name="v")
        one, context, rank = np.ones(100_000, "f4"), current(), sv.rank()
        held = {}

        def read():
            with use(context):
                begun.wait(20)
                time.sleep(0.05)  # the write waits for rank 1
                held["view"] = v.read_value()
                held["sum"] = float(held["view"].sum())
                seen.set()

        def step():
            for _ in range(3 if way == "prepared" else 0):
                v.assign_add(one)
            if rank == 0:
                begun.set()
            else:
                seen.wait(20)
            if way == "grouped":
                sv.assign_add_all([(v, one)])
            else:
                v.assign_add(one)

        reader = threading.Thread(target=read, daemon=True)
        if rank == 0:
            reader.start()
        strategy.run(step)
        if rank:
            return True
        reader.join(20)
        return float(held["view"].sum()) == held["sum"]

    assert run_ranks(2, fn, shared=True, timeout_s=60) == [True, True]


def test_what_is_no_pairs_is_refused_by_name():
    for wrong in (None, 3):
        with pytest.raises(
            sv.ConfigError,
            match=r"assign_add_all takes pairs of a variable and a value, for instance \[\(v, 1\.0\), \(w, x\)\], not",
        ):
            sv.assign_add_all(wrong)
