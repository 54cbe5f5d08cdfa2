"""`with sv.uneven():` around loops of different lengths: every call is that of the ranks that still work, and all end equal.

Random programs are compared with a model that computes each result from the ranks that work at that step alone.
"""

import functools
import operator
import sys
import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.collectives.stage_builders import gather_objects
from syncvar.testing import run_ranks
from tests.support.harness import caught, covering, everywhere

WORLDS = {"shm": {"shared": True}, "links": {}, "hosts": {"shared": True, "hosts": 2}}


def value_of(step, rank, salt=0, shape=(4,)):
    """Return what a rank brings to a call of a step: small integers, so that no order of a sum matters."""
    return np.random.default_rng([step, rank, salt]).integers(1, 5, shape).astype(float)


def pieces(array, count):
    return np.array_split(array, count)


# -- calls, each with its model --------------------------------------------------------------------
# A call takes (state, step, root); its model (state of the model, step, the ranks that work, root) and returns a list by
# place among them.


def reducing(op, combine):
    def call(state, step, root):
        x = value_of(step, sv.rank())
        return sv.all_reduce(x.astype(int) if op in ("and", "or", "xor") else x, op)

    def model(state, step, working, root):
        every = [value_of(step, rank) for rank in working]
        every = [x.astype(int) for x in every] if op in ("and", "or", "xor") else every
        return [combine(every)] * len(working)

    return call, model


def over(ufunc):
    return lambda every: functools.reduce(ufunc, every)


def same(fn):
    """Return a model whose result is the same on all that work."""
    return lambda state, step, working, root: [fn(state, step, working, root)] * len(working)


def on_root(fn):
    return lambda state, step, working, root: [
        fn(state, step, working, root) if rank == root else None for rank in working
    ]


def stack(step, working, salt=0):
    return np.array([value_of(step, rank, salt) for rank in working])


def places(working, found, absent, size):
    known = dict(zip(working, found, strict=True))
    return [known.get(rank, absent) for rank in range(size)]


def weighted(step, working):
    weights = np.arange(1, 9.0)[list(working)]
    return (stack(step, working) * weights[:, None]).sum(0) / weights.sum()


def minloc(step, working):
    every = stack(step, working)
    return every.min(0), np.array(working)[every.argmin(0)]


def lengths(rank):
    return (rank % 3,)


def structure(step, working):
    return {"a": stack(step, working).sum(0), "b": [stack(step, working, 1).sum(0)]}


def matrix(step, rank, size):
    """Return what a rank sends to each: of another length for each."""
    return [value_of(step, rank, dest, (1 + (rank + dest) % 3,)) for dest in range(size)]


