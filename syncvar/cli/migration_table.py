"""Coming from tf.distribute, Horovod, mpi4py or torch.distributed: the same task in each, side by side.

    syncvar coming-from              the whole table
    syncvar coming-from horovod      one library beside syncvar, with what differs
    syncvar coming-from words        single words of theirs (names, keywords, ops, options) and what to write instead

`TASKS` is the table, and what both print. Every spelling of syncvar's is run by a test. In the spellings `x` is an array,
`out` another one, `grads` a list of arrays, `w` a variable, `comm` is `MPI.COMM_WORLD`, `dist` is `torch.distributed`, `ctx`
is `tf.distribute.get_replica_context()`, `ckpt` a checkpoint, `ds` a dataset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = [
    "LIBRARIES",
    "SHORT",
    "TASKS",
    "WORDS",
    "Task",
    "add_options",
    "coming_from_text",
    "table_text",
]

LIBRARIES = ("tf.distribute", "horovod", "mpi4py", "torch.distributed")
SHORT = {
    "torch": "torch.distributed",
    "tf": "tf.distribute",
    "tensorflow": "tf.distribute",
    "hvd": "horovod",
    "mpi": "mpi4py",
}
WORDS = "words"
_TITLES = ("tf.distribute", "Horovod", "mpi4py", "torch.distributed")
_NONE = "-"


class Task(NamedTuple):
    """One task in each library; "-" where it has no call of its own for it.

    Args:
        what: In words.
        tensorflow: As tf.distribute spells it.
        horovod: As Horovod does.
        mpi4py: As mpi4py does.
        torch: As torch.distributed does.
        syncvar: As syncvar does.
        notes: (libraries, what is different); no libraries means all.
    """

    what: str
    tensorflow: str
    horovod: str
    mpi4py: str
    torch: str
    syncvar: str
    notes: tuple[tuple[tuple[str, ...], str], ...] = ()

    def of(self, library: str) -> str:
        """Return the spelling of one of `LIBRARIES`."""
        return (self.tensorflow, self.horovod, self.mpi4py, self.torch)[LIBRARIES.index(library)]


_TF, _HVD, _MPI, _TORCH = ((name,) for name in LIBRARIES)

TASKS = (
    Task(
        "start four workers", "TF_CONFIG=… python train.py, four times", "horovodrun -np 4 python train.py",
        "mpirun -n 4 python train.py", "torchrun --nproc-per-node 4 train.py", "syncvar-launch --workers 4 train.py",
        (
            ((), "Without the launcher the same script runs as a world of one."),
            ((*_TF, *_TORCH), "A job started by TF_CONFIG, or by torchrun, is joined as it is: the variables are read."),
            (_MPI, "comm.Abort() is an exception: the launcher ends the other ranks and says who failed. MPI.Wtime() is time.perf_counter()."),
            ((*_MPI, *_HVD), "Processes that mpirun, mpiexec, srun or horovodrun has started join each other as they are."),
        ),
    ),
    Task(
        "from a program", _NONE, "horovod.run(fn, np=4)", "MPIPoolExecutor(4).map(fn, …)",
        "torch.multiprocessing.spawn(fn, nprocs=4)", "sv.run(fn, workers=4)",
        (((*_TORCH,), "fn gets no rank; sv.rank() tells. Results come back, by rank."),),
    ),
    Task(
        "start again after a failure", _NONE, "hvd.elastic.run", _NONE, "torchrun --max-restarts 3 train.py",
        "syncvar-launch --workers 4 --max-restarts 3 train.py",
        (((*_HVD,), "The number of workers stays the same in a job; a checkpoint can be restored on any number."),),
    ),
    Task(
        "join", "tf.distribute.MultiWorkerMirroredStrategy()", "hvd.init()", "from mpi4py import MPI",
        'dist.init_process_group("gloo")', "sv.init()", (((), "The first call joins by itself; nobody has to call it."),),
    ),
    Task(
        "who am I, of how many", "ctx.replica_id_in_sync_group, strategy.num_replicas_in_sync", "hvd.rank(), hvd.size()",
        "comm.Get_rank(), comm.Get_size()", "dist.get_rank(), dist.get_world_size()", "sv.rank(), sv.world_size()",
    ),
    Task(
        "on this host", _NONE, "hvd.local_rank()", "comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()",
        'int(os.environ["LOCAL_RANK"])', "sv.local_rank()",
    ),
    Task(
        "sum of all", 'ctx.all_reduce("SUM", x)', "hvd.allreduce(x, op=hvd.Sum)", "comm.Allreduce(x, out)",
        "dist.all_reduce(x)", "sv.all_reduce(x)",
        (
            (_HVD, 'hvd.allreduce averages unless told otherwise; syncvar sums: "mean" for the average.'),
            (_TORCH, "torch reduces in place; syncvar returns a new array unless out= is given."),
            (_MPI, "Lower case comm.allreduce pickles its object; syncvar never pickles."),
        ),
    ),
    Task(
        "in place", _NONE, "hvd.allreduce_(x, op=hvd.Sum)", "comm.Allreduce(MPI.IN_PLACE, x)", "dist.all_reduce(x)",
        "sv.all_reduce(x, out=x)", (((), "Arrays of sv.empty and sv.zeros are reduced where they lie: no byte is copied."),),
    ),
    Task(
        "mean of many arrays at once", 'ctx.all_reduce("MEAN", grads)', "hvd.grouped_allreduce(grads)", _NONE, _NONE,
        'sv.all_reduce(grads, "mean")',
        (
            ((), "Any nesting of dicts, lists and tuples of arrays travels as one vector."),
            (
                (*_HVD, *_TORCH),
                'The result is new arrays, and p.grad stays local. sv.all_reduce(grads, "mean", out=grads) writes into each p.grad.',
            ),
        ),
    ),
    Task(
        "go on while it runs", _NONE, "hvd.synchronize(hvd.allreduce_async(x))", "comm.Iallreduce(x, out).Wait()",
        "dist.all_reduce(x, async_op=True).wait()", "sv.all_reduce(x, async_op=True).wait()",
        ((_MPI, "The value is taken when the call is made: x may be changed at once."),),
    ),
    Task(
        "give up after 30 s", _NONE, _NONE, _NONE, 'dist.init_process_group("gloo", timeout=timedelta(seconds=30))',
        "sv.all_reduce(x, timeout=30.0)", (((), "Every wait has a deadline; what ends says who waited for whom."),),
    ),
    Task(
        "broadcast", _NONE, "hvd.broadcast(x, root_rank=0)", "comm.Bcast(x, root=0)", "dist.broadcast(x, src=0)",
        "sv.broadcast(x, root=0)", (((*_MPI, *_TORCH), "In place: sv.broadcast(x, out=x)."),),
    ),
    Task(
        "gather on all", "ctx.all_gather(x, axis=0)", "hvd.allgather(x)", "comm.Allgather(x, out)",
        "dist.all_gather(parts, x)", "sv.all_gather(x)", (((), "Lengths along the axis may differ between ranks."),),
    ),
    Task(
        "a row from each rank, a row to each rank", "-", "-", "comm.Allgather(x, table), comm.Scatter(table, x)",
        "dist.all_gather_into_tensor(table, x)", "sv.all_gather(x[None]), sv.scatter(list(np.atleast_2d(x)))",
        (((), "Pieces are joined along the first axis that is there: x[None] makes one for the ranks, a list gives each its item."),),
    ),
    Task(
        "reduce to one", _NONE, _NONE, "comm.Reduce(x, out, root=0)", "dist.reduce(x, dst=0)", "sv.reduce(x, root=0)",
    ),
    Task(
        "reduce and scatter", _NONE, "hvd.reducescatter(x, op=hvd.Sum)", "comm.Reduce_scatter_block(x, out)",
        "dist.reduce_scatter_tensor(out, x)", "sv.reduce_scatter(x)",
    ),
    Task(
        "all to all", _NONE, "hvd.alltoall(x)", "comm.Alltoall(x, out)", "dist.all_to_all_single(out, x)",
        "sv.all_to_all(x)",
        ((_MPI, "Alltoallv and Alltoallw too: pass a list of arrays, one for each rank; no counts, lengths may differ."),),
    ),
    Task("prefix sum", _NONE, _NONE, "comm.Scan(x, out)", _NONE, "sv.scan(x)"),
    Task(
        "send, receive", _NONE, _NONE, "comm.Send(x, dest=0), comm.Recv(out, source=0)",
        "dist.send(x, dst=0), dist.recv(out, src=0)", "sv.send(x, 0), sv.recv(0)",
        (
            ((), "No wildcard: a receiver names its source, so that the order of messages never depends on time."),
            (
                (*_MPI, *_TORCH),
                ("ANY_SOURCE: start a receive from each rank, works = [sv.recv(r, async_op=True) for r in others], take "
                "works[sv.wait_any(works)], and start the next one from the same rank."),
            ),
            (_MPI, "PROC_NULL: None in sv.sendrecv; for a send alone write `if 0 <= to < sv.world_size(): sv.send(x, to)`."),
        ),
    ),
    Task(
        "send and receive at once", _NONE, _NONE, "comm.Sendrecv(x, dest=0, recvbuf=out, source=0)",
        "dist.batch_isend_irecv([P2POp(dist.isend, x, 0), …])", "sv.sendrecv(x, 0, 0)",
        (
            (_MPI, "dest or source None is MPI's PROC_NULL. With out=x it is Sendrecv_replace."),
            (_TORCH, "Several messages: start them with async_op=True, and write sv.wait_all(works)."),
        ),
    ),
    Task("meet", _NONE, "hvd.barrier()", "comm.Barrier()", "dist.barrier()", "sv.barrier()"),
    Task(
        "plain data", _NONE, 'hvd.broadcast_object({"lr": 0.1})', 'comm.bcast({"lr": 0.1})',
        'dist.broadcast_object_list([{"lr": 0.1}])', 'sv.broadcast_object({"lr": 0.1})',
        (
            ((), "None, bool, int, float, str, bytes, arrays, and lists, tuples and dicts of them; nothing is pickled."),
        ),
    ),
    Task(
        "send, receive plain data", _NONE, _NONE, 'comm.send({"a": 7}, dest=0), comm.recv(source=0)',
        'dist.send_object_list([{"a": 7}], dst=0)', 'sv.send_object({"a": 7}, 0), sv.recv_object(0)',
        ((_MPI, "Lower case and upper case are two calls here as well: send and recv for arrays, send_object and recv_object for plain data."),),
    ),
    Task(
        "some of the ranks", _NONE, "hvd.add_process_set([0])", "comm.Create_group(comm.group.Incl([0]))",
        "dist.new_group([0])", "sv.new_group([0])",
        (
            (_MPI, "comm.Create_group is called by the members only, sv.new_group by every rank of the world, in the same order."),
            (_MPI, "comm.Split(color, key) is group.split(color, key); cartesian grids are sv.mesh((2, 2))."),
        ),
    ),
    Task(
        "train a module or a model", "model.fit(ds) under strategy.scope()",
        "hvd.DistributedOptimizer(optimizer, model.named_parameters()).step()", _NONE,
        "DistributedDataParallel(model)", 'sv.all_reduce(grads, "mean", out=grads)',
        (
            (
                (*_HVD, *_TORCH),
                'Keep module and optimizer: see "A module of PyTorch" in docs/migrating.md.',
            ),
            (_TF, 'scope() refuses a model of Keras: "A model of Keras", docs/migrating.md.'),
        ),
    ),
    Task(
        "a strategy", "tf.distribute.MultiWorkerMirroredStrategy()", _NONE, _NONE, _NONE,
        "sv.MultiWorkerMirroredStrategy()",
        (
            (_TF, "One replica is one process; MirroredStrategy is one over the workers of this host."),
            (_TORCH, "It keeps variables of sv equal, and takes no module."),
        ),
    ),
    Task(
        "a weight, equal everywhere", "tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)",
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)", "comm.Bcast(w, root=0)",
        _NONE, "sv.Variable(0.0, aggregation=sv.VariableAggregation.MEAN)",
        (
            (_TF, "A write takes effect at once, on all replicas; v.sync() and v.read_from(rank) are new."),
            (_TF, "Members of tf.VariableAggregation and of tf's other enumerations are taken."),
            ((*_HVD, *_TORCH), "A module of PyTorch begins equal by model.load_state_dict(sv.broadcast(model.state_dict(), root=0))."),
        ),
    ),
    Task(
        "a metric, summed when read", "tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=…SUM)",
        "hvd.allreduce(x, op=hvd.Sum)", "comm.Allreduce(x, out)", "dist.all_reduce(x)",
        'sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM")',
        ((_TF, "Reading it outside run is collective: all workers read, not only the chief."),),
    ),
    Task(
        "a step on all replicas", "strategy.run(step, args=(x,))", "step(x)", "step(x)", "step(x)",
        "strategy.run(step, args=(x,))", ((_TF, "step is plain Python: there is no graph and no tf.function."),),
    ),
    Task(
        "combine what a step returned", 'strategy.reduce("MEAN", x, axis=0)', "hvd.allreduce(x.mean())", _NONE, _NONE,
        'strategy.reduce("MEAN", x, axis=0)',
        ((_TF, "run returns this process's own value, unwrapped; PerReplica is met only in merge_call."),),
    ),
    Task(
        "gradients to a step of sv's variables", "optimizer.apply_gradients(zip(grads, weights))",
        _NONE, _NONE, _NONE,
        "sv.optimizers.Adam(1e-3).apply_gradients(zip(grads, weights))",
        (
            (_TF, "apply_gradients takes the mean over the replicas: divide the loss by the rows of this replica."),
            (_TF, 'A loss divided by the GLOBAL batch, as in the tutorials of TensorFlow, needs apply_gradients(..., reduce="sum").'),
            ((*_HVD, *_TORCH), "It takes the mean of the gradients. For modules see above."),
        ),
    ),
    Task(
        "clip by the norm of all", "tf.clip_by_global_norm(grads, 1.0)", "torch.nn.utils.clip_grad_norm_(…, 1.0)", _NONE,
        "torch.nn.utils.clip_grad_norm_(…, 1.0)", "sv.optimizers.SGD(0.1, clip_norm=1.0)",
        (((), "After the gradients have been combined, so that every replica scales by the same number."),),
    ),
    Task(
        "several batches to a step", _NONE, "hvd.DistributedOptimizer(optimizer, backward_passes_per_step=4)", _NONE,
        "model.no_sync()", "sv.optimizers.SGD(0.1, accumulate=4)",
    ),
    Task(
        "each worker its part of the data", "strategy.experimental_distribute_dataset(ds)",
        "ds.shard(hvd.size(), hvd.rank())", _NONE, "DataLoader(ds, sampler=DistributedSampler(ds))",
        "strategy.experimental_distribute_dataset(sv.data.from_arrays(x, batch_size=4, shuffle=True))",
        (
            ((*_HVD, *_TORCH), "batch_size is that of all workers together; the order is the same for any number of them."),
            ((*_HVD, *_TORCH), "Workers that run out of data need no hvd.join() and no Join: the steps end together."),
        ),
    ),
    Task(
        "save", "tf.train.Checkpoint(w=w).save(path)", "if hvd.rank() == 0: torch.save(…)", "comm.gather(…), rank 0 writes",
        "torch.distributed.checkpoint.save(state, checkpoint_id=path)", "sv.Checkpoint(w=w).save(path)",
        (
            ((*_HVD, *_TORCH), "Not under `if rank == 0`: saving is collective, each worker writes a part."),
            (_TF, "path is the checkpoint's, without a counter; sv.CheckpointManager numbers them."),
        ),
    ),
    Task(
        "keep the last five, go on from the newest", "tf.train.CheckpointManager(ckpt, path, max_to_keep=5)", _NONE, _NONE,
        _NONE, "sv.CheckpointManager(ckpt, path, keep=5).restore_latest()",
    ),
    Task(
        "the same bits on any number of workers", _NONE, _NONE, _NONE, _NONE, "sv.all_reduce_shards({0: x})",
        (((), "A step has a fixed number of micro-shards with ids; each worker passes a dict of its own, any cut will do."),),
    ),
    Task(
        "a time line of all workers", "tf.profiler.experimental.start(path)", "HOROVOD_TIMELINE=path horovodrun …", _NONE,
        "torch.profiler.profile()", "SYNCVAR_TRACE=traces syncvar-launch --workers 4 train.py",
        (((), "Then `syncvar trace merge traces -o trace.json`, for ui.perfetto.dev."),),
    ),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `syncvar coming-from`."""
    parser.add_argument(
        "library",
        nargs="?",
        choices=(*LIBRARIES, WORDS),
        type=_library,
        metavar="LIBRARY",
        help=f"one of {', '.join(LIBRARIES)} beside syncvar, with notes; {WORDS}: their single words [all, as a table]",
    )


