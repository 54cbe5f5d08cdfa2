"""Records of calls name the variable that a call is about, whichever way the call takes."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.core.settings import RuntimeConfig
from syncvar.optimizers import SGD
from syncvar.runtime.call_summary import CallSummary
from syncvar.testing import run_ranks


def accesses():
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.zeros(4), name="w", aggregation="MEAN")
        b = sv.Variable(np.zeros(3), name="b", aggregation="SUM")
        seen = sv.Variable(np.zeros(2), name="seen", synchronization="ON_READ", aggregation="SUM")
        one = sv.Variable(np.zeros(3), name="one", aggregation="ONLY_FIRST_REPLICA")
    optimizer = SGD(0.1)

    def step():
        for _ in range(4):
            w.assign_add(np.ones(4))
            sv.assign_add_all([(w, np.ones(4)), (b, np.ones(3))])
            one.assign(np.ones(3))
            one.scatter_add([0], [1.0])
            seen.assign_add(np.ones(2))
            seen.sync()
            optimizer.apply_gradients([(np.ones(4), w), (np.ones(3), b)])

    strategy.run(step)
    w.assign(np.ones(4))
    seen.numpy()
    sv.barrier()
    question = {"number": 0, "offset_ns": 0, "error_ns": 0}
    texts = CallSummary(current().recorder).fields(question, {}, {})["kind_texts"]
    shown = set(zip(texts[::3], texts[1::3], strict=True))
    assert {("assign_add(mean)", "w"), ("barrier", "")} <= shown, shown
    return [
        (event.access or event.collective, event.variable)
        for event in current().recorder.events()
        if event.group >= 0 and event.call >= 0
    ]


@pytest.mark.parametrize(
    ("runner", "shared"), [("auto", True), ("python", True), ("python", False)]
)
def test_calls_name_their_variables(runner, shared):
    for calls in run_ranks(2, accesses, config=RuntimeConfig(call_runner=runner), shared=shared):
        assert isinstance(calls, list), calls
        named = set(calls)
        for variable in ("w", "b", "seen", "one"):
            assert ("create variable", variable) in named
        assert {one for one in named if one[0] == "assign_add"} == {("assign_add", "w")}
        assert calls.count(("assign_add", "w")) == 4
        for call in ("apply_gradients", "assign_add_all"):
            assert calls.count((call, "w, b")) == 4, named
        for call, variable in (("assign", "one"), ("scatter_add", "one"), ("assign", "w")):
            assert (call, variable) in named, named
        assert {variable for call, variable in named if call == "barrier"} == {""}
        assert {v for call, v in named if call in ("read", "sync")} == {"seen"}, named