CALLS = {
    "sum": reducing("sum", sum),
    "mean": reducing("mean", lambda every: sum(every) / len(every)),
    "prod": reducing("prod", over(operator.mul)),
    "min": reducing("min", over(np.minimum)),
    "max": reducing("max", over(np.maximum)),
    "and": reducing("and", over(operator.and_)),
    "or": reducing("or", over(operator.or_)),
    "xor": reducing("xor", over(operator.xor)),
    "minloc": (
        lambda state, step, root: sv.all_reduce(value_of(step, sv.rank()), "minloc"),
        same(lambda state, step, working, root: minloc(step, working)),
    ),
    "weight": (
        lambda state, step, root: sv.all_reduce(
            value_of(step, sv.rank()), "mean", weight=1.0 + sv.rank()
        ),
        same(lambda state, step, working, root: weighted(step, working)),
    ),
    "structure": (
        lambda state, step, root: sv.all_reduce(
            {"a": value_of(step, sv.rank()), "b": [value_of(step, sv.rank(), 1)]}
        ),
        same(lambda state, step, working, root: structure(step, working)),
    ),
    "started": (
        lambda state, step, root: sv.all_reduce(value_of(step, sv.rank()), async_op=True).wait(),
        same(lambda state, step, working, root: stack(step, working).sum(0)),
    ),
    "long": (
        lambda state, step, root: sv.all_reduce(value_of(step, sv.rank(), 0, (40_000,)))[::5000],
        same(
            lambda state, step, working, root: sum(
                value_of(step, rank, 0, (40_000,)) for rank in working
            )[::5000]
        ),
    ),
    "shards": (
        lambda state, step, root: sv.all_reduce_shards(
            shards_of(step, sv.rank(), state["working"](step))
        ),
        same(lambda state, step, working, root: stack(step, working).sum(0)),
    ),
    "reduce": (
        lambda state, step, root: sv.reduce(value_of(step, sv.rank()), root=root),
        on_root(lambda state, step, working, root: stack(step, working).sum(0)),
    ),
    "broadcast": (
        lambda state, step, root: sv.broadcast(
            value_of(step, sv.rank()) if sv.rank() == root else None, root=root
        ),
        same(lambda state, step, working, root: value_of(step, root)),
    ),
    "all_gather": (
        lambda state, step, root: sv.all_gather(value_of(step, sv.rank(), 0, lengths(sv.rank()))),
        same(
            lambda state, step, working, root: np.concatenate(
                [value_of(step, rank, 0, lengths(rank)) for rank in working]
            )
        ),
    ),
    "all_gather even": (
        lambda state, step, root: sv.all_gather(value_of(step, sv.rank())),
        same(lambda state, step, working, root: stack(step, working).reshape(-1)),
    ),
    "gather": (
        lambda state, step, root: sv.gather(value_of(step, sv.rank()), root=root),
        on_root(lambda state, step, working, root: stack(step, working).reshape(-1)),
    ),
    "scatter": (
        lambda state, step, root: sv.scatter(
            value_of(step, root, 0, (7,)) if sv.rank() == root else None, root=root
        ),
        lambda state, step, working, root: pieces(value_of(step, root, 0, (7,)), len(working)),
    ),
    "scatter a list": (
        lambda state, step, root: sv.scatter(
            matrix(step, root, sv.world_size()) if sv.rank() == root else None, root=root
        ),
        lambda state, step, working, root: [
            matrix(step, root, state["size"])[rank] for rank in working
        ],
    ),
    "reduce_scatter": (
        lambda state, step, root: sv.reduce_scatter(value_of(step, sv.rank(), 0, (12,))),
        lambda state, step, working, root: pieces(
            sum(value_of(step, rank, 0, (12,)) for rank in working), len(working)
        ),
    ),
    "all_to_all": (
        lambda state, step, root: sv.all_to_all(matrix(step, sv.rank(), sv.world_size())),
        lambda state, step, working, root: [
            places(
                working,
                [matrix(step, source, state["size"])[rank] for source in working],
                np.zeros(0),
                state["size"],
            )
            for rank in working
        ],
    ),
    "all_to_all of an array": (
        lambda state, step, root: sv.all_to_all(value_of(step, sv.rank(), 0, (12,))),
        lambda state, step, working, root: [
            places(
                working,
                [
                    pieces(value_of(step, source, 0, (12,)), len(working))[place]
                    for source in working
                ],
                np.zeros(0),
                state["size"],
            )
            for place in range(len(working))
        ],
    ),
    "scan": (
        lambda state, step, root: sv.scan(value_of(step, sv.rank())),
        lambda state, step, working, root: list(np.cumsum(stack(step, working), 0)),
    ),
    "exscan": (
        lambda state, step, root: sv.exscan(value_of(step, sv.rank())),
        lambda state, step, working, root: list(
            np.cumsum(stack(step, working), 0) - stack(step, working)
        ),
    ),
    "barrier": (lambda state, step, root: sv.barrier(), same(lambda *_: None)),
    "all_gather_object": (
        lambda state, step, root: sv.all_gather_object({"of": sv.rank(), "step": step}),
        same(
            lambda state, step, working, root: places(
                working, [{"of": rank, "step": step} for rank in working], None, state["size"]
            )
        ),
    ),
    "gather_object": (
        lambda state, step, root: sv.gather_object(sv.rank() + step, root),
        on_root(
            lambda state, step, working, root: places(
                working, [rank + step for rank in working], None, state["size"]
            )
        ),
    ),
    "broadcast_object": (
        lambda state, step, root: sv.broadcast_object([step, sv.rank()], root),
        same(lambda state, step, working, root: [step, root]),
    ),
    "scatter_object": (
        lambda state, step, root: sv.scatter_object(
            [f"{step} for {rank}" for rank in range(sv.world_size())], root
        ),
        lambda state, step, working, root: [f"{step} for {rank}" for rank in working],
    ),
    "subgroup": (
        lambda state, step, root: (
            sv.all_reduce(value_of(step, sv.rank()), group=state["pair"]) if sv.rank() < 2 else None
        ),
        lambda state, step, working, root: [
            stack(step, [one for one in working if one < 2]).sum(0) if rank < 2 else None
            for rank in working
        ],
    ),
}


