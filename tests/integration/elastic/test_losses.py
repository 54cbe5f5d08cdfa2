"""Elastic jobs whose workers are lost: those that live go on, no sample is lost or read twice, and the weights are the same."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.elastic_training import finals, training
from tests.support.launching import await_true, state

SLOWLY = pytest.mark.slow
_expected = []


def expected(launch):
    """Return the digest of a run that nothing disturbs."""
    if not _expected:
        job = training(launch, 2)
        assert job.wait() == 0, job
        _expected.append(finals(job)[0])
    return _expected[0]


def check(launch, job, size):
    """Check that a job has succeeded with the right weights, and how many workers it had in the end."""
    assert job.wait() == 0, job
    assert finals(job) == (expected(launch), size), job


def test_three_of_four_workers_are_lost_one_after_the_other(launch):
    faults = [
        [2, 0, "compute", 5, "kill"],
        [0, 0, "applied", 9, "kill"],
        [3, 0, "committed", 12, "kill"],
    ]
    job = training(launch, "1:4", faults, options=("--events", "events.jsonl"))
    check(launch, job, 1)
    for worker in (2, 0, 3):
        assert f"worker {worker} on " in job.report, job
    assert job.report.count("is lost: signal 9") == 3, job


@SLOWLY
@pytest.mark.parametrize(
    ("options", "faults", "size"),
    [
        # a member that has enrolled, or has its assignment, or has met the others
        pytest.param((), [[1, 0, "compute", 3, "kill"], [2, 0, "enrolled", 1, "kill"]], 2),
        pytest.param((), [[1, 0, "compute", 3, "kill"], [0, 0, "assigned", 1, "kill"]], 2),
        pytest.param((), [[1, 0, "compute", 3, "kill"], [3, 0, "synchronize", 1, "kill"]], 2),
        pytest.param(
            ("--fake-hosts", "2"),
            [
                [1, 0, "compute", 3, "kill"],
                [0, 0, "assigned", 1, "kill"],
                [2, 0, "reset", 1, "kill"],
            ],
            1,
        ),
    ],
)
def test_a_loss_while_the_next_generation_forms(launch, options, faults, size):
    check(launch, training(launch, "1:4", faults, options=options), size)


@SLOWLY
def test_two_workers_start_again_and_join_meanwhile(launch):
    faults = [[1, 0, "compute", 3, "kill"], [3, 0, "applied", 5, "kill"]]
    job = training(launch, "2:4", faults, steps=60, pause_s=0.1, options=("--max-restarts", "2"))
    assert job.wait() == 0, job
    _, size = finals(job, steps=60)
    assert size == 4, job
    assert job.report.count("it will be started again") == 2, job
    joined = {
        event["rank"] for event in job.events("begins") if event["step"] > 5 and event["size"] == 4
    }
    assert {1, 3} <= joined, job


@SLOWLY
@pytest.mark.parametrize("options", [(), ("--fake-hosts", "2")])
def test_spares_take_the_places_of_lost_workers(launch, options):
    faults = [[0, 0, "compute", 3, "kill"], [2, 0, "applied", 9, "kill"]]
    job = training(launch, "4:4", faults, options=("--spares", "2", *options))
    check(launch, job, 4)
    assert {event["size"] for event in job.events("begins")} == {4}, job


@pytest.mark.parametrize(
    ("place", "action"),
    [
        pytest.param(place, action, marks=SLOWLY if is_slow else pytest.mark.nightly)
        for action in ("stop", "raise", "exit 0", "exit 3")
        for place, is_slow in (("compute", action == "raise"), ("committed", action != "raise"))
    ],
)
def test_a_worker_that_is_silent_or_leaves_is_a_loss(launch, place, action):
    job = training(launch, "2:3", [[1, 0, place, 5, action]])
    check(launch, job, 2)
    (silent,) = [pid for rank, pid in job.pids().items() if rank == 1]
    await_true(lambda: not state(silent), what="the end of the worker")


@SLOWLY
@pytest.mark.parametrize("action", ["term", "term twice"])
def test_a_worker_that_is_told_to_end_leaves_after_a_commit(launch, action):
    """A scheduler that signals all processes signals the agent too, and that passes it on."""
    job = training(
        launch, "2:3", [[0, 0, "compute", 5, action]], options=("--events", "events.jsonl")
    )
    check(launch, job, 2)
    assert "worker 0 on " in job.report, job
    assert "asks to leave: it leaves at the next commit" in job.report, job
    ends = ends_of(job)
    assert ends[0] == (0, None), job
    later = {event["step"] for event in job.events("begins") if event["size"] == 2}
    assert len(later) == 1, job  # a commit
    assert min(later) > 5, job


@SLOWLY
def test_the_only_member_gives_the_state_to_its_spare_and_leaves(launch):
    faults = [[0, 0, "compute", 5, "term"]]
    job = training(launch, "1:1", faults, pause_s=0.05, options=("--spares", "1"))
    check(launch, job, 1)
    later = [event["step"] for event in job.events("begins") if event["rank"] == 1]
    assert later, job
    assert min(later) > 5, job


@SLOWLY
def test_a_worker_that_is_needed_stays(launch):
    job = training(launch, "2:2", [[1, 0, "compute", 5, "term"]])
    check(launch, job, 2)
    assert "worker 1 on " in job.report, job
    assert "asks to leave: too few would stay" in job.report, job


@SLOWLY
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all(launch, number):
    job = training(launch, "1:3", [[1, 0, "compute", 3, "kill"]], steps=100_000, pause_s=0.01)
    job.await_events("begins", 5)
    job.send(number)
    assert job.wait() == 128 + number, job
    assert not any(map(state, job.pids().values())), job


def ends_of(job):
    """Return the exit code and the signal of each worker's last process."""
    events = map(json.loads, (job.folder / "events.jsonl").read_text().splitlines())
    return {
        one["rank"]: (one["exit_code"], one["signal"])
        for one in events
        if one["event"] == "rank_end"
    }


