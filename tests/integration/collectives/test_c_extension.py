"""The C runner of persistent calls gives the bytes of the Python runner, and leaves to it what is unusual."""

import importlib
import inspect
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from syncvar import _native as kernel
from tests.support.paths import RANK_SCRIPTS, TESTS
from tests.support.sanitizers import NOT_LOADED, loaded, sanitized, variables

SCRIPT = RANK_SCRIPTS / "native_calls.py"


def told(launch, runner, workers, sizes):
    """Return what each rank says of its calls of few or many sizes."""
    job = launch(
        None,
        workers=workers,
        target=[str(SCRIPT)],
        arguments=[str(workers), sizes],
        env={"SYNCVAR_CALL_RUNNER": runner, "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60"},
    )
    assert job.wait(300) == 0, str(job)
    return [json.loads(line[line.index("{") :]) for line in job.out.splitlines()]


@pytest.mark.needs_c_extension
@pytest.mark.parametrize(
    ("workers", "sizes"),
    [
        (2, "few"),
        pytest.param(4, "few", marks=pytest.mark.slow),
        *(
            pytest.param(workers, sizes, marks=pytest.mark.nightly)
            for workers in (2, 3, 4, 5)
            for sizes in ("many", "long")
        ),
    ],
)
@pytest.mark.timeout(600)
def test_both_runners_give_the_same_bytes(launch, workers, sizes):
    seen = {runner: told(launch, runner, workers, sizes) for runner in ("c", "python")}
    assert len({rank["digest"] for ranks in seen.values() for rank in ranks}) == 1, seen
    assert {rank["calls"] for ranks in seen.values() for rank in ranks} == {seen["c"][0]["calls"]}
    assert {rank["native"] for rank in seen["python"]} == {0}
    assert all(rank["native"] > 40 for rank in seen["c"]), f"nothing has been compared: {seen}"


MEANS = """
import numpy as np, syncvar as sv
from probe import note, raised

for _ in range(4):  # prepared, and float64 as well by the time it is combined
    sv.all_reduce(np.arange(5, dtype=np.uint64), "mean")
try:
    sv.all_reduce(np.arange(5, dtype=np.uint64 if sv.rank() else np.float64), "mean")
except sv.MismatchError as error:
    raised(error)
assert sv.all_reduce(1) == 2
"""


EVERY_HALF = """
import ml_dtypes
import numpy as np
import syncvar as sv

np.seterr(all="ignore")
every = np.arange(1 << 16, dtype=np.uint16)
rank, size = sv.rank(), sv.world_size()


def brought(of, kind, turn):
    draw = np.random.default_rng([of, turn])
    values = draw.permutation(every).view(kind)
    if turn % 2:
        return values[np.isfinite(values.astype(np.float32))]  # nothing but sums that overflow is infinite
    values[np.isnan(values.astype(np.float32)) & (draw.random(every.size) < 0.9)] = 1
    return values


for kind in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
    for turn in range(6):
        terms = [brought(one, kind, turn).astype(np.float32) for one in range(size)]
        total = terms[0] + terms[1] if size == 2 else (terms[0] + terms[1]) + terms[2]
        for op, wide in (("sum", total), ("mean", total / np.float32(size))):
            wanted, x = wide.astype(kind), brought(rank, kind, turn)
            for made in (sv.all_reduce(x, op), sv.all_reduce(x, op), sv.all_reduce(x, op, out=np.empty_like(x)), sv.all_reduce(x[:1001], op), sv.all_reduce(x, op, out=x)):
                right, is_nan = wanted[: made.size], np.isnan(wide[: made.size])
                same = (made.view(np.uint16) == right.view(np.uint16)) | (is_nan & np.isnan(made.astype(np.float32)))
                assert same.all(), (kind, turn, op, np.flatnonzero(~same)[:5], made[~same][:5], right[~same][:5])
print("every half is right", flush=True)
"""