def shards_of(step, rank, working):
    return {working.index(rank): value_of(step, rank)}


# -- calls of variables and strategies -------------------------------------------------------------


def wrote(name, write, change):
    """Return a call that writes a variable and reads it, and its model."""

    def call(state, step, root):
        write(state[name], step)
        return np.array(state[name].read_value())

    def model(state, step, working, root):
        change(state, step, working)
        return [np.array(state[name])] * len(working)

    return call, model


def changing(name, combine, sign=1):
    def change(state, step, working):
        state[name] = state[name] + sign * combine(stack(step, working))

    return change


def assigned(state, step, working):
    state["first"] = value_of(step, working[0])


def added_everywhere(state, step, working):
    state["none"] = state["none"] + value_of(step, 0)


def rows_added(state, step, working):
    made = state["rows"].copy()
    for rank in working:
        np.add.at(made, [rank % 3, 0], value_of(step, rank, 0, (2,)) / len(working))
    state["rows"] = made


def read_on_read(state, step, working, root):
    for rank in working:
        state["parts"][rank] = state["parts"][rank] + value_of(step, rank)
    return [sum(state["parts"])] * len(working)


def add_and_read(state, step, root):
    state["seen"].assign_add(value_of(step, sv.rank()))
    return np.array(state["seen"].read_value())


def run_in_strategy(state, step, root):
    strategy = state["strategy"]
    state["inside"] = strategy.run(
        lambda: np.array(state["there"].assign_add(value_of(step, sv.rank())).read_value())
    )
    return state["inside"]


def model_run(state, step, working, root):
    state["there"] = state["there"] + stack(step, working).mean(0)
    return [np.array(state["there"])] * len(working)


def stepped(state, step, root):
    state["optimizer"].apply_gradients([(value_of(step, sv.rank()), state["weight"])])
    return np.array(state["weight"].read_value())


def model_stepped(state, step, working, root):
    state["velocity"] = 0.5 * state["velocity"] + stack(step, working).mean(0)
    state["weight"] = state["weight"] - 0.25 * state["velocity"]
    return [np.array(state["weight"])] * len(working)


VARIABLES = {
    "variable sum": wrote(
        "sum",
        lambda v, step: v.assign_add(value_of(step, sv.rank())),
        changing("sum", lambda x: x.sum(0)),
    ),
    "variable mean": wrote(
        "mean",
        lambda v, step: v.assign_sub(value_of(step, sv.rank())),
        changing("mean", lambda x: x.mean(0), -1),
    ),
    "variable first": wrote("first", lambda v, step: v.assign(value_of(step, sv.rank())), assigned),
    "variable none": wrote(
        "none", lambda v, step: v.assign_add(value_of(step, 0)), added_everywhere
    ),
    "variable rows": wrote(
        "rows",
        lambda v, step: v.scatter_add([sv.rank() % 3, 0], value_of(step, sv.rank(), 0, (2,))),
        rows_added,
    ),
    "variable together": (
        lambda state, step, root: sv.assign_add_all(
            [(state["sum"], value_of(step, sv.rank())), (state["mean"], value_of(step, sv.rank()))]
        ),
        lambda state, step, working, root: (
            [
                changing("sum", lambda x: x.sum(0))(state, step, working)
                or changing("mean", lambda x: x.mean(0))(state, step, working)
            ]
            * len(working)
        ),
    ),
    "variable on read": (add_and_read, read_on_read),
    "strategy.run": (run_in_strategy, model_run),
    "optimizer": (stepped, model_stepped),
    "strategy.reduce": (
        lambda state, step, root: sv.get_strategy().reduce(
            "MEAN", value_of(step, sv.rank(), 0, (1 + sv.rank(),)), axis=0
        ),
        same(
            lambda state, step, working, root: np.concatenate(
                [value_of(step, rank, 0, (1 + rank,)) for rank in working]
            ).mean()
        ),
    ),
}


