"""An elastic training run for tests: faults at given places, and a digest that is equal for all runs that go well.

A fault is [worker, life, place, count, action]: the worker, how often it was started again before, where, at which step (or
at which visit, for places outside of steps, or after how many milliseconds), and what happens.
"""

import json
import random

OUTSIDE_STEPS = ("enrolled", "assigned", "synchronize", "reset")
PLACES = ("compute", "applied", "committed", *OUTSIDE_STEPS)
RANDOM_ACTIONS = ("kill", "kill", "kill", "kill", "term", "raise", "exit 3", "stop")

TRAINING = """
    import hashlib, json, os, signal, sys, threading, time
    import numpy as np
    import probe, syncvar as sv
    from syncvar.bootstrap import enrollment
    from syncvar.elastic.held_objects import HeldObjects

    STEPS, ROWS, SHARDS = int(sys.argv[1]), 96, 24
    faults, pause_s, directory = json.loads(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    worker = int(os.environ["SYNCVAR_RANK"])
    life = int(os.environ["SYNCVAR_INCARNATION"]) + int(os.environ["SYNCVAR_RESTARTS"])
    visits = {}

    def perhaps(place, step=None):
        visits[place] = count = visits.get(place, -1) + 1 if step is None else step
        if [worker, life, place, count] not in [fault[:4] for fault in faults]:
            return
        if place == "time" and state.step >= STEPS - 1:
            return  # what a worker does after the last commit, nobody does again
        (action,) = [fault[4] for fault in faults if fault[:4] == [worker, life, place, count]]
        probe.note("fault", place=place, count=count, action=action)
        if action.startswith("exit"):
            sys.exit(int(action[5:]))
        if action == "raise":
            raise ValueError("batch 7 has no labels")
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(action, signal.SIGTERM)
        for _ in range(2 if action == "term twice" else 1):
            os.kill(os.getpid(), number)

    for fault in faults:
        if fault[:3] == [worker, life, "time"]:  # in ms after the start
            timer = threading.Timer(fault[3] / 1000, perhaps, ("time", fault[3]))
            timer.daemon = True
            timer.start()

    def visiting(place, function):
        def visit(*arguments):
            perhaps(place)
            return function(*arguments)
        return visit

    Enrollment = enrollment.Enrollment
    Enrollment._next_assignment = visiting("enrolled", Enrollment._next_assignment)
    enrollment.connect_generation = visiting("assigned", enrollment.connect_generation)
    HeldObjects.synchronize = visiting("synchronize", HeldObjects.synchronize)

    draw = np.random.default_rng(0)
    x = draw.standard_normal((ROWS, 8)).astype(np.float32)
    data = {"x": x, "y": x @ np.arange(8, dtype=np.float32), "id": np.arange(ROWS)}
    strategy = sv.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.zeros(8, np.float32), name="w", aggregation="MEAN")
        seen = sv.Variable(np.zeros(ROWS, np.int64), name="seen", synchronization="ON_READ", aggregation="SUM")
    dataset = sv.data.from_arrays(data, batch_size=SHARDS, shuffle=True, seed=5).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    manager = None
    if directory:
        manager = sv.CheckpointManager(sv.Checkpoint(), directory, keep=2)
    state = sv.elastic.State(
        checkpoint=manager, w=w, seen=seen, optimizer=sv.optimizers.Adam(0.05), batches=batches, step=0
    )
    state.register_reset(lambda: perhaps("reset"))

    def step():
        batch = next(state.batches)
        replicas, rank = strategy.num_replicas_in_sync, sv.rank()
        first = sum(SHARDS // replicas + (one < SHARDS % replicas) for one in range(rank))
        weights = state.w.read_value()
        parts, counts = {}, np.zeros(ROWS, np.int64)
        for place, (row, y, number) in enumerate(zip(batch["x"], batch["y"], batch["id"])):
            parts[first + place] = row * (row @ weights - y)
            counts[number] += 1
        perhaps("compute", state.step)
        state.optimizer.apply_gradients([(parts, state.w)], shards=True)
        state.seen.assign_add(counts)

    @sv.elastic.run
    def train(state):
        probe.note("begins", step=state.step, size=sv.world_size())
        while state.step < STEPS:
            strategy.run(step)
            state.step += 1
            perhaps("applied", state.step)
            state.commit()
            perhaps("committed", state.step)
            if manager is not None and state.step % 5 == 0:
                manager.save(state.step)
            time.sleep(pause_s)

    train(state)
    with strategy.scope():
        counts = state.seen.numpy().tolist()
    digest = hashlib.sha256(state.w.numpy().tobytes()).hexdigest()
    probe.note("final", digest=digest, counts=sorted(set(counts)), step=state.step, size=sv.world_size())
"""


def training(
    launch, workers, faults=(), *, steps=24, pause_s=0.0, directory="", options=(), **keywords
):
    """Start an elastic training run; a step reads 24 of 96 rows."""
    arguments = [str(steps), json.dumps(list(faults)), str(pause_s), str(directory)]
    return launch(TRAINING, workers=workers, arguments=arguments, options=options, **keywords)


def finals(job, steps=24):
    """Return the digest of a run that has ended well, and how many workers had it in the end."""
    events = job.events("final")
    assert events, job
    (digest,) = {event["digest"] for event in events}
    assert {event["step"] for event in events} == {steps}, job
    assert all(event["counts"] == [steps * 24 // 96] for event in events), job
    assert {event["size"] for event in events} == {len(events)}, job
    return digest, len(events)


def random_run(seed):
    """Return random options of an elastic job, and faults that leave at least one worker."""
    draw = random.Random(seed)
    spares, restarts = draw.choice([0, 0, 1, 2]), draw.choice([0, 0, 1, 3])
    hosts = draw.choice([(), ("--fake-hosts", "2")])
    options = [*hosts, "--spares", str(spares)] if spares else [*hosts]
    if restarts:
        options += ["--max-restarts", str(restarts)]
    workers = draw.sample(range(4 + spares), draw.randint(1, 3 + spares))
    faults = []
    for worker in workers:
        lives = range(draw.randint(1, 2)) if restarts else range(1)
        for life in lives:
            place = draw.choice((*PLACES, *PLACES, "time", "time"))
            if place == "time":
                fault = [draw.randint(0, 1500), draw.choice(("kill", "kill", "term", "stop"))]
            else:
                count = draw.randint(0, 1) if place in OUTSIDE_STEPS else draw.randint(1, 22)
                fault = [count, draw.choice(RANDOM_ACTIONS)]
            faults.append([worker, life, place, *fault])
    return options, faults
