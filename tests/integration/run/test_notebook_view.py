"""What a notebook shows: tables of objects, of results, and of a job that runs."""

import html
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import syncvar as sv
from syncvar.runner.notebook_view import NotebookView, status_html
from syncvar.testing import run_ranks

CELL = """
import time, numpy as np, syncvar as sv

def work():
    for _ in range(60):
        time.sleep(0.1 if sv.rank() == 1 else 0.0)
        sv.all_reduce(np.ones(3))
    return sv.rank() * 10

results = sv.run(work, workers=2)
results
"""

STATUS = {
    "job": {"lasted_s": 12.3, "restarts": 1},
    "ranks": [
        {
            "rank": rank,
            "host": host,
            "state": state,
            "waits_for": waits,
            "call": call,
            "is_in_call": bool(waits),
            "age_s": 1.26,
            "wait_share": 0.25,
        }
        for rank, host, state, waits, call in [
            (0, "a", "waiting", [1, 2], "all_reduce(sum, float32[10]) (call 5)"),
            (1, "b", "running", [], "barrier() (call 4)"),
            (2, "b", "starting", [], "<b>"),
        ]
    ],
}


def texts(page):
    """Return the texts of a page without its tags."""
    return [html.unescape(one) for one in re.split(r"<[^>]*>", page) if one]


def test_the_table_of_a_running_job():
    assert texts(status_html(STATUS)) == [
        *("sv.run: 3 ranks, 12 s, 1 restart", "rank", "host", "state", "call", "waits"),
        *("0", "a", "waiting for rank 1, 2"),
        *("all_reduce(sum, float32[10]) (call 5), for 1.3 s", "25 %"),
        *("1", "b", "running", "barrier() (call 4), ended 1.3 s ago", "25 %"),
        *("2", "b", "starting", "<b>, ended 1.3 s ago", "25 %"),
    ]


def test_nothing_is_shown_of_a_launcher_that_does_not_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(NotebookView, "_show", lambda *_: pytest.fail("something is shown"))
    view = NotebookView(pid=1)
    view.refresh()
    assert 0 < view.due_s() <= 1
    view.finish("finished")


def test_an_answer_that_the_view_does_not_understand_ends_no_job(monkeypatch):
    monkeypatch.setattr(NotebookView, "_ask", lambda _: {"ranks": [{"rank": 0}]})
    view = NotebookView(pid=1)
    view.refresh()
    assert view.due_s() > 0
    view.finish("finished")


def tables():
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.arange(100.0), name="w", aggregation="MEAN")
        on_read = sv.Variable(0.0, name="r", synchronization="ON_READ")
    group = sv.new_group(range(sv.world_size()))
    mesh = sv.mesh((sv.world_size(),))
    pages = []
    if sv.rank() == 0:  # nothing of it is a collective
        values = [w, on_read, strategy, group, mesh, sv.Checkpoint(w=w, epoch=3)]
        pages = [texts(one._repr_html_()) for one in (*values, sv.PerReplica(np.ones(3)))]
    sv.barrier()
    return pages


def test_tables_of_objects_are_made_without_the_other_ranks():
    (variable, on_read, strategy, group, mesh, checkpoint, values), nothing = run_ranks(2, tables)
    assert nothing == []
    assert variable == [
        *("sv.Variable w", "synchronization", "ON_WRITE", "aggregation", "MEAN"),
        *("dtype", "float64", "shape", "(100,)", "copy of this rank"),
        "[ 0.,  1.,  2., ..., 97., 98., 99.]",
    ]
    assert on_read[1:3] == ["synchronization", "ON_READ"]
    assert on_read[-1] == "0."
    assert strategy[:3] == ["sv.MirroredStrategy", "replicas in sync", "2"]
    assert group == ["sv.Group", "size", "2", "ranks", "[0, 1]", "rank here", "0"]
    assert mesh[:3] == ["sv.Mesh", "shape", "(2,)"]
    assert checkpoint[:6] == ["sv.Checkpoint", "object", "type", "value here", "w", "Variable"]
    assert checkpoint[-3:] == ["epoch", "int", "3"]
    assert values[0] == "sv.PerReplica: the part of this rank"
    assert values[-1] == "[1., 1., 1.]"


def test_a_program_gets_a_plain_list():
    assert type(sv.run(divmod, workers=1, args=(7, 2))) is list


# Runs a cell in the kernel of a notebook; prints each message with something to see as JSON.
CLIENT = """
import json, sys, time
from jupyter_client.manager import KernelManager

manager = KernelManager()
manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager.start_kernel()
try:
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    number = client.execute(sys.stdin.read())
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") == number:
            content = message["content"]
            print(json.dumps([message["msg_type"], content.get("data", content)]))
            if content.get("execution_state") == "idle":
                break
    client.stop_channels()
finally:
    manager.shutdown_kernel(now=True)
"""


@pytest.mark.slow
def test_a_notebook_shows_the_ranks_while_they_run(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", CLIENT],
        input=CELL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    messages = [json.loads(line) for line in ended.stdout.splitlines()]
    assert not [one for kind, one in messages if kind == "error"]
    (result,) = [one for kind, one in messages if kind == "execute_result"]
    assert result["text/plain"] == "[0, 10]"
    assert texts(result["text/html"])[0] == "sv.run: results of 2 ranks"
    shown = [(kind, texts(one["text/html"])) for kind, one in messages if "display_data" in kind]
    kinds = [kind for kind, _ in shown]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}
    tables = [lines for _, lines in shown if "call" in lines]
    assert any("all_reduce(sum, float64[3])" in one for lines in tables for one in lines)
    assert shown[-1][1][0].startswith("sv.run: 2 ranks finished after ")
