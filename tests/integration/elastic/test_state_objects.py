"""What each kind of object does when the members of a job change: it works, or says what to do."""

import threading
from functools import partial

import numpy as np
import pytest

import syncvar as sv
from syncvar.elastic.elastic_state import held_by
from syncvar.elastic.held_objects import MembershipChange
from tests.support.elastic_worlds import Workers
from tests.support.harness import caught


def variable(value, synchronization="AUTO", aggregation="NONE", **options):
    return sv.Variable(value, synchronization=synchronization, aggregation=aggregation, **options)


def make_under(strategy_of):
    strategy = strategy_of()
    with strategy.scope():
        v = sv.Variable(np.zeros(3), aggregation="SUM", name="v")
    return sv.elastic.State(v=v)


@pytest.mark.parametrize(
    ("strategy_of", "hosts"),
    [
        (sv.MirroredStrategy, 1),
        (sv.CentralStorageStrategy, 1),
        (sv.CentralStorageStrategy, 2),
        (sv.MultiWorkerMirroredStrategy, 2),
    ],
)
def test_strategies_follow_the_members(strategy_of, hosts):
    def train(state):
        strategy = state.v.strategy
        with strategy.scope():
            extra = sv.Variable(0.0, aggregation="SUM", name="v")  # of the function itself
            strategy.run(lambda: (state.v.assign_add(np.ones(3)), extra.assign_add(1.0)))
        state.commit()
        return strategy.num_replicas_in_sync, state.v.numpy().tolist(), float(extra), extra.name

    workers, total = Workers(4, partial(make_under, strategy_of)), 0
    for members in ([0, 1], [0, 1, 2, 3], [3, 1]):
        size = len(members)
        total += size
        found = workers.generation_of(members, train, shared=True, hosts=hosts)
        assert found == [(size, [total] * 3, size, "v_1")] * size


def test_replicas_of_one_host_are_refused_on_several():
    workers = Workers(4, partial(make_under, sv.MirroredStrategy))
    errors = workers.generation_of(range(4), lambda state: None, hosts=2, may_fail=True)
    assert any("sv.MultiWorkerMirroredStrategy()" in str(error) for error in errors)


def test_aggregated_copies_are_divided_exactly():
    def make():
        options = {"synchronization": "ON_READ"}
        return sv.elastic.State(
            total=variable(0.1, aggregation="SUM", dtype="float64", **options),
            mean=variable(3.0, aggregation="MEAN", **options),
            first=variable(5, aggregation="ONLY_FIRST_REPLICA", **options),
            each=variable(7, **options),
        )

    def read(state):
        return float(state.total.sync()), float(state.mean.sync()), int(state.first.sync())

    def train(state):
        before = read(state)
        for one in (state.total, state.mean, state.first, state.each):
            one.strategy.run(lambda one=one: one.assign_add(sv.rank() + 1))
        after = read(state)
        state.commit()
        state.total.strategy.run(lambda: state.total.assign_add(1000.0))
        return before, after, int(state.each.local_value())

    workers = Workers(3, make)
    first = workers.generation_of([0, 1], train)
    assert [one[0] for one in first] == [(0.1, 3.0, 5)] * 2
    assert first[0][1] == first[1][1] == pytest.approx((3.1, 4.5, 6))
    assert [one[2] for one in first] == [8, 9]
    second = workers.generation_of([2, 1, 0], train)
    assert [one[0] for one in second] == [first[0][1]] * 3
    assert [one[2] for one in second] == [8, 11, 11]  # a newcomer begins with 7
    assert workers.generation_of([1], train)[0][0] == second[0][1]


@pytest.mark.parametrize("pinned_inside", [False, True])
def test_deferred_increments_and_pins(pinned_inside):
    def make():
        v = sv.Variable(np.zeros(2), aggregation="SUM", name="v")
        if not pinned_inside:
            v.pin("deferred")
        return sv.elastic.State(v=v)

    def train(state):
        pace = state.v.explain().mode
        state.v.pin("deferred")
        for _ in range(3):
            state.v.assign_add([1.0, 2.0])
        state.commit()
        state.v.assign_add([100.0, 100.0])  # waits when the members change
        return pace

    workers = Workers(3, make)
    assert "pinned" in workers.generation_of([0, 1], train)[0] or pinned_inside
    assert all("deferred, pinned" in one for one in workers.generation_of([2, 0, 1], train))
    assert workers.generation_of([1], lambda state: state.v.numpy().tolist()) == [[15.0, 30.0]]