EVERY = CALLS | VARIABLES
KEPT = ("sum", "mean", "first", "none", "rows", "weight", "there")


def start_of(size):
    """Return what the model begins with."""
    names = dict.fromkeys(
        ("sum", "mean", "first", "none", "weight", "there", "velocity"), np.zeros(4)
    )
    return {**names, "rows": np.zeros(3), "parts": [np.zeros(4)] * size, "size": size}


def variables_of(size):
    """Return the same of the program."""
    kinds = {
        "sum": "SUM",
        "mean": "MEAN",
        "first": "ONLY_FIRST_REPLICA",
        "none": "NONE",
        "weight": "NONE",
    }
    made = {
        name: sv.Variable(np.zeros(4), aggregation=kind, name=name) for name, kind in kinds.items()
    }
    made["rows"] = sv.Variable(np.zeros(3), aggregation="MEAN", name="rows")
    made["seen"] = sv.Variable(
        np.zeros(4), synchronization="ON_READ", aggregation="SUM", name="seen"
    )
    made["strategy"] = sv.MultiWorkerMirroredStrategy()
    with made["strategy"].scope():
        made["there"] = sv.Variable(np.zeros(4), aggregation="MEAN", name="there")
    made["optimizer"] = sv.optimizers.Momentum(0.25, momentum=0.5)
    made["optimizer"].build([made["weight"]])
    made["pair"] = sv.new_group([0, 1]) if size > 1 else None
    return made


def matches(found, wanted):
    if isinstance(wanted, tuple | list):
        return (
            type(found) is type(wanted)
            and len(found) == len(wanted)
            and all(map(matches, found, wanted))
        )
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(
            matches(found[key], wanted[key]) for key in wanted
        )
    if isinstance(wanted, np.ndarray | np.generic):
        return np.shape(found) == np.shape(wanted) and np.allclose(found, wanted, rtol=1e-12)
    return found == wanted


def check_program(seed, size, world, names=None, warm=0):
    rng = np.random.default_rng([seed, size])
    counts = rng.permutation(
        [int(rng.integers(0, 3)), *rng.integers(0, 6, size - 1).tolist()]
    ).tolist()
    root = int(np.argmax(counts))
    program = [[str(one) for one in rng.choice(list(EVERY), 6)] for _ in range(max(counts))]
    if names is not None:
        program = [names for _ in range(max(counts))]

    def working(step):
        return [rank for rank in range(size) if counts[rank] > step or step >= 100]

    def run():
        state = {**variables_of(size), "working": working}
        found = []
        for step in range(-warm, 0):  # so that calls are prepared
            for name in names:
                EVERY[name][0](state, 100 - step, root)
        with sv.uneven() as block:
            for step in range(counts[sv.rank()]):
                for name in program[step]:
                    found.append(EVERY[name][0](state, step, root))
                assert list(block.working) == working(step)
        kept = {name: state[name].numpy().tobytes() for name in KEPT}
        kept["slots"] = [one.numpy().tobytes() for one in state["optimizer"].variables]
        after = [
            int(sv.all_reduce(1)),
            float(state["sum"].assign_add(np.ones(4)).numpy()[0]),
            sv.all_gather_object(sv.rank()),
        ]
        after.append(
            state["strategy"].run(lambda: float(state["there"].assign_add(np.ones(4)).numpy()[0]))
        )
        state["optimizer"].apply_gradients([(np.ones(4), state["weight"])])
        return (
            found,
            kept,
            after,
            np.array(state["seen"].read_value()),
            {name: np.array(state[name].numpy()) for name in KEPT},
        )

    results = everywhere(size, run, **world)
    model = start_of(size)
    for step in range(-warm, 0):
        for name in names:
            EVERY[name][1](model, 100 - step, range(size), root)
    wanted = [[] for _ in range(size)]
    for step, calls in enumerate(program):
        for name in calls:
            for rank, one in zip(
                working(step), EVERY[name][1](model, step, working(step), root), strict=True
            ):
                wanted[rank].append((step, name, one))
    for rank, (found, kept, after, seen, values) in enumerate(results):
        for (step, name, one), mine in zip(wanted[rank], found, strict=True):
            assert matches(mine, one), (rank, step, name, mine, one, counts)
        assert kept == results[0][1], (
            "the copies are equal to the bit, also of those that left first"
        )
        assert matches(seen, sum(model["parts"]))
        assert matches(after[0], size)
        assert matches(after[2], list(range(size)))
        assert matches(values["none"], model["none"])
        assert matches(values["first"], model["first"])
        assert matches(values["rows"], model["rows"])
        assert matches(values["sum"], model["sum"] + size)
        assert matches(values["there"], model["there"] + 1)


