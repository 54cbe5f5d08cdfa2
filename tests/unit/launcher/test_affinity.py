import pytest

from syncvar.core.errors import ConfigError
from syncvar_launcher.local.host_resources import (
    BLAS_VARIABLES,
    blas_environment,
    blas_threads,
    plan_binding,
)


def test_auto_gives_each_worker_cores_of_its_own():
    plan = plan_binding(2, range(4), 4)
    assert plan.cores == ((0, 1), (2, 3))
    assert plan.reason == "bound: 2 cores of its own for each worker"


def test_auto_leaves_the_remaining_cores_free():
    assert plan_binding(3, range(8), 8).cores == ((0, 1), (2, 3), (4, 5))


def test_auto_binds_in_turn_where_the_cores_get_equally_many():
    plan = plan_binding(4, [0, 1], 2)
    assert plan.cores == ((0,), (1,), (0,), (1,))
    assert plan.reason == "bound in turn: 4 workers share 2 usable cores"
    assert plan_binding(4, [0, 1], 8).cores == (None,) * 4


def test_auto_does_not_bind_where_one_core_would_get_more_workers():
    plan = plan_binding(3, [0, 1], 2)
    assert plan.cores == (None, None, None)
    assert plan.reason == "not bound: 3 workers share 2 usable cores"


def test_auto_respects_an_affinity_of_the_user():
    plan = plan_binding(2, [4, 5], 8)
    assert plan.cores == (None, None)
    assert "an affinity is set already (2 of 8 cores usable)" in plan.reason


def test_none_never_binds():
    assert plan_binding(1, range(4), 4, "none").cores == (None,)


def test_cores_binds_inside_an_affinity_and_with_any_numbers():
    assert plan_binding(2, [3, 7, 9], 16, "cores").cores == ((3,), (7,))


def test_cores_in_turn_when_there_are_too_few():
    plan = plan_binding(5, [2, 3], 4, "cores")
    assert plan.cores == ((2,), (3,), (2,), (3,), (2,))
    assert plan.reason == "bound in turn: 5 workers share 2 usable cores"


@pytest.mark.parametrize("mode", ["auto", "cores"])
def test_cores_per_worker_is_bound_even_inside_an_affinity(mode):
    assert plan_binding(2, [1, 2, 3, 4, 5], 8, mode, 2).cores == ((1, 2), (3, 4))


@pytest.mark.parametrize("mode", ["auto", "cores", "none"])
def test_too_few_cores_for_cores_per_worker_names_numbers_and_remedy(mode):
    with pytest.raises(ConfigError) as caught:
        plan_binding(4, range(6), 6, mode, 2)
    assert str(caught.value) == (
        "4 workers with 2 cores each need 8 cores, but this host lets us use 6: "
        "use --cores-per-worker 1 or at most 3 workers, or leave --cores-per-worker out"
    )


def test_remedy_offers_no_zero_cores():
    with pytest.raises(ConfigError, match="use at most 2 workers, or"):
        plan_binding(4, range(2), 2, "cores", 1)
    with pytest.raises(
        ConfigError, match="use --cores-per-worker 2, or leave --cores-per-worker out"
    ):
        plan_binding(1, range(2), 2, "cores", 9)
    with pytest.raises(ConfigError, match="lets us use 2: leave --cores-per-worker out"):
        plan_binding(4, range(2), 2, "cores", 9)


def test_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="bind must be one of auto, none, cores"):
        plan_binding(1, [0], 1, "sockets")


@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("usable", range(1, 10))
@pytest.mark.parametrize("mode", ["auto", "none", "cores"])
def test_plans_are_fair_and_disjoint_where_they_can_be(workers, usable, mode):
    plan = plan_binding(workers, range(usable), usable, mode)
    assert len(plan.cores) == workers
    bound = [cores for cores in plan.cores if cores is not None]
    assert len(bound) in (0, workers)
    assert len({len(cores) for cores in bound}) <= 1
    if workers <= usable:
        assert len({core for cores in bound for core in cores}) == sum(map(len, bound))
    for cores in bound:
        assert set(cores) <= set(range(usable))


def test_blas_threads_share_the_cores_and_are_never_zero():
    assert [blas_threads(workers, 8) for workers in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert blas_threads(2, 8, 3) == 3


def test_blas_variables_of_the_user_stay():
    assert set(blas_environment(1, {})) == set(BLAS_VARIABLES)
    assert "OMP_NUM_THREADS" not in blas_environment(1, {"OMP_NUM_THREADS": ""})
