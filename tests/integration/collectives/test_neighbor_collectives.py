"""The neighbour collectives on random meshes against a model that shifts a grid of ranks with NumPy."""

import pytest

SCRIPT = """
import numpy as np
import syncvar as sv

RANK, SIZE = sv.rank(), sv.world_size()
SHAPES = {
    2: [(2,), (1, 2), (2, 1, 1)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (1, 2, 2)],
    6: [(6,), (2, 3), (3, 1, 2)],
}
rng = np.random.default_rng(SIZE)
calls = 0


def beside(shape, rings):
    # the ranks at -1 and +1 of each axis, -1 where there is none: a grid of ranks, padded and shifted
    grid = np.arange(SIZE).reshape(shape)
    slots = []
    for axis, ring in enumerate(rings):
        for step in (-1, 1):
            moved = np.roll(grid, -step, axis)
            if not ring:
                edge = [slice(None)] * len(shape)
                edge[axis] = 0 if step == -1 else -1
                moved[tuple(edge)] = -1
            slots.append(moved.reshape(-1))
    return np.array(slots).T


def same(got, wanted, *about):
    global calls
    calls += 1
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, about
    assert (got == wanted).all(), (about, got, wanted)


for shape in SHAPES[SIZE]:
    mesh = sv.mesh(shape)
    for number in range(8):
        rings = tuple(bool(number >> axis & 1) for axis in range(len(shape)))
        table = beside(shape, rings)
        slots = 2 * len(shape)
        dtype = str(rng.choice(["float32", "float64", "int8", "uint16", "complex64", "bool"]))
        part = [(), (0,), (1,), (7, 3), (5000,), (300_000,)][rng.integers(6)]
        data = rng.integers(0, 2 if dtype == "bool" else 100, (SIZE, slots, *part)).astype(dtype)
        about = (shape, rings, dtype, part)
        for is_gather in (True, False):
            call = sv.neighbor_all_gather if is_gather else sv.neighbor_all_to_all
            mine = np.array(data[RANK, 0] if is_gather else data[RANK])
            old = np.ones((slots, *part), dtype)
            fresh, kept = np.zeros_like(old), old.copy()
            for slot, peer in enumerate(table[RANK]):
                if peer >= 0:
                    # what arrives from the neighbour at -1 is what it sends at +1
                    block = data[peer, 0] if is_gather else data[peer, slot + (1, -1)[slot % 2]]
                    fresh[slot] = kept[slot] = block
            before = mine.copy()
            same(call(mine, mesh, rings), fresh, *about)
            same(mine, before, "the input stays", *about)
            out = old.copy()
            assert call(mine, mesh, rings, out=out) is out
            same(out, kept, "out", *about)
            wide = np.ones((*old.shape, 2), dtype)[..., 0]  # not contiguous
            same(call(mine, mesh, rings, out=wide), kept, "strided out", *about)
            changing = mine.copy()
            work = call(changing, mesh, rings, async_op=True)
            changing[...] = 0
            same(work.wait(), fresh, "async", *about)
            if not is_gather:
                both = mine.copy()
                wanted = np.where((table[RANK] < 0).reshape(-1, *[1] * len(part)), mine, fresh)
                same(call(both, mesh, rings, out=both), wanted, "in place", *about)

for call, lead in ((sv.neighbor_all_gather, ()), (sv.neighbor_all_to_all, (2,))):
    line = sv.mesh((SIZE,))
    for mine in (np.ones((*lead, 3 + RANK % 2)), np.ones((*lead, 3), ["f4", "f8"][RANK % 2])):
        try:
            call(mine, line)
            raise SystemExit("not refused")
        except sv.MismatchError:
            pass
    try:
        call(np.ones((*lead, 3)), line, RANK == 0)
        raise SystemExit("not refused")
    except sv.MismatchError:
        pass
    for arguments in ((np.ones((*lead, 3)), None), (np.ones((*lead, 3)), line, (True, False))):
        try:
            call(*arguments)
            raise SystemExit("not refused")
        except sv.ConfigError:
            pass
    same(call(np.ones((*lead, 3)), line, True), np.ones((2, 3)), "after the refusals")
print("calls", calls)
"""


@pytest.mark.parametrize("setting", ["auto", "zmq", "python"])
@pytest.mark.parametrize("workers", [2, 3, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_every_mesh_gives_what_the_model_gives(launch, workers, setting):
    env = {"SYNCVAR_TRANSPORT": "zmq"} if setting == "zmq" else {}
    if setting == "python":
        env = {"SYNCVAR_CALL_RUNNER": "python"}
    job = launch(SCRIPT, workers=workers, env=env)
    assert job.wait() == 0, str(job)
    assert job.out.count("calls") == workers


@pytest.mark.slow
def test_neighbours_on_two_hosts(launch):
    job = launch(SCRIPT, workers=4, options=["--fake-hosts", "2"])
    assert job.wait() == 0, str(job)
    assert job.out.count("calls") == 4