@pytest.mark.parametrize(
    ("size", "world", "seed"), covering([2, 3, 4], list(WORLDS), list(range(6)), strength=1)
)
def test_random_programs_give_what_the_ranks_that_work_make(size, world, seed):
    for part in range(2):
        check_program([seed, part], size, WORLDS[world])


@pytest.mark.parametrize("world", list(WORLDS))
def test_every_call_after_a_rank_has_left(world):
    check_program([77, 0], 3, WORLDS[world], list(EVERY), warm=3)


# -- what is refused, and what goes wrong ----------------------------------------------------------


@pytest.mark.parametrize("world", list(WORLDS))
def test_what_needs_a_rank_that_has_left_is_refused_on_all_and_the_block_goes_on(world, tmp_path):
    def run():
        v = sv.Variable(0.0, aggregation="SUM", name="v")
        seen = sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM", name="seen")
        strategy = sv.MultiWorkerMirroredStrategy()
        with strategy.scope():
            there = sv.Variable(2.0, synchronization="ON_READ", aggregation="SUM", name="there")
        found = {}

        def across():
            with strategy.scope():
                there.assign(3.0)

        with sv.uneven() as block:
            if sv.rank() != 1:
                for name, call in {
                    "root": lambda: sv.broadcast(1.0, root=1),
                    "reduce": lambda: sv.reduce(1.0, root=1),
                    "gathered": lambda: sv.gather_object(1, 1),
                    "variable": lambda: sv.Variable(0.0),
                    "checkpoint": lambda: sv.Checkpoint(v=v).save(tmp_path / "c"),
                    "restore": lambda: sv.Checkpoint(v=v).restore(tmp_path / "c"),
                    "across": across,
                    "send": lambda: sv.send(1.0, 2),
                    "recv": lambda: sv.recv(0),
                    "group": lambda: sv.new_group([0]),
                    "strategy": sv.MultiWorkerMirroredStrategy,
                    "inside": lambda: sv.uneven().__enter__(),
                    "pin": lambda: v.pin("deferred"),
                    "lengths": lambda: sv.reduce_scatter(np.ones(3), lengths=[1, 1, 1]),
                    "wrong": lambda: sv.all_reduce("text") if sv.rank() else sv.all_reduce(1.0),
                    "other": lambda: sv.all_reduce(1.0) if sv.rank() else sv.all_gather(np.ones(2)),
                    "late": lambda: (
                        sv.all_reduce(1.0, timeout=-1.0) if sv.rank() else sv.all_reduce(1.0)
                    ),
                }.items():
                    found[name] = str(caught(call))
                    found[f"{name} then"] = float(sv.all_reduce(1.0))
                sv.all_reduce(1.0, async_op=True)
                refused = sv.all_reduce(1.0 if sv.rank() else [1.0, 2.0], async_op=True)
                found["started"] = str(refused.exception())
                v.assign_add(1.0)
                seen.assign_add(1.0)
                assert seen.read_from(1) == 0.0
                assert sv.all_gather(np.zeros(sv.rank())).size == 2
                assert (
                    strategy.num_replicas_in_sync
                    == 3
                    == strategy.run(lambda: sv.get_replica_context().num_replicas_in_sync)
                )
                assert (
                    strategy.run(lambda: sv.get_replica_context().replica_id_in_sync_group)
                    == sv.rank()
                )
                assert sv.reduce_scatter(np.ones(3), lengths=[1, 0, 2]).tolist() == [2.0] * (
                    1 + sv.rank() // 2
                )
                path = sv.save(tmp_path / f"{sv.rank()}", {"v": v})
                assert sv.load(path)["v"] == 2.0
        assert strategy.num_replicas_in_sync == 3
        return found, block.working, float(v), float(seen), float(sv.all_reduce(1.0)), float(there)

    results = everywhere(3, run, **WORLDS[world])
    for rank in (0, 2):
        found = results[rank][0]
        assert {found[name] for name in found if name.endswith(" then")} == {2.0}
        for name in ("root", "reduce", "gathered"):
            assert (
                "rank 1 is the root of this call and has left its loop in sv.uneven" in found[name]
            ), found[name]
        for name in ("variable", "checkpoint", "restore", "across"):
            assert "rank 1 left the loop" in found[name], found[name]
        assert "sv.save(path" in found["checkpoint"]
        for name in ("send", "recv", "group", "strategy", "inside", "pin"):
            assert "sv.uneven" in found[name], found[name]
        assert "rank 1, which has left" in found["lengths"]
        for name in ("wrong", "other", "late", "started"):
            assert found[name] != "None"
        assert results[rank][1] == (0, 2)
    assert all(result[2:] == (2.0, 2.0, 3.0, 2.0) for result in results)


