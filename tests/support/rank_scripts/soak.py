"""Run as a launched job: random calls on random groups, every result checked on every rank.

Arguments: the seed, how many calls, and "for-ever" to go on until this rank is ended.
"""

import random
import sys

import numpy as np
import probe

import syncvar as sv

SIZES = (
    0,
    1,
    2,
    3,
    7,
    64,
    1000,
    4096,
    8191,
    8192,
    8193,
    32_768,
    65_536,
    131_072,
    131_073,
    262_144,
    300_001,
    524_288,
)
WEIGHTS = (2, 6, 4, 4, 4, 6, 6, 4, 2, 2, 2, 2, 1, 0.5, 0.5, 0.2, 0.1, 0.1)
DTYPES = ("f4", "f8", "i4", "i8", "u1", "f2", "?")
FOLD = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
RANK, WORLD = sv.rank(), sv.world_size()


def brought(call, who, count, dtype):
    """Whole numbers so small that sums and products of all ranks are exact in every dtype."""
    return ((np.arange(count) + call + 2 * who) % 5).astype(dtype)


def folded(parts, op):
    total = parts[0]
    for part in parts[1:]:
        total = FOLD[op](total, part)
    if op != "mean":
        return total
    kind = np.dtype("f8" if total.dtype.kind in "iu" else total.dtype)
    return (total.astype(kind) / kind.type(len(parts))).astype(kind)


class Soak:
    """The same choices on all ranks, except in which order started calls are waited for."""

    def __init__(self, seed):
        self.draw, self.mine = random.Random(seed), random.Random(seed * 1000 + RANK)
        self.groups = [None]
        self.started = []
        self.calls = 0
        self.doing = ""

    def step(self):
        draw = self.draw
        kind = draw.random()
        if kind < 0.02 or len(self.groups) < 3:
            self.groups.append(sv.new_group(draw.sample(range(WORLD), draw.randint(1, WORLD))))
            return
        if kind < 0.03 and len(self.groups) > 4:
            del self.groups[draw.randrange(1, len(self.groups))]
            return
        group = draw.choice(self.groups[-6:]) if draw.random() < 0.6 else None
        call, choice, form = draw.randrange(1000), draw.random(), draw.randrange(6)
        count, dtype = draw.choices(SIZES, WEIGHTS)[0], np.dtype(draw.choice(DTYPES))
        op, is_async = (
            draw.choice(("sum", "sum", "mean", "min", "max", "prod")),
            draw.random() < 0.15,
        )
        root = draw.random()
        members = tuple(range(WORLD)) if group is None else group.ranks
        self.calls += 1
        if RANK not in members:
            return
        if dtype == "?" or (dtype in ("u1", "f2") and op in ("sum", "prod", "mean")):
            op = "max"
        me, n = members.index(RANK), len(members)
        self.doing = (
            f"{choice:.2f} {op} {dtype} {count} form {form} started {is_async} ranks {members}"
        )
        how = {"group": group, "async_op": is_async}
        root = int(root * n)
        parts = [brought(call, who, count, dtype) for who in range(n)]
        lengths = [(count + 37 * who) % (count + 1) for who in range(n)]
        if choice < 0.6:
            self.reduce(parts, me, op, form, how)
        elif choice < 0.67:
            blocks = [part[:length] for part, length in zip(parts, lengths, strict=True)]
            self.see(sv.all_gather(blocks[me], **how), np.concatenate(blocks))
        elif choice < 0.74:
            self.see(
                sv.broadcast(parts[root] if me == root else None, root=root, **how), parts[root]
            )
        elif choice < 0.78:
            self.see(
                sv.reduce(parts[me], op, root=root, **how),
                folded(parts, op) if me == root else None,
            )
        elif choice < 0.81:
            self.see(
                sv.scan(parts[me], "max" if op == "mean" else op, **how),
                folded(parts[: me + 1], "max" if op == "mean" else op),
            )
        elif choice < 0.84:
            mine = [parts[me][: lengths[to]] for to in range(n)]
            self.see(sv.all_to_all(mine, **how), [part[: lengths[me]] for part in parts])
        elif choice < 0.87:
            self.see(
                sv.gather(parts[me], root=root, **how),
                np.concatenate(parts) if me == root else None,
            )
        elif choice < 0.92:
            sv.barrier(group=group)
        elif choice < 0.97:
            words = "x" * (call % 50)
            assert sv.all_gather_object((me, words), group=group) == [
                (who, words) for who in range(n)
            ]
        else:
            total = sv.all_reduce(
                {"a": parts[me], "b": [np.float32(me), brought(call, me, 3, "i8")]},
                "max",
                group=group,
            )
            self.equal(total["a"], folded(parts, "max"))
            self.equal(total["b"][0], np.asarray(n - 1, "f4"))

    def reduce(self, parts, me, op, form, how):
        wanted, x = folded(parts, op), parts[me].copy()
        if how["async_op"]:
            work = sv.all_reduce(x, op, **how)
            x[...] = 1  # its value was taken when the call was made
            self.see(work, wanted)
        elif form == 0 and wanted.dtype == x.dtype:
            assert sv.all_reduce(x, op, out=x, group=how["group"]) is x
            self.equal(x, wanted)
        elif form == 1:
            out = np.empty(wanted.shape, wanted.dtype)
            self.equal(sv.all_reduce(x, op, out=out, group=how["group"]), wanted)
        elif form == 2:
            self.equal(sv.all_reduce(np.repeat(x, 2)[::2], op, group=how["group"]), wanted)
        else:
            self.equal(sv.all_reduce(x, op, group=how["group"]), wanted)
            assert x.tobytes() == parts[me].tobytes()

    def see(self, result, wanted):
        if not hasattr(result, "wait"):
            self.equal(result, wanted)
            return
        self.started.append((result, wanted))
        while len(self.started) > 8 or (self.started and self.mine.random() < 0.3):
            work, wanted = self.started.pop(self.mine.randrange(len(self.started)))
            self.equal(work.wait(), wanted)

    def equal(self, got, wanted):
        if isinstance(wanted, list):
            assert len(got) == len(wanted), self.doing
            for one, other in zip(got, wanted, strict=True):
                self.equal(one, other)
        elif wanted is None:
            assert got is None, self.doing
        else:
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), (
                f"{self.doing}: {got.dtype}{got.shape}, not {wanted.dtype}{wanted.shape}"
            )
            assert got.tobytes() == wanted.tobytes(), (
                f"call {self.calls}, {self.doing}: {np.flatnonzero(got != wanted)[:5]}"
            )

    def end(self):
        for work, wanted in self.started:
            self.equal(work.wait(), wanted)


def main():
    seed, calls, for_ever = int(sys.argv[1]), int(sys.argv[2]), "for-ever" in sys.argv
    soak = Soak(seed)
    sv.barrier()
    probe.note("ready")
    try:
        while soak.calls < calls or for_ever:
            soak.step()
        soak.end()
    except sv.SyncvarError as error:
        probe.raised(error)
        raise
    sv.barrier()
    probe.note("done", calls=soak.calls)


main()