@pytest.mark.parametrize(
    ("kernel", "workers"),
    [
        pytest.param("c", 2, marks=pytest.mark.needs_c_extension),
        ("python", 2),
        pytest.param("c", 3, marks=pytest.mark.needs_c_extension),
    ],
)
def test_sums_and_means_of_every_half_are_those_of_float32_rounded_once(launch, kernel, workers):
    job = launch(EVERY_HALF, workers=workers, env={"SYNCVAR_CALL_RUNNER": kernel})
    assert job.wait(120) == 0, str(job)
    assert job.out.count("every half is right") == workers


@pytest.mark.needs_c_extension
def test_a_mean_of_floats_is_not_taken_for_one_of_integers(launch):
    job = launch(MEANS, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait(120) == 0, str(job)
    assert [sorted(event["table"]) for event in job.events("raised")] == [["0", "1"]] * 2, str(job)


LOCATED = """
import numpy as np, syncvar as sv

size = sv.world_size()
for count in (5, 100_000):
    for op, wanted in (("minloc", 0), ("maxloc", size - 1)):
        values, ranks = sv.all_reduce(np.full(count, sv.rank(), np.float32), op)
        assert (values == wanted).all() and (ranks == wanted).all()
sv.register_op("added", lambda left, right: left + right)
assert (sv.all_reduce(np.ones(100_000), "added") == size).all()
"""


FORMS = """
import numpy as np, syncvar as sv

for _ in range(4):
    for dtype in ("uint64", "float64", "int32", "float64"):
        got = sv.exscan(np.full(3, sv.rank() + 1, dtype), "mean")
        assert got.tolist() == [float(sv.rank())] * 3, (dtype, got)
        assert sv.scan(np.full(3, 2, dtype), "mean").tolist() == [2.0] * 3
    for count in (10, 5000, 100000):
        for dtype in ("uint8", "float32"):
            got = sv.gather(np.full(count, sv.rank() + 1, dtype))
            assert (got is None) == bool(sv.rank()), (dtype, count, got)
            assert sv.rank() or (got == np.repeat(np.array([1, 2], dtype), count)).all()
            assert (sv.reduce(np.full(count, 2, dtype)) is None) == bool(sv.rank())
    x = np.full(200_000, sv.rank() + 1, "int64")
    for call in (sv.scan, sv.exscan):  # one rank makes a persistent call, the other cannot
        got = call(x, "mean") if sv.rank() else call(x, "mean", async_op=True).wait()
        assert set(got.tolist()) == {1 + sv.rank() / 2 if call is sv.scan else float(sv.rank())}, got
    got = sv.reduce(x, "mean") if sv.rank() else sv.reduce(x, "mean", async_op=True).wait()
    assert sv.rank() or set(got.tolist()) == {1.5}, got
assert sv.all_reduce(1) == 2
"""


@pytest.mark.needs_c_extension
def test_whoever_brings_or_gets_nothing_does_not_take_one_form_for_another(launch):
    job = launch(FORMS, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait(120) == 0, str(job)


@pytest.mark.needs_c_extension
def test_ops_that_numpy_has_no_loop_for_are_not_looked_for_among_its_loops(launch):
    job = launch(LOCATED, workers=3, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait(120) == 0, str(job)


STARTED = """
import numpy as np, syncvar as sv
from probe import note
from syncvar.bootstrap.process import current

x, engine = np.ones(4), current().engine
for _ in range(3):
    sv.all_reduce(x)
sv.barrier()
works = [sv.all_reduce(1.0 * x, async_op=True, out=out) for out in (None, x)]
note("started", begun=works[0]._async_call is not None)
assert [work.wait().tolist() for work in works] == [[2.0] * 4] * 2
work = sv.all_reduce(x, "sum", async_op=True) if sv.rank() else sv.all_reduce(x, "max", async_op=True)  # line 13
try:
    work.wait()
except sv.MismatchError as error:
    note("refused", notes=error.__notes__)
work = sv.all_reduce(1.0, async_op=True)
assert sv.all_reduce(2.0) == 4.0 and work.wait() == 2.0 and work.done() and not engine.async_calls
sv.all_reduce(x, async_op=True)  # nobody waits for it
"""


@pytest.mark.needs_c_extension
def test_started_calls_are_published_at_once_and_know_where_they_were_started(launch):
    job = launch(STARTED, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait(120) == 0, str(job)
    assert [event["begun"] for event in job.events("started")] == [True, True]
    refused = job.events("refused")
    assert len(refused) == 2
    for event in refused:
        (said,) = event["notes"]
        assert said.endswith("script.py:13 in <module>"), said


INTERRUPTED = """
import signal, threading, time
import numpy as np, syncvar as sv
from probe import failure, gate, note
from syncvar.bootstrap.process import current

x = np.ones(4)
for _ in range(3):
    sv.all_reduce(x)
if sv.rank() == 0:
    def alarm(busy=current().world.busy, main=threading.main_thread().ident):
        while not busy.locked():  # until the main thread is in the call
            time.sleep(0.01)
        time.sleep(0.2)
        signal.pthread_kill(main, signal.SIGALRM)

    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError("planted")))
    threading.Thread(target=alarm).start()
    try:
        sv.all_reduce(x)
    except InterruptedError:
        note("interrupted", locked=current().world.busy.locked())
    failure(sv.all_reduce, x)
else:
    gate("come")
    for _ in range(2):  # the first may find what rank 0 has put, and be right
        failure(sv.all_reduce, x)
"""


@pytest.mark.needs_c_extension
def test_a_signal_in_a_prepared_call_breaks_the_group_on_all_ranks(launch):
    job = launch(INTERRUPTED, env={"SYNCVAR_CALL_RUNNER": "c"})
    (event,) = job.await_events("interrupted")
    assert not event["locked"]
    job.open_gate("come")
    job.wait(120)
    first = {event["rank"]: event["error"] for event in reversed(job.events("raised"))}
    assert first == {0: "GroupBroken", 1: "PeerLost"}, str(job)


def test_a_demanded_kernel_that_is_not_there_is_refused(launch):
    script = """
import sys
sys.modules["syncvar._native.native"] = None
import syncvar as sv
sv.init()
"""
    job = launch(script, env={"SYNCVAR_CALL_RUNNER": "c"}, options=["--start-method", "spawn"])
    assert job.wait(120) != 0
    assert "there is no C extension" in job.err
    assert "install syncvar with a compiler" in job.err


def test_without_a_kernel_calls_are_prepared_in_python(launch):
    script = """
import sys
sys.modules["syncvar._native.native"] = None
import numpy as np, syncvar as sv
from probe import note
from syncvar import _native as kernel
for _ in range(4):
    total = sv.all_reduce(np.arange(3.0))
    sv.barrier()
note("ends", total=total.tolist(), runner=kernel.which("auto"), why=kernel.missing_reason())
"""
    job = launch(script, options=["--start-method", "spawn"])
    assert job.wait(120) == 0, str(job)
    for event in job.events("ends"):
        assert (event["total"], event["runner"]) == ([0.0, 2.0, 4.0], "python")
        assert "a C compiler" in event["why"]


@pytest.mark.needs_c_extension
def test_dry_run_and_log_say_what_runs(launch):
    for runner, words in (
        ("auto", "persistent calls run in C"),
        ("python", "persistent calls run in Python: call_runner = python asks for it"),
    ):
        job = launch(
            "import syncvar as sv; sv.init()",
            env={"SYNCVAR_CALL_RUNNER": runner, "SYNCVAR_LOG_LEVEL": "info"},
        )
        assert job.wait(120) == 0, str(job)
        assert f"share memory; {words}" in job.err
        job = launch("print(1)", options=["--dry-run"], env={"SYNCVAR_CALL_RUNNER": runner})
        assert job.wait(120) == 0, str(job)
        assert words in job.out.splitlines()


GROUPS = """
import sys
import numpy as np, syncvar as sv
from probe import note

calls = []
turned = sv.new_group([1, 0])
x, mine = np.arange(3.0), sv.rank()


def made():
    total, theirs = sv.all_reduce(x + mine, group=turned), sv.broadcast(x + mine, root=0, group=turned)
    sv.barrier(group=turned)
    halves = sv.all_reduce((x + mine).astype(np.float16), group=turned)
    return halves.tolist(), total.tolist(), theirs.tolist(), sv.all_gather(np.array([mine]), group=turned).tolist(), sv.all_gather(np.array([mine])).tolist()


def seen(frame, event, _):
    if event == "call" and frame.f_code.co_name in ("all_reduce", "broadcast", "barrier", "all_gather"):
        calls.append(frame.f_code.co_name)


first = [made() for _ in range(3)]
sys.setprofile(seen)
for _ in range(20):
    last = made()
sys.setprofile(None)
assert all(one == last for one in first)
shapes = [(first, 7) for first in range(1, 120)]
for _ in range(2):  # more than are remembered in some places
    for shape in shapes:
        assert (sv.all_reduce(np.ones(shape, np.float32)) == 2).all()
errors = []
for wrong in ("world", 3, sv):
    try:
        sv.all_reduce(x, group=wrong)
    except sv.ConfigError as error:
        errors.append(type(error).__name__)
sys.setprofile(seen)
for shape in shapes:
    sv.all_reduce(np.ones(shape, np.float32))
sys.setprofile(None)
turned.destroy()
try:
    sv.all_reduce(x + mine, group=turned)
except sv.UsageError as error:
    errors.append(type(error).__name__)
note("groups", last=last, errors=errors, calls=calls)
"""


@pytest.mark.needs_c_extension
def test_calls_of_groups_and_of_many_forms_are_entered_in_c(launch):
    job = launch(GROUPS, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait(120) == 0, str(job)
    for event in job.events("groups"):
        assert event["last"] == [[1.0, 3.0, 5.0], [1.0, 3.0, 5.0], [1.0, 2.0, 3.0], [1, 0], [0, 1]]
        assert event["errors"] == ["ConfigError"] * 3 + ["UsageError"]
        assert len(event["calls"]) < 40, (
            "of 20 * 5 and 119 calls so many went Python's way, more than after slow peers"
        )


FORMS = """
import sys
import numpy as np
import syncvar as sv
from probe import note

sv.init()
sv.all_reduce(np.ones(1))
module = sys.modules["syncvar.collectives.all_reduce"]
plain, by_python = module.make_call, []
module.make_call = lambda *given: by_python.append(given[2]) or plain(*given)
values = [{"a": 1.0, "n": 2.0}, {"a": 1.0, "n": 3}, {"a": 1, "n": 3}]
for turn in range(4):
    if turn == 2:
        by_python.clear()
    results = [sv.all_reduce(value) for value in values]
dtypes = [[str(result[name].dtype) for name in ("a", "n")] for result in results]
numbers = len(by_python)

by_python.clear()
arrays, again = [np.ones(256 * number + 1) for number in range(9)], 0  # they are looked for in one place
for _ in range(2):
    for array in arrays:
        sv.all_reduce(array)
        before = len(by_python)
        sv.all_reduce(array)
        again += len(by_python) - before
note("forms", dtypes=dtypes, numbers=numbers, forgotten=len(by_python) - len(arrays), again=again)
"""


@pytest.mark.needs_c_extension
def test_numbers_are_told_apart_by_their_types_and_forgotten_calls_are_found_again(launch):
    job = launch(FORMS, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait(120) == 0, str(job)
    for event in job.events("forms"):
        assert event["dtypes"] == [["float64", "float64"], ["float64", "int64"], ["int64", "int64"]]
        assert event["numbers"] == 0, "such dicts take turns, and each is found in C"
        assert event["forgotten"] > 0, "so many of one place are not remembered at once"
        assert event["again"] == 0, "the call after one in Python is found in C again"


CHANGES = """
import sys
import numpy as np
import syncvar as sv
from probe import note

x, sums, calls = np.ones(3), [], []


def seen(frame, event, _):
    if event == "call" and frame.f_code.co_name == "all_reduce":
        calls.append(frame.f_code.co_name)


def call(times=5):
    for turn in range(times):
        made = sv.all_reduce(x)
    sums.append(made[0])

call()
with sv.uneven():  # rank 0 leaves the block first: the others' calls are of a smaller group
    for turn in range(4 + 3 * sv.rank()):
        sv.all_reduce(x)
    sums.append(sv.all_reduce(x)[0] if sv.rank() else 0.0)
call()
pair = sv.new_group([0, 2])
if sv.rank() != 1:
    sums.append(sv.all_reduce(x, group=pair)[0])
call()
sv.shutdown()
sv.init()
call()
sys.setprofile(seen)
call(40)
sys.setprofile(None)
try:
    if sv.rank() != 1:
        sv.all_reduce(x, group=pair)
    refused = sv.rank() == 1
except sv.UsageError:
    refused = True
call()
note("changes", sums=sums, refused=refused, calls=len(calls))
"""


@pytest.mark.needs_c_extension
def test_calls_are_of_the_job_and_group_that_there_are_now(launch):
    job = launch(CHANGES, workers=3, env={"SYNCVAR_CALL_RUNNER": "c"})
    assert job.wait(120) == 0, str(job)
    found = {event["rank"]: event for event in job.events("changes")}
    assert [found[rank]["sums"] for rank in range(3)] == [
        [3.0, 0.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0],
        [3.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0],
        [3.0, 1.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0],
    ], str(job)
    assert all(event["refused"] for event in found.values())
    assert all(event["calls"] < 20 for event in found.values()), (
        "of 40 calls so many went Python's way, more than after slow peers"
    )


@pytest.mark.needs_c_extension
def test_entrances_are_like_the_functions_they_stand_for():
    import pickle

    import syncvar as sv

    assert kernel.missing_reason() == "", "this tree has been installed with its kernel"
    for function in (sv.all_reduce, sv.barrier):
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__doc__.startswith(("Combine", "Wait"))
        assert list(inspect.signature(function).parameters)[-1] in ("_foreign", "async_op")
        assert function.__name__ in repr(function)
        assert function.__module__.startswith("syncvar.collectives")
        assert inspect.isfunction(function)
        assert inspect.getsource(function).count(f"def {function.__name__}(") == 1


@pytest.mark.needs_c_extension
def test_help_shows_each_function_with_its_docstring():
    import pydoc

    import syncvar as sv

    assert kernel.missing_reason() == "", "this tree has been installed with its kernel"
    functions = [name for name in sv.__all__ if inspect.isfunction(getattr(sv, name))]
    assert {"all_reduce", "barrier", "send", "recv"} <= set(functions)
    for name in functions:
        function = getattr(sv, name)
        text = pydoc.plain(pydoc.render_doc(function))
        assert text.startswith(
            f"Python Library Documentation: function {name} in module syncvar"
        ), text[:200]
        assert inspect.getdoc(function).splitlines()[0] in text, text[:400]


@pytest.mark.needs_c_extension
@pytest.mark.nightly
def test_no_byte_outside_is_touched(launch, tmp_path):
    env = sanitized("native", tmp_path)
    job = launch(
        None,
        workers=3,
        target=[str(SCRIPT)],
        arguments=["9", "many"],
        options=[
            "--start-method",
            "spawn",
            *(f"--env={name}={value}" for name, value in env.items()),
        ],
        env={"SYNCVAR_CALL_RUNNER": "c", "SYNCVAR_COLLECTIVE_TIMEOUT_S": "120"},
    )
    assert job.wait(500) == 0, str(job)
    seen = [json.loads(line[line.index("{") :]) for line in job.out.splitlines()]
    assert len({rank["digest"] for rank in seen}) == 1, seen
    assert all(rank["native"] > 40 for rank in seen)
    assert loaded(tmp_path) >= 3


@pytest.mark.needs_c_extension
@pytest.mark.parametrize("way", [0, 1, 2])
def test_copies_are_exact(way):
    """To memory that others read, past the caches (whole lines go so, and what is left at both ends as usual), and to this rank's own."""
    copy = importlib.import_module("syncvar._native.native").copy_once
    draw = np.random.default_rng(5)
    source = np.frombuffer(draw.bytes(40_000), np.uint8)
    for nbytes in (0, 1, 63, 64, 1023, 1024, 1025, 1087, 4096, 8191, 33_333):
        for first, start in itertools.product((0, 1, 8, 63), (0, 1, 16, 63)):
            target = np.full(40_000, 7, np.uint8)
            copy(target[start:], source[first:], nbytes, way)
            assert np.array_equal(target[start : start + nbytes], source[first : first + nbytes]), (
                nbytes,
                first,
                start,
            )
            assert (target[:start] == 7).all()
            assert (target[start + nbytes :] == 7).all()


@pytest.mark.needs_c_extension
@pytest.mark.parametrize("ahead", [-4096, -100, -16, 0, 16, 40, 100, 4096 + 16])
def test_a_copy_to_memory_that_overlaps_is_exact(ahead):
    copy = importlib.import_module("syncvar._native.native").copy_once
    memory = np.frombuffer(bytearray(np.random.default_rng(6).bytes(60_000)), np.uint8)
    before = memory.copy()
    copy(memory[8_000 + ahead :], memory[8_000:], 40_000, 2)
    assert np.array_equal(memory[8_000 + ahead : 48_000 + ahead], before[8_000:48_000])


PLACED = """
import mmap
import numpy as np, syncvar as sv
from probe import note

def placed(offset, elements):
    memory = np.frombuffer(mmap.mmap(-1, 4 * elements + 8192), np.uint8)  # begins with a page
    return memory[offset : offset + 4 * elements].view(np.float32)

rank, size = sv.rank(), sv.world_size()
for elements in (3_000, 70_000, 1_300_000):  # by slots and cells, and read where they lie
    x = placed(16, elements)
    x[:] = np.arange(elements) + rank
    for offset in (0, 4, 16, 32, 40, 80, 144):
        out, whole = placed(offset, elements), placed(offset, size * elements)
        for _ in range(3):  # the first one is not prepared
            out[:] = whole[:] = -1
            sv.broadcast(x, root=1, out=out)
            assert np.array_equal(out, np.arange(elements, dtype=np.float32) + 1), (elements, offset)
            sv.all_gather(x.reshape(1, -1), out=whole.reshape(size, -1))
            for other in range(size):
                assert np.array_equal(whole[other * elements : (other + 1) * elements], np.arange(elements, dtype=np.float32) + other), (elements, offset)
            sv.all_reduce(x, out=out)
            assert np.array_equal(out, (size * np.arange(elements) + size * (size - 1) // 2).astype(np.float32)), (elements, offset)
note("exact")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner", [pytest.param("c", marks=pytest.mark.needs_c_extension), "python"]
)
def test_it_does_not_matter_where_in_a_page_arrays_begin(launch, runner):
    """Copies go another way where the target lies a few bytes after the source by their places in a page."""
    job = launch(PLACED, workers=3, env={"SYNCVAR_CALL_RUNNER": runner})
    assert job.wait(120) == 0, str(job)
    assert len(job.events("exact")) == 3


FUZZ = str(TESTS / "fuzz" / "program_fuzz.py")


@pytest.mark.needs_c_extension
def test_both_runners_do_the_same_and_broken_programs_do_no_harm():
    made = subprocess.run(
        [sys.executable, FUZZ, "1", "150"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (made.returncode, made.stdout) == (0, "the same\n"), made.stderr


@pytest.mark.slow
@pytest.mark.needs_c_extension
def test_sanitizers_find_nothing(tmp_path):
    env = {**os.environ, **sanitized("native", tmp_path)}
    made = subprocess.run(
        [sys.executable, FUZZ, "2", "400"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=env,
    )
    assert (made.returncode, made.stdout) == (0, "the same\n"), made.stderr[-4000:]
    assert loaded(tmp_path) == 1


@pytest.mark.slow
@pytest.mark.needs_c_extension
def test_a_module_that_cannot_be_loaded_is_not_replaced_by_the_installed_one(tmp_path):
    built = tmp_path / "native.so"
    built.write_bytes(b"no module")
    env = {**os.environ, **variables("native", built)}
    made = subprocess.run(
        [sys.executable, FUZZ, "2", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env,
    )
    assert made.returncode == NOT_LOADED, made.stderr
    assert "native.so" in made.stderr
    assert loaded(tmp_path) == 0
