"""The launcher's clock."""

import contextlib
import os
import signal
import subprocess
import sys
import time

CLOCK = """
import os, time
from syncvar_launcher.io.standard_streams import SignalWatch

with SignalWatch(os.environ) as watch:
    began, ours, begun = time.monotonic(), watch.now(), time.monotonic()
    print("ready", flush=True)
    while not watch.is_to_stop:
        time.sleep(0.005)
    lasted = watch.stop()
    assert not watch.is_to_stop
    assert not watch.pending
    print(time.monotonic() - begun, watch.now() - ours, time.monotonic() - began, lasted)
"""


def test_the_clock_stands_while_the_launcher_is_stopped():
    process = subprocess.Popen(
        [sys.executable, "-c", CLOCK], stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTSTP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    least, ours, most, lasted = map(float, out.split())
    assert lasted >= 0.49
    assert least - lasted - 0.001 < ours < most - lasted + 0.001
