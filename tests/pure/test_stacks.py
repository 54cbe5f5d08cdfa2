"""What the interpreter's fault handler writes, read and told in one line."""

import os
import sysconfig

import pytest

import syncvar
from syncvar.stacks import Frame, Thread, dumps_of, shown, where
from syncvar_launcher.stacks import STOPPED, doing

PACKAGE = os.path.dirname(syncvar.__file__)
STANDARD = sysconfig.get_path("stdlib")
START = [Frame(f"{PACKAGE}/bootstrap.py", 130, "_run"), Frame("<frozen runpy>", 88, "_run_code")]


def user(*lines, file="/job/train.py"):
    return [Frame(file, line, "f") for line in lines]


def ours(*lines, file="runtime/engine.py"):
    return [Frame(f"{PACKAGE}/{file}", line, "wait") for line in lines]


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
    assert dumps_of(DUMP) == [
        Thread("", True, (Frame("/job/tré中😀.py", 8, "éa"), Frame('/job/a", line 2 in it.py', 0, "<module>"))),
        Thread("0x00007f0950cc66c0", False, (Frame("/job/a.py", 10, "<lambda>"),)),
        Thread("0x00007f0950cc66c1", False, ()),
        Thread("0x00007f0951a19b80", True, (Frame("/job/a.py", 9, "f"),)),
    ]
    assert dumps_of("") == []


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        (user(9, 49), "in user code, train.py:9 < train.py:49"),
        (user(1, 2, 3, 4), "in user code, train.py:1 < train.py:2 < train.py:3 < …"),
        (user(9, 9, 9, 9, 49), "in user code, train.py:9 < train.py:49"),
        (user(3, file="/elsewhere/job/x.py"), "in user code, /elsewhere/job/x.py:3"),
        (user(0), "in user code, train.py:?"),
        (ours(7, 8) + user(49), "in syncvar/runtime/engine.py:7, called at train.py:49"),
        (ours(5, file="examples/digits.py"), "in user code, syncvar/examples/digits.py:5"),
        (user(7, file="/v/lib/python3/dist-packages/numpy/linalg.py") + user(49), "in numpy/linalg.py:7, called at train.py:49"),
        (user(7, file=f"{STANDARD}/subprocess.py") + user(49), "in subprocess.py:7, called at train.py:49"),
        (user(7, 8, file="/v/lib/python3/site-packages/tool/run.py"), "in user code, tool/run.py:7 < tool/run.py:8"),
        ([*user(9), Frame("<frozen importlib._bootstrap>", 1, "_load"), *user(49)], "in user code, train.py:9 < train.py:49"),
        (user(9) + ours(2) + user(49), "in user code, train.py:9 < train.py:49"),
        ([], "in no code of its script"),
    ],
)
def test_a_stack_is_told_in_one_line(frames, line):
    assert where(frames + START, "/job") == line
    assert where(frames + START, "/job/") == line


def test_one_frame_is_kept_of_each_way_through_syncvar():
    assert shown(ours(1, 2) + user(3) + ours(4, 5) + user(6) + START) == ours(1) + user(3) + ours(4) + user(6)


@pytest.mark.parametrize(
    ("position", "place", "text"),
    [
        ("not waiting in any call", "in user code, a.py:1", "in user code, a.py:1"),
        ("not waiting in any call", "", "not waiting in any call"),
        ("not waiting in any call", STOPPED, f"not waiting in any call; {STOPPED}"),
        ("not waiting in any call; no Python thread answers", "in user code, a.py:1", "in user code, a.py:1; no Python thread answers"),
        ("not joined yet", "in user code, a.py:1", "not joined yet; in user code, a.py:1"),
        ("waiting in barrier (call 1) at a.py:1 in f", "in user code, a.py:1", "waiting in barrier (call 1) at a.py:1 in f"),
        ("waiting in barrier (call 1) at a.py:1 in f", STOPPED, f"waiting in barrier (call 1) at a.py:1 in f; {STOPPED}"),
        ("finished", "", "finished"),
    ],
)
def test_what_a_rank_does_is_told_by_its_call_or_by_its_stack(position, place, text):
    assert doing(position, place) == text