@SLOWLY
@pytest.mark.parametrize(("action", "code"), [("kill", 137), ("exit 3", 3), ("raise", 1)])
def test_too_few_workers_fail_with_the_cause(launch, action, code):
    job = training(launch, "2:3", [[1, 0, "compute", 3, "kill"], [0, 0, "compute", 9, action]])
    assert job.wait() == code, job
    assert "2 of at least 2 workers" not in job.report, job
    assert "1 of at least 2 workers" in job.report, job


@SLOWLY
def test_an_error_that_would_come_again_ends_the_job(launch):
    job = launch(
        """
        import numpy as np, probe, syncvar as sv
        state = sv.elastic.State(step=0)

        @sv.elastic.run
        def train(state):
            probe.note("begins")
            state.commit()
            sv.all_reduce(np.ones(2 + (sv.rank() == 1)))

        train(state)
        """,
        workers="1:3",
    )
    assert job.wait() == 76, job
    assert "all_reduce(sum, float64[3])" in job.report, job
    assert len(job.events("begins")) == 3, job


@SLOWLY
def test_a_job_that_is_not_elastic_calls_the_function_once(launch):
    check(launch, training(launch, 3), 3)
    check(launch, training(launch, 1), 1)


@SLOWLY
def test_the_newest_checkpoint_serves_if_all_copies_are_lost(launch, tmp_path):
    faults = [[worker, 0, "compute", 13, "kill"] for worker in range(3)]
    job = training(launch, "2:3", faults, directory=tmp_path / "c", options=("--max-restarts", "1"))
    check(launch, job, 3)
    starts = {event["step"] for event in job.events("begins")}
    assert starts == {0, 10}, job


@SLOWLY
def test_a_script_without_an_elastic_function_is_explained_once(launch):
    job = launch("import syncvar as sv\nprint(sv.world_size())", workers="1:3")
    assert job.wait() == 0, job
    assert [job.lines(worker) for worker in range(3)] == [["1"]] * 3, job
    assert job.report.count("has ended without a function of @sv.elastic.run") == 1, job
    assert "--workers 3" in job.report, job


