"""What the interpreter's fault handler writes, read and told in one line."""

import os
import sys
import sysconfig

import pytest

import syncvar
from syncvar.cli.stacks import stacks_text
from syncvar.core import stack_dump
from syncvar.core.process_ids import SERVER_0, SERVING
from syncvar.core.stack_dump import (
    STOPPED,
    StackFrame,
    Thread,
    _program_frame,
    activity_text,
    parse_stacks,
    stack_text,
    visible_frames,
)

PACKAGE = os.path.dirname(syncvar.__file__)
STANDARD = sysconfig.get_path("stdlib")
START = [
    StackFrame(f"{PACKAGE}/bootstrap/worker_main.py", 130, "_run"),
    StackFrame("<frozen runpy>", 88, "_run_code"),
]
LOOP = [StackFrame(f"{PACKAGE}/parameter_server/server_main.py", 9, "run")]


def user(*lines, file="/job/train.py"):
    return [StackFrame(file, line, "f") for line in lines]


def ours(*lines, file="runtime/progress.py"):
    return [StackFrame(f"{PACKAGE}/{file}", line, "wait") for line in lines]


DUMP = r"""  File "left over", line 1 in of_another
Stack (most recent call first):
  File "/job/tr\xe9\u4e2d\U0001f600.py", line 8 in \xe9a
  File "/job/a", line 2 in it.py", line ??? in <module>
Thread 0x00007f0950cc66c0 (most recent call first):
  File "/job/a.py", line 10 in <lambda>
  ...

Thread 0x00007f0950cc66c1 [reader] (most recent call first):
  <no Python frame>

Current thread 0x00007f0951a19b80 (most recent call first):
  File "/job/a.py", line 9 in f
"""


def test_dumps_are_read_with_their_names():
    assert parse_stacks(DUMP) == [
        Thread(
            "",
            True,
            (
                StackFrame("/job/tré中😀.py", 8, "éa"),
                StackFrame('/job/a", line 2 in it.py', 0, "<module>"),
            ),
        ),
        Thread("0x00007f0950cc66c0", False, (StackFrame("/job/a.py", 10, "<lambda>"),)),
        Thread("0x00007f0950cc66c1", False, ()),
        Thread("0x00007f0951a19b80", True, (StackFrame("/job/a.py", 9, "f"),)),
    ]
    assert parse_stacks("") == []


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        (user(9, 49), "in user code, train.py:9 < train.py:49"),
        (user(1, 2, 3, 4), "in user code, train.py:1 < train.py:2 < train.py:3 < …"),
        (user(9, 9, 9, 9, 49), "in user code, train.py:9 < train.py:49"),
        (user(3, file="/elsewhere/job/x.py"), "in user code, /elsewhere/job/x.py:3"),
        (user(0), "in user code, train.py:?"),
        (ours(7, 8) + user(49), "in syncvar, called at train.py:49"),
        (ours(5, file="examples/digits.py"), "in user code, syncvar/examples/digits.py:5"),
        (
            user(7, file="/v/lib/python3/dist-packages/numpy/linalg.py") + user(49),
            "in numpy/linalg.py:7, called at train.py:49",
        ),
        (
            user(7, file=f"{STANDARD}/subprocess.py") + user(49),
            "in subprocess.py:7, called at train.py:49",
        ),
        (
            user(7, 8, file="/v/lib/python3/site-packages/tool/run.py"),
            "in user code, tool/run.py:7 < tool/run.py:8",
        ),
        (
            [*user(9), StackFrame("<frozen importlib._bootstrap>", 1, "_load"), *user(49)],
            "in user code, train.py:9 < train.py:49",
        ),
        (user(9) + ours(2) + user(49), "in user code, train.py:9 < train.py:49"),
        (
            [
                StackFrame("/v/site-packages/zmq/poll.py", 3, "poll"),
                *ours(4, file="parameter_server/server_links.py"),
                *LOOP,
            ],
            "waiting for requests",
        ),
        (LOOP, "waiting for requests"),
        (
            [
                *user(7, file="/v/site-packages/numpy/core.py"),
                StackFrame(f"{PACKAGE}/parameter_server/server/replicated_state.py", 5, "execute"),
                *LOOP,
            ],
            "at a request, in numpy/core.py:7",
        ),
        (
            user(7, file=f"{STANDARD}/gc.py")
            + ours(106, 110, file="core/stack_dump.py")
            + user(12),
            "in user code, train.py:12",
        ),
        (
            ours(106, file="core/stack_dump.py") + ours(2) + user(49),
            "in syncvar, called at train.py:49",
        ),
        ([], ""),
    ],
)
def test_a_stack_is_told_in_one_line(frames, line):
    assert stack_text(frames + START, "/job") == line
    assert stack_text(frames + START, "/job/") == line


def test_one_frame_is_kept_of_each_way_through_syncvar():
    assert visible_frames(ours(1, 2) + user(3) + ours(4, 5) + user(6) + START) == ours(1) + user(
        3
    ) + ours(4) + user(6)


JOB = {
    "name": "1a2b3c4d",
    "pid": 7,
    "workers": 5,
    "servers": 0,
    "lasted_s": 12.4,
    "command": "syncvar-launch -n 5 train.py",
    "folder": "/job",
}


