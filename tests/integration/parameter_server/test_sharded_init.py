"""Initial values that a function makes part by part: who calls it, for which parts, and what is refused."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.parameter_server.session import LocalServers
from syncvar.testing import run_ranks


def workers(count, fn, servers=2):
    local = LocalServers(count, servers, 0)
    results = run_ranks(count, fn, servers=local, timeout_s=120)
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results


def rows(shard_info):
    """Return rows that know their numbers."""
    first = shard_info.offset[0]
    return np.repeat(np.arange(first, first + shard_info.shape[0]), shard_info.shape[1]).reshape(
        shard_info.shape
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_the_chief_makes_each_shard_by_itself(shards):
    def program():
        calls = []

        def make(shard_info):
            calls.append((shard_info.shape, shard_info.offset))
            return rows(shard_info)

        with sv.ParameterServerStrategy(
            sv.partitioners.FixedShards(shards), staleness=None
        ).scope():
            table = sv.Variable(make, shape=(7, 2), dtype="float32", name="table")
        return (
            calls,
            isinstance(table, sv.ShardedVariable),
            table.dtype,
            table.numpy().tolist(),
            table.lookup([6, 0, 3]).tolist(),
        )

    parts = (
        [((7, 2), (0, 0))]
        if shards == 1
        else [((3, 2), (0, 0)), ((2, 2), (3, 0)), ((2, 2), (5, 0))]
    )
    value = [[float(row)] * 2 for row in range(7)]
    same = (shards > 1, np.dtype("float32"), value, [value[6], value[0], value[3]])
    assert workers(3, program) == [(parts, *same), ([], *same), ([], *same)]


def test_elsewhere_it_makes_all_as_one_part():
    def program():
        calls = []

        def make(shard_info):
            calls.append(shard_info)
            return rows(shard_info)

        with sv.MirroredStrategy().scope():
            v = sv.Variable(make, shape=[3, 2], dtype="int64")
        own = sv.Variable(make, shape=(1, 1), dtype="int64", synchronization="NONE")
        return calls, v.numpy().tolist(), own.numpy().tolist()

    all_of_it, own = sv.ShardInfo((3, 2), (0, 0)), sv.ShardInfo((1, 1), (0, 0))
    value = [[0, 0], [1, 1], [2, 2]]
    assert run_ranks(2, program) == [([all_of_it, own], value, [[0]]), ([own], value, [[0]])]


@pytest.mark.parametrize("strategy", [sv.MirroredStrategy, sv.ParameterServerStrategy])
@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (rows, {}, r"so shape= and dtype= must say what the whole is"),
        (rows, {"dtype": "float32"}, r"so shape= must say"),
        (rows, {"shape": (4, 2)}, r"so dtype= must say"),
        (rows, {"shape": (4, -2), "dtype": "float32"}, r"no length of a shape may be negative"),
        (
            rows,
            {"shape": "large", "dtype": "float32"},
            r"must be an integer or a tuple of integers, not 'large'",
        ),
        (
            lambda shard_info: np.zeros((3, 3)),
            {"shape": (4, 2), "dtype": "float64"},
            r"initial_value has shape \(3, 3\), and shape= says \(4, 2\)",
        ),
        (np.zeros(3), {"shape": 4}, r"initial_value has shape \(3,\), and shape= says \(4,\)"),
        (
            lambda: np.zeros(3),
            {"shape": 4},
            r"initial_value has shape \(3,\), and shape= says \(4,\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(strategy, given, options, words):
    with strategy().scope(), pytest.raises(sv.ConfigError, match=words):
        sv.Variable(given, **options)


def test_a_value_of_the_shape_that_was_asked_for_is_taken():
    assert sv.Variable([1.0, 2.0], shape=2).shape == (2,)
    assert sv.Variable(lambda: 1.0, shape=()).shape == ()


def test_workers_that_ask_for_another_shape_are_told():
    def program():
        with sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None).scope():
            try:
                sv.Variable(rows, shape=(4 + sv.rank(), 2), dtype="float32", name="table")
            except sv.MismatchError as error:
                return str(error)
        return "made"

    made, told = workers(2, program)
    assert made == "made"
    assert "table" in told
