"""The calls that programs write, as they write them, and what other libraries' programs write instead: data.

Each call is Python text: an expression, or statements that may return something. What may be used
in it:

| name | meaning |
|---|---|
| `sv`; `comm`, `MPI`; `dist`, `torch`; `np` | the library that makes the call, and NumPy |
| `x` | what this rank brings: an array (with torch a tensor) whose elements are all rank + 1 |
| `out` | like `x`, for results; with torch `x` itself, whose all-reduce is in place |
| `whole` | as many elements as all ranks' `x` together, 1 as often as `x` has elements, then 2, … |
| `rank`, `world`, `other`, `pair` | this rank, how many there are, the other of its pair, and the group of both |
| what `setup` makes | a text of the row's own for each library: variables, functions |

`check` must be true after the first call: `got` is what it has returned, or `out`; `flat` makes one
array of anything; `total` is the sum of all ranks' elements. After it `x` is filled with zeros:
what is added to and added to would grow without end.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GROUPS", "PLAIN", "ROWS", "Row", "rows_of"]

KI, MI = 1 << 10, 1 << 20
PLAIN = "sv.all_reduce(x)"
GROUPS = {
    "calls": "Numbers, kinds of elements and options",
    "variables": "Variables",
    "messages": "Messages and objects",
    "moves": "Other collectives",
}


class Row(NamedTuple):
    """A call.

    Args:
        group: One of `GROUPS`.
        syncvar: Its text, by which it is called in tables too.
        mpi: What a program with mpi4py has in its place; empty where there is nothing such.
        torch: Likewise, with torch.distributed.
        check: Whether the first call was right.
        sizes: Bytes of `x`.
        dtype: Of `x`.
        setup: By the library ("syncvar", "mpi", "torch") what is run once before.
        name: Instead of `syncvar`, where that is long.
        times: Bound on its time as a multiple of that of `PLAIN`, at the sizes at which that is
            measured.
        ratio: Bound on the fastest peer's time divided by its.
        within: Whether the call is made inside `strategy.run`.
    """

    group: str
    syncvar: str
    mpi: str = ""
    torch: str = ""
    check: str = "(flat(got) == total).all()"
    sizes: tuple[int, ...] = (8,)
    dtype: str = "float32"
    setup: dict[str, str] = {}  # noqa: RUF012  (nobody writes to it)
    name: str = ""
    times: float | None = None
    ratio: float | None = None
    within: bool = False

    @property
    def title(self) -> str:
        """Return what it is called in tables."""
        return self.name or self.syncvar

    @property
    def is_of_pairs(self) -> bool:
        """Whether each rank needs the other of its pair."""
        return "pair" in self.syncvar or "other" in self.syncvar


MPI_SUM, TORCH_SUM = "comm.Allreduce(x, out)", "dist.all_reduce(x)"
SMALL_TO_MIDDLE = (8, 64 * KI, 1 * MI)
MESSAGES = (8, 8 * KI, 64 * KI, 1 * MI)
MOVED = (8, 4 * KI, 64 * KI, 1 * MI, 16 * MI)


def _sum_of(
    dtype: str,
    call: str = PLAIN,
    mpi: str = MPI_SUM,
    torch: str = TORCH_SUM,
    check: str = Row._field_defaults["check"],
) -> Row:
    return Row("calls", call, mpi, torch, check, dtype=dtype, name=f"{call}, {dtype}", times=2)


def _variable(
    name: str, make: str, call: str, *, times: float | None = 1.3, within: bool = False
) -> Row:
    """Return the row of a write to a variable, or of a write and a read."""
    return Row(
        "variables",
        call,
        f"{MPI_SUM}; np.add(v, out, out=v); return v",
        f"{TORCH_SUM}; v.add_(x); return v",
        "(flat(v.numpy() if hasattr(v, 'numpy') else v) == total).all()",
        SMALL_TO_MIDDLE,
        setup={"syncvar": make, "mpi": "v = np.zeros_like(x)", "torch": "v = torch.zeros_like(x)"},
        name=name,
        times=times,
        within=within,
    )


AUTO = 'v = sv.Variable(np.zeros_like(x), aggregation="SUM")'
ON_WRITE = 'v = sv.Variable(np.zeros_like(x), synchronization="ON_WRITE", aggregation="SUM")'
ON_READ = 'v = sv.Variable(np.zeros_like(x), synchronization="ON_READ", aggregation="SUM")'
READS = "v.assign_add(x); return v.read_value(copy=False)"
SCOPE = "with strategy.scope():\n    "


def _there_and_back(first: str, second: str) -> str:
    """Return a message there and one back: odd ranks answer."""
    return f"if rank % 2:\n    {second}\n    {first}\nelse:\n    {first}\n    {second}"


ROWS = (
    Row("calls", PLAIN, MPI_SUM, TORCH_SUM, sizes=SMALL_TO_MIDDLE),
    Row(
        "calls", "sv.all_reduce(1.0)", "comm.allreduce(1.0)", "t = torch.tensor([1.0]); dist.all_reduce(t); return t.item()",
        "got == world", times=2,
    ),
    Row(
        "calls", "sv.all_reduce([1.0, 2.0, 3.0])", "a = np.array([1.0, 2.0, 3.0]); comm.Allreduce(MPI.IN_PLACE, a); return a.tolist()",
        "t = torch.tensor([1.0, 2.0, 3.0]); dist.all_reduce(t); return t.tolist()", "list(got) == [world, 2 * world, 3 * world]", times=2,
    ),
    Row(
        "calls", 'sv.all_reduce({"loss": 1.0, "n": 2.0})', "a = np.array([1.0, 2.0]); comm.Allreduce(MPI.IN_PLACE, a); return dict(loss=a[0], n=a[1])",
        "t = torch.tensor([1.0, 2.0]); dist.all_reduce(t); return dict(loss=t[0], n=t[1])", "got['loss'] == world and got['n'] == 2 * world", times=4,
    ),
    Row(
        "calls", "sv.all_reduce([x, y, z])", "for one in (x, y, z):\n    comm.Allreduce(MPI.IN_PLACE, one)\nreturn x, y, z",
        "for one in (x, y, z):\n    dist.all_reduce(one)\nreturn x, y, z", "all((flat(one) == total).all() for one in got)", SMALL_TO_MIDDLE,
        setup={"syncvar": "y, z = x.copy(), x.copy()", "mpi": "y, z = x.copy(), x.copy()", "torch": "y, z = x.clone(), x.clone()"},
    ),
    Row(
        "calls", "sv.all_reduce(several, out=several)", "for one in several:\n    comm.Allreduce(MPI.IN_PLACE, one)",
        "for one in several:\n    dist.all_reduce(one)", "all((flat(one) == total).all() for one in several)", SMALL_TO_MIDDLE,
        setup={"syncvar": "several = [x, x.copy(), x.copy()]", "mpi": "several = [x, x.copy(), x.copy()]", "torch": "several = [x, x.clone(), x.clone()]"},
        name="sv.all_reduce([x, y, z], out=[x, y, z])", times=3.5,
    ),
    Row(
        "calls", "sv.all_reduce(nested)", "for one in (x, y, z):\n    comm.Allreduce(MPI.IN_PLACE, one)\nreturn x, y, z",
        "for one in (x, y, z):\n    dist.all_reduce(one)\nreturn x, y, z", "all((flat(one) == total).all() for one in (got if isinstance(got, tuple) else (*got['a'], got['b']['c'])))",
        setup={"syncvar": 'nested = {"a": [x, x.copy()], "b": {"c": x.copy()}}', "mpi": "y, z = x.copy(), x.copy()", "torch": "y, z = x.clone(), x.clone()"},
        name='sv.all_reduce({"a": [x, y], "b": {"c": z}})',
    ),
    Row(
        "calls", "sv.all_reduce(many)", "for one in many:\n    comm.Allreduce(MPI.IN_PLACE, one)\nreturn many",
        "for one in many:\n    dist.all_reduce(one)\nreturn many", "all((flat(one) == total).all() for one in got)", (8, 4 * KI),
        setup={"syncvar": "many = [x.copy() for _ in range(161)]", "mpi": "many = [x.copy() for _ in range(161)]", "torch": "many = [x.clone() for _ in range(161)]"},
        name="sv.all_reduce(a list of 161 arrays like x)",
    ),
    Row(
        "calls", 'sv.all_reduce({"loss": 1.0, "n": 3})', "return dict(loss=comm.allreduce(1.0), n=comm.allreduce(3))",
        "t, n = torch.tensor([1.0]), torch.tensor([3]); dist.all_reduce(t); dist.all_reduce(n); "
        "return dict(loss=t[0], n=n[0])",
        "got['loss'] == world and got['n'] == 3 * world",
    ),
    Row(
        "calls", 'sv.all_reduce({"gradient": x, "loss": 1.0})', "comm.Allreduce(x, out); return dict(gradient=out, loss=comm.allreduce(1.0))",
        "t = torch.tensor([1.0]); dist.all_reduce(x); dist.all_reduce(t); return dict(gradient=x, "
        "loss=t[0])",
        "(flat(got['gradient']) == total).all() and got['loss'] == world", SMALL_TO_MIDDLE,
    ),
    Row("calls", "sv.all_reduce(x, timeout=5.0)", MPI_SUM, TORCH_SUM, times=2),
    Row("calls", "sv.all_reduce(x, async_op=True).wait()", "comm.Iallreduce(x, out).Wait(); return out", "dist.all_reduce(x, async_op=True).wait(); return x", sizes=SMALL_TO_MIDDLE, times=3),
    Row(
        "calls", "return [work.wait() for work in [sv.all_reduce(one, async_op=True) for one in ten]]",
        "for work in [comm.Iallreduce(one, out) for one, out in zip(ten, outs)]:\n    "
        "work.Wait()\nreturn outs",
        "for work in [dist.all_reduce(one, async_op=True) for one in ten]:\n    work.wait()\nreturn ten", "all((flat(one) == total).all() for one in got)",
        SMALL_TO_MIDDLE, setup={"syncvar": "ten = [x.copy() for _ in range(10)]", "mpi": "ten = [x.copy() for _ in range(10)]; outs = [np.empty_like(x) for _ in ten]", "torch": "ten = [x.clone() for _ in range(10)]"},
        name="ten started, then waited for",
    ),
    Row("calls", 'sv.all_reduce(x, "mean")', f"{MPI_SUM}; np.divide(out, world, out=out)", f"{TORCH_SUM}; x.div_(world)", "(flat(got) == total / world).all()", times=2),
    Row("calls", 'sv.all_reduce(x, "max")', "comm.Allreduce(x, out, MPI.MAX)", "dist.all_reduce(x, dist.ReduceOp.MAX)", "(flat(got) == world).all()", times=2),
    _sum_of("float64"),
    _sum_of("int64"),
    _sum_of("bool", 'sv.all_reduce(x, "or")', "comm.Allreduce(x, out, MPI.LOR)", "", "flat(got).all()"),
    _sum_of("float16", mpi=""),
    Row(
        "calls", "sv.all_reduce(x, group=pair)", "pair.Allreduce(x, out)", "dist.all_reduce(x, group=pair)",
        "(flat(got) == rank + 1 + other + 1).all()", times=2,
    ),
    Row("calls", "sv.barrier()", "comm.Barrier()", "dist.barrier()", "True", ratio=0.8),
    _variable("v.assign_add(x)", ON_WRITE, "v.assign_add(x)"),
    _variable("v.assign_add(x), then a read", ON_WRITE, READS),
    _variable("v.assign_add(x) in run", SCOPE + ON_WRITE, "v.assign_add(x)", within=True),
    _variable("AUTO: v.assign_add(x), then a read", AUTO, READS),
    _variable("AUTO: v.assign_add(x) in run", SCOPE + AUTO, "v.assign_add(x)", within=True),
    _variable(
        "strategy.run(step) of one v.assign_add(x)", f"{SCOPE}{ON_WRITE}\ndef step():\n    v.assign_add(x)", "strategy.run(step)", times=None,
    ),
    Row(
        "variables", "v.assign_add(same)", check="(flat(v.numpy()) == 1).all()", sizes=SMALL_TO_MIDDLE,
        setup={"syncvar": f"{SCOPE}{ON_WRITE}\nsame = np.ones_like(x)"}, name="strategy's v.assign_add(the same everywhere), outside run",
    ),
    Row("variables", "strategy.run(nothing)", check="True", setup={"syncvar": "nothing = lambda: None"}),
    Row("variables", "v.read_value()", MPI_SUM, TORCH_SUM, setup={"syncvar": f"{ON_READ}\nv.assign(x)"}, name="ON_READ: v.read_value()", times=2),
    Row("variables", 'strategy.reduce("SUM", 1.0, axis=None)', "comm.allreduce(1.0)", check="got == world", times=3),
    Row(
        "messages", _there_and_back("sv.send(x, other)", "sv.recv(other, out=out)"), _there_and_back("comm.Send(x, other)", "comm.Recv(out, other)"),
        _there_and_back("dist.send(x, other)", "dist.recv(out, other)"), "(flat(out) == other + 1).all()", MESSAGES,
        setup={"torch": "out = torch.zeros_like(x)"}, name="sv.send(x, other) there, sv.recv(other, out=out) back", ratio=0.8,
    ),
    Row(
        "messages", 'sv.broadcast_object({"a": 1})', 'comm.bcast({"a": 1})',
        'box = [{"a": 1} if rank == 0 else None]; dist.broadcast_object_list(box); return box[0]', "got == {'a': 1}", times=10,
    ),
    Row(
        "messages", "sv.all_gather_object(rank)", "comm.allgather(rank)", "box = [None] * world; dist.all_gather_object(box, rank); return box",
        "list(got) == list(range(world))",
    ),
    Row(
        "messages", _there_and_back('sv.send_object({"a": 1}, other)', "got = sv.recv_object(other)") + "\nreturn got",
        _there_and_back('comm.send({"a": 1}, other)', "got = comm.recv(source=other)") + "\nreturn got", check="got == {'a': 1}",
        name='sv.send_object({"a": 1}, other) there, sv.recv_object(other) back',
    ),
    Row("moves", "sv.reduce(x)", MPI_SUM.replace("Allreduce", "Reduce"), "dist.reduce(x, 0)", "rank or (flat(got) == total).all()", MOVED),
    Row(
        "moves", "sv.gather(x, out=whole if rank == 0 else None)", "comm.Gather(x, whole)",
        "dist.gather(x, list(whole.chunk(world)) if rank == 0 else None)", "rank or (flat(whole) == pieces).all()", MOVED, name="sv.gather(x, out=whole)", ratio=0.8,
        setup=dict.fromkeys(("syncvar", "mpi", "torch"), "whole = whole * 0"),
    ),
    Row(
        "moves", "sv.scatter(whole if rank == 0 else None, out=out)", "comm.Scatter(whole, out)",
        "dist.scatter(x, list(whole.chunk(world)) if rank == 0 else None)", "(flat(got) == rank + 1).all()", MOVED, name="sv.scatter(whole, out=out)", ratio=0.8,
    ),
    Row("moves", "sv.scan(x, out=out)", "comm.Scan(x, out)", "", "(flat(got) == (rank + 1) * (rank + 2) // 2).all()", MOVED, ratio=0.8),
    Row(
        "moves", "sv.all_to_all(whole, out=given)", "comm.Alltoall(whole, given)", "dist.all_to_all_single(given, whole)",
        "(flat(given) == rank + 1).all()", MOVED, setup={"syncvar": "given = np.zeros_like(whole)", "mpi": "given = np.zeros_like(whole)", "torch": "given = torch.zeros_like(whole)"}, ratio=0.8,
    ),
)  # fmt: skip


def rows_of(groups: str) -> list[Row]:
    """Return the rows of groups, which are named with commas between."""
    return [row for row in ROWS if row.group in groups.split(",")]