@pytest.mark.parametrize("world", list(WORLDS))
def test_an_exception_in_a_loop_is_told_to_those_that_work_and_to_those_that_have_left(world):
    def run():
        v = sv.Variable(0.0, aggregation="SUM")
        steps = []

        def loop():
            with sv.uneven():
                for step in range([1, 9, 9][sv.rank()]):
                    if sv.rank() == 2 and step == 4:
                        raise ArithmeticError("at step 4")
                    v.assign_add(1.0)
                    steps.append(step)

        error = None
        try:
            loop()
        except Exception as raised:
            error = raised
        with sv.uneven():  # whoever has caught it goes on, in step
            for _ in range(sv.rank()):
                sv.all_reduce(1.0)
        return type(error).__name__, str(error), len(steps), float(sv.all_reduce(1.0))

    results = everywhere(3, run, **WORLDS[world])
    assert [one[0] for one in results] == ["MismatchError", "MismatchError", "ArithmeticError"]
    assert all("left sv.uneven: ArithmeticError: at step 4" in one[1] for one in results[:2])
    assert [one[2:] for one in results] == [(1, 3.0), (4, 3.0), (4, 3.0)]


@pytest.mark.parametrize("world", list(WORLDS))
def test_an_exception_that_leaves_a_run_ends_the_block_on_all_even_where_it_is_caught(world):
    """Rank 0 catches it and goes on, rank 1 catches what it hears of it, rank 2 has left its loop before."""

    def run():
        strategy = sv.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = sv.Variable(0.0, aggregation="SUM", name="v")
        steps, refused = [], []

        def step(number):
            if number == 2 and sv.rank() == 0:
                raise ValueError("bad batch")
            v.assign_add(1.0)
            steps.append(number)

        def loop():
            with sv.uneven():
                for number in range([5, 5, 1][sv.rank()]):
                    try:
                        strategy.run(step, (number,))
                    except (ValueError, sv.SyncvarError) as error:
                        refused.append(f"{type(error).__name__}: {error}")

        left = caught(loop)
        strategy.run(step, (9,))
        return steps, refused, f"{type(left).__name__}: {left}", float(sv.all_reduce(1.0))

    results = everywhere(3, run, **WORLDS[world])
    words = "rank 0 left strategy.run inside sv.uneven: ValueError: bad batch"
    assert [one[0] for one in results] == [[0, 1, 9], [0, 1, 9], [0, 9]]
    assert [[text.partition(":")[0] for text in one[1]] for one in results] == [
        ["ValueError", "UsageError", "UsageError"],
        ["MismatchError", "UsageError", "UsageError"],
        [],
    ]
    assert all(
        words in text
        for one in results
        for text in one[1][one[1][:1] == ["ValueError: bad batch"] :]
    )
    assert [one[2].partition(":")[0] for one in results] == [
        "UsageError",
        "UsageError",
        "MismatchError",
    ]
    assert all(words in one[2] for one in results)
    assert [one[3] for one in results] == [3.0] * 3