def _library(name: str) -> str:
    """Return the library that a name, long or short, means."""
    return SHORT.get(name.lower(), name)


def table_text() -> str:
    """Return the whole table in Markdown.

    Example:
        >>> print(table_text().splitlines()[0])
        | task | tf.distribute | Horovod | mpi4py | torch.distributed | syncvar |
    """
    rows = [
        (one.what, *(_code(one.of(library)) for library in LIBRARIES), _code(one.syncvar))
        for one in TASKS
    ]
    return _grid(("task", *_TITLES, "syncvar"), rows)


def coming_from_text(library: str | None = None) -> str:
    """Return the whole table, or one library beside syncvar and below it what is different.

    Args:
        library: One of `LIBRARIES`, or None.

    Example:
        >>> print(coming_from_text("mpi4py").splitlines()[0])
        | task | mpi4py | syncvar |
    """
    if library is None:
        return table_text()
    title = _TITLES[LIBRARIES.index(library)]
    rows = [(one.what, _code(one.of(library)), _code(one.syncvar)) for one in TASKS]
    notes = [
        f"- {one.what}: {text}"
        for one in TASKS
        for libraries, text in one.notes
        if not libraries or library in libraries
    ]
    return (
        _grid(("task", title, "syncvar"), rows)
        + "\nWhat is different:\n\n"
        + "\n".join(notes)
        + "\n"
    )


def _code(spelling: str) -> str:
    return spelling if spelling == _NONE else f"`{spelling}`"


def _grid(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, *rows]
    shown = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([shown[0], "|---" * len(head) + "|", *shown[1:]]) + "\n"