def optimizer_state(make_optimizer, **options):
    def make():
        w = sv.Variable(np.linspace(-1, 1, 12).reshape(4, 3), name="w", **options)
        return sv.elastic.State(w=w, optimizer=make_optimizer(), step=0)

    return make


def descend(state, steps, *, last=0):
    """Make calls with gradients that sum up to the same on any number of ranks, and commit them."""
    for _ in range(steps):
        gradient = np.cos(np.arange(12).reshape(4, 3) + state.step)
        state.optimizer.apply_gradients([(gradient, state.w)])
        state.step += 1
        state.commit()
    for _ in range(last):
        state.optimizer.apply_gradients([(np.ones((4, 3)), state.w)])
    return state.w.numpy()


@pytest.mark.parametrize(
    ("make_optimizer", "options"),
    [
        (lambda: sv.optimizers.Adam(0.1), {}),
        (lambda: sv.optimizers.SGD(0.1, accumulate=3), {}),
        (lambda: sv.optimizers.Momentum(0.1), {"dtype": "float16"}),
        (lambda: sv.optimizers.SGD(0.1, compress=sv.compressors.PowerSGD(rank=1)), {}),
        (lambda: sv.optimizers.SGD(0.1, compress=sv.compressors.TopK(0.25)), {}),
        (lambda: sv.optimizers.Adam(0.1, accumulate=2), {"synchronization": "NONE"}),
    ],
    ids=["adam", "accumulate", "half", "powersgd", "topk", "independent"],
)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(make_optimizer, options):
    make = optimizer_state(make_optimizer, **options)
    expected = Workers(1, make).generation_of([0], lambda state: descend(state, 11))[0]
    workers = Workers(4, make)
    descended = workers.generation_of([0, 1], lambda state: descend(state, 4, last=1))
    for members, steps in (([1, 2, 0], 4), ([2], 3)):
        if options.get("synchronization") == "NONE":
            members = [one for one in members if one < 2] or [1]
        descended = workers.generation_of(
            members, lambda state, n=steps: descend(state, n, last=1 if n == 4 else 0)
        )
    for one in descended:
        np.testing.assert_allclose(
            one, expected, rtol=2e-3 if "dtype" in options else 1e-5, atol=1e-6
        )


def test_gradients_of_a_lost_rank_are_not_lost():
    make = optimizer_state(lambda: sv.optimizers.SGD(1.0, accumulate=2), dtype="float64")
    workers = Workers(2, make)

    def first(state):
        state.optimizer.apply_gradients([(np.full((4, 3), 10.0 * sv.rank()), state.w)])
        state.commit()

    def second(state):
        before = state.w.numpy()
        state.optimizer.apply_gradients([(np.full((4, 3), 7.0), state.w)])
        return (before - state.w.numpy()).tolist()

    workers.generation_of([0, 1], first)
    assert workers.generation_of([0], second) == [np.full((4, 3), 6.0).tolist()]  # (5 + 7) / 2


@pytest.mark.parametrize("delay", [0, 1])
def test_diloco_continues_with_the_shared_weights(delay):
    def make():
        w = variable(np.zeros(4), "NONE", name="w")
        inner, outer = sv.optimizers.SGD(0.1), sv.optimizers.SGD(1.0)
        return sv.elastic.State(
            w=w, optimizer=sv.optimizers.DiLoCo(inner, outer, steps=2, delay=delay)
        )

    def train(state):
        for _ in range(5):
            state.optimizer.apply_gradients([(np.ones(4) * (1 + sv.rank()), state.w)])
            state.commit()
        anchor = state.optimizer.tracked()["NONE:w/outer_anchor"].numpy()
        state.optimizer.apply_gradients([(np.ones(4), state.w)])
        state.optimizer.finish()
        return anchor.tolist(), state.w.numpy().tolist()

    def begin(state):
        state.optimizer.build([state.w])
        return state.w.numpy().tolist()

    workers = Workers(3, make)
    anchors = workers.generation_of([0, 1], train)
    assert workers.generation_of([2, 1, 0], begin) == [anchors[0][0]] * 3
    results = workers.generation_of([1, 2], train)
    assert results[0] == results[1]


