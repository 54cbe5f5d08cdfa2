"""How each library is found and started."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from comparison.machine import cores
from comparison.processes import run

__all__ = ["LABELS", "MPI", "NAMES", "PEERS", "Library", "library", "peer_python", "script"]

SCRIPTS = Path(__file__).resolve().parents[1] / "peers"
MPI = ("openmpi", "mpich", "intelmpi")
PEERS = (*MPI, "torch", "tensorflow")
NAMES = ("syncvar", *PEERS)
LABELS = {
    "syncvar": "syncvar",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "torch": "torch gloo",
    "tensorflow": "TensorFlow",
}
PROBE_S = 120.0


def peer_python(peers: Path, name: str) -> str:
    """Return the interpreter of a peer's virtual environment; the link itself, which is what makes it one."""
    return os.path.abspath(peers / name / "bin" / "python")


def script(name: str) -> str:
    """Return the path of a worker script."""
    return str(SCRIPTS / name)


def library(name: str, python: str, peers: Path) -> Library:
    """Return a library by its name; `python` is the interpreter that has syncvar."""
    return Library(name, python if name == "syncvar" else peer_python(peers, name))


@dataclass(frozen=True, slots=True)
class Library:
    """One library of the comparison.

    Args:
        name: One of `NAMES`.
        python: The interpreter that has it.
    """

    name: str
    python: str

    @property
    def label(self) -> str:
        """Return its name for people."""
        return LABELS[self.name]

    @property
    def folder(self) -> Path:
        """Return the virtual environment that its interpreter belongs to."""
        return Path(self.python).parents[1]

    @property
    def script(self) -> str:
        """Return the worker script."""
        return script(f"peer_{'mpi' if self.name in MPI else self.name}.py")

    def start(self, workers: int) -> list[str]:
        """Return the command that starts workers, up to the script."""
        match self.name:
            case "syncvar":
                return [
                    self.python,
                    "-m",
                    "syncvar_launcher",
                    "--workers",
                    str(workers),
                    "--bind",
                    "auto",
                ]
            case "openmpi":
                root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
                crowded = ["--oversubscribe"] if workers > cores() else []
                return ["mpirun.openmpi", *root, *crowded, "-np", str(workers), self.python]
            case "mpich":
                return ["mpirun.mpich", "-np", str(workers), self.python]
            case "intelmpi":
                return [str(self.folder / "bin" / "mpiexec.hydra"), "-n", str(workers), self.python]
            case "tensorflow":
                return [self.python, script("launch_by_variables.py"), "--workers", str(workers)]
            case _:
                module = [self.python, "-m", "torch.distributed.run"]
                return [*module, "--standalone", f"--nproc-per-node={workers}"]

    def environment(self, workers: int) -> dict[str, str]:
        """Return what is set for the workers beside the caller's environment."""
        threads = str(max(1, cores() // workers))
        return {
            "torch": {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"},
            "tensorflow": {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads},
            "intelmpi": {
                "I_MPI_ROOT": str(self.folder),
                "LD_LIBRARY_PATH": str(self.folder / "lib"),
                "I_MPI_FABRICS": "shm",
            },
        }.get(self.name, {})

    def started_as(self, workers: int) -> str:
        """Return the command as it is shown, without the folders of this machine."""
        settings = [f"{name}={value}" for name, value in self.environment(workers).items()]
        words = ["python" if word == self.python else word for word in self.start(workers)]
        words = [Path(word).name if word.startswith(str(SCRIPTS)) else word for word in words]
        return " ".join([*settings, *words, Path(self.script).name]).replace(
            str(self.folder), "ENV"
        )

    def probe(self, script: str | None = None) -> tuple[str | None, str]:
        """Find the library: its versions and "", or None and why it is missing.

        Args:
            script: A worker script that tells the versions; None for that of the collectives.
        """
        if not os.path.exists(self.python):
            return None, "not set up, see --setup"
        tool = self.start(1)[0]
        if shutil.which(tool) is None:
            return None, f"no {os.path.basename(tool)}, see --setup"
        done = run(
            [self.python, script or self.script, "--versions"],
            timeout=PROBE_S,
            env=self.environment(1),
        )
        if done.failure:
            return None, done.failure
        versions = json.loads(done.stdout.splitlines()[-1])
        expected = {
            "openmpi": "Open MPI",
            "mpich": "MPICH",
            "intelmpi": "Intel(R) MPI Library",
        }.get(self.name)
        if expected and expected not in versions:
            return None, f"its mpi4py was built for another MPI: {versions}"
        return ", ".join(f"{name} {version}" for name, version in versions.items()), ""
