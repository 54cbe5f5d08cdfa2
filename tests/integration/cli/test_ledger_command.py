"""The ledger of real calls, whichever way they take, and `syncvar ledger` of a launched job."""

import json
import time

import numpy as np
import pytest

import syncvar as sv
from syncvar.cli.commands import main
from syncvar.core.settings import RuntimeConfig
from syncvar.optimizers import SGD
from syncvar.testing import run_ranks
from tests.support.launching import LIMIT_S

TRAIN = """
import numpy as np
import syncvar as sv

w = sv.Variable(np.zeros(1000), name="w", aggregation="SUM")


def step():
    w.assign_add(np.ones(1000))


for _ in range({steps}):
    step()
    sv.all_reduce(1.0)
"""


def many_calls():
    w = sv.Variable(np.zeros(4), name="w", aggregation="MEAN")
    b = sv.Variable(np.zeros(3), name="b", aggregation="SUM")
    optimizer = SGD(0.1)

    def calls(count):
        for number in range(count):
            w.assign_add(np.ones(4))
            sv.all_reduce(np.ones(5))
            sv.assign_add_all([(w, np.ones(4)), (b, np.ones(3))])
            optimizer.apply_gradients([(np.ones(4), w), (np.ones(3), b)])
            if sv.rank() == 1 and number == 1:
                time.sleep(0.2)  # rank 0 then waits in the engine, in another line
            started = sv.all_reduce(np.ones(2), async_op=True)
            started.wait()
            if sv.rank() == 0:
                sv.send(np.ones(6), 1)
            else:
                sv.recv(0)

    calls(3)  # the C extension has its calls before the ledger opens
    with sv.ledger() as ledger:
        calls(5)
    calls(3)
    with sv.ledger() as again:
        calls(2)
    assert ledger.totals().calls == 5 * 6
    assert again.totals().calls == 2 * 6
    return [
        (row.variable, row.collective, row.function, row.calls, row.nbytes) for row in ledger.rows
    ]


@pytest.mark.parametrize(
    ("runner", "shared"), [("auto", True), ("python", True), ("python", False)]
)
def test_every_way_of_a_call_is_counted(runner, shared):
    config = RuntimeConfig(call_runner=runner)
    for rank, rows in enumerate(run_ranks(2, many_calls, config=config, shared=shared)):
        assert isinstance(rows, list), rows
        # Over links a receiver also counts the header.
        message = ("", ("send", "recv")[rank], "calls", 5, 840 if rank and not shared else 240)
        assert {row[2] for row in rows} == {"calls"}
        expected = {
            ("w", "assign_add(mean)", "calls", 5, 160),
            ("", "all_reduce(sum)", "calls", 5, 200),
            ("", "all_reduce(sum)", "calls", 5, 80),
            message,
        }
        assert expected <= set(rows), rows
        grouped = {row[:2]: row[3:] for row in rows if row not in expected}
        assert grouped == {
            ("w, b", "assign_add_all"): (5, 280),
            ("w, b", "apply_gradients(mean)"): (5, 280),
        }


@pytest.fixture
def ledgers(launch, tmp_path):
    def run(name, steps):
        job = launch(TRAIN.format(steps=steps), options=["--ledger", name])
        assert job.wait(LIMIT_S) == 0
        return str(job.folder / name)

    return run


@pytest.fixture
def syncvar(capsys):
    """Run the command, in this process; return its exit code and what it wrote."""

    def run(*arguments):
        capsys.readouterr()
        code = main(["ledger", *arguments])
        return code, "".join(capsys.readouterr())

    return run


def test_ledgers_of_launched_jobs_are_merged_and_compared(ledgers, syncvar, tmp_path):
    old, new = ledgers("old", 4), ledgers("new", 6)
    code, text = syncvar(old)
    assert code == 0
    assert text.startswith("ledger of ranks 0, 1: 18 calls, ")
    assert "in step" in text
    code, text = syncvar(old, "--by", "variable", "--json")
    rows = {row["variable"]: row for row in json.loads(text)["rows"]}
    assert {name: row["calls"] for name, row in rows.items()} == {"w": 10, "": 8}
    code, text = syncvar(old, new)
    assert code == 0
    assert "8 -> 12" in text
    assert "+50.0%" in text
    assert text.endswith("1 kinds of calls have the same calls and bytes\n")
    assert syncvar(old, old)[1] == "3 kinds of calls have the same calls and bytes\n"
    changes = json.loads(syncvar(old, new, "--json")[1])
    grown = [one for one in changes if (one["variable"], one["unit"]) == ("w", "calls")]
    assert sorted((one["old"], one["new"]) for one in grown) == [(2, 2), (8, 12)]


def test_a_folder_without_ledgers_is_an_error(syncvar, tmp_path):
    code, text = syncvar(str(tmp_path))
    assert code == 2
    assert f"syncvar-launch --ledger {tmp_path}" in text