def answer_of(rank, position, frames=(), instead="", ident=""):
    threads = [[ident, True, [list(frame) for frame in (*frames, *START)]]] if frames else []
    return {
        "rank": rank,
        "pid": 100 + rank,
        "position": position,
        "instead": instead,
        "threads": threads,
    }


def test_equal_stacks_are_shown_once_and_who_does_not_answer_is_named():
    waits = "waiting in barrier (call 3) at train.py:49 in f"
    ranks = [answer_of(rank, waits, ours(7, 8) + user(49)) for rank in (0, 1, 3)]
    ranks.insert(2, answer_of(2, "not waiting in any call", user(9, 49)))
    ranks.append({**answer_of(4, "not waiting in any call"), "threads": None})
    ranks.append(answer_of(5, "not waiting in any call", instead=STOPPED))
    assert stacks_text({"job": JOB, "ranks": ranks}) == (
        "job 1a2b3c4d: 5 ranks, launcher 7, since 12 s: syncvar-launch -n 5 train.py\n"
        f"ranks 0, 1, 3: {waits}\n"
        f"  {PACKAGE}/runtime/progress.py:7 in wait\n"
        "  /job/train.py:49 in f\n"
        "rank 2: in user code, train.py:9 < train.py:49\n"
        "  /job/train.py:9 in f\n"
        "  /job/train.py:49 in f\n"
        "rank 4: does not answer within 2 s (process 104); not waiting in any call\n"
        f"rank 5: not waiting in any call; {STOPPED}\n"
    )


def test_servers_are_shown_beside_ranks_with_their_own_frames():
    waiting = [
        StackFrame("/v/site-packages/zmq/poll.py", 3, "poll"),
        *ours(4, file="parameter_server/server_links.py"),
        *LOOP,
    ]
    answers = [
        answer_of(0, "not joined yet", user(9)),
        *(answer_of(SERVER_0 + server, SERVING, waiting) for server in (0, 1)),
    ]
    text = stacks_text({"job": JOB | {"workers": 1, "servers": 2}, "ranks": answers})
    assert text.startswith("job 1a2b3c4d: 1 rank and 2 servers, launcher 7")
    assert text.split("\n")[3:-1] == [
        "servers 0, 1: waiting for requests",
        "  /v/site-packages/zmq/poll.py:3 in poll",
        f"  {PACKAGE}/parameter_server/server_links.py:4 in wait",
        f"  {PACKAGE}/parameter_server/server_main.py:9 in run",
    ]


def test_every_frame_and_thread_is_shown_where_that_is_asked_for():
    one = answer_of(0, "not joined yet", user(9), ident="0x2")
    one["threads"].insert(0, ["0x1", False, [list(frame) for frame in user(3)]])
    text = stacks_text({"job": JOB, "ranks": [one]}, all_threads=True, verbose=True)
    assert text.split("\n")[1:-1] == [
        "rank 0: not joined yet; in user code, train.py:9",
        "  thread 0x1:",
        "    /job/train.py:3 in f",
        "  main thread:",
        "    /job/train.py:9 in f",
        f"    {PACKAGE}/bootstrap/worker_main.py:130 in _run",
        "    <frozen runpy>:88 in _run_code",
    ]


@pytest.mark.parametrize(
    ("position", "place", "text"),
    [
        ("not waiting in any call", "in user code, a.py:1", "in user code, a.py:1"),
        ("not waiting in any call", "", "not waiting in any call"),
        ("not waiting in any call", STOPPED, f"not waiting in any call; {STOPPED}"),
        (
            "not waiting in any call; no Python thread answers",
            STOPPED,
            f"not waiting in any call; {STOPPED}",
        ),
        (
            "not waiting in any call; no Python thread answers",
            "in user code, a.py:1",
            "in user code, a.py:1; no Python thread answers",
        ),
        ("not joined yet", "in user code, a.py:1", "not joined yet; in user code, a.py:1"),
        (
            "waiting in barrier (call 1) at a.py:1 in f",
            "in user code, a.py:1",
            "waiting in barrier (call 1) at a.py:1 in f",
        ),
        (
            "waiting in barrier (call 1) at a.py:1 in f",
            STOPPED,
            f"waiting in barrier (call 1) at a.py:1 in f; {STOPPED}",
        ),
        ("finished", "", "finished"),
        ("serving", "waiting for requests", "waiting for requests"),
        ("serving", STOPPED, f"serving; {STOPPED}"),
        ("serving", "", "serving"),
    ],
)
def test_what_a_rank_does_is_told_by_its_call_or_by_its_stack(position, place, text):
    assert activity_text(position, place) == text


def test_a_second_question_finds_the_program_and_not_the_answer_to_the_first():
    names = {"frame_here": sys._getframe}
    exec(compile("def answer():\n    return frame_here()", stack_dump.__file__, "exec"), names)  # noqa: S102  (a frame of that file)
    frame = names["answer"]()
    assert frame.f_code.co_filename == stack_dump.__file__
    assert _program_frame(frame).f_code.co_filename == __file__