def test_a_block_that_ends_with_the_first_may_do_so_in_a_run():
    def run():
        strategy = sv.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = sv.Variable(0.0, aggregation="SUM", name="v")
        with sv.uneven(stop_at_first=True):
            for _ in range(3 + sv.rank()):
                strategy.run(lambda: v.assign_add(1.0))
        return float(v), float(sv.all_reduce(1.0))

    assert everywhere(3, run, shared=True) == [(9.0, 3.0)] * 3


@pytest.mark.parametrize("world", list(WORLDS))
def test_a_block_may_end_with_the_first_that_leaves_it(world):
    def run():
        v = sv.Variable(0.0, aggregation="SUM")
        steps = 0
        with sv.uneven(stop_at_first=True):
            for _ in range(3 + sv.rank()):
                v.assign_add(1.0)
                steps += 1
        return steps, float(v), float(sv.all_reduce(1.0))

    assert everywhere(3, run, **WORLDS[world]) == [(3, 9.0, 3.0)] * 3


def test_after_an_exception_in_a_block_comparisons_and_decisions_are_at_the_same_points_again():
    def run():
        strategy = sv.MultiWorkerMirroredStrategy()
        strategy.check_every = 3
        with strategy.scope():
            v = sv.Variable(0.0, aggregation="SUM", name="v")
        w = sv.Variable(0.0, aggregation="SUM", name="w")

        def loop():
            with sv.uneven():
                for number in range([9, 9, 1][sv.rank()]):
                    if number == 4 and sv.rank() == 0:
                        raise sv.UsageError("bad batch")
                    strategy.run(lambda: v.assign_add(1.0))
                    w.assign_add(1.0)

        left = caught(loop)
        v.assign(0.0)  # what the ranks wrote alone is no part of a block that an exception has left
        w.assign(0.0)
        for _ in range(7):
            strategy.run(lambda: v.assign_add(1.0))
        for _ in range(70):  # AUTO decides at the 64th
            w.assign_add(1.0)
        return type(left).__name__, float(v), float(w)

    results = everywhere(3, run, shared=True)
    assert results == [
        ("UsageError", 21.0, 210.0),
        ("MismatchError", 21.0, 210.0),
        ("MismatchError", 21.0, 210.0),
    ]


@pytest.mark.parametrize("world", list(WORLDS))
def test_a_call_within_another_is_refused_and_makes_no_roll(world):
    def run():
        refused = []

        def mine():  # while the group's call runs: so it is with a second thread, and with a signal's handler
            if sv.rank() == 0:
                refused.append(str(caught(lambda: sv.all_reduce(1.0, timeout=5.0))))

        with sv.uneven() as block:
            for _ in range(3):
                gather_objects(current().world, "gather", mine, None)
                total = sv.all_reduce(1.0)
        return refused, float(total), block.working

    results = everywhere(2, run, **WORLDS[world])
    assert len(results[0][0]) == 3
    assert all("another call on this group is running" in text for text in results[0][0])
    assert [one[1:] for one in results] == [(2.0, (0, 1))] * 2