def test_plain_data_that_differs_stays_that_of_each_rank():
    def make():
        return sv.elastic.State(
            same=np.random.default_rng(5),
            own=np.random.default_rng(),
            epoch=0,
            notes={"loss": [1.0]},
            at=-1,
        )

    def draws(state):
        return (
            state.same.integers(1 << 60),
            state.own.integers(1 << 60),
            state.epoch,
            state.notes,
            state.at,
        )

    def train(state):
        state.epoch += 1
        state.notes = {"loss": [1.0, 0.5]}
        state.at = sv.rank()
        state.later = "added"
        state.commit()
        following = draws(state)
        state.restore()
        assert draws(state) == following
        return following

    workers = Workers(3, make)
    first = workers.generation_of([0, 1], train)
    assert first[0][1] != first[1][1]
    second = workers.generation_of([2, 1, 0], lambda state: (*draws(state), state.later))
    assert [one[0] for one in second] == [first[0][0]] * 3
    assert len({one[1] for one in second}) == 3
    assert [one[1] for one in second][1:] == [first[1][1], first[0][1]]
    assert [one[2:] for one in second] == [
        (1, {"loss": [1.0, 0.5]}, at, "added") for at in (-1, 1, 0)
    ]


def test_a_single_survivor_does_not_give_its_own_data_away():
    workers = Workers(3, lambda: sv.elastic.State(own=np.random.default_rng()))
    workers.generation_of([0, 1], lambda state: state.commit())
    drawn = workers.generation_of([0, 2], lambda state: state.own.integers(1 << 60))
    assert drawn[0] != drawn[1]


def test_an_iterator_reads_each_sample_once_in_an_epoch():
    def make():
        strategy = sv.MirroredStrategy()
        dataset = sv.data.from_arrays(np.arange(60), batch_size=6, shuffle=True, seed=3)
        batches = strategy.experimental_distribute_dataset(dataset)
        return sv.elastic.State(batches=iter(batches), seen=[])

    def train(state, steps):
        for _ in range(steps):
            batch = next(state.batches, None)
            if batch is None:
                break
            parts = sv.all_gather(np.asarray(batch))
            state.seen = [*state.seen, *parts.tolist()]
            state.commit()
        next(state.batches, None)  # not committed
        return state.seen

    workers = Workers(4, make)
    for members, steps in (([0, 1], 3), ([1, 2, 3], 2), ([3], 1), ([2, 1], 9)):
        seen = workers.generation_of(members, lambda state, n=steps: train(state, n))
    assert len(seen[0]) == 60
    assert sorted(seen[0]) == list(range(60))


def test_what_belongs_to_its_members_says_what_to_do():
    def make():
        strategy = sv.MirroredStrategy()
        rows = sv.data.from_arrays(np.arange(12), batch_size=2)
        own = strategy.distribute_datasets_from_function(lambda context: rows)
        kept = {
            "group": sv.new_group([0]),
            "call": sv.persistent(sv.all_reduce, np.ones(2)),
            "own": iter(own),
        }
        kept["grouped"] = sv.persistent(sv.all_reduce, np.ones(2), group=kept["group"])
        state = sv.elastic.State(v=sv.Variable(1.0), own=kept["own"])
        held_by(state).kept = kept
        return state

    def use(state):
        kept = held_by(state).kept
        assert kept["call"]().tolist() == [sv.world_size()] * 2
        state.v.read_from(sv.world_size() - 1)
        return [
            str(caught(call, of=sv.SyncvarError))
            for call in (
                lambda: sv.all_reduce(1.0, group=kept["group"]),
                kept["grouped"],
                lambda: next(kept["own"]),
            )
        ]

    for texts in Workers(2, make).generation_of([0, 1], use):
        assert ["sv.elastic.run" in text for text in texts] == [True, True, True]


def test_a_strategy_of_explicit_ranks_does_not_move():
    def make():
        strategy = sv.MirroredStrategy(group=sv.new_group([0]))
        with strategy.scope():
            return sv.elastic.State(v=sv.Variable(1.0))

    (error,) = Workers(1, make).generation_of([0], lambda state: None, may_fail=True)
    assert "leave out group=" in str(error)


def test_a_block_of_uneven_does_not_move():
    blocks = []

    def make():
        state = sv.elastic.State(v=sv.Variable(1.0))
        state.v.strategy.context.uneven = blocks  # as `with sv.uneven():` around the function
        return state

    (error,) = Workers(1, make).generation_of([0], lambda state: None, may_fail=True)
    assert "with sv.uneven():" in str(error)

    def inside(state):
        with sv.uneven():
            return str(caught(state.commit, of=sv.UsageError))

    assert (
        "state.commit()"
        in Workers(2, lambda: sv.elastic.State(n=1)).generation_of([0, 1], inside)[1]
    )


