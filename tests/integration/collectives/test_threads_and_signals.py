"""Threads that make groups, write, and wait beside each other, and handlers that strike anywhere, where threads take turns as often as they can."""

import pytest

BEGIN = """
import os, signal, sys, threading, time
import numpy as np
import probe, syncvar as sv

sys.setswitchinterval(1e-6)
rank, size = sv.rank(), sv.world_size()
raised = []


def guarded(work):
    def run():
        try:
            work()
        except BaseException as error:
            raised.append(f"{type(error).__name__}: {error}")
            print(raised[-1], file=sys.stderr, flush=True)
            os._exit(7)
    return run


def together(*works):
    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised, raised
"""

ONE_WORK = """
group, beside = sv.new_group(range(size)), sv.new_group(range(size))
meeting, state, rounds = threading.Barrier(4), {}, 60


def another():
    for number in range(rounds):
        if rank:
            time.sleep(0.002)
        assert sv.all_reduce(np.full(100, float(number)), group=beside, async_op=True).wait()[0] == 2 * number
        assert (sv.all_gather(np.full(1 + rank, float(number)), group=beside) == number).all()


def waiter(place):
    def wait():
        for number in range(rounds):
            if place == 0:
                if rank:
                    time.sleep(0.005)
                state["work"] = sv.all_reduce(np.full(5000, float(number)), "min", async_op=True, group=group)
            meeting.wait(60)
            assert state["work"].wait()[0] == number
            meeting.wait(60)
    return wait


together(another, *[waiter(place) for place in range(4)])
"""

GROUPS_MEANWHILE = """
pair, beside = sv.new_group([0, 1]), sv.new_group(range(size))


def blocks():
    for _ in range(25 if rank < 2 else 0):
        with sv.uneven(group=pair):
            for _ in range(1 + rank):
                assert float(sv.all_reduce(1.0, group=pair)) in (1.0, 2.0)


def tags():
    for number in range(25):
        for tag in range(10):
            for other in range(size):
                if other != rank:
                    sv.send(np.array([float(tag)]), other, tag=number * 100 + tag, group=beside)
            for other in range(size):
                assert other == rank or sv.recv(other, tag=number * 100 + tag, group=beside)[0] == tag
        sv.barrier(group=beside)


together(blocks, tags)
"""

REPORTED = """
groups = [sv.new_group(range(size)) for _ in range(5)]


def late(group):
    def reduce():
        for number in range(12):
            if rank:
                time.sleep(0.05)
            assert sv.all_reduce(np.full(3, float(number)), group=group)[0] == 2 * number
    return reduce


def tags():
    for number in range(120):
        for tag in range(10):
            if rank == 0:
                sv.send(np.array([float(tag)]), 1, tag=number * 100 + tag)
            else:
                assert sv.recv(0, tag=number * 100 + tag)[0] == tag


together(*[late(group) for group in groups[:4]], tags)
"""

QUEUES = """
groups = [sv.new_group(range(size)) for _ in range(2)]
strategies, variables = [sv.MirroredStrategy(group) for group in groups], []
for strategy in strategies:
    with strategy.scope():
        variables.append(sv.Variable(np.zeros(5), aggregation="SUM"))
    variables[-1].pin("deferred")


def writer(place):
    variable = variables[place]

    def step(number):
        for _ in range(5):
            variable.assign_add(np.full(5, 1.0 + rank))
        assert number % 5 or variable.numpy()[0] == 5 * (number + 1) * 3

    def write():
        for number in range(60):
            if rank and number % 7 == place:
                time.sleep(0.002)
            strategies[place].run(step, args=(number,))
            sv.all_reduce(1.0, group=groups[place])
        assert variable.numpy()[0] == 60 * 5 * 3
    return write


together(writer(0), writer(1))
"""