@pytest.mark.parametrize(("world", "made"), [("shm", 0), ("shm", 1), ("links", 1)])
@pytest.mark.parametrize("kind", [sv.SharedMemoryFull, KeyboardInterrupt])
def test_a_rank_that_cannot_begin_the_block_is_outside_it_and_the_others_hear_of_it(
    world, made, kind
):
    """It fails at the first group that it would make, the world's, or at the next."""

    def run():
        pair = sv.new_group([0, 1])
        v = sv.Variable(0.0, aggregation="SUM", name="v")
        v.pin("deferred")
        context = current()
        make, calls = context.communicator, []

        def fail(*args, **kwargs):
            calls.append(args)
            if len(calls) > made:
                raise kind("no room")
            return make(*args, **kwargs)

        if sv.rank() == 0:
            context.communicator = fail
        error = None
        try:
            with sv.uneven():
                for _ in range(3):
                    sv.all_reduce(1.0, group=pair if made and pair.is_member else None)
        except (sv.SyncvarError, KeyboardInterrupt) as raised:
            error = raised
        context.communicator = make
        mode = v.explain().mode
        with sv.uneven():
            for _ in range(sv.rank()):
                v.assign_add(1.0)
        return (
            f"{type(error).__name__}: {error}",
            mode,
            float(v),
            sv.new_group([0, 2]).ranks,
            float(sv.all_reduce(1.0)),
        )

    results = everywhere(3, run, **WORLDS[world])
    assert results[0][0].startswith(f"{kind.__name__}: no room")
    assert all(f"rank 0 left sv.uneven: {kind.__name__}: no room" in one[0] for one in results[1:])
    assert [one[1:] for one in results] == [("ON_WRITE (deferred, pinned)", 3.0, (0, 2), 3.0)] * 3


def test_blocks_follow_one_another_in_groups_and_with_deferred_variables():
    def run():
        v = sv.Variable(0.0, aggregation="SUM", name="v")
        v.pin("deferred")
        v.assign_add(1.0)
        half = sv.new_group([0, 2])
        work = sv.all_reduce(5.0, async_op=True)
        for turn in range(3):
            with (
                sv.uneven(group=half if turn == 1 and half.is_member else None)
                if turn != 1 or half.is_member
                else sv.MirroredStrategy().scope()
            ):
                for _ in range(sv.rank() + turn):
                    if turn == 1 and half.is_member:
                        sv.all_reduce(1.0, group=half)
                    elif turn != 1:
                        v.assign_add(1.0)
        v.assign_add(1.0)
        return float(work.wait()), float(v), v.explain().mode, half.ranks, half.rank, half.size

    results = everywhere(3, run, shared=True)
    assert [one[:3] for one in results] == [
        (15.0, 3.0 + 3.0 + 9.0 + 3.0, "ON_WRITE (deferred, pinned)")
    ] * 3
    assert [one[3:] for one in results] == [((0, 2), 0, 2), ((0, 2), None, 2), ((0, 2), 1, 2)]


@pytest.mark.slow
def test_a_wait_for_the_others_loops_has_a_deadline():
    gave_up, begins = threading.Event(), threading.Barrier(2)

    def run():
        begins.wait(50)
        try:
            with sv.uneven(timeout=3.0):  # also for the begin of the loops, where both come
                if sv.rank() == 1:
                    assert gave_up.wait(50)
        finally:
            gave_up.set()

    errors = run_ranks(2, run, shared=True)
    assert isinstance(errors[0], sv.DeadlineExceeded)
    assert "sv.uneven" in str(errors[0])
    assert "rank 0 waited 3.0 s for rank 1" in str(errors[0])


@pytest.mark.parametrize("world", list(WORLDS))
def test_who_waits_hears_of_a_rank_that_ends_in_its_loop(world):
    def run():
        with sv.uneven():
            if sv.rank() == 2:
                sv.all_reduce(1.0)
                sys.exit(3)

    errors = run_ranks(3, run, **WORLDS[world])
    assert all(isinstance(error, sv.MismatchError | sv.PeerLost) for error in errors[:2])
    assert all("SystemExit" in str(error) for error in errors[:2])


def test_ranks_that_enter_different_blocks_and_wrong_arguments_are_refused():
    def run():
        error = caught(lambda: sv.uneven(stop_at_first=sv.rank() == 0).__enter__())
        wrong = caught(lambda: sv.uneven(stop_at_first="yes"))
        strategy = sv.MultiWorkerMirroredStrategy()
        inside = caught(lambda: strategy.run(lambda: sv.uneven().__enter__()))
        return str(error), str(wrong), str(inside), float(sv.all_reduce(1.0))

    for error, wrong, inside, total in everywhere(2, run):
        assert "rank 1: stop_at_first=False" in error
        assert "stop_at_first must be True or False" in wrong
        assert "is inside strategy.run" in inside
        assert total == 2.0