AFTERWARDS = """
    import os, signal, sys
    import probe, syncvar as sv

    state = sv.elastic.State(step=0)
    worker = int(os.environ["SYNCVAR_RANK"])
    if worker == 3:
        probe.gate("end")
        sys.exit(3)

    @sv.elastic.run
    def train(state):
        state.step += 1
        state.commit()

    train(state)
    probe.note("trained")
    probe.open_gate("end")
    if worker == int(sys.argv[1]):
        raise OSError("no space left for the model")
"""


@SLOWLY
@pytest.mark.parametrize(("failing", "code"), [(-1, 0), (1, 1)])
def test_after_the_function_only_its_members_matter(launch, failing, code):
    options = ("--spares", "1")
    job = launch(AFTERWARDS, workers="1:3", options=options, arguments=[str(failing)])
    assert job.wait() == code, job
    assert len(job.events("trained")) == 3, job
    assert ("no space left for the model" in job.report) == (failing == 1), job


@SLOWLY
def test_the_status_and_the_events_show_what_is_lost(launch):
    options = ("--events", "events.jsonl", "--spares", "1")
    faults = [[0, 0, "compute", 3, "kill"], [2, 0, "compute", 5, "kill"]]
    job = training(launch, "2:3", faults, steps=100_000, pause_s=0.01, options=options)
    job.await_events("begins", 3 + 3 + 2)
    lines = (job.folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [one["rank"] for one in events if one["event"] == "worker_lost"] == [0, 2], job
    members = [one["members"] for one in events if one["event"] == "generation"]
    assert members == [[0, 1, 2], [1, 2, 3], [1, 3]], job
    line = [sys.executable, "-m", "syncvar", "status", events[0]["job"][:8]]
    shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^worker +host ", shown, re.MULTILINE), shown
    assert "for worker" in shown, shown
    rows = dict(re.findall(r"^(\d) +\S+ +(\w+)", shown, re.MULTILINE))
    assert rows["0"] == rows["2"] == "lost", shown
    assert {rows["1"], rows["3"]} <= {"running", "waiting"}, shown
    job.send(signal.SIGTERM)
    assert job.wait() == 143, job


HANGING = """
    import os, sys, time
    import numpy as np
    import probe, syncvar as sv

    state = sv.elastic.State(step=0)
    is_late = os.environ["SYNCVAR_RANK"] == "1"

    @sv.elastic.run
    def train(state):
        global is_late
        probe.note("begins", step=state.step, size=sv.world_size())
        while state.step < 10:
            if is_late and state.step == 3:
                is_late = False
                time.sleep(float(sys.argv[1]))
            sv.all_reduce(np.ones(3))
            state.step += 1
            state.commit()

    train(state)
    probe.note("final", size=sv.world_size())
"""


@pytest.mark.parametrize(
    ("sleeps_s", "size"),
    [pytest.param(8, 3, marks=SLOWLY), pytest.param(300, 2, marks=pytest.mark.nightly)],
)
def test_when_a_deadline_passes_all_meet_again_without_a_worker_that_hangs(launch, sleeps_s, size):
    env = {"SYNCVAR_COLLECTIVE_TIMEOUT_S": "4", "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "30"}
    job = launch(HANGING, workers="1:3", arguments=[str(sleeps_s)], env=env)
    assert job.wait() == 0, job
    assert [event["size"] for event in job.events("final")] == [size] * size, job
    assert {event["step"] for event in job.events("begins")} == {0, 3}, job


STUCK = """
    import ctypes, os, signal, sys
    import numpy as np
    import probe, syncvar as sv

    state = sv.elastic.State(step=0)
    is_stuck = os.environ["SYNCVAR_RANK"] == "1" and os.environ["SYNCVAR_INCARNATION"] == "0"


    def hang(way):
        if way == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        library = ctypes.PyDLL(None) if way == "C with the GIL" else ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)
        while True:
            library.pthread_mutex_lock(mutex)  # the second time forever

    @sv.elastic.run
    def train(state):
        global is_stuck
        probe.note("begins", step=state.step, pid=os.getpid())
        while state.step < 10:
            if is_stuck and state.step == 3:
                is_stuck = False
                probe.note("stuck")
                hang(sys.argv[1])
            sv.all_reduce(np.ones(3))
            state.step += 1
            state.commit()

    train(state)
    probe.note("final", size=sv.world_size())
"""


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("stopped", marks=SLOWLY),
        pytest.param("C", marks=pytest.mark.nightly),
        pytest.param("C with the GIL", marks=pytest.mark.nightly),
    ],
)
def test_a_worker_that_hangs_is_ended_and_starts_again(launch, way):
    """The others need it, and wait for its next process."""
    env = {"SYNCVAR_COLLECTIVE_TIMEOUT_S": "10", "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "20"}
    options = ("--max-restarts", "1")
    job = launch(STUCK, workers="3:3", arguments=[way], options=options, env=env)
    assert job.wait() == 0, job
    assert [event["size"] for event in job.events("final")] == [3] * 3, job
    assert "worker 1 on " in job.report, job
    assert "is started again (restart 1 of 1)" in job.report, job
    begins = job.events("begins")
    assert {event["step"] for event in begins} == {0, 3}, job
    pids = {rank: {one["pid"] for one in begins if one["rank"] == rank} for rank in range(3)}
    assert [len(pids[rank]) for rank in range(3)] == [1, 2, 1], job
    (stuck,) = job.events("stuck")
    assert not state(stuck["pid"]), job


NUMBERS = """
    import os, sys
    import numpy as np
    import probe, syncvar as sv

    state = sv.elastic.State(step=0)
    worker = os.environ["SYNCVAR_RANK"]

    @sv.elastic.run
    def train(state):
        while state.step < 100:
            if state.step == 3 and worker == "0" and sv.world_size() == 3:
                sys.exit(3)
            if state.step == 6 and worker == "2":
                probe.gate("late")
                raise ValueError("batch 7 has no labels")
            sv.all_reduce(np.ones(3))
            state.step += 1
            state.commit()

    train(state)
"""


@SLOWLY
def test_the_launcher_calls_workers_by_the_numbers_of_their_output(launch):
    """Worker 2 is rank 1 after the loss of worker 0."""
    env = {"SYNCVAR_STALL_WARNING_S": "0.5"}
    job = launch(NUMBERS, workers="2:3", options=("--events", "events.jsonl"), env=env)
    await_true(lambda: "has not entered it" in job.report, what="the report of the stall")
    job.open_gate("late")
    assert job.wait() == 1, job
    assert "worker 1 has been waiting" in job.report, job
    assert "worker 2 has not entered it" in job.report, job
    assert "syncvar: worker 2 on " in job.report, job
    assert "evidence: traceback of worker 2" in job.report, job
    assert "  worker 0: lost: exited with status 3\n" in job.report, job
    assert "  worker 1: waiting in all_reduce(" in job.report, job
    assert not re.search(r"\branks?\b", job.report), job
    events = map(json.loads, (job.folder / "events.jsonl").read_text().splitlines())
    stalls = [one["text"] for one in events if one["event"] == "stall"]
    assert stalls, job
    assert all("worker 2 has not entered it" in text for text in stalls), job
    (name,) = re.findall(r"\(syncvar explain (\w+)\)", job.report)
    env = {**os.environ, "XDG_STATE_HOME": str(job.folder / "state")}
    line = [sys.executable, "-m", "syncvar", "explain", name]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert "rank 0 is worker 1, rank 1 is worker 2" in done.stdout, done


CURVE = """
    import json, os, signal, sys, time
    import numpy as np
    import probe, syncvar as sv

    ROWS, BATCH, EPOCHS = 240, 48, 12
    faults = json.loads(sys.argv[1])
    worker, life = os.environ["SYNCVAR_RANK"], os.environ["SYNCVAR_INCARNATION"]
    draw = np.random.default_rng(0)
    x = draw.standard_normal((ROWS, 8)).astype(np.float32)
    y = x @ np.arange(8, dtype=np.float32) + draw.standard_normal(ROWS).astype(np.float32)
    w = sv.Variable(np.zeros(8, np.float32), name="w", aggregation="MEAN")
    uses = sv.Variable(np.zeros(ROWS, np.int64), name="uses", aggregation="SUM")
    optimizer = sv.optimizers.Adam(0.2)
    state = sv.elastic.State(w=w, uses=uses, optimizer=optimizer, step=0, losses=())

    def loss():
        return float(np.mean((x @ w.numpy() - y) ** 2))

    def has_come():
        time.sleep(0.01)
        return sv.all_reduce(os.path.exists(f"{probe.FOLDER}/gate-came"), op="or")

    @sv.elastic.run
    def train(state):
        if life != "0":
            probe.open_gate("came")
        while state.step < EPOCHS * ROWS // BATCH:
            while faults and state.step == 45 and not has_come():
                state.commit()
            epoch, start = divmod(state.step * BATCH, ROWS)
            rows = np.random.default_rng(epoch).permutation(ROWS)[start : start + BATCH]
            mine = np.array_split(rows, sv.world_size())[sv.rank()]
            grad = 2 * (x[mine] @ w.numpy() - y[mine]) @ x[mine] / len(mine)
            if [int(worker), int(life), state.step] in faults:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.apply_gradients([(grad, w)], weight=len(mine))
            used = np.zeros(ROWS, np.int64)
            used[mine] = 1
            uses.assign_add(used)
            state.step += 1
            if state.step * BATCH % ROWS == 0:
                state.losses = (*state.losses, loss())
            state.commit()

    train(state)
    probe.note("final", life=life, losses=state.losses, uses=sorted(set(uses.numpy().tolist())))
"""


@SLOWLY
def test_the_loss_curve_is_that_of_undisturbed_runs_within_their_noise(launch):
    """Without shards the sums are rounded in another order, and nothing else differs."""

    def curve(workers, faults=(), options=()):
        job = launch(CURVE, workers=workers, arguments=[json.dumps(faults)], options=options)
        assert job.wait() == 0, job
        assert {tuple(event["uses"]) for event in job.events("final")} == {(12,)}, job
        (losses,) = {tuple(event["losses"]) for event in job.events("final")}
        return losses, {event["life"] for event in job.events("final")}

    undisturbed = [curve(size)[0] for size in (1, 2, 3, 4)]
    faults = [[1, 0, 7], [0, 0, 16], [3, 0, 21], [2, 0, 33]]
    disturbed, lives = curve("2:4", faults, ("--max-restarts", "2"))
    assert "1" in lives, lives  # workers were lost, and came
    noise = max(
        abs(one - other) / one
        for losses in zip(*undisturbed, strict=True)
        for one in losses
        for other in losses
    )
    bound = max(100 * noise, 1e-3)  # a lost or repeated batch changes a loss by several percent
    for mine, *others in zip(disturbed, *undisturbed, strict=True):
        assert min(abs(mine - one) / one for one in others) < bound, (noise, disturbed, undisturbed)
    assert disturbed[0] > 10 * disturbed[-1], disturbed


TORCH = """
    import os
    import probe, torch
    import torch.distributed as dist
    import syncvar as sv
    import syncvar.torch

    total = torch.zeros(4)
    state = sv.elastic.State(total=total, step=0)

    @sv.elastic.run
    def train(state):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("syncvar")
        sizes = dist.get_rank(), dist.get_world_size()
        assert sizes == (sv.rank(), sv.world_size())
        while state.step < 10:
            if state.step == 4 and sizes == (1, 3):
                os._exit(3)
            ones = torch.ones(4)
            dist.all_reduce(ones)
            total.add_(ones)
            state.step += 1
            state.commit()

    train(state)
    probe.note("final", total=total.tolist())
"""


@pytest.mark.tensors
def test_a_process_group_of_torch_is_made_anew_in_each_generation(launch):
    job = launch(TORCH, workers="2:3")
    assert job.wait() == 0, job
    finals = job.events("final")
    assert [event["total"] for event in finals] == [[4 * 3.0 + 6 * 2.0] * 4] * 2, job
