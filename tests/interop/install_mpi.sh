#!/bin/sh
# Installs what the tests with the marker mpi need: both MPIs from Debian, side by side (mpirun.openmpi and mpirun.mpich), and
# mpi4py into the Python that runs the tests. One wheel of mpi4py serves both: MPI4PY_MPIABI says which.
#   tests/interop/install_mpi.sh [python]
set -eu
as_root=$([ "$(id -u)" = 0 ] || echo sudo)
$as_root apt-get update -q
$as_root apt-get install -y -q openmpi-bin libopenmpi3 mpich libmpich12
"${1:-python3}" -m pip install 'mpi4py>=4.1'
mpirun.openmpi --version | head -n 1
mpirun.mpich --version | grep -m 1 Version:
