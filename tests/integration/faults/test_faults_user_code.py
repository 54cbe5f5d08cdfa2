"""What a user's program does to itself: forks (F42), threads (F43), exceptions and exits in odd places (F44), alarms."""

import textwrap

import pytest

from tests.support.launching import check_bound

FORK = """
import multiprocessing, os, sys, time
import numpy as np
import probe, syncvar as sv

assert sv.all_reduce(1) == 2
work = sv.all_reduce(np.ones(1000), async_op=True) if "X" in sys.argv else None
variable = sv.Variable(1.0, synchronization=sv.VariableSynchronization.ON_WRITE, aggregation=sv.VariableAggregation.SUM)


def child():
    began = time.monotonic()
    for call in (lambda: sv.all_reduce(1), sv.barrier, lambda: sv.all_reduce(1, async_op=True), sv.init, sv.rank,
                 lambda: variable.assign(2.0)):
        try:
            call()
            probe.note("child", error="nothing", text="")
        except Exception as error:
            probe.note("child", error=type(error).__name__, text=str(error))
    probe.note("child took", seconds=time.monotonic() - began)


def fork(end):
    pid = os.fork()
    if pid == 0:
        child()
        end()
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fail():
    raise ValueError("of the child")


codes = [fork(lambda: os._exit(0)), fork(sys.exit)]
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(10)
codes.append(process.exitcode)
probe.note("codes", codes=codes)
probe.note("fail code", code=fork(fail))
if work is not None:
    assert work.wait()[0] == 2.0
for _ in range(20):
    assert sv.all_reduce(1) == 2
"""


@pytest.mark.parametrize(
    ("phase", "transport"),
    [
        ("X", "auto"),
        ("C", "zmq"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("C", "auto"), ("X", "zmq"))),
    ],
)
def test_f42_fork(launch, phase, transport):
    job = launch(FORK, workers=2, arguments=[phase], env={"SYNCVAR_TRANSPORT": transport})
    assert job.wait() == 0, str(job)
    for event in job.events("child"):
        assert event["error"] == "UsageError", str(job)
    assert sum("forked from rank" in event["text"] for event in job.events("child")) >= 2 * 4 * 5, (
        str(job)
    )
    assert len(job.events("child")) == 2 * 4 * 6, str(job)
    check_bound(f"F42-{phase}", max(event["seconds"] for event in job.events("child took")), 0.1)
    assert [event["codes"] for event in job.events("codes")] == [[0, 0, 0]] * 2, str(job)
    assert [event["code"] for event in job.events("fail code")] == [1, 1], str(job)


THREADS = """
import threading, time
import numpy as np
import probe, syncvar as sv

sv.init()
wrong = []
go = threading.Barrier(2)


def own_group(group, factor):
    for index in range(200):
        total = sv.all_reduce(np.full(50, factor * (index + sv.rank())), group=group)
        if not (total == factor * (2 * index + 1)).all():
            wrong.append((factor, index, total[:3].tolist()))


groups = [sv.new_group([0, 1]), sv.new_group([0, 1])]
threads = [threading.Thread(target=own_group, args=(group, factor)) for group, factor in zip(groups, (1.0, 7.0))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong[:3]

# Two threads on one group: the second one is refused while the first one's call runs. Rank 1 makes one call, late.
refused, results = [], []
both = threading.Barrier(2)


def same_group():
    both.wait()
    try:
        results.append(float(sv.all_reduce(np.float64(5.0))))
    except sv.UsageError as error:
        refused.append(str(error))


if sv.rank() == 0:
    threads = [threading.Thread(target=same_group) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not refused:
        time.sleep(0.01)
    probe.open_gate("late")
    for thread in threads:
        thread.join()
    assert results == [10.0], results
    assert len(refused) == 1, refused
    assert "another thread" in refused[0]
else:
    probe.gate("late")
    assert float(sv.all_reduce(np.float64(5.0))) == 10.0
assert sv.all_reduce(1) == 2
probe.note("done")
"""


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_f43_threads(launch, transport):
    job = launch(THREADS, workers=2, env={"SYNCVAR_TRANSPORT": transport})
    assert job.wait() == 0, str(job)
    assert len(job.events("done")) == 2, str(job)


ENDS = {
    # name: (body, exit code, seconds until the end after the event "end")
    "exception in scope": (
        """
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            variable = sv.Variable(0.0)
            if sv.rank() == 1:
                probe.note("end")
                raise ValueError("planted failure")
            other = sv.Variable(1.0)
        sv.all_reduce(1)
        """,
        1,
    ),
    "exception in run": (
        """
        strategy = sv.MirroredStrategy()
        with strategy.scope():
            variable = sv.Variable(0.0, aggregation=sv.VariableAggregation.SUM)

        def step():
            if sv.rank() == 1:
                probe.note("end")
                raise ValueError("planted failure")
            variable.assign_add(1.0)

        strategy.run(step)
        """,
        1,
    ),
    "exit and exception in threads": (
        """
        def fail():
            raise ValueError("only of the thread")

        for thread in (threading.Thread(target=sys.exit, args=(5,)), threading.Thread(target=fail)):
            thread.start()
            thread.join()
            assert sv.all_reduce(1) == 2
        probe.note("end")
        """,
        0,
    ),
    "exit while a daemon thread waits": (
        """
        if sv.rank() == 1:
            threading.Thread(target=sv.all_reduce, args=(1,), daemon=True).start()
            time.sleep(0.3)
        probe.note("end")
        """,
        None,
    ),
    "exit while started work waits": (
        """
        if sv.rank() == 1:
            work = sv.all_reduce(1, async_op=True)
        probe.note("end")
        """,
        None,
    ),
    "exit during shutdown": (
        """
        def leave(*_):
            sys.exit(5)

        if sv.rank() == 1:
            work = sv.all_reduce(1, async_op=True)  # shutdown waits for it
            signal.signal(signal.SIGALRM, leave)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            probe.note("end")
            sv.shutdown()
        time.sleep(30)  # ended with the job
        """,
        5,
    ),
    "exception at exit": (
        """
        def fail():
            raise ValueError("of an exit handler")

        atexit.register(fail)
        assert sv.all_reduce(1) == 2
        probe.note("end")
        """,
        0,
    ),
    "collective at exit": (
        """
        atexit.register(lambda: probe.note("sum", total=int(sv.all_reduce(1))))
        assert sv.all_reduce(1) == 2
        probe.note("end")
        """,
        0,
    ),
    "shutdown twice and init again": (
        """
        for round in range(3):
            assert sv.all_reduce(round) == 2 * round
            sv.shutdown()
            sv.shutdown()
            assert not sv.is_initialized()
        assert sv.all_reduce(1) == 2
        probe.note("end")
        """,
        0,
    ),
    "sys.exit in scope": (
        """
        with sv.MirroredStrategy().scope():
            if sv.rank() == 1:
                probe.note("end")
                sys.exit(3)
        sv.all_reduce(1)
        """,
        3,
    ),
    "no use of syncvar": ("probe.note('end')", 0),
}


@pytest.mark.parametrize("name", ENDS, ids=lambda name: name.replace(" ", "-"))
def test_f44_ends(launch, name):
    body, code = ENDS[name]
    head = "import atexit, signal, sys, threading, time\nimport probe, syncvar as sv\n"
    head += "" if name == "no use of syncvar" else "sv.init()\nsv.barrier()\n"
    job = launch(head + textwrap.dedent(body), workers=2)
    exit_code = job.wait()
    if code is not None:
        assert exit_code == code, str(job)
    ends = job.events("end")
    assert ends, str(job)
    check_bound(f"F44-{name}", job.ended - ends[-1]["at"], 1.0)
    if code == 1:
        assert "ValueError: planted failure" in job.report, str(job)
        assert "syncvar: rank 1 on" in job.report, str(job)
    if name == "collective at exit":
        assert [event["total"] for event in job.events("sum")] == [2, 2], str(job)


