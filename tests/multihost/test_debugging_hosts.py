"""A rank of another host that is debugged has the terminal: lines are edited there, Ctrl-C reaches it, and the end leaves all as it was."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import textwrap
import time

import pytest
from test_several_hosts import at, start

from tests.support.launching import PROBE
from tests.support.paths import PROFILE

pytestmark = pytest.mark.slow

DEBUGGED = """
    import os
    import probe, syncvar as sv
    if sv.rank() == 2:
        value = 41
        breakpoint()
        print("after", value + 1, os.isatty(0), os.isatty(1), flush=True)
    else:
        print("of another rank", flush=True)
    assert sv.all_reduce(1) == 3
    probe.note("done")
"""


class Person:
    """Somebody at a terminal in which a launcher runs."""

    def __init__(self, folder, line):
        self.seen = b""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvp(line[0], line)
        self.before = termios.tcgetattr(self.terminal)

    def await_words(self, words, limit_s=60.0, again=b""):
        """Read until words are seen; `again` is typed every two seconds meanwhile."""
        until = time.monotonic() + limit_s
        typed = time.monotonic()
        while words not in self.seen:
            assert time.monotonic() < until, self.seen.decode(errors="replace")
            if again and time.monotonic() > typed + 2:
                typed = time.monotonic()
                os.write(self.terminal, again)
            if select.select([self.terminal], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.terminal, 4096)
                except OSError:
                    break
        assert words in self.seen, self.seen.decode(errors="replace")

    def types(self, keys, words):
        self.seen = b""
        os.write(self.terminal, keys)
        self.await_words(words)

    def wait(self):
        """Read to the end; return the exit code of the launcher."""
        with pytest.raises(AssertionError):
            self.await_words(b"no such words", 30.0)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self):
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_rank_of_another_host_has_the_terminal(hosts, tmp_path, method):
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "script.py").write_text(textwrap.dedent(DEBUGGED))
    line = [
        *hosts.prefix,
        sys.executable,
        "-m",
        "syncvar_launcher",
        "--config",
        str(PROFILE),
        "--no-timestamps",
        "--start-method",
        method,
        *hosts.ssh,
        "-H",
        at(hosts, 0, 2, 1),
        "--debug",
        "2",
        "script.py",
    ]
    person = Person(tmp_path, line)
    try:
        person.await_words(b"(Pdb) ")
        person.types(b"p valux\x7fe\r", b"\n41")
        person.await_words(b"(Pdb) ")
        # CPython takes a signal that comes just before readline waits for what is typed next: then a person types it again.
        person.types(b"\x03", b"")
        person.await_words(b"KeyboardInterrupt", again=b"\x03")
        fcntl.ioctl(person.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 132, 0, 0))
        until = time.monotonic() + 20
        while b"columns=132, lines=50" not in person.seen:
            assert time.monotonic() < until, person.seen
            person.types(b"p os.get_terminal_size()\r", b"lines=")
        assert termios.tcgetattr(person.terminal) != person.before, "key by key meanwhile"
        person.types(b"c\r", b"after 42 True True")
        assert person.wait() == 0, person.seen
        assert termios.tcgetattr(person.terminal) == person.before
    finally:
        person.close()
    assert len(list(tmp_path.glob("events-*"))) == 3


def test_without_a_terminal_the_debugged_rank_reads_lines(hosts, tmp_path):
    job = start(
        hosts, tmp_path, DEBUGGED, at(hosts, 0, 2, 1), "--debug", "2", stdin=b"p value\nc\n"
    )
    assert job.wait(120) == 0, job
    assert "(Pdb) 41\n(Pdb) after 42 False False\n" in job.out, "as it is, without a prefix"
    assert job.lines(0) == ["of another rank"]


def test_a_rank_that_is_not_there_cannot_be_debugged(hosts, tmp_path):
    job = start(hosts, tmp_path, DEBUGGED, at(hosts, 0, 2, 1), "--debug", "3")
    assert job.wait(120) == 78, job
    assert "--debug 3: there is no such rank among 3 (ranks are 0 to 2)" in job.err
