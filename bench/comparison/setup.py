"""Set the peers up: Debian's two MPIs, Intel's of the package registry, and one virtual environment for each peer."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from comparison.libraries import PEERS, library, peer_python
from comparison.processes import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TRAINING", "make_environment", "set_up"]

PACKAGES = ("openmpi-bin", "libopenmpi-dev", "mpich", "libmpich-dev")
TOOLS = ("mpirun.openmpi", "mpicc.openmpi", "mpirun.mpich", "mpicc.mpich")
TRAINING = "training"
"""The environment that has syncvar, as it stands in this checkout, and what it trains with."""
CHECKOUT = str(Path(__file__).resolve().parents[2])
FOR_MPI = ["numpy", "ml_dtypes"]
PYTHON_PACKAGES = {
    "torch": ["torch==2.13.0", "numpy"],
    "intelmpi": ["mpi4py", "impi-rt", *FOR_MPI],
    "tensorflow": ["tensorflow-cpu", "numpy"],
    TRAINING: ["torch==2.13.0", "numpy", "--editable", f"{CHECKOUT}[examples]"],
}
OPTIONAL = ("tensorflow",)
STEP_S = 1800.0


def set_up(peers: Path, names: Sequence[str]) -> bool:
    """Set up what is missing; True when every named peer can be used afterwards.

    TensorFlow is optional: it is tried, and the comparison does without it.
    """
    wanted = [name for name in PEERS if name in names]
    if {"openmpi", "mpich"} & set(wanted):
        _install_mpi()
    for name in wanted:
        versions, _ = library(name, "", peers).probe()
        if versions is None:
            make_environment(peers, name)
    ready = True
    for name in wanted:
        one = library(name, "", peers)
        versions, problem = one.probe()
        ready = ready and (versions is not None or name in OPTIONAL)
        print(f"{one.label}: {versions or f'missing: {problem}'}")
    return ready


def _install_mpi() -> None:
    """Install Debian's packages where a tool of theirs is missing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"missing: {', '.join(missing)}. Needed, as root: {shlex.join(install)}")
        return
    if _step(["apt-get", "update"]):
        _step(install, {"DEBIAN_FRONTEND": "noninteractive"})


def make_environment(peers: Path, name: str) -> bool:
    """Make one virtual environment: that of a peer, or `TRAINING`."""
    python = peer_python(peers, name)
    pip = [python, "-m", "pip", "install"]
    if not _step([sys.executable, "-m", "venv", "--clear", os.path.abspath(peers / name)]):
        return False
    if name in PYTHON_PACKAGES:
        return _step([*pip, *PYTHON_PACKAGES[name]])
    compiler = f"mpicc.{name}"
    if shutil.which(compiler) is None:
        return False
    # Without the cache: pip would take the build for one MPI as the build for the other.
    build = [*pip, "--no-cache-dir", "--no-binary", "mpi4py", "mpi4py"]
    return _step([*pip, *FOR_MPI]) and _step(
        build, {"MPICC": compiler, "MPI4PY_BUILD_MPICC": compiler}
    )


def _step(command: Sequence[str], env: Mapping[str, str] | None = None) -> bool:
    """Say and run one command."""
    settings = [f"{name}={value}" for name, value in (env or {}).items()]
    print("+", *settings, shlex.join(command), flush=True)
    problem = run(command, timeout=STEP_S, env=env).failure
    if problem:
        print(f"  failed: {problem}")
    return problem is None
