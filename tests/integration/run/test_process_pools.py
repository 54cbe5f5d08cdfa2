"""Pools, executors and queues in a rank: before it joins, while it is a member, and after it has left."""

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import concurrent.futures, multiprocessing, sys, time
import numpy as np


def square(number):
    return number * number


def fill(queue):
    for number in range(100):
        queue.put(number)


def use_all(method):
    context = multiprocessing.get_context(method)
    squares = [square(number) for number in range(10)]
    with context.Pool(2) as pool:
        assert pool.map(square, range(10)) == squares
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        assert list(executor.map(square, range(10))) == squares
    queue = context.Queue()
    filling = context.Process(target=fill, args=(queue,))
    filling.start()
    assert [queue.get(timeout=60) for _ in range(100)] == list(range(100))
    filling.join()
    assert filling.exitcode == 0
    sleeping = context.Process(target=time.sleep, args=(600,))
    sleeping.start()
    sleeping.terminate()
    sleeping.join()
    assert sleeping.exitcode == -15, (method, sleeping.exitcode)


def main(method):
    use_all(method)
    import syncvar as sv

    assert sv.all_reduce(np.ones(100_000))[0] == sv.world_size()
    strategy = sv.ParameterServerStrategy(staleness=None)
    with strategy.scope():
        variable = sv.Variable(np.zeros(20_000), name="v")
    for turn in (1, 2):
        variable.assign_add(np.ones(20_000))
        sv.barrier()
        assert (variable.read_value() == turn * sv.world_size()).all()
        sv.barrier()
        use_all(method)
    assert sv.all_reduce(np.ones(100_000))[0] == sv.world_size()
    sv.shutdown()
    use_all(method)
    print("used", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
"""
WAYS = {
    "shared memory": ((), {}),
    "ZeroMQ": ((), {"SYNCVAR_TRANSPORT": "zmq"}),
    "two hosts": (("--fake-hosts", "2"), {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools_executors_and_queues_work_in_a_rank(launch, method, way):
    options, env = WAYS[way]
    env = {"SYNCVAR_LOST_AFTER_S": "40", "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60", **env}
    job = launch(SCRIPT, options=("--servers", "2", *options), arguments=[method], env=env)
    assert job.wait(100) == 0, str(job)
    assert job.out.count("used") == 2, str(job)
