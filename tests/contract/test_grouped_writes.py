"""Structures and groups of variables: one transfer for many arrays, the same result as one after another."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.runtime.context import current
from syncvar.runtime.fused import pieces
from syncvar.testing import run_ranks

COUNTS = [(3, 1, 5), (0, 7, 0), (1,) * 40, (70_000, 5, 300_000, 1), (16_384, 16_384)]


@pytest.fixture(params=["links", "arena"])
def ranks(request):
    def run(size, fn):
        results = run_ranks(size, fn, shared=request.param == "arena", timeout_s=30)
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


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{len(counts)} arrays, {sum(counts)}")
@pytest.mark.parametrize("size", [2, 3])
def test_a_structure_is_reduced_like_its_leaves(ranks, size, counts):
    def fn():
        tree = {f"leaf{index}": np.arange(count, dtype=np.float32) % 5 * (sv.rank() + 1) for index, count in enumerate(counts)}
        tree["half"] = np.full(3, sv.rank(), np.float16)
        tree["more"] = [np.full((2, 2), sv.rank(), np.float16).T, np.int64(sv.rank())]
        together = sv.all_reduce(tree, reproducible=True)
        out = {name: np.zeros_like(value) for name, value in tree.items() if name.startswith("leaf")}
        sv.all_reduce({name: tree[name] for name in out}, "mean", out=out)
        right = all((together[name] == sv.all_reduce(tree[name], reproducible=True)).all() for name in out)
        right = right and all((out[name] == sv.all_reduce(tree[name], "mean")).all() for name in out)
        return right, together["half"].tolist(), together["more"][0].tolist(), int(together["more"][1])

    ones = float(sum(range(size)))
    assert ranks(size, fn) == [(True, [ones] * 3, [[ones] * 2] * 2, int(ones))] * size


def test_a_group_of_variables_is_written_like_one_after_another(ranks):
    def fn():
        strategy = sv.MirroredStrategy()
        name = "arena" if current().arena else "links"
        with strategy.scope():
            made = [
                sv.Variable(np.zeros(shape, dtype), aggregation=how, synchronization=mode, name=f"{name}{number}")
                for number, (shape, dtype, how, mode) in enumerate(
                    [
                        ((4,), "float32", "SUM", "ON_WRITE"), ((2, 3), "float32", "MEAN", "ON_WRITE"),
                        ((), "float64", "SUM", "ON_WRITE"), ((70_000,), "float32", "SUM", "ON_WRITE"),
                        ((3,), "float16", "SUM", "ON_WRITE"), ((2,), "int64", "SUM", "ON_WRITE"),
                        ((2,), "float32", "ONLY_FIRST_REPLICA", "ON_WRITE"), ((2,), "float32", "SUM", "ON_READ"),
                        ((2,), "float32", "NONE", "NONE"),
                    ]
                )
            ]  # fmt: skip

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
            v, w = sv.Variable(np.ones(2), aggregation="SUM"), sv.Variable(np.ones(3), aggregation="SUM")

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
