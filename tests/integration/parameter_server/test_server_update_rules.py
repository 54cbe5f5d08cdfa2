"""Update rules of programs in real servers: imported from beside the script, the same on a copy, and survived when they raise."""

import os
import signal

import pytest
from test_servers import servers_of

RULES = """
import numpy as np
import syncvar as sv

@sv.optimizers.update_rule(slots={"largest": 0.0})
def scaled(value, slots, gradient, numbers):
    if not np.isfinite(gradient).all():
        raise ArithmeticError("this gradient is not finite")
    largest = np.maximum(slots["largest"], abs(gradient))
    return value - numbers["learning_rate"] * gradient / np.maximum(largest, numbers["least"]), {"largest": largest}
"""

SCRIPT = """
import numpy as np
import probe, syncvar as sv
import my_rules

strategy = sv.ParameterServerStrategy(sv.partitioners.FixedShards(2), staleness=None)
with strategy.scope():
    whole = sv.Variable(np.ones(8, np.float32), name="whole")
    table = sv.Variable(np.ones((6, 2), np.float32), name="table")
sgd = sv.optimizers.Custom(my_rules.scaled, 0.25, least=0.5)
if sv.rank() == 0:
    for step in range(1, 7):
        sgd.apply_gradients([(np.full(8, step, np.float32), whole), (([4, 1, 4], np.full((3, 2), step, np.float32)), table)])
        try:
            sgd.apply_gradients([(np.ones(8, np.float32), whole), (([0, 5], np.full((2, 2), np.inf, np.float32)), table)])
            strategy.tick()
        except sv.ConfigError as error:
            probe.note("raised", text=str(error))
        if step == 3:
            probe.note("half")
            probe.gate("on")
    probe.note("found", whole=whole.numpy().tolist(), table=table.numpy().tolist())
    for rule in ("nowhere:rule", "my_rules:other", "__main__:own"):
        try:
            strategy.servers.prepare(("Custom", {"rule": rule}))
        except sv.ConfigError as error:
            probe.note("refused", text=str(error))
sv.barrier()
"""


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rule_beside_the_script_steps_and_what_raises_fails_its_push_alone(
    launch, tmp_path, kills
):
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "train.py").write_text(SCRIPT)
    job = launch(
        target=[str(tmp_path / "train.py")],
        options=("--servers", "2", "--server-replicas", "1"),
        workers=1 + kills,
        env={"PYTHONPATH": str(tmp_path / "job0")},
    )
    job.await_events("half", 1, limit_s=120)
    if kills:
        os.kill(servers_of(job)[1], signal.SIGKILL)
    job.open_gate("on")
    assert job.wait(120) == 0, job
    raised = [event["text"] for event in job.events("raised")]
    assert len(raised) == 6, job
    assert all(
        "ArithmeticError: this gradient is not finite" in text and "my_rules.py" in text
        for text in raised
    )
    (found,) = job.events("found")
    assert found["whole"] == [1 - 6 * 0.25] * 8
    assert found["table"] == [[1 - 6 * 0.25 * (row in (1, 4))] * 2 for row in range(6)]
    first, second, third = (event["text"] for event in job.events("refused"))
    assert "put it beside the script, or install it, on every host that has a server" in first
    assert "my_rules" in second
    assert "write @sv.optimizers.update_rule before its def" in second
    assert "put it into a module beside the script" in third
