"""Open MPI and MPICH as Debian has them (install_mpi.sh), and jobs of them for tests."""

import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MPIS = ("openmpi", "mpich")
MISSING = "run tests/interop/install_mpi.sh first"
# What mpirun forwards it may cut anywhere: ranks write to files of their own.
BEGIN = """
import os, signal, sys, time
import numpy as np
import syncvar as sv
from syncvar.bootstrap.process import current
def note(*words):
    with open(f"{sys.argv[1]}/rank{os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']}", "a") as file:
        print(*words, file=file)
"""


def mpirun(mpi):
    """Return the program of an MPI."""
    found = shutil.which(f"mpirun.{mpi}")
    assert found, f"there is no mpirun.{mpi}: {MISSING}"
    return found


def command(mpi, count, *more):
    """Return what starts so many processes of one host, however few cores it has."""
    own = {"openmpi": ("--oversubscribe", "--bind-to", "none"), "mpich": ("-bind-to", "none")}[mpi]
    return [mpirun(mpi), *own, *more, "-n", str(count)]


def environment(mpi, folder, **more):
    """Return the environment of a job: mpi4py's wheel asks for MPICH's library by a name that Debian does not give it.

    Args:
        mpi: Which.
        folder: Where a link of that name may be made, and private folders of the job.
        more: Further variables.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SYNCVAR_", "MASTER_", "OMPI_", "PMI"))
    }
    environ |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPI4PY_MPIABI": mpi,
        "XDG_RUNTIME_DIR": str(folder),
    }
    environ |= {
        "SYNCVAR_RENDEZVOUS_DIR": str(folder),
        "SYNCVAR_RENDEZVOUS_TIMEOUT_S": "40",
        "SYNCVAR_COLLECTIVE_TIMEOUT_S": "60",
        "UCX_LOG_LEVEL": "error",
        "TMPDIR": str(folder),
    }
    if mpi == "mpich":
        found = glob.glob("/usr/lib/*/libmpich.so.12")
        assert found, f"there is no libmpich.so.12: {MISSING}"
        link = Path(folder) / "lib" / "libmpi.so.12"
        link.parent.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to(found[0])
        environ["LD_LIBRARY_PATH"] = os.pathsep.join(
            [str(link.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        )
    return environ | more


# Stands for ssh: the host is this one under another name.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare %s--uts sh -c 'hostname "$0" && exec sh -c "$1"' "$host" "$*"
"""


def hosts_of(mpi, count, each, folder):
    """Return the options by which mpirun starts so many ranks on each of several hosts, as which this one poses."""
    ssh = Path(folder) / "ssh"
    ssh.write_text(SSH % ("" if os.geteuid() == 0 else "--map-root-user "))
    ssh.chmod(0o700)
    names = ",".join(f"host{number}:{each}" for number in range(count // each))
    if mpi == "openmpi":
        return ["--mca", "plm_rsh_agent", str(ssh), "-H", names]
    return ["-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", names]


def await_true(ask, limit_s=60.0):
    """Ask until the answer is true; return it."""
    end = time.monotonic() + limit_s
    while not (answer := ask()):
        assert time.monotonic() < end, f"it did not come true within {limit_s:g} s"
        time.sleep(0.02)
    return answer


class MpiJob:
    """Processes that an mpirun has started; its output goes to a file.

    Args:
        mpi: Which MPI.
        count: How many.
        program: What each runs: arguments of Python.
        options: Of mpirun.
        each: How many are on each host, if there are several.
        variables: Further ones.
    """

    def __init__(self, mpi, count, program, options=(), each=0, **variables):
        self.folder = Path(
            tempfile.mkdtemp(prefix="sv", dir=os.environ.get("SYNCVAR_TEST_RUNTIME", "/tmp"))
        )
        self.out = self.folder / "out"
        environ = environment(mpi, self.folder, **variables)
        hosts = hosts_of(mpi, count, each, self.folder) if each else ()
        line = [*command(mpi, count, *hosts, *options), sys.executable, *map(str, program)]
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environ,
                cwd=self.folder,
                start_new_session=True,
            )

    def wait(self, limit_s=90.0):
        """Return exit code and output."""
        code = self.process.wait(limit_s)
        return code, self.text

    @property
    def text(self):
        return self.out.read_text(errors="replace")

    def until(self, words, count=1, limit_s=60.0):
        """Wait until the output has some words so many times."""
        await_true(
            lambda: self.text.count(words) >= count or self.process.poll() is not None, limit_s
        )
        assert self.text.count(words) >= count, self.text

    def until_noted(self, folder, words, count, limit_s=60.0):
        """Wait until so many ranks have noted some words."""
        noted = lambda: sum(words in path.read_text() for path in folder.glob("rank*"))
        await_true(lambda: noted() >= count or self.process.poll() is not None, limit_s)
        assert noted() >= count, self.text

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)  # mpirun ends what it has started
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(120)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def run(mpi, count, program, limit_s=90.0, **named):
    """Run a job to its end; return exit code and output."""
    with MpiJob(mpi, count, program, **named) as job:
        return job.wait(limit_s)


def notes(folder, count=4):
    """Return what each rank has noted; an empty text where that is nothing."""
    paths = [folder / f"rank{rank}" for rank in range(count)]
    return [path.read_text() if path.exists() else "" for path in paths]


def script(folder, body):
    """Write a script; return the arguments that run it."""
    (folder / "script.py").write_text(BEGIN + body)
    return [folder / "script.py", folder]
