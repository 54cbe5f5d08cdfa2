"""Signals to the launcher that belong to the program: they reach all ranks of all hosts, and what these have started."""

import re
import signal

import pytest

from tests.support.launching import await_true, line_of

SCRIPT = """
import os, signal, subprocess, sys
import probe, syncvar as sv

child = subprocess.Popen([sys.executable, "-c", '''
import os, signal, time
for later in (signal.SIGUSR2, 40):  # they may come before the handler of the first has run
    signal.signal(later, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
print("listens", flush=True)
time.sleep(60)
'''], stdout=subprocess.PIPE)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, 40):
    signal.signal(number, lambda number, _: probe.note("got", number=number))
child.stdout.readline()
probe.note("ready")
if probe.RANK == 1:
    probe.gate("go")
assert sv.all_reduce(1) == sv.world_size()  # rank 0 waits here while the signals come
probe.note("done", child=child.wait(120))
"""


@pytest.mark.parametrize(
    ("start", "options"), [("fork", ()), ("spawn", ("--fake-hosts", "2"))], ids=["fork", "hosts"]
)
def test_signals_reach_all_ranks_and_their_children(launch, start, options):
    job = launch(
        SCRIPT, start=start, options=["--forward-signals", "USR1,SIGUSR2,CONT,40", "-v", *options]
    )
    job.await_events("ready", 2)
    for count, number in enumerate((signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, 40), 1):
        job.send(number)
        got = job.await_events("got", 2 * count)
        assert sorted(event["rank"] for event in got if event["number"] == number) == [0, 1], str(
            job
        )
    assert not job.events("done"), "a handler runs while its rank waits in a call"
    job.open_gate("go")
    assert job.wait() == 0, str(job)
    assert [event["child"] for event in job.events("done")] == [7, 7], str(job)
    assert "syncvar: SIGUSR1 forwarded to all ranks" in job.err


UNHANDLED = """
import signal, subprocess, sys
import probe, syncvar as sv

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
if probe.RANK == 2:
    signal.signal(signal.SIGUSR1, lambda *_: probe.note("got"))
sv.barrier()
probe.note("ready")
if probe.RANK == 1:
    probe.gate("go")
sv.all_reduce(1)  # the others wait here
assert child.poll() is None
child.kill()
"""


@pytest.mark.parametrize("options", [(), ("-H", "localhost:3")], ids=["here", "agent"])
def test_a_signal_that_a_rank_does_not_expect_is_not_passed_on_to_it(launch, options):
    job = launch(UNHANDLED, workers=3, options=options, env={"SYNCVAR_STALL_WARNING_S": "0.5"})
    job.await_events("ready", 3)
    waits = re.compile(r"been waiting .*in all_reduce")  # not in the barrier before it
    await_true(lambda: waits.search(job.err), what="rank 0 waits")
    job.send(signal.SIGUSR1)
    job.await_events("got", rank=2)
    await_true(lambda: "syncvar: `syncvar stacks" in job.err, what="what the launcher says")
    title = "syncvar: SIGUSR1 would end ranks 0, 1, which have no handler for it: they do not get it. What they do:\n"
    places = job.report.split(title)[1].split("\n")
    waits = f"at script.py:{line_of(UNHANDLED, '# the others wait here')}"
    assert re.fullmatch(rf"  rank 0: waiting in all_reduce.* {waits}.*", places[0]), str(job)
    assert places[1].startswith("  rank 1: not waiting in any call"), str(job)
    assert (
        places[2]
        == f"syncvar: `syncvar stacks {job.process.pid}` shows where they are in the script"
    ), str(job)
    job.open_gate("go")
    assert job.wait() == 0, str(job)


def test_signals_stay_with_the_launcher_where_none_is_passed_on(launch):
    job = launch(
        "import probe\nprobe.note('ready')\nprobe.gate('never', 60)\n",
        options=["--forward-signals", "none"],
    )
    job.await_events("ready", 2)
    job.send(signal.SIGUSR1)
    assert job.wait() == -signal.SIGUSR1, "as any program that does not handle it"


def test_a_signal_while_there_are_no_ranks_is_dropped(launch):
    script = """
    import os, signal
    import probe
    if os.environ["SYNCVAR_RESTARTS"] == "0":
        os._exit(3)
    probe.note("again")
    """
    job = launch(
        script, workers=1, options=["--max-restarts", "1"], env={"SYNCVAR_RESTART_DELAY_S": "1.5"}
    )
    await_true(lambda: "as attempt 2" in job.err, what="the pause before the restart")
    job.send(signal.SIGUSR1)
    await_true(
        lambda: "SIGUSR1 was dropped: no rank runs between two attempts" in job.err,
        what="the words",
    )
    assert job.wait() == 0, str(job)
    assert len(job.events("again")) == 1, "the ranks of the next start did not get it"
