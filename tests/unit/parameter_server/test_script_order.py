"""Names of a script that scheduled functions need and that the script binds too late."""

import textwrap

import pytest

from syncvar.parameter_server.task_coordinator import RunningModule, late_names, line_of

HEAD = "import syncvar as sv\n"
MADE = "coordinator = sv.ClusterCoordinator(strategy)\n"
STEP = "def step(x):\n    return helper(x) + rate\n"
HELPER = "def helper(x):\n    return x\n"


def late(*parts):
    text = "".join(parts)
    line = text.partition("sv.ClusterCoordinator")[0].count("\n") + 1
    return [(one.name, one.user) for one in late_names(RunningModule("train.py", line, text))]


SCHEDULED = "coordinator.schedule(step, args=(1,))\n"
CASES = {
    "all above": (["rate = 1\n", HELPER, STEP, MADE, SCHEDULED], []),
    "all below": (
        [MADE, SCHEDULED, STEP, HELPER, "rate = 1\n"],
        [("step", "step"), ("helper", "step"), ("rate", "step")],
    ),
    "a variable in a with block": (
        [HELPER, STEP, MADE, "with scope:\n    rate = 1\n", SCHEDULED],
        [("rate", "step")],
    ),
    "a function that nobody schedules": (
        ["rate = 1\n", HELPER, STEP, MADE, "def report(): pass\n", SCHEDULED],
        [],
    ),
    "a decorated function": ([MADE, "@wrapped\n", STEP, SCHEDULED], [("step", "step")]),
    "a name bound above and below": (
        [HELPER, "rate = 0\n", STEP, MADE, "rate = 1\n", SCHEDULED],
        [],
    ),
    "a name that a function binds": (
        [
            *(HELPER, STEP, "def fill():\n    global rate\n    rate = 1\n"),
            *(MADE, "rate = 2\n", SCHEDULED),
        ],
        [],
    ),
    "a local of the same name": (
        ["def step(x):\n    rate = x\n    return rate\n", MADE, "rate = 2\n", SCHEDULED],
        [],
    ),
    "an import below": (
        [HELPER, STEP, MADE, "from settings import rate\n", SCHEDULED],
        [("rate", "step")],
    ),
    "a loop over functions": (
        ["rate = 1\n", HELPER, STEP, MADE, "for fn in [step]:\n    coordinator.schedule(fn)\n"],
        [],
    ),
    "another object that schedules": (
        ["rate = 1\n", HELPER, STEP, MADE, "for epoch in range(3):\n    lr.schedule(epoch)\n"],
        [],
    ),
    "a scheduled function imported below": ([MADE, "from jobs import step\n", SCHEDULED], []),
    "a class below": (
        ["def step(x):\n    return Model(x)\n", MADE, "class Model: pass\n", SCHEDULED],
        [("Model", "step")],
    ),
    "a dataset": (
        [MADE, "def rows(): pass\n", "coordinator.create_per_worker_dataset(fn=rows)\n"],
        [("rows", "rows")],
    ),
    "a method's body": (
        [
            "class Model:\n    def loss(self):\n        return rate\n",
            "def step(x):\n    return Model()\n",
            *(MADE, "rate = 1\n", SCHEDULED),
        ],
        [("rate", "step")],
    ),
    "scheduled in a function": (
        ["def main():\n    coordinator.schedule(step)\n", MADE, STEP, "main()\n"],
        [("step", "step")],
    ),
    "not Python any more": ([MADE, "def step(:\n", SCHEDULED], []),
    "nothing to read": ([""], []),
}


@pytest.mark.parametrize("case", CASES)
def test_names_that_come_too_late(case):
    parts, expected = CASES[case]
    assert late(HEAD, *parts) == expected


MODULE = """
    import sys
    from syncvar.parameter_server.task_coordinator import running_modules

    def main():
        found.extend(running_modules(sys._getframe()))

    found = []
    main()

    def below():
        pass
"""


def test_the_module_that_is_being_run_is_found_from_inside_a_function(tmp_path, monkeypatch):
    (tmp_path / "order_of_a_script.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    import order_of_a_script

    first = order_of_a_script.found[0]
    assert (first.file, first.line) == (str(tmp_path / "order_of_a_script.py"), 9)
    assert "def below" in first.source
    assert line_of("order_of_a_script", "below") == "order_of_a_script.py line 11"
    assert line_of("order_of_a_script", "nothing") == ""
    assert line_of("no_such_module", "below") == ""
