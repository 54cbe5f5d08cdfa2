"""Jobs whose ranks meet and exchange data by MPI, under the mpirun of Open MPI and of MPICH: `pytest -m mpi`."""

import re

import pytest

from tests.support.mpi_jobs import MPIS, notes, run, script

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

PATHS = {  # data path -> setting, and how many ranks are on each host, of four
    "shm": ("mpi", 4),
    "hosts": ("mpi", 2),
    "links": ("mpi-only", 4),
    "links of hosts": ("mpi-only", 2),
}
MEET = """
sv.init()
assert (sv.all_reduce(np.arange(3.0)) == 4 * np.arange(3.0)).all()
note("met", sv.rank(), sv.world_size(), sv.local_rank(), sv.host_index(), sv.host_count(), current().transport)
sv.shutdown()
sv.init()
note("again", sv.all_reduce(1))
"""


@pytest.fixture(params=MPIS)
def mpi(request):
    return request.param


def placed(path):
    setting, each = PATHS[path]
    return {"SYNCVAR_TRANSPORT": setting, "each": each % 4}


@pytest.mark.parametrize("path", PATHS)
def test_ranks_meet_by_mpi_and_join_anew(mpi, path, tmp_path):
    code, text = run(mpi, 4, script(tmp_path, MEET), **placed(path))
    assert (code, text) == (0, "")
    each = PATHS[path][1]
    how = (
        f"shared memory: {each} ranks of this host share memory"
        if PATHS[path][0] == "mpi"
        else "mpi: SYNCVAR_TRANSPORT=mpi-only asks for it"
    )
    between = "; MPI (not encrypted by syncvar) between 2 hosts" if each < 4 else ""
    for rank, noted in enumerate(notes(tmp_path)):
        assert noted.startswith(
            f"met {rank} 4 {rank % each} {rank // each} {4 // each} {how}{between}"
        )
        assert noted.endswith("again 4\n")


@pytest.mark.parametrize("path", PATHS)
def test_every_collective_gives_what_it_must(mpi, path):
    code, text = run(mpi, 4, ["-m", "syncvar.cli.selftest"], limit_s=200.0, **placed(path))
    assert code == 0, text
    assert "FAIL" not in text
    assert len(re.findall(r"^\w+ +OK ", text, re.MULTILINE)) > 15, text