@pytest.mark.parametrize(
    ("script", "workers", "env"),
    [
        (ONE_WORK, 2, {}),
        pytest.param(ONE_WORK, 2, {"SYNCVAR_CALL_RUNNER": "python"}, marks=pytest.mark.slow),
        pytest.param(ONE_WORK, 2, {"SYNCVAR_TRANSPORT": "zmq"}, marks=pytest.mark.slow),
        (GROUPS_MEANWHILE, 3, {}),
        pytest.param(GROUPS_MEANWHILE, 3, {"SYNCVAR_TRANSPORT": "zmq"}, marks=pytest.mark.slow),
        (REPORTED, 2, {"SYNCVAR_REPORT_AFTER_S": "0.01"}),
        pytest.param(
            REPORTED,
            2,
            {"SYNCVAR_REPORT_AFTER_S": "0.01", "SYNCVAR_CALL_RUNNER": "python"},
            marks=pytest.mark.slow,
        ),
        (QUEUES, 2, {}),
        pytest.param(QUEUES, 2, {"SYNCVAR_TRANSPORT": "zmq"}, marks=pytest.mark.slow),
    ],
    ids=[
        "one work",
        "one work in Python",
        "one work over links",
        "groups meanwhile",
        "groups meanwhile over links",
        "reported",
        "reported in Python",
        "queues",
        "queues over links",
    ],
)
def test_threads_beside_each_other(launch, script, workers, env):
    job = launch(BEGIN + script, workers=workers, env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "30", **env})
    assert job.wait(120) == 0, str(job)


HANDLERS = """
mode, busy, made, refused, is_over = sys.argv[1], [False], [0], [], False
group, theirs = sv.new_group(range(size)), sv.new_group(range(size))


def call(number):
    if mode == "short":
        return sv.all_reduce(np.full(4, float(number)), group=theirs)[0] == 2 * number
    if mode == "long":
        return sv.all_reduce(np.full(40_000, float(number)), group=theirs)[0] == 2 * number
    return (sv.all_gather(np.full(2 + rank, float(number)), group=theirs) == number).all()


def strike(*_):
    if not busy[0] and made[0] < 100:
        busy[0] = True
        try:
            assert call(made[0])
            made[0] += 1
        except sv.UsageError as error:
            refused.append(str(error))
        finally:
            busy[0] = False


def partner():
    for number in range(100):
        call(number)


if rank:
    thread = threading.Thread(target=partner)
    thread.start()
else:
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.004, 0.004)
while True:
    over = sv.all_reduce(np.array([float(made[0] >= 100 if rank == 0 else 0)]), "max", group=group)[0]
    if over:
        break
    assert sv.all_reduce(np.full(3000, 1.0), group=group)[0] == 2.0
    sv.all_gather(np.full(1 + rank, 1.0), group=group)
    work = sv.all_reduce(np.full(50_000, 1.0), group=group, async_op=True)
    work.done()
    assert work.wait()[0] == 2.0
if rank:
    thread.join()
else:
    signal.setitimer(signal.ITIMER_REAL, 0)
probe.note("over", made=made[0], said=sorted({one.partition(" on rank")[2][:60] for one in refused}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kernel"),
    [
        ("uneven", "auto"),
        ("short", "auto"),
        ("short", "python"),
        ("long", "auto"),
        ("long", "python"),
        ("uneven", "python"),
    ],
)
def test_a_handlers_call_is_made_or_refused_wherever_it_strikes(launch, mode, kernel):
    job = launch(
        BEGIN + HANDLERS,
        arguments=[mode],
        env={"SYNCVAR_COLLECTIVE_TIMEOUT_S": "30"}
        | ({} if kernel == "auto" else {"SYNCVAR_CALL_RUNNER": kernel}),
    )
    assert job.wait(120) == 0, str(job)
    seen = {event["rank"]: event for event in job.events("over")}
    assert seen[0]["made"] == 100, str(job)
    assert all(
        "a signal's handler has interrupted this thread" in one for one in seen[0]["said"]
    ), str(job)


MEMORY = """
busy, made, refused = [False], [0], []


def strike(*_):
    if not busy[0]:
        busy[0] = True
        try:
            sv.empty((16,), np.float64)[:] = 1
            made[0] += 1
        except sv.UsageError as error:
            refused.append(str(error))
        finally:
            busy[0] = False


sv.empty(3, np.float64)
signal.signal(signal.SIGALRM, strike)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
number = 0
while made[0] + len(refused) < 200:
    array = sv.empty(1 << number % 21, np.float64)
    array[-1] = 2
    number += 1
signal.setitimer(signal.ITIMER_REAL, 0)
probe.note("over", said=sorted(set(refused)), sum=float(sv.all_reduce(1.0)))
"""


def test_a_handler_that_asks_for_shared_memory_gets_it_or_is_refused(launch):
    job = launch(BEGIN + MEMORY)
    assert job.wait(120) == 0, str(job)
    for event in job.events("over"):
        assert event["sum"] == 2.0
        assert all("a signal handler asks for shared memory" in one for one in event["said"]), str(
            job
        )
