"""Contexts: which strategy is in force, in which context, for scope, run, merge and none of them."""

import threading

import pytest

import syncvar as sv
from syncvar.bootstrap.process import current, use
from syncvar.core.errors import ConfigError, MismatchError, UsageError
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=120)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # the cause rather than its consequence
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def where():
    context = sv.get_replica_context()
    replica = None if context is None else context.replica_id_in_sync_group
    return sv.in_cross_replica_context(), replica, sv.has_strategy()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_where_the_program_is(size):
    def program():
        strategy, rank = sv.MirroredStrategy(), sv.rank()
        assert where() == (False, rank, False)
        assert sv.get_strategy() is sv.get_strategy()
        assert sv.get_strategy().num_replicas_in_sync == size
        with strategy.scope() as entered:
            assert entered is strategy is sv.get_strategy()
            assert where() == (True, None, True)
            assert strategy.run(where) == (False, rank, True)
            assert strategy.run(sv.get_strategy) is strategy
            assert where() == (True, None, True)
        assert strategy.run(lambda: sv.get_replica_context().merge_call(lambda _: where())) == (
            True,
            None,
            True,
        )
        assert where() == (False, rank, False)

    everywhere(size, program)


def test_scope_is_reusable_reentrant_and_per_thread():
    def program():
        strategy = sv.MirroredStrategy()
        scope = strategy.scope()
        with scope, scope, strategy.scope():
            assert sv.in_cross_replica_context()
            seen, context = [], current()

            def other():
                with use(context):
                    seen.append(sv.in_cross_replica_context())

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert seen == [False]
        with scope:
            assert sv.in_cross_replica_context()
        with pytest.raises(KeyError), scope:
            raise KeyError
        assert not sv.has_strategy()

    everywhere(2, program)


def test_what_is_refused_where():
    def program():
        one, two = sv.MirroredStrategy(), sv.MirroredStrategy()

        def refused(call, match):
            with pytest.raises(UsageError, match=match):
                call()

        with one.scope():
            refused(lambda: two.scope().__enter__(), "under another strategy")
            refused(lambda: two.run(int), "under another strategy")
            refused(lambda: two.reduce("SUM", 1.0, axis=None), "under another strategy")
            refused(lambda: sv.MirroredStrategy().gather([1.0], axis=0), "under another strategy")

        def step():
            context = sv.get_replica_context()
            refused(lambda: one.run(int), "call the function directly")
            refused(lambda: one.scope().__enter__(), "inside strategy.run")
            refused(lambda: one.reduce("SUM", 1.0, axis=None), "all_reduce")
            refused(lambda: one.gather([1.0], axis=0), "all_gather")

            def merged(_):
                refused(lambda: context.merge_call(print), "replica context")
                refused(lambda: context.all_reduce("SUM", 1.0), "strategy.reduce")
                refused(lambda: one.run(int), "inside merge_call")

            context.merge_call(merged)

        one.run(step)
        for wrong in ({"args": 3}, {"kwargs": [1]}):
            with pytest.raises(ConfigError):
                one.run(int, **wrong)
        for wrong in ({"strict": 1}, {"timeout": 0}, {"timeout": "1"}, {"group": [0]}):
            with pytest.raises(ConfigError):
                sv.MirroredStrategy(**wrong)

    everywhere(2, program)


def test_run_unwraps_arguments_and_returns_the_functions_own_result():
    def program():
        strategy, rank = sv.MirroredStrategy(), sv.rank()
        part = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group * 10
        )
        same = sv.Mirrored(7)
        plain = [1, 2]

        def step(a, nested, *, key):
            assert nested["plain"] is plain
            return a, nested["deep"][0], key

        made = strategy.run(
            step, args=[part, {"deep": (part, 1), "plain": plain}], kwargs={"key": same}
        )
        assert made == (rank * 10, rank * 10, 7)
        assert strategy.experimental_local_results({"a": part, "b": [same, 5]}) == (
            {"a": rank * 10, "b": [7, 5]},
        )
        return strategy.run(lambda: None)

    assert everywhere(2, program) == [None, None]


def test_merge_call_groups_its_arguments():
    def program():
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            v = sv.Variable(0.0, aggregation="MEAN")

        def merged(inside, x, variable, nothing):
            assert inside is strategy
            assert isinstance(x, sv.PerReplica)
            assert variable is v
            assert nothing is None
            variable.assign(inside.reduce("SUM", x, axis=None))
            return x

        def step():
            return sv.get_replica_context().merge_call(merged, args=(sv.rank() + 1.0, v, None))

        return strategy.run(step), float(v)

    assert everywhere(3, program) == [(1.0, 6.0), (2.0, 6.0), (3.0, 6.0)]


def test_unequal_merges():
    def program():
        strategy = sv.MirroredStrategy()

        def step():
            if sv.rank() == 0:
                sv.get_replica_context().merge_call(lambda _: 1)

        with pytest.raises(MismatchError):
            strategy.run(step)
            strategy.reduce("SUM", 1.0, axis=None)
        return float(strategy.run(lambda: sv.get_replica_context().all_reduce("SUM", 1.0)))

    assert everywhere(3, program) == [3.0] * 3


def test_a_strategy_over_some_ranks():
    def program():
        group = sv.new_group([0, 2])
        strategy = sv.MirroredStrategy(group)
        if not group.is_member:
            for call in (lambda: strategy.scope().__enter__(), lambda: strategy.run(int)):
                with pytest.raises(UsageError, match="not a member"):
                    call()
            return None
        with strategy.scope():
            v = sv.Variable(0.0, aggregation="SUM", name="v")
        strategy.run(lambda: v.assign_add(sv.get_replica_context().replica_id_in_sync_group + 1.0))
        return float(v)

    assert everywhere(3, program) == [3.0, None, 3.0]


def test_many_strategies_send_nothing_and_do_not_disturb_one_another():
    def program():
        engine = current().engine
        sent = engine.frames_sent
        strategies = [sv.MultiWorkerMirroredStrategy() for _ in range(200)]
        assert engine.frames_sent == sent
        first, last = strategies[0], strategies[-1]
        return float(first.reduce("SUM", 1.0, axis=None)) + float(
            last.reduce("MAX", sv.rank(), axis=None)
        )

    assert everywhere(3, program) == [5.0] * 3


def test_the_default_strategy_runs_and_scopes_too():
    def program():
        strategy = sv.get_strategy()
        v = sv.Variable(0.0, aggregation="SUM")
        strategy.run(lambda: v.assign_add(1.0))
        with strategy.scope():
            v.assign_add(1.0)
        v.assign_add(1.0)
        return float(v), v.strategy is strategy

    assert everywhere(2, program) == [(5.0, True)] * 2