def test_scopes_around_the_function_stay_entered():
    scopes = []

    def make():
        strategy = sv.MirroredStrategy()
        scopes.append(strategy.scope())
        scopes[-1].__enter__()
        return sv.elastic.State(v=sv.Variable(1.0, aggregation="SUM"))

    workers = Workers(1, make)

    def train(state):
        return sv.get_strategy() is state.v.strategy

    # The scope belongs to the thread that has entered it, so it is not entered in this one.
    assert workers.generation_of([0], train) == [False]


def test_a_change_interrupts_after_the_commit():
    def make():
        return sv.elastic.State(v=sv.Variable(0.0, aggregation="SUM"), step=0)

    def train(state):
        held_by(state).membership.is_changing = sv.rank() == 1  # one rank knows it first
        state.step += 1
        error = caught(state.commit, of=MembershipChange)
        assert not isinstance(error, Exception)
        return held_by(state).holds(), "commit 1" in str(error)

    workers = Workers(2, make)
    assert workers.generation_of([0, 1], train) == [((1, 1), True)] * 2
    assert workers.generation_of([1, 0], lambda state: state.step) == [1, 1]


class Opaque:
    """An object whose state is no plain data on one rank."""

    def state_dict(self):
        return {"value": threading if sv.rank() == 1 else 1}

    def load_state_dict(self, state):
        del state


def test_an_object_that_one_rank_cannot_hold_is_an_error_on_all():
    def add(state):
        state.opaque = Opaque()
        error = caught(state.commit)
        del state.opaque
        state.commit()
        return type(error).__name__

    workers = Workers(2, lambda: sv.elastic.State(v=sv.Variable(1.0)))
    assert workers.generation_of([0, 1], add) == ["MismatchError", "ConfigError"]


def test_ranks_with_other_objects():
    def commit(state):
        state.v.assign(2.0)
        if sv.rank():
            state.w = sv.Variable(1.0, synchronization="NONE", name="extra")
            state.z = state.v
        return str(caught(state.commit, of=sv.MismatchError))

    workers = Workers(2, lambda: sv.elastic.State(v=sv.Variable(1.0)))
    texts = workers.generation_of([0, 1], commit)
    assert all("the ranks do not commit the same" in text for text in texts)


def test_the_common_commit_is_the_newest_that_all_holders_have():
    gate = threading.Barrier(2, timeout=30)

    def train(state):
        state.step = 1
        state.commit()
        if sv.world_size() > 1:
            gate.wait()  # the first commit is complete on both ranks
        state.step = 2
        if sv.rank() == 1:
            raise ValueError("lost before its second commit")
        state.commit()

    def step(state):
        return state.step

    workers = Workers(3, lambda: sv.elastic.State(step=0))
    errors = workers.generation_of([0, 1], train, may_fail=True)
    assert isinstance(errors[0], sv.PeerLost)
    assert [held_by(one).holds()[1] for one in workers.states] == [2, 1, -1]
    assert workers.generation_of([2, 0, 1], step) == [1] * 3
    workers.generation_of([0], train)
    assert held_by(workers.states[0]).holds() == (3, 3)  # generation, number of the commit
    assert workers.generation_of([1, 2, 0], step) == [2] * 3  # 1 and 2 had been cut off


def test_reset_functions_follow_each_change():
    def make():
        optimizer = sv.optimizers.SGD(0.1)
        state = sv.elastic.State(w=sv.Variable(0.0), optimizer=optimizer)

        def scale():
            optimizer.learning_rate = 0.1 * sv.world_size()

        state.register_reset(scale)
        return state

    workers = Workers(3, make)
    for size in (2, 3, 1):
        rates = workers.generation_of(range(size), lambda state: state.optimizer.learning_rate)
        assert rates == pytest.approx([0.1 * size] * size)


def test_the_latest_checkpoint_serves_if_nobody_holds_the_state(tmp_path):
    def make():
        manager = sv.CheckpointManager(sv.Checkpoint(), str(tmp_path))
        state = sv.elastic.State(w=sv.Variable([1.0, 2.0]), step=0, checkpoint=manager)
        held_by(state).manager = manager
        return state

    def train(state):
        state.w.assign([5.0, 6.0])
        state.step = 3
        held_by(state).manager.save(state.step)
        held_by(state).manager.close()

    def look(state):
        state.commit()
        return state.w.numpy().tolist(), state.step

    assert Workers(2, make).generation_of([0, 1], look) == [([1.0, 2.0], 0)] * 2
    Workers(2, make).generation_of([0, 1], train)
    assert Workers(3, make).generation_of([0, 1, 2], look) == [([5.0, 6.0], 3)] * 3
