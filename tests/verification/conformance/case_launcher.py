"""Conducts launches: all cases of one number of replicas in one launch, one after another.

The ranks are told each case over a socket and answer with the differences they saw. After a failed case they leave the
job and join anew, so that the next case starts from fresh groups. Where the group broke, a rank ended or a case took
longer than is allowed, the launch is ended, and the remaining cases get a new one: no case costs another its result.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.verification.conformance.case_collection import without_category

CASE_S = 120.0  # a case that takes longer has failed
START_S = 120.0
_REPLICA = Path(__file__).with_name("replica_process.py")


@dataclass
class Outcome:
    """What became of a case."""

    case: dict
    differences: list = field(default_factory=list)  # texts, beginning with the rank
    seconds: float = 0.0

    @property
    def passed(self):
        return not self.differences

    def __str__(self):
        return f"{self.case['id']}:\n" + "\n".join(f"    {text}" for text in self.differences)


class _Ended(Exception):
    """A launch cannot go on."""


class _Launch:
    """Ranks that wait for orders."""

    def __init__(self, replicas, folder, case_s, transport, start):
        self.replicas, self.folder, self.case_s = replicas, folder, case_s
        self.lines, self.buffers = {}, {}
        path = os.path.join(folder, "s")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.log = open(os.path.join(folder, "log"), "ab")  # noqa: SIM115  (closed by `end`)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(replicas)
        hosts = ["--fake-hosts", "2"] if transport == "hosts" else []
        line = [
            sys.executable,
            "-m",
            "syncvar_launcher",
            "--workers",
            str(replicas),
            "--no-timestamps",
            "--start-method",
            "fork",
            *hosts,
        ]
        environment = os.environ | {
            "SYNCVAR_COLLECTIVE_TIMEOUT_S": str(0.75 * case_s),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SYNCVAR_TRANSPORT": "auto" if transport == "hosts" else transport,
        }
        if start is not None:
            line, environment = start(replicas, folder, environment)
        self.process = subprocess.Popen(
            [*line, str(_REPLICA), path, folder],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=environment,
            start_new_session=True,
        )
        self.selector = selectors.DefaultSelector()
        try:
            self._accept()
        except BaseException:
            self.end(kill=True)
            raise

    def _accept(self):
        until = time.monotonic() + START_S
        arrived = []
        self.listener.settimeout(0.2)
        while len(arrived) < self.replicas:
            if time.monotonic() > until or self.process.poll() is not None:
                raise _Ended(f"the ranks did not come: {self.words()}")
            with contextlib.suppress(TimeoutError):
                arrived.append(self.listener.accept()[0])
        for number, line in enumerate(arrived):
            self.lines[number] = line
            self.buffers[number] = b""
            self.selector.register(line, selectors.EVENT_READ, number)
        self.rank_of = {number: answer["rank"] for number, answer in self._answers(until).items()}
        if len(self.rank_of) < self.replicas:
            raise _Ended(f"the ranks did not join: {self.words()}")

    def order(self, limit_s=None, **order):
        """Tell every rank the same; return their answers by rank, those that came."""
        data = (json.dumps(order) + "\n").encode()
        with contextlib.suppress(OSError):
            for line in self.lines.values():
                line.sendall(data)
        answers = self._answers(time.monotonic() + (limit_s or self.case_s))
        return {self.rank_of[number]: answer for number, answer in answers.items()}

    def _answers(self, until):
        answers = {}
        gone = set()
        while len(answers) + len(gone) < self.replicas and time.monotonic() < until:
            for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
                number = key.data
                data = self.lines[number].recv(1 << 16)
                if not data:
                    self.selector.unregister(self.lines[number])
                    gone.add(number)
                    continue
                self.buffers[number] += data
                if b"\n" in self.buffers[number]:
                    text, self.buffers[number] = self.buffers[number].split(b"\n", 1)
                    answers[number] = json.loads(text)
        return answers

    def words(self):
        """Return the end of what the launch has written."""
        return Path(self.folder, "log").read_text(errors="replace")[-1500:]

    def end(self, *, kill=False):
        """End the launch."""
        if not kill:
            with contextlib.suppress(OSError):
                for line in self.lines.values():
                    line.sendall(b'{"do": "end"}\n')
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 10)):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
        self.selector.close()
        for line in (*self.lines.values(), self.listener):
            line.close()
        self.log.close()


def conduct(cases, *, case_s=CASE_S, launches=None, transport="auto", start=None):
    """Run cases, all of the same number of replicas, over real processes; return their outcomes by id.

    Args:
        cases: As `collection.load` gives them.
        case_s: Seconds allowed for one case.
        launches: A list that gets one entry for each launch: the id of the first case.
        transport: "auto": what this host offers, shared memory; "zmq": links; "hosts": two hosts, each with shared memory.
        start: Given the number of ranks, a folder and an environment, returns what starts them instead of syncvar-launch, as a
            command line, and its environment.
    """
    outcomes = {}
    left = list(cases)
    folder = tempfile.mkdtemp(prefix="sv-conf-", dir="/tmp")  # short: paths of sockets are limited
    try:
        while left:
            if launches is not None:
                launches.append(left[0]["id"])
            _conduct_launch(left, outcomes, folder, case_s, transport, start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def _conduct_launch(left, outcomes, folder, case_s, transport, start):
    """Run cases from the front of `left` until none is left or the launch cannot go on."""
    try:
        launch = _Launch(left[0]["replicas"], folder, case_s, transport, start)
    except _Ended as error:
        case = left.pop(0)
        outcomes[case["id"]] = Outcome(case, [f"no launch: {error}"])
        return
    whole = True
    try:
        while left and whole:
            case = left.pop(0)
            began = time.monotonic()
            prefix = f"case{len(outcomes)}"
            answers = launch.order(do="case", case=without_category(case), prefix=prefix)
            differences = _differences(answers, launch, case_s)
            outcome = outcomes[case["id"]] = Outcome(case, differences, time.monotonic() - began)
            if outcome.passed:
                continue
            whole = len(answers) == launch.replicas and not any(
                answer["broken"] for answer in answers.values()
            )
            whole = whole and len(launch.order(do="rejoin")) == launch.replicas
    finally:
        launch.end(kill=not whole)


def _differences(answers, launch, case_s):
    found = [
        f"rank {rank}: {text}"
        for rank, answer in sorted(answers.items())
        for text in answer["differences"]
    ]
    found += [
        f"rank {rank}: the group broke: {answer['broken']}"
        for rank, answer in sorted(answers.items())
        if answer["broken"]
    ]
    silent = sorted(set(range(launch.replicas)) - set(answers))
    if silent:
        ended = launch.process.poll() is not None
        how = (
            f"ended: {launch.words()}"
            if ended
            else f"did not answer within {case_s:g} s, or ended: {launch.words()}"
        )
        found.append(f"ranks {silent} {how}")
    return found
