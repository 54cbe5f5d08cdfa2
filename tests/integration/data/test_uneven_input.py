"""Input over real processes: uneven data with threads that read ahead, a failing reader, and the evaluation example."""

import pytest

LINKS = [
    pytest.param({}, id="shm"),
    pytest.param({"env": {"SYNCVAR_TRANSPORT": "zmq"}}, id="zmq"),
    pytest.param({"options": ["--fake-hosts", "2"]}, id="two-hosts"),
]

UNEVEN = """
    import threading
    import numpy as np
    import syncvar as sv
    from probe import note

    strategy = sv.MultiWorkerMirroredStrategy()
    rank, size = sv.rank(), sv.world_size()
    with strategy.scope():
        w = sv.Variable(np.zeros(2), dtype=np.float64, aggregation=sv.VariableAggregation.SUM)
        seen = sv.Variable(0, synchronization=sv.VariableSynchronization.ON_READ, aggregation=sv.VariableAggregation.SUM)

    def make(context):
        rows = [0, 7, 3][context.input_pipeline_id]
        data = sv.data.from_arrays(np.full((rows, 2), 1.0 + context.input_pipeline_id), batch_size=2, shuffle=True)
        return data.map(lambda x: x * 2).prefetch(2)

    def step(batch):
        seen.assign_add(len(batch))
        w.assign_add(batch.sum(axis=0))
        return batch

    distributed = strategy.distribute_datasets_from_function(make)
    for epoch in range(2):
        iterator = iter(distributed)
        means = [strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=0).tolist() for batch in iterator]
        assert iterator.state_dict()["position"] == 4
    parts = strategy.experimental_distribute_dataset(sv.data.from_arrays(np.arange(10), batch_size=4, shuffle=True, seed=5))
    with strategy.scope():
        note("result", w=w.numpy().tolist(), seen=int(seen), means=means, parts=[part.tolist() for part in parts],
             threads=[t.name for t in threading.enumerate() if t.name == "syncvar-prefetch"])
"""


BLOCKS = """
    import gc
    from syncvar.bootstrap.process import current
    import numpy as np
    import syncvar as sv
    from probe import note

    gc.disable()
    rank = sv.rank()
    kept = [sv.new_group(range(sv.world_size())) for _ in range(2)]
    v = sv.Variable(np.zeros(3), aggregation="SUM")
    for block in range(40):
        with sv.uneven():
            for _ in range(1 + (rank + block) % 2):
                v.assign_add(np.ones(3))
                sv.all_reduce(1.0, group=kept[0])
    note("over", value=float(v.numpy()[0]), groups=len(current()._communicators))
"""


@pytest.mark.parametrize(
    "how",
    [
        LINKS[0],
        *(pytest.param(*one.values, id=one.id, marks=pytest.mark.slow) for one in LINKS[1:]),
    ],
)
def test_blocks_of_uneven_may_follow_one_another_as_long_as_a_program_likes(launch, how):
    """Each made three groups of every one that it found, those of the block before among them, until the garbage was collected."""
    job = launch(BLOCKS, workers=2, **how)
    assert job.wait(120) == 0, str(job)
    assert [event["value"] for event in job.events("over")] == [120.0] * 2, str(job)
    assert max(event["groups"] for event in job.events("over")) < 60, str(job)


@pytest.mark.parametrize("how", LINKS)
def test_uneven_data_over_processes(launch, how):
    job = launch(UNEVEN, workers=3, **how)
    assert job.wait() == 0, str(job)
    results = {event["rank"]: event for event in job.events("result")}
    assert set(results) == {0, 1, 2}, str(job)
    steps = []
    for result in results.values():
        assert result["seen"] == 20
        assert result["w"] == [2 * (7 * 4.0 + 3 * 6.0)] * 2
        assert result["means"] == [[5.0, 5.0], [(2 * 4 + 6) / 3] * 2, [4.0, 4.0], [4.0, 4.0]]
        assert result["threads"] == []
        steps.append(result["parts"])
    sizes = [
        [len(part) for part in step]
        for step in zip(*(results[rank]["parts"] for rank in range(3)), strict=True)
    ]
    assert sizes == [[2, 1, 1], [2, 1, 1], [1, 1, 0]]
    assert sorted(row for parts in steps for part in parts for row in part) == list(range(10))


FAILS = """
    import numpy as np
    import syncvar as sv
    from probe import failure, note

    def elements():
        yield np.zeros(3)
        if sv.rank() == 1:
            raise OSError("file 7 is truncated")
        yield np.zeros(3)

    strategy = sv.MirroredStrategy()
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: sv.data.from_generator(elements).prefetch(1)))
    next(iterator)
    failure(next, iterator)
    note("after", total=float(sv.all_reduce(1.0)))
"""


def test_a_reader_that_fails_is_told_to_all_and_the_job_goes_on(launch):
    job = launch(FAILS, workers=3)
    assert job.wait() == 0, str(job)
    raised = {event["rank"]: event for event in job.events("raised")}
    assert [raised[rank]["error"] for rank in range(3)] == [
        "MismatchError",
        "OSError",
        "MismatchError",
    ]
    assert "rank 1" in raised[0]["text"]
    assert "file 7 is truncated" in raised[0]["text"]
    assert [event["total"] for event in job.events("after")] == [3.0] * 3


@pytest.mark.slow  # its worlds in one process run by default: tests/unit/examples/test_evaluate.py
def test_two_workers_evaluate_1797_digits_as_one_does(launch):
    job = launch(target=["-m", "syncvar.examples.evaluate"], workers=2)
    assert job.wait() == 0, str(job)
    # The accuracy of one worker: tests/unit/examples/test_evaluate.py computes it with NumPy alone.
    assert job.lines(0)[-1] == "accuracy=0.9037284362826934 right=1624 seen=1797 workers=2", str(
        job
    )