ALARM = """
import ctypes, functools, operator, signal, sys
import numpy as np
import probe, syncvar as sv
from syncvar.bootstrap.process import current

class Alarm(BaseException): pass
def ring(*_): raise Alarm

x = np.ones(1) if "short" in sys.argv else 1
signal.signal(signal.SIGALRM, ring)
world = current().world
lock = world.busy

class Busy:
    locked, __enter__ = lock.locked, lock.__enter__
    def __exit__(self, *error):
        lock.release()

world.busy = Busy()
for _ in range(3):
    sv.all_reduce(x)
if sv.rank() == 0:
    # Taking the lock, and the signal, in one step of the interpreter: as if the alarm came while the lock was taken.
    steps = map(operator.call, [lock.acquire, functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGALRM))])
    Busy.__enter__ = functools.partial(list, steps)
    try:
        sv.all_reduce(x)
    except Alarm:
        probe.note("alarm", locked=lock.locked())
    raise SystemExit(3)
try:
    sv.all_reduce(x)
except sv.SyncvarError as error:
    probe.raised(error)
"""


@pytest.mark.parametrize("way", ["short", "long"])
def test_an_alarm_while_a_call_takes_its_group(launch, way):
    # The C runner takes it in a step of its own, in which no handler runs: tests/integration/collectives/test_c_extension.py has an alarm there.
    job = launch(ALARM, workers=2, arguments=[way], env={"SYNCVAR_CALL_RUNNER": "python"})
    job.wait()
    assert [event["locked"] for event in job.events("alarm")] == [False], str(job)


MEMORY = """
import resource
import numpy as np
import syncvar as sv
from probe import failure, note

sv.all_reduce(np.ones(200_000))  # ZeroMQ starts a thread when it first sends without a copy, and ends the process where it cannot
x = np.ones(8_000_000)  # 64 MB; the call needs as much again
if sv.rank() == 0:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (16 << 20),) * 2)
error = failure(sv.all_reduce, x)
note("told", error=type(error).__name__, is_memory=isinstance(error, MemoryError), text=str(error))
note("after", total=float(sv.all_reduce(1.0)))
"""


@pytest.mark.parametrize("layout", ["links", "hosts"])
def test_memory_that_runs_out_inside_a_call_is_told_to_the_others_and_the_next_call_works(
    launch, layout
):
    where = (
        {"env": {"SYNCVAR_TRANSPORT": "zmq"}}
        if layout == "links"
        else {"options": ["--fake-hosts", "2"]}
    )
    job = launch(MEMORY, workers=3, **where)
    assert job.wait() == 0, str(job)
    for event in job.events("told"):
        if event["rank"] == 0:
            assert event["is_memory"], str(job)
        else:
            assert event["error"] == "MismatchError", str(job)
            assert "rank 0 refused its own call" in event["text"], str(job)
            assert "Unable to allocate" in event["text"], str(job)
    assert [event["total"] for event in job.events("after")] == [3.0] * 3


HANDLER_CALLS = """
import signal, threading, time
import probe, syncvar as sv
from syncvar.bootstrap.process import current

other = sv.new_group(range(2))


def ring(*_):
    try:
        sv.all_reduce(1.0, group=other)
    except sv.UsageError as error:
        probe.note("refused", text=str(error))
        probe.open_gate(f"refused-{turn}")


def alarm():
    while not busy.locked():  # until the main thread is in the call
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


signal.signal(signal.SIGALRM, ring)
busy = current().world.busy
for turn in range(2):
    sv.barrier()
    if sv.rank() == 0:
        threading.Thread(target=alarm).start()
    else:
        probe.gate(f"refused-{turn}")
    sv.barrier(timeout=60.0)
    probe.note("went on", total=sv.all_reduce(1.0, group=other).item())  # from the second turn on the handler's call is prepared
probe.note("end")
"""


def test_a_signals_handler_that_makes_a_call_inside_another_one_is_refused_and_never_waits(launch):
    job = launch(HANDLER_CALLS, workers=2, arguments=[])
    job.wait()
    refused = [event["text"] for event in job.events("refused", rank=0)]
    assert refused, str(job)
    assert all(
        "a signal's handler has interrupted this thread in another call" in text
        and "rank 0" in text
        for text in refused
    ), str(job)
    assert [event["total"] for event in job.events("went on", rank=0)][:1] == [2.0], str(job)
    assert len(refused) == 2, str(job)
